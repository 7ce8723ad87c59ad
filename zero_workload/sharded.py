"""Stage 3: parameters are sharded too. Each unit is gathered just before it is used and freed just after.

Forward: ``pre_forward`` gathers the unit and starts the gathers of the next ``prefetch`` units; ``post_forward`` frees
it. Backward: a hook on the unit's output gathers it again, with those before it; when the gradient of its input is
known, all its parameters' gradients are too, and they are reduce-scattered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .comm import Collectives
from .layout import Bucket, Unit, cut
from .reducer import Reducer


class _AfterBackward(torch.autograd.Function):
    """Identity on a unit's inputs: its backward runs when every operation inside the unit has run its own."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.done = done
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.done()
        return None, *grads


class ShardedUnit:
    """One gather unit: its buckets (trainable and frozen parameters lie apart) and whether they are gathered."""

    def __init__(self, unit: Unit, buckets: list[Bucket]) -> None:
        self.unit, self.buckets = unit, buckets
        self.gathers: list[dist.Work] | None = None
        self.gathered = False
        self.uses = 0  # forward calls whose backward has not come yet
        self.reduced = False


class Sharded:
    """The part of a model whose parameters are sharded at rest.

    Args:
        comm: the data-parallel ranks.
        params: the engine's parameters.
        units: gather units, the root's first.
        prefetch: units gathered ahead of the one in use, in both directions; ``"auto"`` measures.
        keep_last: do not free the unit that forward ends with, backward begins with it (saves one gather a step).
        began: called when a backward pass begins.
    """

    def __init__(
        self,
        comm: Collectives,
        params: list[nn.Parameter],
        units: list[Unit],
        *,
        prefetch: int | str,
        param_dtype: torch.dtype,
        master_dtype: torch.dtype,
        keep_last: bool,
        reducer: Reducer,
        began: Callable[[], None],
    ) -> None:
        self.comm, self.params, self.reducer, self.began = comm, params, reducer, began
        self.auto = prefetch == "auto"
        self.prefetch = 1 if self.auto else int(prefetch)
        self.keep_last = keep_last
        self.in_backward = False
        self.order: list[ShardedUnit] = []  # forward calls as the last pass made them
        self._cursor = 0
        self._known = False  # a whole forward pass was seen: `order` says what comes last
        self.units = [ShardedUnit(u, self._shard(u, param_dtype, master_dtype)) for u in units if u.params]
        self.buckets = [b for u in self.units for b in u.buckets]
        for unit in self.units:
            module = unit.unit.module
            module.register_forward_pre_hook(partial(self._pre_forward, unit), with_kwargs=True, prepend=True)
            module.register_forward_hook(partial(self._post_forward, unit))

    def _shard(self, unit: Unit, param_dtype: torch.dtype, master_dtype: torch.dtype) -> list[Bucket]:
        buckets = []
        for trainable in (True, False):
            sizes = [(i, self.params[i].numel()) for i in unit.params if self.params[i].requires_grad is trainable]
            for bucket in cut(sizes, self.comm.size, None):
                bucket.stage = 3
                device = self.params[unit.params[0]].device
                exact = torch.zeros(bucket.numel, dtype=master_dtype, device=device)
                for piece in bucket.pieces:
                    exact[piece.offset : piece.offset + piece.numel] = self.params[piece.param].detach().reshape(-1)
                self.comm.broadcast(exact)
                size = bucket.numel // self.comm.size
                mine = exact[self.comm.rank * size : (self.comm.rank + 1) * size].clone()
                bucket.shard = mine.to(param_dtype)
                bucket.full = torch.empty(bucket.numel, dtype=param_dtype, device=device)
                if trainable:
                    bucket.master = nn.Parameter(bucket.shard if param_dtype == master_dtype else mine)
                    grad_dtype = self.reducer.accumulate_dtype or param_dtype
                    bucket.grad_shard = torch.zeros(size, dtype=grad_dtype, device=device)
                buckets.append(bucket)
                self._release(bucket)
        return buckets

    # Gather and free -----------------------------------------------------------------------------------------------

    def _release(self, bucket: Bucket) -> None:
        # Views saved for backward keep pointing at this storage: it is emptied and refilled, never replaced. The
        # parameters themselves become empty, so that a use outside the unit's forward fails instead of reading freed
        # memory.
        for piece in bucket.pieces:
            param = self.params[piece.param]
            if not hasattr(param, "_zero_shape"):
                param._zero_shape = param.shape  # type: ignore[attr-defined]
            param.data = bucket.full.new_empty(0)
        _resize(bucket.full, 0)

    def gather(self, unit: ShardedUnit) -> None:
        """Start to gather ``unit`` unless it is gathered or on its way."""
        if unit.gathered or unit.gathers is not None:
            return
        unit.gathers = []
        for bucket in unit.buckets:
            _resize(bucket.full, bucket.numel)
            unit.gathers.append(self.comm.all_gather(bucket.full, bucket.shard))

    def wait(self, unit: ShardedUnit) -> None:
        """Gather ``unit`` and return when its parameters can be used."""
        self.gather(unit)
        if unit.gathered:
            return
        for work in unit.gathers or ():
            work.wait()
        unit.gathers, unit.gathered = None, True
        for bucket in unit.buckets:
            for piece in bucket.pieces:
                param = self.params[piece.param]
                param.data = bucket.full[piece.offset : piece.offset + piece.numel].view(param._zero_shape)  # type: ignore[attr-defined]

    def free(self, unit: ShardedUnit) -> None:
        """Give the memory of the gathered parameters back; the shard stays."""
        if unit.gathers is not None:
            self.wait(unit)
        if unit.gathered:
            unit.gathered = False
            for bucket in unit.buckets:
                self._release(bucket)

    # Forward -------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """At the start of the root's forward."""
        del self.order[self._cursor :]
        self._known, self._cursor = bool(self.order), 0

    def _pre_forward(self, unit: ShardedUnit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.in_backward:  # activation checkpointing runs the forward again: only the parameters are needed
            self.wait(unit)
            return None
        here = self._cursor
        if here < len(self.order) and self.order[here] is not unit:
            del self.order[here:]  # the model takes another path than last time
            self._known = False
        if here == len(self.order):
            self.order.append(unit)
        self._cursor += 1
        self.gather(unit)
        for ahead in self.order[here + 1 : here + 1 + self.prefetch]:
            self.gather(ahead)
        self.wait(unit)
        if not torch.is_grad_enabled():
            return None
        unit.uses += 1
        unit.reduced = False
        flat, spec = tree_flatten((args, kwargs))
        picked = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not picked:
            return None
        outputs = _AfterBackward.apply(partial(self._after_backward, unit), *(flat[i] for i in picked))
        for i, tensor in zip(picked, outputs, strict=True):
            flat[i] = tensor
        return tree_unflatten(flat, spec)

    def _post_forward(self, unit: ShardedUnit, module: nn.Module, args: Any, output: Any) -> None:
        if self.in_backward:
            return
        if torch.is_grad_enabled():
            for tensor in tree_flatten(output)[0]:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit))
            last = self._cursor == len(self.order) and unit is self.order[-1]
            if self.keep_last and (unit.unit.name == "root" or (last and self._known)):
                return
        self.free(unit)

    # Backward ------------------------------------------------------------------------------------------------------

    def _before_backward(self, unit: ShardedUnit, grad: torch.Tensor) -> None:
        self.began()
        if unit.uses == 0:
            return
        self.gather(unit)
        here = max(i for i, u in enumerate(self.order) if u is unit)
        ahead = 0
        for before in reversed(self.order[:here]):
            if ahead == self.prefetch:
                break
            if before.uses:
                self.gather(before)
                ahead += 1
        self.wait(unit)

    def _after_backward(self, unit: ShardedUnit) -> None:
        unit.uses -= 1
        if unit.uses == 0:
            self._reduce(unit)

    def _reduce(self, unit: ShardedUnit) -> None:
        unit.uses, unit.reduced = 0, True
        self.free(unit)
        for bucket in unit.buckets:
            if bucket.master is not None:
                self.reducer.launch(bucket)

    def flush(self) -> None:
        """At the end of a backward pass: reduce the units whose inputs carry no gradient, or that were not used."""
        for unit in reversed(self.units):
            if not unit.reduced:
                self._reduce(unit)
            unit.reduced = False

    def publish(self) -> None:
        """After the optimizer's step: round the master weights into the shards; nothing gathered is valid any more."""
        for unit in self.units:
            self.free(unit)
        for bucket in self.buckets:
            if bucket.master is not None and bucket.shard.dtype != bucket.master.dtype:
                bucket.shard.copy_(bucket.master.detach())


def _resize(tensor: torch.Tensor, numel: int) -> None:
    tensor.untyped_storage().resize_(numel * tensor.itemsize)
