"""What the engine holds: float16 and its scale, exact weights, save and resume, offload, the classic stage 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dry_run import CollectiveLog
from dynamiccl.zero_workload import Engine, zero
from dynamiccl.zero_workload.engine import checkpoint
from dynamiccl.zero_workload.engine.agreement import message_numel
from dynamiccl.zero_workload.engine.scale import GROW_AFTER, LossScale
from dynamiccl.zero_workload.job.model import Transformer
from dynamiccl.zero_workload.job.parallel import groups
from test_zero import TINY, adamw, run, texts, train, train_alone
from test_zero_exact import spelled
from torch import nn
from torch.distributed.checkpoint import filesystem
from world import SIZES_AND_DTYPES, World

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BUCKET_BYTES = 2**14


def engine_of(stage: int, seed: int = 0, **settings: Any) -> Engine:
    torch.manual_seed(seed)
    both: dict[str, Any] = {"bucket_bytes": BUCKET_BYTES, **settings}
    return zero(Transformer(TINY), adamw(1e-2), stage=stage, **both)


# float16 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "near"), [(torch.float16, 0.01), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("size", ["two", pytest.param("four", marks=pytest.mark.slow)])
def test_16_bits_train_as_float32_within_rounding(
    size: str, dtype: torch.dtype, near: float, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(size)
    exact = train_alone(10, max_norm=0.5)
    first: list[float] = []
    for stage in range(4):
        settings = {"stage": stage, "param_dtype": dtype, "max_norm": 0.5, "loss_scale": 256.0}
        losses = world.run(train, 10, settings)[0]
        assert losses == pytest.approx(exact, rel=0, abs=2 * near), stage
        first = first or losses
        assert losses == pytest.approx(first, rel=0, abs=near), stage


def overflowing(stage: int) -> dict[str, Any]:
    """A step whose gradient overflows on rank 1 alone, at a scale that fits; then one that fits."""
    engine = engine_of(stage, param_dtype=torch.float16, max_norm=1.0, loss_scale=1024.0)
    before = engine.full_state()
    loss = engine.model(*texts(0, 0, 2))
    engine.backward(loss * (1e6 if dist.get_rank() else 1.0))
    engine.step()
    stayed = all(
        torch.equal(value, engine_value) for value, engine_value in _pairs(before, engine.full_state())
    )
    found = {
        "stayed": stayed,
        "scale": engine.scale.value,
        "skipped": engine.scale.skipped,
        "steps": engine.steps,
    }
    engine.backward(engine.model(*texts(1, 0, 2)))
    norm = engine.step()
    assert norm is not None
    plain = ""
    try:
        engine.model(*texts(2, 0, 2)).backward()
    except RuntimeError as error:
        plain = str(error)
    return found | {"norm": norm.item(), "after": engine.steps, "plain": plain}


def _pairs(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(value, other[name]) for name, value in one.items()]


def unscaled_norm() -> float:
    engine = engine_of(1, param_dtype=torch.float32, max_norm=1.0)
    for step in (0, 1):
        loss = engine.model(*texts(step, 0, 2))
        engine.backward(loss * (0.0 if step == 0 else 1.0))
        norm = engine.step()
    assert norm is not None
    return norm.item()


def test_an_overflow_on_one_rank_skips_the_step_on_all(two: World) -> None:
    norm = two.run(unscaled_norm)[0]
    for stage in range(4):
        for found in two.run(overflowing, stage):
            assert found["stayed"] and found["scale"] == 512.0
            assert (found["skipped"], found["steps"], found["after"]) == (1, 0, 1)
            assert found["norm"] == pytest.approx(norm, rel=0.02)  # without the scale
            assert "call engine.backward(loss), not loss.backward()" in found["plain"]


def test_the_scale_doubles_after_2000_good_steps_and_halves_at_an_overflow() -> None:
    scale = LossScale(1024.0, dynamic=True)
    for _ in range(1999):
        scale.updated()
    assert scale.value == 1024.0
    scale.updated()
    assert (scale.value, scale.overflowed(), scale.value, scale.skipped) == (2048.0, True, 1024.0, 1)
    fixed = LossScale(1024.0, dynamic=False)
    fixed.updated()
    assert (fixed.value, fixed.overflowed(), fixed.skipped, fixed.good_steps) == (1.0, False, 0, 0)


# Exact weights, save and resume -------------------------------------------------------------------------------------


def exact_and_rounded(stage: int, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    engine = engine_of(stage, param_dtype=dtype)
    run(engine, range(2), rows=4)
    return engine.full_state(), engine.state_dict()


@pytest.mark.parametrize("size", ["two", pytest.param("four", marks=pytest.mark.slow)])
def test_full_state_is_exact_and_on_the_first_rank(size: str, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(size)
    for dtype in DTYPES:
        for stage in range(4):
            (exact, rounded), *others = world.run(exact_and_rounded, stage, dtype)
            assert all(elsewhere == {} for elsewhere, _ in others)
            assert exact.keys() == rounded.keys()
            assert {value.dtype for value in exact.values()} == {torch.float32}
            for name, value in exact.items():
                assert torch.equal(value.to(dtype), rounded[name]), (stage, name)
            same = all(torch.equal(value, rounded[name].float()) for name, value in exact.items())
            assert same == (dtype is torch.float32), (stage, dtype)


ROWS = 12  # of a batch: as many for each of 1, 2, 3 and 4 ranks


def saved(folder: str, stage: int, settings: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Losses of three steps after a save at the third, and the exact weights at the save."""
    engine = engine_of(stage, **settings)
    run(engine, range(3), rows=ROWS)
    engine.save(folder)
    exact = engine.full_state()
    return run(engine, range(3, 6), rows=ROWS), exact


