"""A gradient's way: from ``p.grad`` into a bucket's buffer, through one collective, into the owner's shard."""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..buffers.comm import IN_FLIGHT, Collectives
from ..buffers.layout import Bucket, Row
from ..buffers.settings import Settings

_CALLED = [
    getattr(torch.autograd.function.BackwardCFunction, name, None) for name in ("apply", "apply_boxed")
]
#: What autograd calls for a ``torch.autograd.Function``, in whatever thread. PyTorch 2.13 has a second one.
_OF_NODES = {function.__code__ for function in _CALLED if function}


class _Reduction(NamedTuple):
    """A reduction under way."""

    bucket: Bucket
    work: dist.Work
    result: torch.Tensor
    sent: torch.Tensor | None  # the buffer, at stages 2 and 3
    last: bool  # of the last micro-batch


class Reducer:
    """Knows where in a step backward is, starts each bucket's reduction when told to and collects the results.

    Stages 2 and 3 copy gradients into buffers that are kept. At most ``IN_FLIGHT`` reductions are under way, so buffers
    do not grow with the model.

    Args:
        whole: no parameter is cut (stages 0 and 1), for optimizers of matrices.
    """

    def __init__(
        self, comm: Collectives, params: Sequence[nn.Parameter], settings: Settings, whole: bool = False
    ) -> None:
        self.comm, self.params, self.settings, self.whole = comm, params, settings, whole
        self.micro_batch = 0
        self.in_backward = False
        self._task = -1  # autograd's number of the pass in which backward began
        self._to_some = False  # it is told whose gradients it computes: torch.autograd.grad is such a pass
        self._graded = False  # a parameter got a gradient in it
        self.by_engine = False  # engine.backward called this backward pass
        self.used = [0.0] * len(params)  # 1: has a gradient on this rank in this step
        self.at_end: list[Callable[[], None]] = []  # called at the end of every backward pass
        self._reductions: deque[_Reduction] = deque()
        self._replicas: list[dist.Work] = []

    def rows(self, indices: Sequence[int], stage: int) -> list[Row]:
        """Parameters laid end to end; the trainable and the frozen apart."""
        found = []
        for trainable in (True, False):
            some = [i for i in indices if self.params[i].requires_grad == trainable]
            if some:
                whole = self.whole and trainable
                found.append(Row(self.comm, self.params, some, self.settings, stage, whole))
        return found

    def begin_backward(self, index: int | None = None) -> None:
        """Called by the first hook of a backward pass, and for each parameter (``index``) that has a gradient.

        For a reentrant checkpoint's inner pass ``engine.backward`` calls this in the outer one first.

        Raises:
            RuntimeError: this step's gradients are reduced already, the loss is not scaled, or this is a pass inside
                one that the engine did not see begin.
        """
        if index is not None:
            self.used[index], self._graded = 1.0, True
        if self.in_backward:
            return
        if _in_node():
            raise RuntimeError(
                "a backward pass runs inside another that the engine did not see begin: call engine.backward(loss), "
                "not loss.backward(), or checkpoint with use_reentrant=False"
            )
        self.in_backward, self._task = True, torch._C._current_graph_task_id()
        self._to_some = not torch.autograd._is_checkpoint_valid()
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if not self._to_some:
            self.require_room()
        if self.settings.scaled and not self.by_engine:
            raise RuntimeError(
                "float16 gradients need a scaled loss: call engine.backward(loss), not loss.backward() "
                "(a schedule that calls it itself runs inside engine.scaling())"
            )

    @property
    def is_nested(self) -> bool:
        """Whether the pass that runs here lies inside the one in which backward began."""
        return torch._C._current_graph_task_id() != self._task

    def require_room(self) -> None:
        """Raise RuntimeError where backward was called once a micro-batch already."""
        if self.micro_batch >= self.settings.gradient_accumulation:
            raise RuntimeError(
                f"backward was called {self.micro_batch} times in this step, which has as many micro-batches: "
                "add the losses up for one backward, or call engine.step() first"
            )

    def _end_backward(self) -> None:
        if self._to_some and not self._graded:
            raise RuntimeError(
                "torch.autograd.grad went through the model, whose hooks took it for the step's backward: at stage 3 "
                "leave it out, or take stage 0, 1 or 2"
            )
        self.require_room()
        for flush in self.at_end:
            flush()
        self.micro_batch, self.in_backward, self._graded = self.micro_batch + 1, False, False

    def require_whole(self) -> None:
        """Raise RuntimeError where a backward pass has ended with an error: other ranks may wait for its reductions."""
        if self.in_backward and torch._C._current_graph_task_id() < 0:
            raise RuntimeError(
                "backward has failed and left its step half reduced: end the job, and start it again"
            )

    @property
    def in_last(self) -> bool:
        """Whether this is the last micro-batch of the step."""
        return self.micro_batch == self.settings.gradient_accumulation - 1

    def launch(self, bucket: Bucket) -> None:
        """Start the reduction of ``bucket``. At stages 2 and 3 this frees the gradients it has copied."""
        if bucket.grads is not None:
            self._launch_whole(bucket, bucket.grads)
            return
        # The buffers are as many as the reductions in flight: wait for the oldest before filling another.
        while len(self._reductions) >= IN_FLIGHT:
            self._finish()
        sent = self._pack(bucket)
        assert bucket.grad_shard is not None
        result, first = bucket.grad_shard, self.micro_batch == 0
        if not first or result.dtype != sent.dtype:  # to be added to what is there
            result = self.comm.take(bucket.numel // self.comm.size, sent)
            if first:
                bucket.grad_shard.zero_()
        work = self.comm.reduce_scatter(result, sent)
        self._reductions.append(_Reduction(bucket, work, result, sent, self.in_last))

    def _launch_whole(self, bucket: Bucket, grads: torch.Tensor) -> None:
        """At stages 0 and 1, where the gradients [numel] added up: the result lies where the optimizer looks for it."""
        local = grads.to(self.settings.wire)
        if not self.settings.stage or self.settings.classic:
            work, result = self.comm.all_reduce(local), local[bucket.owned]
        else:
            own_memory = local is not grads
            result = local.new_empty(local.numel() // self.comm.size) if own_memory else local[bucket.owned]
            work = self.comm.reduce_scatter(result, local)
        bucket.grad_shard = result
        self._reductions.append(_Reduction(bucket, work, result, None, self.in_last))

    def drain(self) -> None:
        """Wait for everything under way."""
        while self._reductions:
            self._finish()
        while self._replicas:
            self._replicas.pop().wait()

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        """The gradients of ``bucket`` in a buffer [numel], with zeros for those that are not there."""
        sent = self.comm.take(bucket.numel, bucket.full.new_empty(0, dtype=self.settings.wire))
        into, source, end = [], [], 0
        with torch._C.DisableTorchFunctionSubclass():  # those of freed units have a class of their own
            grads = [self.params[piece.param].grad for piece in bucket.pieces]
        for piece, grad in zip(bucket.pieces, grads, strict=True):
            sent[end : piece.offset].zero_()
            end = piece.offset + piece.numel
            if grad is None:
                sent[piece.where].zero_()
            else:
                into.append(sent[piece.where])
                source.append(grad.reshape(-1)[piece.start : piece.start + piece.numel])
        sent[end:].zero_()
        if into:
            torch._foreach_copy_(into, source)
        with torch._C.DisableTorchFunctionSubclass():
            for piece in bucket.pieces:
                if (
                    piece.start == 0
                ):  # buckets are reduced last to first, so this was the parameter's last piece
                    self.params[piece.param].grad = None
        return sent

    def _finish(self) -> None:
        bucket, work, result, sent, last = self._reductions.popleft()
        work.wait()
        if sent is None:
            return
        assert bucket.grad_shard is not None
        if result is not bucket.grad_shard:
            bucket.grad_shard.add_(result)
            self.comm.give(result)
        self.comm.give(sent)
        if last and self.comm.replicas:  # once a step, while the next bucket's reduce-scatter is under way
            self._replicas.append(self.comm.replicas.all_reduce(bucket.grad_shard))


def _in_node() -> bool:
    """Whether a node of the graph started the backward pass that runs here, as a reentrant checkpoint does."""
    frame = sys._getframe()
    while frame.f_back:
        frame = frame.f_back
        if frame.f_code in _OF_NODES:
            return True
    return False
