"""Stage 3: parameters are sharded too. Each unit is gathered just before it is used and freed just after.

Forward: ``pre_forward`` gathers the unit and starts the gathers of the next ``prefetch`` units; ``post_forward`` frees
it. Backward: a hook on the unit's output gathers it again, with those before it; when the gradient of its input is
known, all its parameters' gradients are too, and they are reduce-scattered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from .comm import Collectives
from .layout import Bucket, Settings, Unit, cut
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
        settings: those of ``zero()``.
        reducer: where gradients go.
        began: called when a backward pass begins.
    """

    def __init__(
        self,
        comm: Collectives,
        params: list[nn.Parameter],
        units: list[Unit],
        settings: Settings,
        reducer: Reducer,
        began: Callable[[], None],
    ) -> None:
        self.comm, self.params, self.settings = comm, params, settings
        self.reducer, self.began = reducer, began
        self.prefetch = 1 if settings.prefetch == "auto" else int(settings.prefetch)
        self.prefetch_reason = "as asked for"
        self.in_backward = False
        self.order: list[ShardedUnit] = []  # forward calls as the last pass made them
        self._cursor = 0
        self._known = False  # a whole forward pass was seen: `order` says what comes last
        self._clock = Stopwatch(params[0].device) if settings.prefetch == "auto" else None
        self._shapes = [p.shape for p in params]
        self.units = [ShardedUnit(u, self._shard(u)) for u in units if u.params]
        self.buckets = [b for u in self.units for b in u.buckets]
        for unit in self.units:
            module = unit.unit.module
            module.register_forward_pre_hook(partial(self._pre_forward, unit), with_kwargs=True, prepend=True)
            module.register_forward_hook(partial(self._post_forward, unit))

    def _shard(self, unit: Unit) -> list[Bucket]:
        buckets = []
        for trainable in (True, False):
            sizes = [(i, self.params[i].numel()) for i in unit.params if self.params[i].requires_grad is trainable]
            for bucket in cut(sizes, self.comm.size, None):
                bucket.stage = 3
                exact = self.params[0].new_zeros(bucket.numel, dtype=self.settings.master_dtype)
                for piece in bucket.pieces:
                    exact[piece.offset : piece.offset + piece.numel] = self.params[piece.param].detach().reshape(-1)
                self.comm.broadcast(exact)
                mine = exact[bucket.owned(self.comm.rank, self.comm.size)].clone()
                bucket.shard = mine.to(self.settings.param_dtype)
                bucket.full = bucket.shard.new_empty(bucket.numel)
                if trainable:
                    bucket.master = nn.Parameter(mine)
                    bucket.grad_shard = torch.zeros_like(mine, dtype=self.settings.shard_grad_dtype)
                buckets.append(bucket)
                self._release(bucket)
        return buckets

    # Gather and free -----------------------------------------------------------------------------------------------

    def _release(self, bucket: Bucket) -> None:
        # Views saved for backward keep pointing at this storage: it is emptied and refilled, never replaced. The
        # parameters themselves become empty, so that a use outside the unit's forward fails instead of reading freed
        # memory.
        for piece in bucket.pieces:
            self.params[piece.param].data = bucket.full.new_empty(0)
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
                flat = bucket.full[piece.offset : piece.offset + piece.numel]
                self.params[piece.param].data = flat.view(self._shapes[piece.param])

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
        if self._clock and self._known and self._cursor == len(self.order):
            self._choose_prefetch()
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
        if self._clock and self._known:  # measuring: one gather at a time, alone
            self._clock.start()
            self.wait(unit)
            self._clock.stop("gather")
            self._clock.start()
        else:
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
        if self._clock and self._known and unit.unit.name != "root":
            self._clock.stop("compute")
        if torch.is_grad_enabled():
            for tensor in tree_flatten(output)[0]:
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit))
            # Backward begins with these: it would gather them again at once.
            last = self._known and unit in self.order[-1 - self.prefetch :]
            if self.settings.keep_last and (last or unit.unit.name == "root"):
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
            bucket.publish()

    def _choose_prefetch(self) -> None:
        """k* = ceil(T_gather / T_compute): so many units' forward hides one gather. The slowest rank decides for all,
        because every rank has to start its gathers in the same order.
        """
        assert self._clock is not None
        times = torch.tensor([self._clock.mean("gather"), self._clock.mean("compute")], device=self.params[0].device)
        self.comm.all_reduce(times, dist.ReduceOp.MAX).wait()
        gather, compute = times.tolist()
        self._clock = None
        self.prefetch = max(1, min(math.ceil(gather / max(compute, 1e-9)), len(self.units)))
        self.prefetch_reason = f"a gather takes {gather * 1e3:.2f} ms, a unit's forward {compute * 1e3:.2f} ms"


class Stopwatch:
    """Mean wall time of what lies between ``start`` and ``stop``, the device's queue included."""

    def __init__(self, device: torch.device) -> None:
        self.sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.spans: dict[str, list[float]] = {}
        self.begin = 0.0

    def start(self) -> None:
        """From now on."""
        self.sync()
        self.begin = time.perf_counter()

    def stop(self, name: str) -> None:
        """Up to now."""
        self.sync()
        self.spans.setdefault(name, []).append(time.perf_counter() - self.begin)

    def mean(self, name: str) -> float:
        """Seconds; 0 when nothing was timed."""
        return sum(self.spans.get(name, [])) / max(len(self.spans.get(name, [])), 1)


def _resize(tensor: torch.Tensor, numel: int) -> None:
    tensor.untyped_storage().resize_(numel * tensor.itemsize)