def resumed(folder: str, stage: int, settings: dict[str, Any]) -> tuple[list[float], dict[str, Any], int]:
    engine = engine_of(stage, seed=99, **settings)
    engine.load(folder)
    exact, begun = engine.full_state(), engine.steps
    return run(engine, range(3, 6), rows=ROWS), exact, begun


def refused(folder: str, other: bool) -> str:
    engine = zero(torch.nn.Linear(4, 4), adamw(1e-3), stage=1) if other else engine_of(1)
    try:
        engine.load(folder)
    except ValueError as error:
        return str(error)
    return ""


def test_a_run_resumes_at_another_stage(two: World, tmp_path: Path) -> None:
    settings = {"param_dtype": torch.float32, "max_norm": 0.5}
    through, _ = two.run(saved, str(tmp_path), 2, settings)[0]
    for losses, _, begun in two.run(resumed, str(tmp_path), 3, settings):
        assert begun == 3 and losses == pytest.approx(through, rel=1e-6)
    assert "holds no whole checkpoint" in two.run(refused, str(tmp_path / "none"), False)[0]
    assert (
        "is of another model: bias has 0 elements there, 4 here" in two.run(refused, str(tmp_path), True)[0]
    )


def scale_after(folder: str) -> tuple[int, int, float]:
    """Of a run that is saved a step before its scale doubles, and resumed by another that has taken a step.

    Good steps as they were read, those after one more step, and the scale then.
    """
    settings: dict[str, Any] = {"param_dtype": torch.float16, "loss_scale": 256.0}
    engine, resumes = engine_of(1, **settings), engine_of(1, **settings)
    engine.scale.good_steps = GROW_AFTER - 1
    engine.save(folder)
    run(resumes, range(1))
    resumes.load(folder)
    read = resumes.scale.good_steps
    run(resumes, range(1))
    return read, resumes.scale.good_steps, resumes.scale.value


def test_a_resumed_run_doubles_its_scale_when_it_would_have(one: World, tmp_path: Path) -> None:
    """Before: it began to count anew."""
    assert one.run(scale_after, str(tmp_path))[0] == (GROW_AFTER - 1, 0, 512.0)


