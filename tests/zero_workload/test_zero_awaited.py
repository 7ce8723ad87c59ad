"""At stages 1 and 2 a parameter is awaited before its first use, in whatever way it is used, and not long before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynamiccl.zero_workload import zero
from dynamiccl.zero_workload.buffers.comm import Collectives
from dynamiccl.zero_workload.engine import replicated
from dynamiccl.zero_workload.engine.awaited import Awaited
from dynamiccl.zero_workload.engine.units import find_units
from paths import ROOT
from torch import nn
from world import World


class Used(nn.Module):
    """A model whose head and scales are used in the way ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.body, self.head = how, nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.scales = nn.ParameterList([torch.ones(8), torch.zeros(8)])
        if how == "special":
            self.head.weight = Special(torch.eye(8))
        self.named = nn.ParameterDict({"shift": torch.zeros(8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        if self.how == "lists":
            x = x * self.scales[0] + self.scales[1] + self.named["shift"]
        if self.how in ("tied", "twice", "special"):
            x = F.linear(x, self.head.weight)
        return x if self.how == "tied" else self.head(x)


class Late(dist.Work):
    """A gather whose values come when it is waited for, as over a slow wire."""

    seen: ClassVar[list[str]] = []

    def __init__(self, comm: Collectives, full: torch.Tensor, shard: torch.Tensor) -> None:
        super().__init__()
        self.comm, self.full, self.shard = comm, full, shard.clone()

    def wait(self, timeout: Any = None) -> bool:
        self.seen.append(f"gather of {self.full.numel()}")
        shards = list(self.full.chunk(self.comm.size))
        dist.all_gather(shards, self.shard)
        return True


def losses(stage: int, how: str) -> list[float]:
    """Of four steps. ``method``: the model is entered without its forward; ``held``: its loss has a parameter in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "all_gather", lambda *args: Late(*args))
        model = Used(how)
        held = list(model.parameters())
        engine = zero(
            model, partial(torch.optim.SGD, lr=0.1), stage=stage, param_dtype=torch.float32, bucket_bytes=1
        )
        found = []
        for step in range(4):
            draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
            x = torch.randn(4, 8, generator=draw)
            decay = sum(p.square().sum() for p in held) if how == "held" else 0.0
            y = model.forward(x) if how == "method" else model(x)
            loss = (y - x.roll(1, 1)).square().mean() + 0.1 * decay
            engine.backward(loss)
            engine.synchronize()  # what nobody used
            engine.step()
            found.append(round(loss.item(), 6))
        engine.synchronize()
        return found


@pytest.mark.parametrize("how", ["lists", "tied", "twice", "method", "held"])
def test_a_parameter_is_awaited_however_it_is_used(how: str, two: World) -> None:
    """Before: outside of its module's forward a weight was that of the step before, now and then."""
    plain = two.run(losses, 0, how)
    for stage in (1, 2):
        assert two.run(losses, stage, how) == plain


def order(stage: int) -> list[str]:
    """In which order modules run and gathers are awaited, in the second step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "all_gather", lambda *args: Late(*args))
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 64))
        engine = zero(
            model, partial(torch.optim.SGD, lr=0.1), stage=stage, param_dtype=torch.float32, bucket_bytes=1
        )
        for step in range(2):
            if step:
                Late.seen = []
                for module in model:
                    module.register_forward_hook(lambda *_: Late.seen.append("module"))
            engine.backward(model(torch.randn(4, 8)).square().mean())
            engine.step()
        engine.synchronize()
        return Late.seen


def streams_that_wait(stage: int, how: str) -> list[str]:
    """For which streams gathers are awaited when another than that of the step uses the weights first."""
    now, waited = ["main"], list[str]()

    class Work(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            waited.append(now[-1])
            return True

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        now.append(stream)
        yield
        now.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collectives, "all_gather", lambda *args: Work())
        patch.setattr(replicated, "current_stream", lambda device: now[-1])
        patch.setattr(torch.cuda, "stream", on)
        model = nn.Linear(8, 8, bias=False)
        engine = zero(model, partial(torch.optim.SGD, lr=0.1), stage=stage, param_dtype=torch.float32)
        engine.backward(model(torch.ones(2, 8)).square().mean())
        engine.step()
        with on("side"):
            model(torch.ones(2, 8)) if how == "module" else model.weight.sum()
        model(torch.ones(2, 8))
    return waited


@pytest.mark.parametrize("how", ["module", "weight"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_use_on_another_stream_makes_that_of_training_wait_too(stage: int, how: str, two: World) -> None:
    """Before: the next forward read weights that were still on their way."""
    assert two.run(streams_that_wait, stage, how) == [["main", "side"]] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gather_is_not_awaited_before_it_is_needed(stage: int, two: World) -> None:
    seen = two.run(order, stage)[0]
    first, second, last = [number for number, what in enumerate(seen) if what == "module"]
    numbers = [seen[:first], seen[first:second], seen[second:last]]
    assert all(any(what.startswith("gather") for what in part) for part in numbers)


def test_a_marked_parameter_waits_once_and_is_plain_then() -> None:
    uses = {
        "list": lambda p: torch.cat([p, p]),
        "second": lambda p: torch.ones(2) * p,
        "data": lambda p: p.data,
        "pointer": lambda p: p.data_ptr(),
        "copy": copy.deepcopy,
        "pickle": pickle.dumps,
        "text": repr,
    }
    for name, use in uses.items():
        param, waits = nn.Parameter(torch.ones(2)), []
        Awaited.mark(param, lambda waits=waits: waits.append(1))  # type: ignore[misc]
        assert param.grad is None and param.shape == (2,) and param.requires_grad and not waits
        use(param)
        use(param)
        assert waits == [1] and type(param) is nn.Parameter and not param.__dict__, name


@pytest.mark.filterwarnings("ignore")  # that such copies are seldom what is meant
def test_the_page_names_what_pytorch_hides() -> None:
    """Before: it named C++ extensions alone. A use that waits in a newer PyTorch leaves the page."""
    page = (ROOT / "zero_workload" / "README.md").read_text("utf-8")
    hidden: dict[str, Callable[[nn.Parameter], Any]] = {
        "torch.func.grad(f)(p)": lambda p: torch.func.grad(torch.sum)(p),
        "torch.func.vjp(f, p)": lambda p: torch.func.vjp(torch.sum, p),
        "p.as_subclass(...)": lambda p: p.as_subclass(torch.Tensor),
        "torch.tensor(p)": torch.tensor,
        "torch.as_tensor(p)": torch.as_tensor,
        "torch.asarray(p)": lambda p: torch.asarray(p, requires_grad=True),
        "torch.Tensor(p)": torch.Tensor,
        "to_dlpack(p)": torch.utils.dlpack.to_dlpack,
    }
    for name, use in hidden.items():
        param, waits = nn.Parameter(torch.ones(2)), []
        Awaited.mark(param, lambda waits=waits: waits.append(1))  # type: ignore[misc]
        use(param)
        assert not waits and f"`{name}`" in page, name
    Awaited.mark(param, lambda: None)
    with pytest.raises(RuntimeError, match="Creating a Parameter"):
        nn.Parameter(param)
    assert "`nn.Parameter(p)` raises" in page


def compiled(how: str) -> list[float]:
    """Losses of a compiled model (``all``), or of one that gives a compiled function a weight."""
    torch.manual_seed(0)
    linear = torch.compile(F.linear, backend="eager") if how == "part" else F.linear
    body, head = nn.Linear(8, 8), nn.Linear(8, 8)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return linear(self.body(x), self.head.weight, self.head.bias)

    model = Model()
    engine = zero(model, partial(torch.optim.SGD, lr=0.1), stage=1, param_dtype=torch.float32)
    call = torch.compile(model, backend="eager") if how == "all" else model
    found = []
    for step in range(4):
        loss = call(torch.ones(2, 8) * step).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(round(loss.item(), 6))
    return found


class Special(nn.Parameter):
    """A class of its own, which cannot be exchanged for a while."""


def test_a_parameter_of_another_class_is_awaited_at_once(two: World) -> None:
    param = Special(torch.ones(2))
    assert not Awaited.mark(param, lambda: None) and type(param) is Special
    assert two.run(losses, 1, "special") == two.run(losses, 0, "special")


@pytest.mark.slow
def test_a_compiled_model_trains_alike(one: World) -> None:
    """torch.compile must not look into what waits: it fails there."""
    plain = one.run(compiled, "")[0]
    assert one.run(compiled, "part")[0] == plain
    assert one.run(compiled, "all")[0] == plain


def test_a_list_of_parameters_is_gathered_with_the_module_around_it() -> None:
    """Before: it was a unit, which nobody calls: at stage 3 it was never gathered."""
    assert [unit.name for unit in find_units(Used("lists"), "block", 1)] == ["root", "body", "head"]
