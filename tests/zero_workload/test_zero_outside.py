"""What a user does outside the engine, and models that real ones are like: right, or refused in one line."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import Engine, zero
from dynamiccl.zero_workload.job.model import Transformer
from paths import ROOT
from test_zero import TINY, adamw, run, texts
from torch import nn
from world import World


def engine_of(stage: int, **settings: Any) -> Engine:
    torch.manual_seed(0)
    both: dict[str, Any] = {"param_dtype": torch.float32, "bucket_bytes": 2**14, **settings}
    return zero(Transformer(TINY), adamw(1e-2), stage=stage, **both)


def said_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return ""


# Gradients ----------------------------------------------------------------------------------------------------------


def plain_backward_twice(stage: int) -> tuple[str, str]:
    """What is said of the second, and of the step after it."""
    engine = engine_of(stage)
    engine.model(*texts(0, 0, 2)).backward()
    said = said_of(lambda: engine.model(*texts(1, 0, 2)).backward())
    return said, said_of(engine.step)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_second_plain_backward_is_refused(stage: int, two: World) -> None:
    """Seen: at stages 0 and 1 the weights were off by 3.7e-2 after three steps, without a word."""
    for said, _ in two.run(plain_backward_twice, stage):
        assert "call engine.step() before the next backward" in said or "or call engine.step() first" in said


def clipped_outside(stage: int) -> list[str]:
    engine = engine_of(stage)
    engine.backward(engine.model(*texts(0, 0, 2)))
    parameters = list(engine.model.parameters())
    acts = [
        lambda: nn.utils.clip_grad_norm_(parameters, 1e-3),
        lambda: nn.utils.clip_grad_value_(parameters, 1e-3),
        lambda: parameters[0].grad.mul_(0.5),
        lambda: torch.optim.SGD(parameters, lr=1.0).step(),
    ]
    said = [said_of(act) for act in acts]
    engine.step()
    return said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_the_engine_has_are_nobody_elses(stage: int, two: World) -> None:
    """Seen: clip_grad_norm_ had no effect at stages 2 and 3, and spoiled the weights at 0 and 1."""
    for *said, stepped in two.run(clipped_outside, stage):
        assert all("clip them by zero(max_norm=...)" in one for one in said), said
        here = "each rank holds a part of embed.weight" if stage == 3 else "clip them by zero(max_norm=...)"
        assert here in stepped


def replaced(stage: int, how: str) -> tuple[str, bool]:
    """What is said of the step, and whether the weights stayed."""
    engine = engine_of(stage)
    engine.backward(engine.model(*texts(0, 0, 2)))
    before = engine.state_dict()
    if how == "removed":
        engine.model.zero_grad()
    else:
        last = list(engine.model.parameters())[-1]
        last.grad = torch.zeros_like(last)
    said = said_of(engine.step)
    after = engine.state_dict()
    return said, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("how", "name"), [("removed", "embed.weight"), ("new", "head.weight")])
def test_gradients_are_not_replaced_after_backward(stage: int, how: str, name: str, two: World) -> None:
    """Seen: the step was taken with the engine's gradients all the same, without a word."""
    for said, stayed in two.run(replaced, stage, how):
        assert stayed and said.startswith(f"the gradient of {name} was removed or replaced after backward")
        assert "leave it until engine.step()" in said


