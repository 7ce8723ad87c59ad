"""Stage 3: parameters are sharded too. Each unit is gathered just before it is used and freed just after, in forward
by hooks on its module, in backward by hooks on its output (gather) and its input (free, and reduce its gradients).
"""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .awaited import Awaited
from .outside import Elements, Hook
from .reducer import Reducer
from .units import State, Unit


class _AfterBackward(torch.autograd.Function):
    """Identity on a unit's inputs: its backward runs when every operation inside the unit has run its own.

    Autograd refuses a module that changes such an input in place.
    """

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.done = done
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.done()
        return None, *grads


@dataclass(eq=False)
class Pass:
    """One forward pass of the model: its units in the order of their calls, and what of it waits for backward."""

    calls: list[Unit] = field(default_factory=list)
    uses: Counter[Unit] = field(default_factory=Counter)  # calls whose backward has not come yet
    begun: bool = False  # its backward


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Within it, a collective that fails is told with the usual cause at stage 3."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).splitlines() or [""])[0]
        cure = "keep whole what some ranks leave out, by hybrid or min_unit"
        rule = "at stage 3 all ranks call the same units in the same order"
        raise RuntimeError(f"{what} failed: {rule}, {cure} ({first})") from error


class Sharded:
    """The part of a model whose parameters are sharded at rest: ``units``, the root's first.

    All ranks call the same units in the same order: to gather is a collective.
    """

    def __init__(self, units: list[Unit], reducer: Reducer, names: list[str]) -> None:
        self.comm, self.params = reducer.comm, reducer.params
        self.reducer, self.names = reducer, names
        self.keep_last, self.prefetch = reducer.settings.keep_last, reducer.settings.prefetch
        self.passes: list[Pass] = []  # those with calls that wait for backward
        self._pass = Pass()  # the present one, or the last
        self._expected: list[Unit] = []  # the calls of the pass before, as long as this one makes the same
        self.digest = 0  # of the units that were gathered in this step, in order
        self._elements = Elements()
        self._hidden = dict[int, tuple[torch.Tensor, Callable[[], None]]]()
        self.units = [u for u in units if u.params]
        for unit in self.units:
            unit.rows = reducer.rows(unit.params, 3)
            self.free(unit)
            self._watch(unit)
        self.buckets = [b for u in self.units for b in u.buckets]
        reducer.at_end.append(self._flush)

    def _watch(self, unit: Unit) -> None:
        before = partial(self._pre_forward, unit)
        unit.module.register_forward_pre_hook(Hook(before), with_kwargs=True, prepend=True)
        unit.module.register_forward_hook(Hook(partial(self._post_forward, unit)))
        for row in unit.rows:
            for index in row.begins if row.trainable else ():
                self.params[index].register_post_accumulate_grad_hook(partial(self._on_grad, unit, index))

    def gather(self, unit: Unit) -> None:
        """Start to gather ``unit`` unless it is gathered or on its way."""
        if unit.state not in (State.SHARDED, State.REDUCED):
            return
        self.digest = zlib.crc32(unit.name.encode(), self.digest)
        for bucket in unit.buckets:
            storage = bucket.full.untyped_storage()
            storage.resize_(bucket.full.nbytes)
        unit.gathers = [self.comm.all_gather(bucket.full, bucket.shard) for bucket in unit.buckets]
        unit.state = State.GATHERING

    def wait(self, unit: Unit) -> None:
        """Gather ``unit`` and return when its parameters can be used. Raises RuntimeError."""
        self.gather(unit)
        if unit.state is not State.GATHERING:
            return
        with explained(f"the gather of {unit.name}"):
            for work in unit.gathers:
                work.wait()
        unit.gathers, unit.state = [], State.GATHERED
        for row in unit.rows:
            for index in row.begins:
                Awaited.clear(self.params[index])
                self.params[index].data = row.view(row.arena, index)

    def free(self, unit: Unit) -> None:
        """Give the memory of the gathered parameters back; the shard stays.

        Views saved for backward keep pointing at this storage: it is emptied and refilled, never replaced. The
        parameters keep their shapes, and a use of their values outside the unit's forward is refused.
        """
        if unit.state is State.GATHERING:
            self.wait(unit)
        if unit.state is not State.GATHERED:
            return
        for row in unit.rows:
            for index in row.begins:
                self.hide(index)
            row.arena.untyped_storage().resize_(0)
        unit.state = State.SHARDED

    def hide(self, index: int) -> None:
        """From now on parameter ``index`` has its shape and no values: each element is the same NaN."""
        param = self.params[index]
        Awaited.clear(param)
        if index not in self._hidden:
            nothing = self._elements[param.dtype, param.device, math.nan]
            shape = param.shape
            self._hidden[index] = nothing.expand(shape), partial(self._refuse, index)
        param.data, refuse = self._hidden[index]
        Awaited.mark(param, refuse)

    def _refuse(self, index: int) -> None:
        raise RuntimeError(
            f"each rank holds a part of {self.names[index]} at stage 3: use it in its module's forward, read it from "
            "engine.state_dict() (on every rank), and copy or convert the model before zero()"
        )

    def copies(self) -> dict[int, torch.Tensor]:
        """Each sharded parameter whole, on the CPU, by its index: gathered unit by unit, by all ranks together."""
        found: dict[int, torch.Tensor] = {}
        for unit in self.units:
            self.wait(unit)
            for index in unit.params:
                found[index] = self.params[index].detach().to("cpu", copy=True)
            self.free(unit)
        return found

    # Forward -------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """At the start of the model's forward."""
        if self.reducer.in_backward:  # the whole model is recomputed
            return
        self._expected, self._pass = self._pass.calls, Pass()

    def _enter(self, unit: Unit) -> None:
        here, calls = len(self._pass.calls), self._pass.calls
        calls.append(unit)
        if self._expected[here : here + 1] != [unit]:  # the first pass, or another way than the last one took
            self._expected = []
        for ahead in self._expected[here : here + 1 + self.prefetch]:
            self.gather(ahead)
        self.wait(unit)
        if torch.is_grad_enabled():
            if not self._pass.uses:
                self.passes.append(self._pass)
            self._pass.uses[unit] += 1

    def _is_last(self, unit: Unit, calls: list[Unit]) -> bool:
        """Whether backward begins with ``unit``: it would be gathered again at once."""
        return self.keep_last and (unit.name == "root" or unit in calls[-1 - self.prefetch :])

    def kept_numel(self) -> int:
        """Elements that a step gathers once, not twice."""
        kept = [unit for unit in self.units if self._is_last(unit, self._pass.calls)]
        return sum(bucket.numel for unit in kept for bucket in unit.buckets)

    def _leave(self, unit: Unit) -> None:
        if not (torch.is_grad_enabled() and self._is_last(unit, self._expected)):
            self.free(unit)

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.reducer.in_backward:  # a checkpoint runs the forward again: only parameters are needed
            self.wait(unit)
            return None
        self._enter(unit)
        if not torch.is_grad_enabled():
            return None
        flat, spec = tree_flatten((args, kwargs))
        picked = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not picked:  # the unit waits for the end of backward
            return None
        done = partial(self._after_backward, unit, self._pass)
        entered = _AfterBackward.apply(done, *(flat[i] for i in picked))
        for i, tensor in zip(picked, entered, strict=True):
            flat[i] = tensor
        return tree_unflatten(flat, spec)

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self.reducer.in_backward:
            return
        if torch.is_grad_enabled():
            leaves = tree_leaves(output)
            graded = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            if not graded:
                _require_visible(unit, leaves)
            for leaf in graded:
                leaf.register_hook(partial(self._before_backward, unit, self._pass))
        self._leave(unit)

    # Backward ------------------------------------------------------------------------------------------------------

    def _on_grad(self, unit: Unit, index: int, param: nn.Parameter) -> None:
        self.reducer.begin_backward(index)
        if unit.state is State.REDUCED:
            raise RuntimeError(
                f"{self.names[index]} got a gradient when {unit.name} was done: a tensor came into that module by "
                "another way than its arguments. Pass it to forward"
            )

    def _before_backward(self, unit: Unit, during: Pass, grad: torch.Tensor | None = None) -> None:
        self.reducer.begin_backward()
        during.begun = True
        if during.uses[unit] == 0:
            return
        places = [i for i, u in enumerate(during.calls) if u is unit]
        here = places[min(during.uses[unit], len(places)) - 1]
        self.gather(unit)
        before = [u for u in reversed(during.calls[:here]) if during.uses[u]]
        for ahead in before[: self.prefetch]:
            self.gather(ahead)
        self.wait(unit)

    def _after_backward(self, unit: Unit, during: Pass) -> None:
        during.uses[unit] -= 1
        if all(waiting.uses[unit] == 0 for waiting in self.passes):
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        """Free ``unit`` and start to reduce its gradients: all of them are known."""
        self.free(unit)
        unit.state = State.REDUCED
        for bucket in unit.buckets:
            if bucket.master is not None:
                self.reducer.launch(bucket)

    def _flush(self) -> None:
        """At the end of a backward pass: reduce the units whose inputs carry no gradient, or that were not used.

        Forward passes whose backward is still to come (pipelines have several) keep what they wait for.
        """
        begun = [during for during in self.passes if during.begun]
        if (
            torch._C._current_graph_task_id() < 0
        ):  # backward failed here: where it has not, all of them are gathered
            for during in begun:
                self._finish(during)
        self.passes = [during for during in self.passes if not during.begun]
        for unit in reversed(self.units):
            if unit.state is not State.REDUCED:
                self._reduce(unit)
            unit.state = State.SHARDED

    def _finish(self, during: Pass) -> None:
        for unit in reversed(during.calls):
            if during.uses[unit]:
                self._before_backward(unit, during)
                self._after_backward(unit, during)

    def publish(self) -> None:
        """After the optimizer's step: round the master weights into the shards; nothing gathered is valid any more."""
        for unit in self.units:
            self.free(unit)
        for bucket in self.buckets:
            bucket.publish()
        self.digest = 0
        self.passes.clear()


def _require_visible(unit: Unit, leaves: list[Any]) -> None:
    """Raise TypeError where no tensor with a gradient is seen among what a unit returns, and an object may hide one."""
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor | int | float | str | None):
            kind = type(leaf).__name__
            raise TypeError(
                f"{unit.name} returns a {kind}, whose tensors stage 3 cannot see: return tensors in tuples, "
                "lists or dictionaries, or register the class with torch.utils._pytree"
            )