def cut_short(folder: str, sharing: int, failing: int) -> tuple[list[str], list[int], bool]:
    """Saves after one and after two steps, the second of which fails on rank ``failing`` when the data are written;
    then one that is whole. ``sharing`` ranks hold parts of one model. What was said; the steps of what is loaded
    after each; whether its weights are those of the first save.
    """
    found = groups(0, False, sharing)
    torch.manual_seed(0)
    engine = zero(nn.Linear(4, 4), adamw(1e-2), stage=1, param_dtype=torch.float32, **found)

    def train() -> torch.Tensor:
        engine.backward(engine.model(torch.ones(2, 4)).square().mean())
        engine.step()
        return engine.state_dict()["weight"]

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    first = train()
    engine.save(folder)
    train()
    said, loaded, same = [], [], False
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == failing:
            patch.setattr(filesystem.FileSystemWriter, "finish", fail)
        try:
            engine.save(folder)
        except OSError as error:
            said.append(str(error))
    engine.load(folder)
    loaded.append(engine.steps)
    same = torch.equal(engine.state_dict()["weight"], first)
    train()
    train()
    engine.save(folder)
    engine.load(folder)
    loaded.append(engine.steps)
    dist.barrier()
    return said, loaded, same


@pytest.mark.parametrize(("sharing", "failing"), [(1, 0), (2, 0), (2, 1)])
def test_a_save_that_is_cut_short_leaves_the_one_before(
    sharing: int, failing: int, two: World, tmp_path: Path
) -> None:
    """Before: it left a mixture of both, which was loaded without a word."""
    for said, loaded, same in two.run(cut_short, str(tmp_path), sharing, failing):
        assert len(said) == 1 and "could not be written" in said[0]
        assert loaded == [1, 3] and same
    (whole,) = {path.name for path in tmp_path.iterdir()} - {"zero-save-current"}
    assert whole.startswith("zero-save-")


def of_another_format(folder: str) -> list[str]:
    """What is said of a checkpoint of the format to come, and of one without a number."""
    said = []
    for name, value in (("FORMAT", checkpoint.FORMAT + 1), ("_ABOUT", "engine/unknown")):
        engine = engine_of(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, name, value)
            engine.save(folder)
        with pytest.raises(ValueError) as caught:
            engine.load(folder)
        said.append(str(caught.value))
    return said


def test_a_checkpoint_of_another_format_is_refused(one: World, tmp_path: Path) -> None:
    newer, older = one.run(of_another_format, str(tmp_path))[0]
    assert "is a checkpoint of format 3, and this release reads 2: resume it with the release" in newer
    assert "is a checkpoint of format 1, and this release reads 2" in older and "\n" not in older


def test_a_save_is_read_by_its_own_folder_too(one: World, tmp_path: Path) -> None:
    settings = {"param_dtype": torch.float32}
    through, _ = one.run(saved, str(tmp_path), 1, settings)[0]
    (tmp_path / "zero-save-current").unlink()
    (folder,) = tmp_path.iterdir()
    assert one.run(resumed, str(folder), 1, settings)[0][0] == through


