"""Gradients on their way: from ``p.grad`` into a bucket's buffer, through one collective, into the owner's shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from .comm import Collectives
from .layout import Bucket, Settings


class Pool:
    """Buffers of the sizes asked for, kept for the next user: their number depends on what is in flight at once,
    never on the size of the model (ZeRO's constant-size buffers, C_B).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.bytes = 0  # of all buffers made so far
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, numel: int) -> torch.Tensor:
        """A buffer [numel] with any content."""
        free = self._free.get(numel)
        if free:
            return free.pop()
        self.bytes += numel * self.dtype.itemsize
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Hand ``buffer`` back; nothing may still read or write it."""
        self._free.setdefault(buffer.numel(), []).append(buffer)


class Reducer:
    """Starts each bucket's reduction when told to and collects the results, at stages 2 and 3 ``IN_FLIGHT`` at most.

    Args:
        comm: the data-parallel ranks.
        params: the engine's parameters, by index.
        settings: those of ``zero()``.
    """

    IN_FLIGHT = 2

    def __init__(self, comm: Collectives, params: Sequence[nn.Parameter], settings: Settings) -> None:
        self.comm, self.params, self.settings = comm, params, settings
        self.pool = Pool(settings.param_dtype, params[0].device)
        self.first_micro_batch = True
        # bucket, handle, result, send buffer to give back, whether the shard starts afresh
        self._work: deque[tuple[Bucket, dist.Work, torch.Tensor, torch.Tensor | None, bool]] = deque()

    def launch(self, bucket: Bucket) -> None:
        """Start the reduction of ``bucket``. At stages 2 and 3 this frees the gradients it has copied."""
        size = bucket.numel // self.comm.size
        if bucket.stage <= 1:
            assert bucket.grads is not None
            if bucket.stage == 0 or self.settings.classic:
                out, work = bucket.grads, self.comm.all_reduce(bucket.grads)
            else:
                out = bucket.grads.new_empty(size)
                work = self.comm.reduce_scatter(out, bucket.grads)
            self._work.append((bucket, work, out, None, True))
            return
        # The buffers are as many as the reductions in flight: wait for the oldest before filling another.
        while len(self._work) >= self.IN_FLIGHT:
            self._finish()
        send = self._pack(bucket)
        assert bucket.grad_shard is not None
        direct = self.first_micro_batch and bucket.grad_shard.dtype == send.dtype
        out = bucket.grad_shard if direct else self.pool.take(size)
        self._work.append((bucket, self.comm.reduce_scatter(out, send), out, send, self.first_micro_batch))

    def drain(self) -> None:
        """Wait for everything under way."""
        while self._work:
            self._finish()

    def _pack(self, bucket: Bucket) -> torch.Tensor:
        send = self.pool.take(bucket.numel)
        into, source, end = [], [], 0
        for piece in bucket.pieces:
            send[end : piece.offset].zero_()
            end = piece.offset + piece.numel
            grad = self.params[piece.param].grad
            if grad is None:
                send[piece.offset : end].zero_()
            else:
                into.append(send[piece.offset : end])
                source.append(grad.reshape(-1)[piece.start : piece.start + piece.numel])
        send[end:].zero_()
        if into:
            torch._foreach_copy_(into, source)
        for piece in bucket.pieces:
            if piece.start == 0:  # buckets are reduced last to first, so this was the parameter's last piece
                self.params[piece.param].grad = None
        return send

    def _finish(self) -> None:
        bucket, work, out, send, afresh = self._work.popleft()
        work.wait()
        if send is None:
            classic = bucket.stage == 1 and self.settings.classic
            bucket.grad_shard = out[bucket.owned(self.comm.rank, self.comm.size)] if classic else out
            return
        assert bucket.grad_shard is not None
        if out is not bucket.grad_shard:
            bucket.grad_shard.copy_(out) if afresh else bucket.grad_shard.add_(out)
            self.pool.give(out)
        self.pool.give(send)
