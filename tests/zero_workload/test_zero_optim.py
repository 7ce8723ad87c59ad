"""ZeRO with other optimizers, and what it refuses."""

from __future__ import annotations

import warnings
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import formulas as f
from dynamiccl.zero_workload import zero
from dynamiccl.zero_workload.job.model import Transformer
from dynamiccl.zero_workload.job.optimizers import optimizer_of
from dynamiccl.zero_workload.job.tensor import ColumnLinear
from test_zero import BATCH, TINY, adamw, texts, train
from test_zero_exact import Hand
from torch import nn
from world import World


@pytest.mark.parametrize(
    ("optimizer", "stages"),
    [
        (partial(torch.optim.NAdam, lr=1e-2), (0, 1, 2, 3)),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), (0, 3)),
        (partial(torch.optim.RMSprop, lr=1e-3), (0, 3)),
        (partial(torch.optim.Adagrad, lr=1e-2), (0, 1, 2, 3)),  # it has a state before the first step
    ],
)
def test_optimizers_agree_across_stages(optimizer: Any, stages: tuple[int, ...], two: World) -> None:
    runs = {stage: two.run(train, 8, {"stage": stage, "optimizer": optimizer})[0] for stage in stages}
    assert runs[0][-1] < runs[0][0] - 0.3
    for losses in runs.values():
        assert losses == pytest.approx(runs[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["two", "four"])
@pytest.mark.parametrize("name", ["Adan", "Lion"])
def test_adan_and_lion_of_a_kept_package(name: str, size: str, request: pytest.FixtureRequest) -> None:
    """Each stage as the first one, in three dtypes; masters and states as large as the formulas say."""
    pytest.importorskip("pytorch_optimizer", reason="not installed")
    world: World = request.getfixturevalue(size)
    optimizer, elementwise = optimizer_of(f"pytorch_optimizer:{name}", 2e-3)
    assert elementwise
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float16, 0.01)):
        settings = {"optimizer": optimizer, "elementwise": True, "param_dtype": dtype, "loss_scale": 256.0}
        runs = [world.run(train, 5, {"stage": stage, **settings})[0] for stage in range(4)]
        assert runs[0][-1] < runs[0][0]
        for losses in runs[1:]:
            assert losses == pytest.approx(runs[0], rel=near), dtype
    held, n_params = world.run(optimizer_bytes, optimizer)[0]
    states = f.state_bytes(name.lower())[2] + 4 * f.KEPT_BESIDE.get(name.lower(), 0)
    assert held == pytest.approx(states * n_params / len(world.ranks), rel=0.01)


def optimizer_bytes(optimizer: Any) -> tuple[int, int]:
    """Bytes of masters and states at stage 1 in mixed precision, and the number of parameters."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    engine = zero(model, optimizer, stage=1, elementwise=True)
    engine.backward(model(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum())
    engine.step()
    return engine.memory()["optimizer"], sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch.optim:Adafactor", "Adafactor may need whole matrices, .* give --elementwise if"),
        ("test_zero_optim:OfItsMean", "give --elementwise if it looks at each element by itself"),
        (".a:SGD", ".a cannot be imported"),
        ("torch.optim", "an optimizer is MODULE:CLASS"),
        ("torch.optim:Nothing", "torch.optim has no Nothing"),
        ("nowhere:Adan", "there is no module nowhere"),
        ("torch.nn:Linear", "is no torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_by_name_is_known_or_said_to_be_elementwise(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        optimizer_of(text, 1e-3)
    assert optimizer_of("torch.optim:RMSprop", 1e-3)[1] is None
    assert optimizer_of("test_zero_optim:OfItsMean", 1e-3, elementwise=True)[1]
    with pytest.raises(ValueError, match="cannot be made from parameters and lr alone"):
        optimizer_of("test_zero_optim:Needy", 1e-3, elementwise=True)


class OfItsMean(torch.optim.SGD):
    """Its step depends on all gradients that it has, of whatever parameter."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grads = torch.cat([p.grad.flatten() for p in group["params"]])
            for p in group["params"]:
                p.grad /= grads.abs().mean()
        super().step()


