"""ZeRO in numbers: the worked example, memory at rest and at its peak, bytes sent, odd models, bad input."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dry_run import Call, CollectiveLog
from dynamiccl.zero_workload import formulas as f
from dynamiccl.zero_workload import zero
from dynamiccl.zero_workload.engine.agreement import message_numel
from dynamiccl.zero_workload.engine.outside import Elements
from dynamiccl.zero_workload.job.data import Corpus
from dynamiccl.zero_workload.job.model import ModelConfig, Transformer
from test_zero import TINY, adamw, texts
from torch import nn
from world import SIZES_AND_DTYPES, World

# The worked example: two ranks, four weights -----------------------------------------------------------------------


class Hand(nn.Module):
    """h = w1 x1 + w2 x2, a = relu(h), y = w3 a + w4, loss (y - t)^2 / 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 1, bias=False), nn.Linear(1, 1)
        for param, values in zip(self.parameters(), ([[2.0, -3.0]], [[1.0]], [0.5]), strict=True):
            param.data = torch.tensor(values)

    def forward(self, x: torch.Tensor, target: float) -> torch.Tensor:
        return 0.5 * (self.second(F.relu(self.first(x))) - target).square().sum()


def hand_example(stage: int, by_layer: bool = False) -> dict[str, list[float] | float]:
    rank = dist.get_rank()
    model, local = Hand(), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: local.append((p, p.grad.flatten().tolist())))
    params = list(model.parameters())
    settings: dict[str, Any] = {"param_dtype": torch.float32, "bucket_bytes": 1}
    settings |= {"min_unit": 1, "keep_last": False} if by_layer else {}
    engine = zero(model, partial(torch.optim.Adam, lr=0.1), stage=stage, **settings)
    shards: list[float] = []
    step_hook = engine.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: shards.extend(
            v for part in engine.owned for v in part.param.grad.tolist()
        )
    )
    x, target = [([1.0, 3.0], 5.0), ([2.0, 1.0], 7.0)][rank]
    with CollectiveLog() as log:
        loss = model(torch.tensor(x), target)
        engine.backward(loss)
        engine.step()
    step_hook.remove()
    by_param = {id(p): values for p, values in local}
    states = [engine.optimizer.state[part.param] for part in engine.owned]
    return {
        "gathered": [call.n_bytes for call in log.calls if call.func in ("all_gather", "broadcast")],
        "loss": loss.item(),
        "local": [v for p in params for v in by_param[id(p)]],
        "shard": shards,
        "exp_avg": [v for state in states for v in state["exp_avg"].tolist()],
        "exp_avg_sq": [v for state in states for v in state["exp_avg_sq"].tolist()],
        "master": [v for part in engine.owned for v in part.param.tolist()],
        "weights": torch.cat([value.flatten() for value in engine.state_dict().values()]).tolist(),
    }


OF_A_RANK = ("shard", "exp_avg", "exp_avg_sq", "master")  # which half of four values it is


@pytest.mark.parametrize(("stage", "by_layer"), [(1, False), (2, False), (3, False), (3, True)])
def test_hand_example(stage: int, by_layer: bool, two: World) -> None:
    expected: list[dict[str, Any]] = [
        {
            "loss": 10.125,
            "local": [0.0, 0.0, 0.0, -4.5],
            "shard": [-5.5, -2.75],
            "exp_avg": [-0.55, -0.275],
            "exp_avg_sq": [0.03025, 0.0075625],
            "master": [2.1, -2.9],
            "weights": [2.1, -2.9, 1.1, 0.6],
        },
        {
            "loss": 15.125,
            "local": [-11.0, -5.5, -5.5, -5.5],
            "shard": [-2.75, -5.0],
            "exp_avg": [-0.275, -0.5],
            "exp_avg_sq": [0.0075625, 0.025],
            "master": [1.1, 0.6],
            "weights": [2.1, -2.9, 1.1, 0.6],
        },
    ]
    if by_layer:  # a rank owns half of each layer: the first has w1 and w3
        for name in OF_A_RANK:
            (w1, w2), (w3, w4) = (values[name] for values in expected)
            expected[0][name], expected[1][name] = [w1, w3], [w2, w4]
    for rank, got in enumerate(two.run(hand_example, stage, by_layer)):
        # Four weights at once; or the layers' two and two, before forward and again before backward.
        # At stages 1 and 2 over gloo: a broadcast of each rank's two.
        assert got.pop("gathered") == ([8] * 4 if by_layer else [16] if stage == 3 else [8, 8])
        for name, value in expected[rank].items():
            exact = torch.tensor(value)  # float32, as the engine computes
            assert torch.tensor(got[name]).sub(exact).abs().max() <= 2e-7 * exact.abs().max(), (
                rank,
                name,
                got[name],
            )


