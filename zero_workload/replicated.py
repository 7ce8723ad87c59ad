"""Stages 0, 1 and 2: every rank holds all parameters, in one arena that is cut into buckets.

One contiguous allocation each for parameters, gradients (stages 0 and 1), master weights and gradient shards lives as
long as the engine, so long-lived tensors never fragment the memory that activations come and go in (ZeRO's M_D).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .comm import Collectives
from .layout import Bucket, Settings, Unit, cut, whole
from .reducer import Reducer


class Replicated:
    """The part of a model whose parameters are replicated; its optimizer states are not from stage 1 on.

    Args:
        comm: the data-parallel ranks.
        params: the engine's parameters; ``indices`` says which of them are handled here, in order of first use.
        settings: those of ``zero()``; stage 3 (what ``hybrid`` leaves replicated) counts as 2.
        reducer: where full buckets go.
    """

    def __init__(
        self, comm: Collectives, params: list[nn.Parameter], indices: list[int], settings: Settings, reducer: Reducer
    ) -> None:
        self.comm, self.params, self.reducer = comm, params, reducer
        self.stage = min(settings.stage, 2)
        sizes = [(i, params[i].numel()) for i in indices]
        if settings.whole_params:
            self.buckets = whole(sizes, comm.size)
        else:
            self.buckets = cut(sizes, comm.size, settings.bucket_bytes // settings.param_dtype.itemsize)
        self.in_bucket: dict[int, list[Bucket]] = {i: [] for i in indices}
        self._begins: dict[int, int] = {}
        ends = 0
        for bucket in self.buckets:
            bucket.stage = self.stage
            for piece in bucket.pieces:
                self.in_bucket[piece.param].append(bucket)
                self._begins.setdefault(piece.param, ends + piece.offset)
            ends += bucket.numel
        self._adopt(ends, settings)
        self._views: dict[int, torch.Tensor] = {}
        if self.stage <= 1:
            grads = torch.zeros_like(self.arena)
            for bucket, part in zip(self.buckets, self._split(grads), strict=True):
                bucket.grads = part
            self._views = {i: self._view(grads, i) for i in indices}
        else:
            shards = self.arena.new_zeros(ends // comm.size, dtype=settings.shard_grad_dtype)
            for bucket, part in zip(self.buckets, self._split(shards, comm.size), strict=True):
                bucket.grad_shard = part
        self._gathers: dict[Bucket, dist.Work] = {}
        self.begin()

    def _split(self, arena: torch.Tensor, over: int = 1) -> tuple[torch.Tensor, ...]:
        return arena.split([b.numel // over for b in self.buckets])

    def _view(self, arena: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter ``index`` in ``arena``: its pieces lie end to end, across buckets."""
        param = self.params[index]
        return arena[self._begins[index] : self._begins[index] + param.numel()].view(param.shape)

    def _adopt(self, total: int, settings: Settings) -> None:
        """Move the parameters into the arena, equal on all ranks, and make the master weights."""
        exact = self.params[0].new_zeros(total, dtype=settings.master_dtype)
        for index in self.in_bucket:
            self._view(exact, index).copy_(self.params[index].detach())
        parts = self._split(exact)
        for part in parts:
            self.comm.broadcast(part)
        mine = [p[b.owned(self.comm.rank, self.comm.size)] for b, p in zip(self.buckets, parts, strict=True)]
        if settings.mixed and mine:
            mine = list(torch.cat(mine).split([m.numel() for m in mine]))  # one arena, and `exact` goes
        self.arena = exact.to(settings.param_dtype)
        for bucket, full, master in zip(self.buckets, self._split(self.arena), mine, strict=True):
            bucket.full, bucket.master = full, nn.Parameter(master)
            bucket.shard = full[bucket.owned(self.comm.rank, self.comm.size)]
        for index in self.in_bucket:
            self.params[index].data = self._view(self.arena, index)

    def begin(self) -> None:
        """Before the first gradient of a backward pass: every parameter is awaited, last bucket first."""
        for bucket in self.buckets:
            bucket.pending = len(bucket.pieces)
        self._next = len(self.buckets) - 1

    def on_grad(self, index: int, last_micro_batch: bool) -> None:
        """``params[index].grad`` is complete for this backward pass: take it, reduce the buckets that became full.

        Buckets are reduced strictly last to first, on every rank alike: a rank that does not use some parameter
        must not send its collectives in another order than the rest.
        """
        param = self.params[index]
        if self.stage <= 1 and param.grad is not self._views[index]:
            assert param.grad is not None
            self._views[index].copy_(param.grad)
            param.grad = self._views[index]
        for bucket in self.in_bucket[index]:
            bucket.pending -= 1
        if self.stage == 2 or last_micro_batch:
            self._launch(complete_only=True)

    def flush(self, last_micro_batch: bool) -> None:
        """At the end of a backward pass: reduce what is left, with zeros for parameters that got no gradient."""
        if self.stage == 2 or last_micro_batch:
            for index, view in self._views.items():
                if self.params[index].grad is None:
                    view.zero_()
            self._launch(complete_only=False)
        self.begin()

    def _launch(self, complete_only: bool) -> None:
        while self._next >= 0 and not (complete_only and self.buckets[self._next].pending > 0):
            self.reducer.launch(self.buckets[self._next])
            self._next -= 1

    def publish(self) -> None:
        """After the optimizer's step: round the master weights, start to gather the other ranks' parts."""
        for index in self.in_bucket:
            self.params[index].grad = None
        for bucket in self.buckets:
            bucket.publish()
            if self.stage:
                self._gathers[bucket] = self.comm.all_gather(bucket.full, bucket.shard)
            if self.stage <= 1:
                bucket.grad_shard = None

    def wait(self, unit: Unit | None = None) -> None:
        """Wait until the parameters of ``unit`` (all of them when ``None``) are those of the last step."""
        if self._gathers:
            needed = self.buckets if unit is None else [b for i in unit.params for b in self.in_bucket.get(i, ())]
            for bucket in needed:
                if bucket in self._gathers:
                    self._gathers.pop(bucket).wait()