class Needy(torch.optim.SGD):
    """It needs something else than parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        raise AttributeError("it has no model")


class Queued(torch.optim.SGD):
    """As AdaShift and MADGRAD: it holds what a checkpoint cannot keep."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        self.state["k"] = 1
        for p in self.param_groups[0]["params"]:
            self.state[p] |= {
                "queue": deque(),
                "pair": (torch.ones(2),),
                "step": 1,
                "none": None,
                "tuple": (1, 2),
            }


def save_queued(folder: str) -> str:
    engine = zero(nn.Linear(4, 4), partial(Queued, lr=0.1), stage=1, elementwise=True)
    engine.backward(engine.model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
    engine.step()
    if dist.get_rank() == 0:
        engine.optimizer.state.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine.save(folder)
    return "".join(str(one.message) for one in said)


def test_what_no_checkpoint_keeps_is_said_and_the_rest_is_saved(two: World, tmp_path: Path) -> None:
    """Before: a script of a user that saved at its end lost the trained weights."""
    first, second = two.run(save_queued, str(tmp_path))
    assert "which no checkpoint keeps" not in first
    assert "Queued holds k, queue, pair, which no checkpoint keeps: a resume goes on without" in second
    assert list(tmp_path.rglob(".metadata"))


def matrices(stage: int, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Weights after four steps of Muon; without an engine where ``dtype`` is ``None``."""
    torch.manual_seed(0)
    layers = [nn.Linear(n, m, bias=False) for n, m in ((12, 40), (40, 24), (24, 12))]
    model = nn.Sequential(*layers)
    muon = partial(torch.optim.Muon, lr=0.05)
    batches = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(1))
    if dtype is None:
        optimizer = muon(model.parameters())
        for batch in batches:
            optimizer.zero_grad()
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
        return model.state_dict()
    rank, size = dist.get_rank(), dist.get_world_size()
    engine = zero(model, muon, stage=stage, param_dtype=dtype, bucket_bytes=2**10)
    for batch in batches:
        mine = batch.chunk(size)[rank].to(dtype)
        engine.backward((model(mine) - mine).float().square().mean())
        engine.step()
    owned = sum(part.param.numel() for part in engine.owned)
    whole = sum(p.numel() for p in model.parameters())
    assert owned < whole if stage else owned == whole
    assert all(part.param.shape == engine.shapes[part.piece.param] for part in engine.owned)
    return engine.state_dict()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("size", ["two", pytest.param("four", marks=pytest.mark.slow)])
def test_muon_has_whole_matrices(stage: int, size: str, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(size)
    wanted = matrices(stage, None)
    for dtype, near in ((torch.float32, 1e-4), (torch.bfloat16, 0.03), (torch.float16, 0.03)):
        for got in world.run(matrices, stage, dtype):
            for name, value in wanted.items():
                # Muon orthogonalises in bfloat16: of a rounding of the gradient it makes one of its own.
                assert (got[name].float() - value).abs().max() <= near, (dtype, name)


def muon_alone(steps: int) -> list[float]:
    """The losses of ``--optimizer torch.optim:Muon`` in one process, on the whole batch."""
    torch.manual_seed(0)
    model = Transformer(TINY)
    optimizer = optimizer_of("torch.optim:Muon", 1e-2)[0](list(model.parameters()))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*texts(step, 0, BATCH))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("size", ["two", pytest.param("four", marks=pytest.mark.slow)])
def test_muon_by_name_trains_as_one_process(size: str, request: pytest.FixtureRequest) -> None:
    """Seen: the job refused it, because the class that steps Muon and AdamW was not on any list."""
    world: World = request.getfixturevalue(size)
    optimizer, elementwise = optimizer_of("torch.optim:Muon", 1e-2)
    alone = muon_alone(5)
    assert alone[-1] < alone[0] - 0.3
    for stage in (0, 1):
        settings = {"stage": stage, "optimizer": optimizer, "elementwise": elementwise}
        for losses in world.run(train, 5, settings):
            # Muon orthogonalises in bfloat16, so the last digits of a gradient matter.
            assert losses == pytest.approx(alone, rel=1e-3), stage


# What is not finite ------------------------------------------------------------------------------------------------


def not_finite(stage: int, where: str) -> tuple[int, str]:
    """The step in which, and what, the engine says when something on rank 1 is not finite in step 2."""
    torch.manual_seed(0)
    model = Hand()
    engine = zero(model, adamw(1e-2), stage=stage, param_dtype=torch.float32, min_unit=1)
    spoil = dist.get_rank() == 1
    for step in range(5):
        x = torch.tensor([1.0, -1.0])  # h = 5, relu passes
        loss = model(x, float("nan") if where == "loss" and spoil and step == 2 else 1.0)
        if where == "gradient" and spoil and step == 2:
            loss.register_hook(
                lambda grad: grad * float("inf")
            )  # the loss is fine, a gradient on its way is not
        try:
            engine.backward(loss)
            engine.step()
        except FloatingPointError as error:
            return step, str(error)
    return -1, ""


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_told_on_every_rank(where: str, two: World) -> None:
    for stage in range(4):
        for step, said in two.run(not_finite, stage, where):
            assert step == 2 and said.startswith("the gradient is not finite at step 2: lower"), said


# Bad input ---------------------------------------------------------------------------------------------------------


class Mine(torch.optim.SGD):
    """A user's own: a subclass may do anything, so the user's word decides."""


def refusal(case: str) -> str:
    model: nn.Module = Hand()
    settings: dict[str, Any] = {"stage": 1}
    optimizer: Any = adamw(1e-3)
    if case == "ranks":
        model = nn.Linear(4, 4 + dist.get_rank())
    elif case == "frozen":
        model.requires_grad_(False)
    elif case == "muon":
        model, optimizer, settings["stage"] = nn.Linear(4, 4, bias=False), torch.optim.Muon, 2
    elif case == "muon of parts":
        model, optimizer = nn.Linear(4, 4), optimizer_of("torch.optim:Muon", 0.1)[0]
        model = ColumnLinear(model, dist.group.WORLD)
    elif case in ("Shampoo", "KFAC"):
        optimizer = type(case, (torch.optim.SGD,), {})
    elif case.startswith("a user's own"):
        settings["elementwise"], optimizer = True if "fine" in case else None, partial(Mine, lr=0.1)
    else:
        name, value = case.split("=")
        settings[name] = int(value) if value.lstrip("-").isdigit() else value
    try:
        zero(model, optimizer, **settings)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("stage=4", "stage is 0, 1, 2 or 3"),
        ("prefetch=-1", "prefetch"),
        ("gradient_accumulation=0", "a whole number from 1 up, not 0"),
        ("unit=row", "'block' or 'layer'"),
        ("ranks", "ranks [1] have another model or other settings than rank 0"),
        ("frozen", "no trainable parameter"),
        ("muon", "Muon needs whole matrices, and stage 2 cuts their gradients: take stage 0 or 1"),
        ("muon of parts", "Muon needs whole matrices, and tensor parallelism cuts them"),
        (
            "Shampoo",
            "no shard of anything, and one rank would hold a whole layer's: take an elementwise optimizer",
        ),
        ("KFAC", "K-FAC needs the inputs and output gradients of each layer"),
        ("a user's own", "Mine may need whole matrices: say elementwise=True if"),
        ("a user's own, and fine", ""),
    ],
)
def test_bad_input_is_refused_on_every_rank(case: str, words: str, two: World) -> None:
    for said in two.run(refusal, case):
        assert words in said if words else said == ""