def changed(stage: int, what: str, dtype: torch.dtype) -> str:
    engine = engine_of(stage, param_dtype=dtype)
    param = next(engine.model.parameters())
    if what == "value":
        with torch.no_grad():
            if said := said_of(lambda: param.mul_(2)):
                return said
    elif what == "data":
        param.data = param.data.clone()
    elif what == "dtype":
        if said := said_of(engine.model.double):
            return said
    elif what == "optimizer":
        return said_of(engine.optimizer.step)
    elif what == "frozen":
        engine = zero(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)), adamw(1e-3), stage=stage
        )
        engine.model[1].requires_grad_(True)
    return said_of(engine.step)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("value", "embed.weight was changed, but the engine holds its exact value"),
        ("dtype", "embed.weight became torch.float64 on cpu after zero(): convert the model before"),
        ("optimizer", "call engine.step(), not optimizer.step()"),
        ("frozen", "1.weight was frozen in zero() and is not now: unfreeze it before zero()"),
    ],
)
def test_changes_behind_the_engines_back_are_told(what: str, words: str, two: World) -> None:
    for stage in (1, 2, 3):
        if stage == 3 and what in ("value", "dtype"):  # there is nothing of it to be changed
            words = "each rank holds a part of embed.weight at stage 3: use it in its module's forward"
        for said in two.run(changed, stage, what, torch.bfloat16):
            assert words in said
    # At stage 0 in float32 the parameter is what the optimizer updates, on every rank: it may be changed.
    assert what != "value" or two.run(changed, 0, what, torch.float32) == ["", ""]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_data_that_is_replaced_is_told(stage: int, two: World) -> None:
    """Seen: the engine went on to update memory that the model no longer used (nn.utils.vector_to_parameters)."""
    for dtype in (torch.float32, torch.bfloat16):
        for said in two.run(changed, stage, "data", dtype):
            assert said.startswith("embed.weight.data was replaced") and "engine.full_state()" in said


def frozen_later(stage: int) -> list[str]:
    """The names of the parameters that a step changes after the first one was frozen."""
    engine = engine_of(stage)
    next(engine.model.parameters()).requires_grad_(False)
    before = engine.state_dict()
    run(engine, range(2))
    after = engine.state_dict()
    return [name for name in before if not torch.equal(before[name], after[name])]


def test_a_parameter_that_is_frozen_after_zero_stays_and_the_others_train(two: World) -> None:
    names = [name for name, _ in Transformer(TINY).named_parameters()]
    for stage in range(4):
        assert two.run(frozen_later, stage) == [names[1:], names[1:]], stage


def test_every_call_that_a_message_names_exists() -> None:
    """Seen: a cure named engine.load_full_state(), which no engine has."""
    named = set()
    for path in (ROOT / "zero_workload").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"engine\.(\w+)\(", node.value))
    assert {"step", "save"} <= named
    assert [name for name in named if not callable(getattr(Engine, name, None))] == []


def mixed(dtype: torch.dtype, second: torch.dtype, said: torch.dtype | None) -> str:
    model = nn.Sequential(nn.Linear(4, 4).to(dtype), nn.Linear(4, 4).to(second))
    settings = {"param_dtype": said} if said else {}
    refused = said_of(lambda: zero(model, adamw(1e-3), stage=1, **settings))
    return refused or str(model[0].weight.dtype)


@pytest.mark.parametrize(
    ("dtype", "second", "said", "words"),
    [
        (torch.float32, torch.float32, None, "torch.bfloat16"),
        (torch.bfloat16, torch.bfloat16, None, "torch.bfloat16"),
        (torch.float16, torch.float16, None, "0.weight is torch.float16: say param_dtype=torch.float16"),
        (torch.float64, torch.float64, None, "0.weight is torch.float64: say param_dtype=torch.float64"),
        (
            torch.bfloat16,
            torch.float32,
            None,
            "1.weight is torch.float32 and 0.weight is torch.bfloat16: say",
        ),
        (torch.bfloat16, torch.float32, torch.float32, "torch.float32"),
    ],
)
def test_no_dtype_is_lost_without_a_word(
    dtype: torch.dtype, second: torch.dtype, said: torch.dtype | None, words: str, two: World
) -> None:
    for got in two.run(mixed, dtype, second, said):
        assert got.startswith(words)


# Models -------------------------------------------------------------------------------------------------------------


