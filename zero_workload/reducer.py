"""A gradient's way: from ``p.grad`` into a bucket's buffer, through one collective, into the owner's shard."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from .comm import IN_FLIGHT, Collectives
from .layout import Bucket, Row, Settings


class Reducer:
    """Knows where in a step backward is, starts each bucket's reduction when told to and collects the results.

    Stages 2 and 3 copy gradients into buffers that are kept for the next bucket. At most ``IN_FLIGHT`` reductions are
    under way at once, so the buffers do not grow with the model.
    """

    def __init__(self, comm: Collectives, params: Sequence[nn.Parameter], settings: Settings) -> None:
        self.comm, self.params, self.settings = comm, params, settings
        self.micro_batch, self.in_backward = 0, False
        self.used = [0.0] * len(params)  # 1: has a gradient on this rank in this step
        self.at_end: list[Callable[[], None]] = []  # called at the end of every backward pass
        # bucket, handle, result, the buffer that is sent (stages 2 and 3), whether it was the last micro-batch
        self._work: deque[tuple[Bucket, dist.Work, torch.Tensor, torch.Tensor | None, bool]] = deque()
        self._replicas: list[dist.Work] = []

    def rows(self, indices: Sequence[int], stage: int) -> list[Row]:
        """Parameters laid end to end; the trainable and the frozen apart."""
        apart = [
            [i for i in indices if self.params[i].requires_grad == trainable] for trainable in (True, False)
        ]
        return [Row(self.comm, self.params, some, self.settings, stage) for some in apart if some]

    def begin_backward(self, index: int | None = None) -> None:
        """Called by whatever sees a backward pass first, and for each parameter (``index``) that has a gradient."""
        if index is not None:
            self.used[index] = 1.0
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        for flush in self.at_end:
            flush()
        self.micro_batch, self.in_backward = self.micro_batch + 1, False

    def require_whole(self) -> None:
        """Raise RuntimeError where a backward pass has ended with an error: other ranks may wait for its reductions."""
        if self.in_backward and torch._C._current_graph_task_id() < 0:
            raise RuntimeError(
                "backward has failed and left its step half reduced: end the job, and start it again"
            )

    def launch(self, bucket: Bucket) -> None:
        """Start the reduction of ``bucket``. At stages 2 and 3 this frees the gradients it has copied."""
        comm, size = self.comm, bucket.numel // self.comm.size
        last = self.micro_batch == self.settings.gradient_accumulation - 1
        if bucket.grads is not None:
            local = bucket.grads.to(self.settings.wire)
            out = (
                local[bucket.owned]
                if not self.settings.stage or local is bucket.grads
                else local.new_empty(size)
            )
            work = comm.reduce_scatter(out, local) if self.settings.stage else comm.all_reduce(local)
            bucket.grad_shard = out
            self._work.append((bucket, work, out, None, last))
            return
        # The buffers are as many as the reductions in flight: wait for the oldest before filling another.
        while len(self._work) >= IN_FLIGHT:
            self._finish()
        send = self._pack(bucket)
        assert bucket.grad_shard is not None
        out, first = bucket.grad_shard, self.micro_batch == 0
        if not first or out.dtype != send.dtype:  # to be added to what is there
            out = self.comm.take(size, send)
            if first:
                bucket.grad_shard.zero_()
        self._work.append((bucket, comm.reduce_scatter(out, send), out, send, last))

    def drain(self) -> None:
        """Wait for everything under way."""
        while self._work:
            self._finish()
        while self._replicas:
            self._replicas.pop().wait()

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        send = self.comm.take(bucket.numel, bucket.full.new_empty(0, dtype=self.settings.wire))
        into, source, end = [], [], 0
        for piece in bucket.pieces:
            send[end : piece.offset].zero_()
            end = piece.offset + piece.numel
            grad = self.params[piece.param].grad
            if grad is None:
                send[piece.where].zero_()
            else:
                into.append(send[piece.where])
                source.append(grad.reshape(-1)[piece.start : piece.start + piece.numel])
        send[end:].zero_()
        if into:
            torch._foreach_copy_(into, source)
        for piece in bucket.pieces:
            if piece.start == 0:  # buckets are reduced last to first, so this was the parameter's last piece
                self.params[piece.param].grad = None
        return send

    def _finish(self) -> None:
        bucket, work, out, send, last = self._work.popleft()
        work.wait()
        if send is None:  # stages 0 and 1: reduced where the optimizer looks for it
            return
        assert bucket.grad_shard is not None
        if out is not bucket.grad_shard:
            bucket.grad_shard.add_(out)
            self.comm.give(out)
        self.comm.give(send)
        if last and self.comm.replicas:  # once a step, while the next bucket's reduce-scatter is under way
            self._replicas.append(self.comm.replicas.all_reduce(bucket.grad_shard))