# Memory ------------------------------------------------------------------------------------------------------------

#: By the name in the formulas of one that has as many states: SGD with momentum has Lion's.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": adamw(1e-3),
    "lion": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}


def precision_of(dtype: torch.dtype) -> str:
    """Its name in the formulas."""
    return "fp32" if dtype is torch.float32 else "mixed"


def live_bytes(tensors: Iterable[Any], known: set[int]) -> int:
    """Bytes of all storages that Python can reach now and that were not there before; scalars do not count."""
    sizes = {}
    with (
        torch._C.DisableTorchFunctionSubclass()
    ):  # what stands for a value that is elsewhere refuses to be read
        for t in tensors:
            if isinstance(t, torch.Tensor) and t.dim() and t.untyped_storage()._cdata not in known:
                sizes[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
    return sum(sizes.values())


def resting(stage: int, optimizer: str, dtype: torch.dtype) -> tuple[int, int, int, dict[str, int]]:
    """Bytes at rest, padded parameters, ranks, the engine's own account."""
    gc.collect()
    with torch._C.DisableTorchFunctionSubclass():
        known = {t.untyped_storage()._cdata for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    torch.manual_seed(0)
    model = Transformer(TINY)
    settings: dict[str, Any] = {"param_dtype": dtype, "loss_scale": 256.0, "bucket_bytes": 2**14}
    engine = zero(model, OPTIMIZERS[optimizer], stage=stage, **settings)
    corpus = Corpus(TINY.seq)
    for step in range(2):
        engine.backward(model(*corpus.batch(0, 2, step=step, seed=0)))
        engine.step()
    engine.synchronize()
    texts = {corpus.text.untyped_storage()._cdata}
    # One a dtype, whatever the model's size.
    for found in (o for o in gc.get_objects() if isinstance(o, Elements)):
        texts |= {element.untyped_storage()._cdata for element in found.values()}
    buffers = engine.comm.buffer_bytes  # of constant size, see test_buffers_do_not_grow_with_the_model
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    tensors += [t for s in engine.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    padded = sum(bucket.numel for bucket in engine.buckets)
    assert all(p.grad is None for p in model.parameters())
    return live_bytes(tensors, known | texts) - buffers, padded, engine.comm.size, engine.memory()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_memory_at_rest_equals_the_formulas(
    size: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """To the byte for the padded parameters, whose padding is below 1 %."""
    world: World = request.getfixturevalue(size)
    n_params = sum(p.numel() for p in Transformer(TINY).parameters())
    for name in OPTIMIZERS if size == "two" else ["adam"]:
        for stage in range(4):
            for total, padded, n, account in world.run(resting, stage, name, dtype):
                assert n_params <= padded < n_params * 1.01
                parts = f.model_states(padded, n, stage, name, precision_of(dtype))
                assert total == sum(parts), (name, stage)
                assert tuple(account.values()) == parts, (name, stage)


def accumulating(stage: int) -> tuple[int, int]:
    """Bytes of gradients at rest over two micro-batches in bfloat16, padded parameters."""
    settings = {"stage": stage, "gradient_accumulation": 2}
    engine = zero(Transformer(TINY), adamw(1e-3), bucket_bytes=2**14, **settings)
    return engine.memory()["gradients"], sum(bucket.numel for bucket in engine.buckets)


def test_gradients_that_add_up_are_held_as_planned(two: World) -> None:
    for stage in range(4):
        n_bytes, padded = two.run(accumulating, stage)[0]
        assert n_bytes == (
            4 * padded // 2 if stage >= 2 else 2 * padded
        )  # sums over micro-batches are in fp32


def norms_of_alike_steps(stage: int) -> list[float]:
    """Gradient norms of three steps of two micro-batches in bfloat16, of the same batches and weights."""
    torch.manual_seed(0)
    settings = {"stage": stage, "gradient_accumulation": 2, "max_norm": 1.0}
    engine = zero(Transformer(TINY), adamw(0.0), bucket_bytes=2**14, **settings)
    rank, norms = dist.get_rank(), []
    for _ in range(3):
        for micro in range(2):
            engine.backward(engine.model(*texts(micro, rank, rank + 1)))
            norm = engine.step()
        norms.append(norm.item())
    return norms


@pytest.mark.parametrize("stage", [2, 3])
def test_the_sums_over_micro_batches_begin_anew_with_each_step(two: World, stage: int) -> None:
    """Before: where they have other digits than the wire, they went on from the step before."""
    first, *later = two.run(norms_of_alike_steps, stage)[0]
    assert first > 0 and later == [first] * 2


def peak_of_gradients(bucket_bytes: int, layers: int) -> tuple[int, int, int]:
    """Most bytes of gradients alive at once in a backward pass of stage 2; of all of them; of the buffers."""
    torch.manual_seed(0)
    config = ModelConfig(layers=layers, width=32, heads=2, seq=16)
    model = Transformer(config)
    engine = zero(model, adamw(1e-3), stage=2, bucket_bytes=bucket_bytes)
    peak = 0

    def look(_: torch.Tensor) -> None:
        nonlocal peak
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        peak = max(peak, sum(g.untyped_storage().nbytes() for g in grads) + engine.comm.buffer_bytes)

    for p in model.parameters():
        p.register_hook(look)
        p.register_post_accumulate_grad_hook(look)
    engine.backward(model(*Corpus(config.seq).batch(0, 2, step=0, seed=0)))
    engine.step()
    return peak, sum(2 * p.numel() for p in model.parameters()), engine.comm.buffer_bytes


def test_stage_2_never_holds_all_gradients(two: World) -> None:
    bucket, largest = 2**14, 2 * 256 * 32
    for peak, everything, buffers in two.run(peak_of_gradients, bucket, 9):
        assert (
            buffers < 6 * bucket
        )  # two full ones, and the shorter last bucket's; over gloo as many to receive into
        assert peak <= buffers + bucket + largest < everything / 2


def test_buffers_do_not_grow_with_the_model(two: World) -> None:
    (_, small, few), (_, large, many) = (two.run(peak_of_gradients, 2**13, layers)[0] for layers in (3, 9))
    assert large > 2 * small
    assert max(few, many) < 6 * 2**13


# Traffic -----------------------------------------------------------------------------------------------------------


def bytes_of_a_step(settings: dict[str, Any]) -> tuple[dict[str, int], int, int]:
    """Bytes by collective in one step, bytes of the padded parameters, bytes of what stage 3 keeps for backward."""
    torch.manual_seed(0)
    model = Transformer(TINY)
    engine = zero(model, adamw(1e-3), bucket_bytes=2**14, **settings)
    corpus = Corpus(TINY.seq)
    for step in range(2):
        with CollectiveLog() as log:
            engine.backward(model(*corpus.batch(0, 2, step=step, seed=0)))
            engine.step()
    note = Call(
        "all_reduce", 4 * message_numel(len(engine.params)), "float32", log.calls[0].group, engine.comm.size
    )
    log.calls.remove(note)  # see engine.agreement
    total: dict[str, int] = {}
    for call in log.calls:
        total[call.func] = total.get(call.func, 0) + call.n_bytes
    units = {u.name: sum(b.numel for b in u.buckets) for u in engine.sharded.units}
    itemsize = engine.settings.param_dtype.itemsize
    kept = itemsize * sum(
        units.get(name, 0) for name in ("root", "blocks.1", "blocks.2")
    )  # forward ends with these
    return total, itemsize * sum(b.numel for b in engine.buckets), kept


OVER_GLOO = {"all_to_all": "reduce_scatter", "broadcast": "all_gather"}


def spelled(total: dict[str, int]) -> dict[str, int]:
    """Over gloo a reduce-scatter is an exchange of slices, an all-gather in place broadcasts: of as many bytes."""
    return {OVER_GLOO.get(func, func): n for func, n in total.items()}


@pytest.mark.parametrize(("size", "dtype"), SIZES_AND_DTYPES)
def test_traffic_equals_the_formulas(size: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    world: World = request.getfixturevalue(size)
    ranks, both = len(world.ranks), {"param_dtype": dtype}
    passes: list[dict[str, int]] = [
        {"all_reduce": 1},
        {"reduce_scatter": 1, "all_gather": 1},
        {"reduce_scatter": 1, "all_gather": 1},
        {"reduce_scatter": 1, "all_gather": 2},
    ]
    for stage, times in enumerate(passes):
        total, whole, _ = world.run(bytes_of_a_step, {"stage": stage, "keep_last": False, **both})[0]
        total = spelled(total)
        assert total == {func: n * whole for func, n in times.items()}, stage
        # An all-reduce of n bytes moves what a reduce-scatter and an all-gather of n bytes move: it counts twice.
        sent = f.ring(ranks) * sum(n * (2 if func == "all_reduce" else 1) for func, n in total.items())
        size_of = dtype.itemsize
        assert sent == f.traffic(whole // size_of, ranks, stage, weight=size_of, gradient=size_of), stage
    total, whole, kept = world.run(bytes_of_a_step, {"stage": 3, **both})[0]
    assert kept > 0 and spelled(total) == {"reduce_scatter": whole, "all_gather": 2 * whole - kept}
