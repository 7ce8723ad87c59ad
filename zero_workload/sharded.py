"""Stage 3: parameters are sharded too. Each unit is gathered just before it is used and freed just after, in forward
by hooks on its module, in backward by hooks on its output (gather) and its input (free, and reduce its gradients).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .layout import State, Unit
from .reducer import Reducer


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


class Sharded:
    """The part of a model whose parameters are sharded at rest: ``units``, the root's first.

    All ranks call the same units in the same order: to gather is a collective.
    """

    def __init__(self, units: list[Unit], reducer: Reducer, names: list[str]) -> None:
        self.comm, self.params, self.reducer, self.names = reducer.comm, reducer.params, reducer, names
        self.keep_last, self.prefetch = reducer.settings.keep_last, reducer.settings.prefetch
        self.order: list[Unit] = []  # forward calls as the last pass made them
        self._cursor, self._known = (
            0,
            False,
        )  # known: a whole forward pass was seen, `order` says what comes last
        self.units = [u for u in units if u.params]
        for unit in self.units:
            unit.rows = reducer.rows(unit.params, 3)
            self.free(unit)
            unit.module.register_forward_pre_hook(
                partial(self._pre_forward, unit), with_kwargs=True, prepend=True
            )
            unit.module.register_forward_hook(partial(self._post_forward, unit))
            for index in (i for row in unit.rows if row.trainable for i in row.begins):
                self.params[index].register_post_accumulate_grad_hook(partial(self._on_grad, unit, index))
        self.buckets = [b for u in self.units for b in u.buckets]
        reducer.at_end.append(self._flush)

    def gather(self, unit: Unit) -> None:
        """Start to gather ``unit`` unless it is gathered or on its way."""
        if unit.state in (State.SHARDED, State.REDUCED):
            for bucket in unit.buckets:
                bucket.full.untyped_storage().resize_(bucket.full.nbytes)
            unit.gathers = [self.comm.all_gather(bucket.full, bucket.shard) for bucket in unit.buckets]
            unit.state = State.GATHERING

    def wait(self, unit: Unit) -> None:
        """Gather ``unit`` and return when its parameters can be used."""
        self.gather(unit)
        if unit.state is State.GATHERING:
            for work in unit.gathers:
                work.wait()
            unit.gathers, unit.state = [], State.GATHERED
            for row in unit.rows:
                for index in row.begins:
                    self.params[index].data = row.view(row.arena, index)

    def free(self, unit: Unit) -> None:
        """Give the memory of the gathered parameters back; the shard stays.

        Views saved for backward keep pointing at this storage: it is emptied and refilled, never replaced. The
        parameters themselves become empty, so that a use outside the unit's forward fails instead of reading freed
        memory.
        """
        if unit.state is State.GATHERING:
            self.wait(unit)
        if unit.state is not State.GATHERED:
            return
        for row in unit.rows:
            for index in row.begins:
                self.params[index].data = row.arena.new_empty(0)
            row.arena.untyped_storage().resize_(0)
        unit.state = State.SHARDED

    def copies(self) -> dict[int, torch.Tensor]:
        """Each sharded parameter whole, on the CPU, by its id: gathered unit by unit, by all ranks together."""
        found: dict[int, torch.Tensor] = {}
        for unit in self.units:
            self.wait(unit)
            found |= {id(p): p.detach().to("cpu", copy=True) for p in (self.params[i] for i in unit.params)}
            self.free(unit)
        return found

    # Forward -------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """At the start of the model's forward."""
        if self.reducer.in_backward:  # the whole model is recomputed
            return
        del self.order[self._cursor :]
        self._known, self._cursor = bool(self.order), 0

    def _enter(self, unit: Unit) -> None:
        here = self._cursor
        if self.order[here : here + 1] != [unit]:  # the first pass, or another way than the last one took
            self.order[here:], self._known = [unit], False
        self._cursor += 1
        for ahead in self.order[here : here + 1 + self.prefetch]:
            self.gather(ahead)
        self.wait(unit)
        unit.uses += torch.is_grad_enabled()

    def _leave(self, unit: Unit) -> None:
        # Backward begins with these: it would gather them again at once.
        last = self._known and unit in self.order[-1 - self.prefetch :]
        if not (torch.is_grad_enabled() and self.keep_last and (last or unit.name == "root")):
            self.free(unit)

    def _pre_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if (
            self.reducer.in_backward
        ):  # activation checkpointing runs the forward again: only parameters are needed
            self.wait(unit)
            return None
        self._enter(unit)
        if not torch.is_grad_enabled():
            return None
        flat, spec = tree_flatten((args, kwargs))
        picked = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not picked:  # the unit waits for the end of backward
            return None
        entered = _AfterBackward.apply(partial(self._after_backward, unit), *(flat[i] for i in picked))
        for i, tensor in zip(picked, entered, strict=True):
            flat[i] = tensor
        return tree_unflatten(flat, spec)

    def _post_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        if self.reducer.in_backward:
            return
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if not isinstance(leaf, torch.Tensor | int | float | str | None):
                    kind = type(leaf).__name__
                    raise TypeError(
                        f"{unit.name} returns a {kind}, whose tensors stage 3 cannot see: return tensors in tuples, "
                        "lists or dictionaries, or register the class with torch.utils._pytree"
                    )
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._before_backward, unit))
        self._leave(unit)

    # Backward ------------------------------------------------------------------------------------------------------

    def _on_grad(self, unit: Unit, index: int, param: nn.Parameter) -> None:
        self.reducer.begin_backward(index)
        if unit.state is State.REDUCED:
            raise RuntimeError(
                f"{self.names[index]} got a gradient when {unit.name} was done: a tensor came into that module by "
                "another way than its arguments. Pass it to forward"
            )

    def _before_backward(self, unit: Unit, grad: torch.Tensor | None) -> None:
        self.reducer.begin_backward()
        if unit.uses == 0:
            return
        places = [i for i, u in enumerate(self.order) if u is unit]
        here = places[min(unit.uses, len(places)) - 1]
        self.gather(unit)
        for before in [u for u in reversed(self.order[:here]) if u.uses][: self.prefetch]:
            self.gather(before)
        self.wait(unit)

    def _after_backward(self, unit: Unit) -> None:
        unit.uses -= 1
        if unit.uses == 0:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        """Free ``unit`` and start to reduce its gradients: all of them are known."""
        self.free(unit)
        unit.uses, unit.state = 0, State.REDUCED
        for bucket in unit.buckets:
            if bucket.master is not None:
                self.reducer.launch(bucket)

    def _flush(self) -> None:
        """At the end of a backward pass: reduce the units whose inputs carry no gradient, or that were not used."""
        if (
            torch._C._current_graph_task_id() < 0
        ):  # backward failed here: where it has not, all of them are gathered
            for unit in reversed(self.order):
                if unit.uses:
                    self._before_backward(unit, None)
                    self._after_backward(unit)
        for unit in reversed(self.units):
            if unit.state is not State.REDUCED:
                self._reduce(unit)
            unit.state = State.SHARDED

    def publish(self) -> None:
        """After the optimizer's step: round the master weights into the shards; nothing gathered is valid any more."""
        for unit in self.units:
            self.free(unit)
        for bucket in self.buckets:
            bucket.publish()
