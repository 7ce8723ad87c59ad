"""What a user's own code meets under the engine - in the optimizer's callback, in hooks and in state dicts - is what it
meets without one: shapes, names, dtypes, groups and order. Values that are not here are refused, not made up.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import zero
from hypothesis import given, settings
from hypothesis import strategies as st
from test_zero_outside import said_of
from torch import nn
from world import World

#: Shapes of parameters that one thinks of last.
SHAPES = [(), (1,), (1, 1), (0,), (0, 3), (3,), (5, 2), (2, 1, 3), (17,), (300,)]


class Odd(nn.Module):
    """A parameter of each of ``shapes``, in blocks of two; some frozen, tied to an earlier one or not contiguous."""

    def __init__(self, shapes: list[tuple[int, ...]], kinds: list[str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Module() for _ in range((len(shapes) + 1) // 2))
        made: list[nn.Parameter] = []
        for number, (shape, kind) in enumerate(zip(shapes, kinds, strict=True)):
            value = torch.randn(shape)
            param = nn.Parameter(value.t().contiguous().t() if len(shape) == 2 else value)
            if kind == "tied" and made:
                param = made[0]
            elif kind == "frozen" and made:
                param.requires_grad_(False)
            made.append(param)
            self.blocks[number // 2].register_parameter(f"p{number}", param)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _block(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for param in module.parameters():
        x = x * (1 + 0.1 * param.cos().sum().tanh()) + 0.1 * param.sum().tanh()
    return x


def grouped(seen: list[Any], params: Any) -> torch.optim.Optimizer:
    """By what a user sees of each: every group trains at another rate."""
    params = list(params)
    seen.extend((tuple(p.shape), p.dim(), p.dtype, p.stride(), p.is_leaf, p.requires_grad) for p in params)
    of: dict[int, list[nn.Parameter]] = {}
    for p in params:
        of.setdefault(min(p.dim(), 2), []).append(p)
    return torch.optim.SGD([{"params": some, "lr": 0.1 / 2**dim} for dim, some in of.items()], momentum=0.5)


def met(shapes: list[tuple[int, ...]], kinds: list[str], stage: int | None) -> dict[str, Any]:
    """All that the callback, hooks and state dicts meet in three steps; without an engine where stage is None."""
    model = Odd(shapes, kinds)
    for block in model.blocks:
        block.forward = partial(_block, block)
    called: list[Any] = []
    hooked: set[Any] = set()

    def note(where: str, name: str) -> Callable[..., None]:
        def hook(*given: Any) -> None:
            tensors = [t for t in given if isinstance(t, torch.Tensor)]
            about = tuple((tuple(t.shape), t.dtype) for t in tensors)
            grads = tuple(tuple(t.grad.shape) for t in tensors if t.is_leaf and t.grad is not None)
            hooked.add((where, name, about, grads))

        return hook

    def watch(when: str) -> None:
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.register_hook(note(f"{when}: tensor", name))
                p.register_post_accumulate_grad_hook(note(f"{when}: accumulated", name))
        for name, module in model.named_modules():
            before, after = note(f"{when}: pre", name), note(f"{when}: post", name)
            module.register_forward_pre_hook(lambda m, _, hook=before: hook(*m.parameters()))
            module.register_forward_hook(lambda m, *_, hook=after: hook(*m.parameters()))

    watch("before")
    model.register_state_dict_post_hook(
        lambda m, state, prefix, about: state.update(total=sum(v.double().sum() for v in state.values()))
    )
    rank, size = (dist.get_rank(), dist.get_world_size()) if stage is not None else (0, 1)
    batches = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(2))
    if stage is None:
        optimizer = grouped(called, [p for p in model.parameters() if p.requires_grad])
        watch("after")
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        state = model.state_dict()
    else:
        engine = zero(
            model, partial(grouped, called), stage=stage, param_dtype=torch.float32, bucket_bytes=64
        )
        watch("after")
        for batch in batches:
            engine.backward(model(batch.chunk(size)[rank]).square().mean())
            engine.step()
        engine.synchronize()
        state = engine.state_dict()
    about = [
        (name, tuple(p.shape), p.dim(), p.numel(), p.dtype, p.requires_grad, p.grad is None)
        for name, p in model.named_parameters()
    ]
    return {"called": called, "hooked": hooked, "about": about, "state": state}


drawn = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from(["", "", "", "frozen", "tied"])),
    min_size=2,
    max_size=8,
).filter(lambda some: any(k == "" and 0 not in s for s, k in some) and 0 not in some[0][0])


@pytest.mark.hypothesis
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_user_sees_is_the_modules(stage: int, two: World) -> None:
    """Seen: a 0-dim parameter was 1-D in the callback, so a group by ``p.dim() == 0`` was empty, without a word."""

    @settings(max_examples=20, deadline=None)
    @given(drawn)
    def check(some: list[tuple[tuple[int, ...], str]]) -> None:
        shapes, kinds = [s for s, _ in some], [k for _, k in some]
        alone = met(shapes, kinds, None)
        for seen in two.run(met, shapes, kinds, stage):
            assert seen["called"] == alone["called"]
            assert seen["about"] == alone["about"]
            assert seen["hooked"] == alone["hooked"]
            assert list(seen["state"]) == list(alone["state"])
            for name, value in alone["state"].items():
                got = seen["state"][name]
                assert (got.shape, got.dtype) == (value.shape, value.dtype), name
                assert torch.allclose(got, value, rtol=1e-4, atol=1e-5), name

    check()


# Values that are not here -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.factor


def outside(stage: int) -> dict[str, Any]:
    """What a loop reads of the parameters between two steps, or what is said of it."""
    model = Net()
    engine = zero(model, partial(torch.optim.SGD, lr=0.1), stage=stage, param_dtype=torch.float32)
    for _ in range(2):
        engine.backward(model(torch.ones(2, 8)).square().mean())
        engine.step()
    params = list(model.parameters())
    found: dict[str, Any] = {"numel": sum(p.numel() for p in params)}
    reads: dict[str, Callable[[], Any]] = {
        "norm": lambda: float(sum(p.norm() ** 2 for p in params)),
        "penalty": lambda: float(sum(p.square().sum() for p in params)),
        "copy": lambda: float(sum(p.norm() ** 2 for p in copy.deepcopy(model).parameters())),
        "pickle": lambda: float(sum(p.norm() ** 2 for p in pickle.loads(pickle.dumps(model)).parameters())),
    }
    for name, read in reads.items():
        said = said_of(lambda read=read, name=name: found.update({name: read()}))
        found.setdefault(name, said)
    found["state"] = float(sum(v.norm() ** 2 for v in engine.state_dict().values()))
    if stage < 3:
        average = copy.deepcopy(model)
        average(torch.ones(2, 8)).sum().backward()  # a plain module
        found["hooks"] = [type(p.grad) for p in average.parameters()]
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_values_outside_of_forward_are_right_or_refused(stage: int, two: World) -> None:
    """Seen: at stage 3 a count of 0 and norms of 0.0 without a word; at 1 to 3 "cannot pickle 'Exchange' object"."""
    for found in two.run(outside, stage):
        assert found["numel"] == 2 * 72 + 1
        for name in ("norm", "penalty", "copy", "pickle"):
            if stage == 3:
                assert "each rank holds a part of" in found[name] and "engine.state_dict()" in found[name], (
                    name
                )
                assert "\n" not in found[name]
            else:
                assert found[name] == pytest.approx(found["state"], rel=1e-6), name
        assert set(found.get("hooks", [torch.Tensor])) == {torch.Tensor}


def misused(stage: int, how: str) -> str:
    model: nn.Module = Net()
    make: Any = partial(torch.optim.SGD, lr=0.1)
    if how == "an optimizer":
        make = make(model.parameters())
    elif how == "wrapped":
        model = nn.parallel.DistributedDataParallel(model)
    elif how == "sparse":
        model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    elif how == "twice":
        zero(model, make, stage=stage, param_dtype=torch.float32)
    elif how == "misspelt":
        return said_of(lambda: zero(model, make, stage=stage, prefetchs=2))  # type: ignore[call-arg]
    elif how == "half":
        engine = zero(model, make, stage=stage, param_dtype=torch.float32)
        return said_of(model.half) or said_of(lambda: engine.model(torch.ones(2, 8)))
    return said_of(lambda: zero(model, make, stage=stage, param_dtype=torch.float32))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("an optimizer", "pass lambda params: SGD(params, ...), not made SGD"),
        ("misspelt", "unexpected keyword argument 'prefetchs'"),
        (
            "wrapped",
            "DistributedDataParallel reduces gradients itself: give zero() the model in it (model.module)",
        ),
        ("sparse", "0 makes sparse gradients, which ZeRO cannot cut: make it with sparse=False"),
        ("twice", "the model has an engine already: go on with that one, or build the model anew"),
        ("half", "convert the model before zero()"),
    ],
)
def test_misuse_is_told_in_one_line_with_its_cure(how: str, words: str, two: World) -> None:
    for stage in (0, 1, 3):
        for said in two.run(misused, stage, how):
            assert words in said and "\n" not in said, stage
