"""Stages 0, 1 and 2: every rank holds all parameters, in a row that is cut into buckets."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

from ..buffers.comm import current_stream
from ..buffers.layout import Bucket, Row
from .awaited import Awaited
from .reducer import Reducer
from .units import Unit

#: ``Bucket.pending`` when its reduction was started.
_REDUCED = -1


class Replicated:
    """The part of a model whose parameters are replicated: ``units``. Stage 3 (what ``hybrid`` leaves) counts as 2.

    Args:
        alone: no other part has collectives in backward. Where one has, all reductions wait for the end of backward:
            when a gradient comes differs between ranks, if one leaves its module out, and then so would their order.
    """

    def __init__(self, units: list[Unit], reducer: Reducer, alone: bool = True) -> None:
        self.alone = alone
        self.params, self.reducer = reducer.params, reducer
        self.stage = min(reducer.settings.stage, 2)
        held = sorted(i for u in units for i in u.params)  # as registered: the order of first use
        rows = reducer.rows(held, self.stage)
        self.frozen = [b for row in rows if not row.trainable for b in row.buckets]
        trained = [row for row in rows if row.trainable]
        #: those of trainable parameters, in the order in which gradients end, from the last to the first.
        self.buckets = sorted((b for row in trained for b in row.buckets), key=Bucket.ends)
        self.in_bucket = _by_parameter(self.buckets)
        self._views: dict[int, torch.Tensor] = {}  # up to stage 1: where a parameter's gradients add up
        for row in trained:
            self._watch(row)
        self._gathers: dict[Bucket, dist.Work] = {}  # under way
        self._stream: Any = None  # of the last publish
        self._waiting = set[int]()  # parameters that nobody has used since the last step
        reducer.at_end.append(self._flush)
        self._begin()

    def _watch(self, row: Row) -> None:
        for index in row.begins:
            self.params[index].register_post_accumulate_grad_hook(partial(self._on_grad, index))
            if self.stage <= 1:
                self._views[index] = row.view(row.grads, index)

    def _begin(self) -> None:
        """Before the first gradient of a backward pass: every parameter is awaited, last bucket first."""
        for bucket in self.buckets:
            bucket.pending = len(bucket.pieces)
        self._next = len(self.buckets) - 1
        self._held = False  # nothing is reduced before the end: gradients may come again
        self._full = False  # a bucket has all its gradients

    def _on_grad(self, index: int, param: nn.Parameter) -> None:
        """``param.grad`` is complete for this backward pass: reduce the buckets that were full before it, take it.

        Not yet its own bucket: hooks of the user on ``param`` may come after this one, and look at its gradient.
        Of several passes inside one (reentrant checkpoints) each may have a gradient of the same parameter.
        """
        self.reducer.begin_backward(index)
        if self._full and self.alone:
            self._full = False
            self._launch(complete_only=True)
        self._held |= self.reducer.is_nested
        view = self._views.get(index)
        if view is not None and param.grad is not view:
            assert param.grad is not None
            view.copy_(param.grad)
            param.grad = view
        for bucket in self.in_bucket.get(index, ()):  # none for a parameter without elements
            if bucket.pending == _REDUCED:
                raise RuntimeError(
                    "a parameter got a gradient after its reduction: it is used both inside and outside of a "
                    "reentrant checkpoint. Checkpoint with use_reentrant=False"
                )
            if not self._held:
                bucket.pending -= 1
                self._full |= bucket.pending == 0

    def _launch(self, complete_only: bool) -> None:
        """Reduce strictly last to first, on every rank alike, whatever parameters a rank has not used."""
        if self.stage < 2 and not self.reducer.in_last:
            return
        while self._next >= 0:
            bucket = self.buckets[self._next]
            if complete_only and bucket.pending > 0:
                return
            self.reducer.launch(bucket)
            self._next, bucket.pending = self._next - 1, _REDUCED

    def _flush(self) -> None:
        """At the end of a backward pass: reduce what is left, with zeros for parameters that got no gradient."""
        for index, view in self._views.items():
            if self.params[index].grad is None:
                view.zero_()
        self._launch(complete_only=False)
        self._begin()

    def publish(self) -> None:
        """After the optimizer's step: round the master weights, start to gather the other ranks' parts."""
        for index in self.in_bucket:
            self.params[index].grad = None
        self._stream = current_stream(self.params[0].device)
        for bucket in self.buckets:
            bucket.publish()
            if self.stage:
                self._gathers[bucket] = self.reducer.comm.all_gather(bucket.full, bucket.shard)
            if self.stage <= 1:
                bucket.grad_shard = None
        for index in self.in_bucket if self.stage else ():
            self._waiting.add(index)
            if not Awaited.mark(self.params[index], partial(self._arrive, index)):
                self._arrive(index)

    def _arrive(self, index: int) -> None:
        """Wait for the parameter ``index``."""
        for bucket in self.in_bucket.get(index, ()):
            if bucket in self._gathers:
                self._end(self._gathers[bucket])
                del self._gathers[bucket]
        self._waiting.discard(index)
        Awaited.clear(self.params[index])

    def _end(self, work: dist.Work) -> None:
        """Wait for a gather. NCCL holds up only the stream that waits. So where another stream uses the weights first,
        the one that trains waits too: nobody waits for this gather again.
        """
        if current_stream(self.params[0].device) != self._stream:
            with torch.cuda.stream(self._stream):
                work.wait()
        work.wait()

    def wait(self, unit: Unit | None = None) -> None:
        """Wait until the parameters of ``unit`` (all of them when ``None``) are those of the last step."""
        if self._waiting or self._gathers:
            self._wait(unit)

    @_disable_dynamo
    def _wait(self, unit: Unit | None) -> None:
        for index in self.in_bucket if unit is None else unit.params:
            self._arrive(index)
        while unit is None and self._gathers:  # of padding alone
            _, work = self._gathers.popitem()
            self._end(work)


def _by_parameter(buckets: list[Bucket]) -> dict[int, list[Bucket]]:
    """A parameter's number -> the buckets that hold parts of it."""
    found: dict[int, list[Bucket]] = {}
    for bucket in buckets:
        for piece in bucket.pieces:
            found.setdefault(piece.param, []).append(bucket)
    return found