class Hollow(nn.Module):
    """With a parameter that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.none = nn.Linear(4, 4), nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(x), self.none])


def hollow(stage: int, folder: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Steps of a run that is saved after one and resumed, and its exact weights."""
    engine = zero(Hollow(), adamw(1e-2), stage=stage)
    engine.backward(engine.model(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean())
    engine.step()
    engine.save(folder)
    engine.load(folder)
    return engine.steps, engine.full_state()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_without_elements_trains_and_is_saved(stage: int, one: World, tmp_path: Path) -> None:
    """Before: KeyError in backward, at stages 0 to 2."""
    steps, weights = one.run(hollow, stage, str(tmp_path))[0]
    assert steps == 1 and weights["none"].shape == (0, 4)
    assert {value.dtype for value in weights.values()} == {torch.float32}


def scale_of_a_resumed_run(folder: str, dtype: torch.dtype) -> float:
    """The loss scale of a run in float16 that resumes one in ``dtype``."""
    writer = engine_of(1, param_dtype=dtype, loss_scale=512.0)
    run(writer, range(1))
    writer.save(folder)
    reader = engine_of(1, param_dtype=torch.float16, loss_scale=256.0)
    reader.load(folder)
    return reader.scale.value


def test_a_scale_is_taken_over_only_from_a_run_that_had_one(one: World, tmp_path: Path) -> None:
    """Before: from float32 it became 1, and gradients below 6e-8 became 0."""
    for dtype, wanted in ((torch.float32, 256.0), (torch.bfloat16, 256.0), (torch.float16, 512.0)):
        assert one.run(scale_of_a_resumed_run, str(tmp_path), dtype)[0] == wanted


#: Ranks that save and ranks that resume.
SIZES = [("one", "two"), ("two", "four"), ("four", "three"), ("four", "two")]
#: The stage that saves and the stage that resumes.
STAGES = ((1, 1), (2, 2), (3, 3), (3, 1), (0, 3))


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("before", "after"), SIZES)
def test_a_run_resumes_on_another_number_of_ranks(
    before: str, after: str, stages: tuple[int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    writers: World = request.getfixturevalue(before)
    readers: World = request.getfixturevalue(after)
    for dtype, near in zip(DTYPES, (1e-6, 0.01, 0.002), strict=True):
        # At the default scale of float16 one number of ranks may overflow, and skip a step, where another does not.
        settings = {"param_dtype": dtype, "loss_scale": 256.0}
        folder = str(tmp_path / str(dtype))
        through, written = writers.run(saved, folder, stages[0], settings)[0]
        (losses, read, begun), *others = readers.run(resumed, folder, stages[1], settings)
        assert begun == 3 and written.keys() == read.keys()
        for name, value in written.items():
            assert torch.equal(value, read[name]), (dtype, name)
        assert losses == pytest.approx(through, rel=near), dtype
        assert all(found[0] == losses for found in others)


# Offload ------------------------------------------------------------------------------------------------------------


def offloaded(stage: int, dtype: torch.dtype) -> tuple[list[float], dict[str, int], bool]:
    engine = engine_of(stage, param_dtype=dtype, offload=True, max_norm=0.5)
    losses = run(engine, range(4))
    on_host = all(bucket.master.device.type == "cpu" for bucket in engine.buckets)
    shared = {bucket.full.untyped_storage()._cdata for bucket in engine.buckets}
    shared |= {bucket.shard.untyped_storage()._cdata for bucket in engine.buckets}
    apart = not any(bucket.master.untyped_storage()._cdata in shared for bucket in engine.buckets)
    return losses, engine.memory(), on_host and apart


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_offloaded_shards_train_alike_and_weigh_nothing(
    size: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(size)
    n = sum(p.numel() for p in Transformer(TINY).parameters())
    for stage in (1, 2, 3):
        # The same buckets: others add the norm up in another order, which is another last digit.
        settings = {"param_dtype": dtype, "max_norm": 0.5, "bucket_bytes": BUCKET_BYTES}
        plain = world.run(train, 4, {"stage": stage, **settings})[0]
        losses, memory, on_host = world.run(offloaded, stage, dtype)[0]
        assert losses == plain and on_host, stage
        assert memory["optimizer"] == 0
        assert memory["host"] == pytest.approx(12 * n / len(world.ranks), rel=0.01)


# The classic stage 1 ------------------------------------------------------------------------------------------------


def classic(dtype: torch.dtype) -> tuple[list[float], dict[str, int], int]:
    """Losses, bytes by collective of a step, and those of the parameters."""
    engine = engine_of(1, param_dtype=dtype, classic=True, max_norm=0.5)
    losses = run(engine, range(4))
    with CollectiveLog() as log:
        engine.backward(engine.model(*texts(4, 0, 2)))
        engine.step()
    total: dict[str, int] = {}
    for call in log.calls:
        if call.n_bytes != 4 * message_numel(len(engine.params)):
            total[call.func] = total.get(call.func, 0) + call.n_bytes
    return losses, spelled(total), dtype.itemsize * sum(b.numel for b in engine.buckets)


@pytest.mark.parametrize("size", ["two", pytest.param("four", marks=pytest.mark.slow)])
def test_classic_stage_1_all_reduces_and_gathers(size: str, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(size)
    for dtype, near in zip(DTYPES, (1e-6, 0.01, 0.002), strict=True):
        plain = world.run(train, 4, {"stage": 1, "param_dtype": dtype, "max_norm": 0.5})[0]
        losses, sent, whole = world.run(classic, dtype)[0]
        assert losses == pytest.approx(plain, rel=near)
        assert sent == {"all_reduce": whole, "all_gather": whole}  # 6 P in all: an all-reduce moves twice