class Cache:
    """As transformers' DynamicCache: an object that no pytree knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Nested(nn.Module):
    """A block whose layers lie in a list (T5's), and which returns an object beside its output."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(24, 24)) if normed else nn.Linear(24, 24)
        self.layer = nn.ModuleList([layer, nn.Linear(24, 24)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        for layer in self.layer:
            x = x + torch.tanh(layer(x))
        return x, Cache(x)


class Stack(nn.Module):
    """Such blocks, after a scalar."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Nested(normed) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Cache]:
        x = x * self.factor
        for block in self.blocks:
            x, cache = block(x)
        return x, cache


def stacked(settings: dict[str, Any] | None, optimizer: Any, normed: bool) -> dict[str, torch.Tensor]:
    """Weights after three steps; ``settings`` of ``zero``, or ``None``: plain PyTorch on the whole batch."""
    torch.manual_seed(0)
    model = Stack(normed)
    batches = torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(1))
    if settings is None:
        made = optimizer(model.parameters())
        for batch in batches:
            made.zero_grad()
            model(batch)[0].square().mean().backward()
            made.step()
        return model.state_dict()
    engine = zero(model, optimizer, param_dtype=torch.float32, **settings)
    for batch in batches:
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()]
        engine.backward(model(mine)[0].square().mean())
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("normed", [False, True], ids=["", "weight norm"])
@pytest.mark.parametrize("kind", ["Adagrad", "Rprop", "NAdam"])
def test_lists_in_blocks_objects_beside_outputs_and_scalars_train(
    kind: str, normed: bool, two: World
) -> None:
    """Seen: "size of tensor a (0) must match", SIGFPE, "returns a DynamicCache", and Adagrad's broken scalar."""
    optimizer = partial(getattr(torch.optim, kind), lr=1e-2)
    wanted = stacked(None, optimizer, normed)
    forms: list[dict[str, Any]] = [{"stage": 1}, {"stage": 3, "unit": "layer"}, {"stage": 3}]
    for settings in forms if kind == "Adagrad" else forms[1:2]:
        for got in two.run(stacked, settings, optimizer, normed):
            for name, value in wanted.items():
                assert torch.allclose(got[name], value, rtol=1e-5, atol=1e-6), (settings, name)


class Fork(nn.Module):
    """Every rank takes a block of its own, or leaves one out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, way: tuple[int, ...]) -> torch.Tensor:
        for number in way:
            x = torch.tanh(self.blocks[number](x))
        return x.square().mean()


def forked(ways: list[tuple[int, ...]]) -> tuple[str, bool]:
    """What is said, and whether the weights stayed."""
    torch.manual_seed(0)
    engine = zero(Fork(), adamw(1e-2), stage=3, param_dtype=torch.float32)
    before = engine.state_dict()
    loss = engine.model(torch.ones(2, 16), ways[dist.get_rank()])
    engine.backward(loss)
    said = said_of(engine.step)
    after = engine.state_dict()
    return said, all(torch.equal(before[name], after[name]) for name in before)


def test_ranks_that_take_other_ways_are_told_before_the_weights_change(two: World) -> None:
    """As many gathers of as many bytes: nothing hangs, each rank computes with the other's block."""
    for said, stayed in two.run(forked, [(0, 1), (0, 2)]):
        assert (
            stayed and "the ranks called the model's units in different orders" in said and "hybrid" in said
        )


def timed_out() -> str:
    group = dist.new_group(timeout=timedelta(seconds=15))  # of which a busy machine takes some to connect
    engine = zero(Fork(), adamw(1e-2), stage=3, param_dtype=torch.float32, group=group)
    way = (0, 1, 2) if dist.get_rank() else (0,)
    return said_of(lambda: engine.backward(engine.model(torch.ones(2, 16), way))) or said_of(engine.step)


@pytest.mark.slow
def test_a_path_that_one_rank_leaves_out_is_named() -> None:
    """Seen: a bare timeout of gloo."""
    world = World(2)
    said = world.run(timed_out)
    world.close()
    assert any("all ranks call the same units in the same order" in one and "min_unit" in one for one in said)
