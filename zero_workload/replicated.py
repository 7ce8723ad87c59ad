"""Stages 0, 1 and 2: every rank holds all parameters, in one arena that is cut into buckets.

One contiguous allocation each for parameters, gradients (stages 0 and 1), master weights and gradient shards lives as
long as the engine, so long-lived tensors never fragment the memory that activations come and go in (ZeRO's M_D).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .comm import Collectives
from .layout import Bucket, Unit, cut, whole
from .reducer import Reducer


class Replicated:
    """The part of a model whose parameters are replicated; its optimizer states are not from stage 1 on.

    Args:
        comm: the data-parallel ranks.
        params: the engine's parameters; ``indices`` says which of them are handled here, in order of first use.
        stage: 0, 1 or 2.
        bucket_bytes: size of a bucket, in bytes of ``param_dtype``; ignored when ``whole_params``.
        whole_params: lay the shards out so that no parameter is cut (stages 0 and 1).
    """

    def __init__(
        self,
        comm: Collectives,
        params: list[nn.Parameter],
        indices: list[int],
        *,
        stage: int,
        bucket_bytes: int,
        param_dtype: torch.dtype,
        master_dtype: torch.dtype,
        whole_params: bool,
        reducer: Reducer,
    ) -> None:
        self.comm, self.params, self.stage, self.reducer = comm, params, stage, reducer
        sizes = [(i, params[i].numel()) for i in indices]
        if whole_params:
            self.buckets = whole(sizes, comm.size) if sizes else []
        else:
            self.buckets = cut(sizes, comm.size, bucket_bytes // param_dtype.itemsize)
        device = params[0].device if params else torch.device("cpu")
        total = sum(b.numel for b in self.buckets)
        self.arena = torch.zeros(total, dtype=param_dtype, device=device)
        self._adopt(master_dtype)
        self.in_bucket: dict[int, list[Bucket]] = {i: [] for i in indices}
        for bucket in self.buckets:
            for piece in bucket.pieces:
                self.in_bucket[piece.param].append(bucket)
        self._views: dict[int, torch.Tensor] = {}
        if stage <= 1:
            grads = torch.zeros(total, dtype=param_dtype, device=device)
            self._place(grads, lambda bucket, view: setattr(bucket, "grads", view))
            self._views = {i: self._view(grads, i) for i in indices}
        elif total:
            shards = torch.zeros(
                total // comm.size, dtype=reducer.accumulate_dtype or param_dtype, device=device
            )
            at = 0
            for bucket in self.buckets:
                n = bucket.numel // comm.size
                bucket.grad_shard = shards[at : at + n]
                at += n
        self._gathers: dict[int, dist.Work] = {}
        self.begin()

    def _place(self, arena: torch.Tensor, put: object) -> None:
        at = 0
        for bucket in self.buckets:
            put(bucket, arena[at : at + bucket.numel])  # type: ignore[operator]
            at += bucket.numel

    def _view(self, arena: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter ``index`` in ``arena``: its pieces lie end to end, across buckets."""
        at = 0
        for bucket in self.buckets:
            for piece in bucket.pieces:
                if piece.param == index and piece.start == 0:
                    begin = at + piece.offset
                    return arena[begin : begin + self.params[index].numel()].view(self.params[index].shape)
            at += bucket.numel
        raise AssertionError("a parameter that no bucket holds")

    def _adopt(self, master_dtype: torch.dtype) -> None:
        """Move the parameters into the arena, equal on all ranks, and make the master weights."""
        self._place(self.arena, lambda bucket, view: setattr(bucket, "full", view))
        exact = torch.zeros_like(self.arena, dtype=master_dtype) if self._mixed(master_dtype) else self.arena
        for index in {p.param: None for b in self.buckets for p in b.pieces}:
            self._view(exact, index).copy_(self.params[index].detach())
        at, masters = 0, []
        for bucket in self.buckets:
            view = exact[at : at + bucket.numel]
            self.comm.broadcast(view)
            at += bucket.numel
            bucket.stage = self.stage
            size = bucket.numel // self.comm.size
            mine = slice(self.comm.rank * size, (self.comm.rank + 1) * size) if self.stage else slice(None)
            bucket.shard = bucket.full[mine]
            masters.append(view[mine])
        if self._mixed(master_dtype) and masters:
            self.arena.copy_(exact)
            kept = torch.cat(masters)  # one arena for all master weights; `exact` goes
            masters = list(kept.split([m.numel() for m in masters]))
        for bucket, master in zip(self.buckets, masters, strict=True):
            bucket.master = nn.Parameter(master)
        for index in {p.param: None for b in self.buckets for p in b.pieces}:
            self.params[index].data = self._view(self.arena, index)

    def _mixed(self, master_dtype: torch.dtype) -> bool:
        return self.arena.dtype != master_dtype

    def begin(self) -> None:
        """Before the first gradient of a backward pass: every parameter is awaited, last bucket first."""
        for bucket in self.buckets:
            bucket.pending = len({piece.param for piece in bucket.pieces})
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
            while self._next >= 0 and self.buckets[self._next].pending <= 0:
                self.reducer.launch(self.buckets[self._next])
                self._next -= 1

    def flush(self, last_micro_batch: bool) -> None:
        """At the end of a backward pass: reduce what is left, with zeros for parameters that got no gradient."""
        if self.stage == 2 or last_micro_batch:
            if self.stage <= 1:
                for index, view in self._views.items():
                    if self.params[index].grad is None:
                        view.zero_()
            while self._next >= 0:
                self.reducer.launch(self.buckets[self._next])
                self._next -= 1
        self.begin()

    def publish(self) -> None:
        """After the optimizer's step: round the master weights, start to gather the others' parts."""
        for index in self.in_bucket:
            self.params[index].grad = None
        for number, bucket in enumerate(self.buckets):
            assert bucket.master is not None
            if bucket.shard.dtype != bucket.master.dtype:
                bucket.shard.copy_(bucket.master.detach())
            if self.stage:
                self._gathers[number] = self.comm.all_gather(bucket.full, bucket.shard)
            if self.stage <= 1:
                bucket.grad_shard = None

    def wait(self, unit: Unit | None = None) -> None:
        """Wait until the parameters of ``unit`` (all of them when ``None``) are those of the last step."""
        if not self._gathers:
            return
        for number, bucket in enumerate(self.buckets):
            needed = unit is None or any(bucket in self.in_bucket.get(i, ()) for i in unit.params)
            if needed and number in self._gathers:
                self._gathers.pop(number).wait()
