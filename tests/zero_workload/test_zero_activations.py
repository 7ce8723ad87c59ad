"""Recomputation, tensor parallelism with partitioned checkpoints, pipelines: exact, and as large as the formulas."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dry_run import CollectiveLog
from dynamiccl.zero_workload import Engine, formulas, zero
from dynamiccl.zero_workload.engine.agreement import message_numel
from dynamiccl.zero_workload.job.data import Corpus
from dynamiccl.zero_workload.job.model import ModelConfig, Transformer
from dynamiccl.zero_workload.job.parallel import groups
from dynamiccl.zero_workload.job.recompute import MODES, Checkpoints
from dynamiccl.zero_workload.job.tensor import cut_matrices
from test_zero import BATCH, TINY, adamw, run, saved_and_resumed, texts, train_alone
from world import SIZES_AND_DTYPES, World

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pipelines"

# Recomputation ------------------------------------------------------------------------------------------------------

WAYS = {
    "block": {"recompute": "block"},
    "every second": {"recompute": "block", "recompute_every": 2},
    "auto": {"recompute": "block", "recompute_every": 0},
    "sub-block": {"recompute": "sub-block"},
    "selective": {"recompute": "selective", "materialised": True},
}


def recomputing(stage: int, dtype: torch.dtype, way: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model = Transformer(replace(TINY, **way))
    engine = zero(model, adamw(1e-2), stage=stage, param_dtype=dtype, bucket_bytes=2**14)
    return run(engine, range(3))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_recomputation_changes_no_digit(
    size: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(size)
    for stage in (1, 3):
        plain = {
            flag: world.run(recomputing, stage, dtype, {"materialised": flag})[0] for flag in (False, True)
        }
        for name, way in WAYS.items():
            losses = world.run(recomputing, stage, dtype, way)[0]
            assert losses == plain[way.get("materialised", False)], (stage, dtype, name)


def kept_bytes(config: ModelConfig, dtype: torch.dtype, batch: int) -> int:
    """Bytes of activations that the blocks keep for backward, floating-point and not parameters."""
    model = Transformer(config).to(dtype)
    own = list(model.parameters())  # held: a storage that is freed could come again as an activation's
    parameters = {p.untyped_storage()._cdata for p in own}
    sizes: dict[int, int] = {}
    held = [*own]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage._cdata not in parameters:
            sizes[storage._cdata] = storage.nbytes()
            held.append(tensor)
        return tensor

    x = torch.randn(batch, config.seq, config.width, dtype=dtype, requires_grad=True)
    whole = torch.nn.Identity()
    model.embed, model.position, model.norm = whole, None, whole
    model.head.forward = lambda _: torch.zeros(batch, config.seq, config.vocab, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x, torch.zeros(batch, config.seq, dtype=torch.int64))
    logits = batch * config.seq * config.vocab * 4  # the loss's own
    arena = model.keep.arena
    assert loss.isfinite()
    return sum(sizes.values()) - logits + (0 if arena is None else arena.nbytes)


def test_what_is_kept_equals_the_formulas() -> None:
    config = ModelConfig(layers=4, width=128, heads=4, seq=64, vocab=16, materialised=True)
    for dtype in DTYPES:
        shape = formulas.Shape(4, 128, 4, 64, 3, dtype.itemsize)
        linear, attention = formulas.layer_activations(shape, norm_outputs=True)
        one = shape.token_bytes
        wanted = {
            "none": 4 * (linear + attention),
            "selective": 4 * linear,
            "sub-block": 8 * one,
            "block": 4 * one,
        }
        assert set(wanted) == set(MODES)
        for mode, n_bytes in wanted.items():
            kept = kept_bytes(replace(config, recompute=mode), dtype, 3)
            assert kept == pytest.approx(n_bytes, rel=0.01), (mode, dtype)
        for every in (0, 2):  # 0: as many as hold least
            some = replace(config, recompute="block", recompute_every=every)
            assert some.every == (every or 1)
            assert kept_bytes(some, dtype, 3) == pytest.approx(math.ceil(4 / some.every) * one, rel=0.01)


# Tensor parallelism, partitioned checkpoints ------------------------------------------------------------------------


def cut_engine(stage: int, tensor: int, dtype: torch.dtype, **model_settings: Any) -> Engine:
    found = groups(tensor=tensor)
    sharing = found["model_group"]
    torch.manual_seed(0)
    config = replace(TINY, **model_settings)
    model = Transformer(config, Checkpoints(config.checkpoints, sharing))
    cut_matrices(model, sharing)
    settings: dict[str, Any] = {
        "param_dtype": dtype,
        "bucket_bytes": 2**14,
        "max_norm": 0.5,
        "loss_scale": 256.0,
    }
    return zero(model, adamw(1e-2), stage=stage, **found, **settings)


def train_cut(stage: int, dtype: torch.dtype, tensor: int = 2) -> tuple[list[float], float, int]:
    """Losses, the first step's norm, elements of checkpoints that this rank keeps."""
    engine = cut_engine(stage, tensor, dtype, recompute="block")
    norms: list[float] = []
    step = engine.step

    def noted() -> torch.Tensor | None:
        norm = step()
        assert norm is not None
        norms.append(norm.item())
        return norm

    engine.step = noted  # type: ignore[method-assign]
    keep = engine.model.keep
    held: list[int] = []  # free rows of the arena while the head runs: all checkpoints lie in it then
    engine.model.head.register_forward_hook(lambda *_: held.append(len(keep.free)))
    losses = run(engine, range(4))
    assert held == [0, 0, 0, 0] and sorted(keep.free) == list(range(keep.count))  # backward gave them back
    arena = keep.arena
    return losses, norms[0], arena.numel()


def cut_saved_and_resumed(stage: int, folder: str) -> tuple[list[float], list[float]]:
    """See ``saved_and_resumed``."""
    engine, other = (cut_engine(stage, 2, torch.float32) for _ in range(2))
    run(other, range(7, 9))
    return saved_and_resumed(engine, other, folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_share_matrices_save_and_resume(four: World, stage: int, tmp_path: Path) -> None:
    for through, again in four.run(cut_saved_and_resumed, stage, str(tmp_path)):
        assert again == through and len(set(through)) == 3


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_ranks_that_share_matrices_agree_with_one_process(
    size: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(size)
    alone = train_alone(4, max_norm=0.5)
    torch.manual_seed(0)
    model = Transformer(TINY)
    model(*texts(0, 0, BATCH)).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    data = len(world.ranks) // 2
    inputs = TINY.layers * BATCH // data * TINY.seq * TINY.width
    for stage in (1, 2, 3):
        near: dict[str, float] = {"rel": 1e-5} if dtype is torch.float32 else {"abs": 0.03}
        for losses, first, kept in world.run(train_cut, stage, dtype):
            assert losses == pytest.approx(alone, **near), (stage, dtype)
            assert first == pytest.approx(norm, rel=1e-5 if dtype is torch.float32 else 0.02)
            assert kept == inputs // 2  # divided by the ranks that hold copies


def cut_traffic(recompute: str, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of a step between ranks that share matrices, by collective, and of the norm."""
    engine = cut_engine(1, 2, dtype, recompute=recompute)
    name = engine.comm.model.group.group_name  # type: ignore[union-attr]
    engine.backward(engine.model(*texts(0, 0, 3)))
    engine.step()
    total = {"all_reduce": 0, "all_gather": 0}
    with CollectiveLog() as log:
        engine.backward(engine.model(*texts(1, 0, 3)))
        engine.step()
    for call in log.calls:
        if call.group == name:
            total[call.func] = total.get(call.func, 0) + call.n_bytes
    return total


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_traffic_between_ranks_that_share_matrices(
    size: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(size)
    shape = formulas.Shape(TINY.layers, TINY.width, TINY.heads, TINY.seq, 3, dtype.itemsize)
    norm = 4
    for recompute, checkpoints in (("none", 0), ("block", TINY.layers)):
        sent = world.run(cut_traffic, recompute, dtype)[0]
        # An all-reduce sends 2 (N - 1) / N of its bytes, an all-gather (N - 1) / N.
        on_a_ring = (2 * (sent["all_reduce"] - norm) + sent["all_gather"]) / 2
        assert on_a_ring == formulas.tensor_traffic(shape, 2, checkpoints), recompute


def scalar_bytes(dtype: torch.dtype) -> tuple[int, int]:
    torch.manual_seed(0)
    engine = zero(Transformer(TINY), adamw(1e-2), stage=3, param_dtype=dtype)
    with CollectiveLog() as log:
        engine.backward(engine.model(*texts(0, 0, 2)))
        engine.step()
    small = 4 * message_numel(len(engine.params))
    return sum(call.n_bytes for call in log.calls if call.func == "all_reduce"), small


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_scalar_reductions_are_in_the_formulas(
    size: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(size)
    sent, message = world.run(scalar_bytes, dtype)[0]
    n_tensors, ranks = len(list(Transformer(TINY).parameters())), len(world.ranks)
    assert sent == message
    assert formulas.scalar_traffic(n_tensors, ranks) == pytest.approx(2 * message * (ranks - 1) / ranks)


# Pipelines ----------------------------------------------------------------------------------------------------------


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pipelined(stage: int, dtype: torch.dtype) -> list[float]:
    losses: list[float] = example("pipeline").train(5, stage, dtype)
    return losses


def in_one_process(pipelines: int) -> list[float]:
    """What the example trains, by plain PyTorch."""
    module = example("pipeline")
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh()) for _ in range(4)]
    model = module.Half(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        rows = torch.randn(pipelines, module.ROWS, 32, generator=torch.Generator().manual_seed(step)).flatten(
            0, 1
        )
        optimizer.zero_grad()
        loss = (model(rows) - rows.roll(1, 1)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_a_pipeline_with_zero_in_each_stage(
    size: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """GPipe runs all forward passes before the first backward, which stage 3 gathers for one by one."""
    world: World = request.getfixturevalue(size)
    pipelines = len(world.ranks) // 2
    alone = in_one_process(pipelines)
    near = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.02}[dtype]
    for stage in (1, 2, 3):
        last = world.run(pipelined, stage, dtype)[-1]
        assert last == pytest.approx(alone, rel=near), stage


@pytest.mark.slow
def test_the_example_of_a_pipeline_runs() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "pipeline.py")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"loss (\S+) at the first step, (\S+) at the last\n", done.stdout)
    assert said and float(said[2]) < 0.5 * float(said[1]), done.stdout


def test_corpus_holds_out_what_it_never_trains_on() -> None:
    corpus = Corpus(16)
    unseen, _ = corpus.unseen(0, 4)
    assert torch.equal(corpus.unseen(0, 4)[0], unseen)
    n = len(corpus.text) + len(corpus.held_out)
    assert len(corpus.held_out) == n // 10
    # the two lie end to end, and share no byte
    assert corpus.text.data_ptr() + len(corpus.text) == corpus.held_out.data_ptr()
