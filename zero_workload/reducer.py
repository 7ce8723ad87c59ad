"""Gradients on their way: from ``p.grad`` into a bucket's buffer, through one collective, into the owner's shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from .comm import Collectives
from .layout import Bucket


class Pool:
    """Buffers of the sizes asked for, kept for the next user: their number depends on what is in flight at once,
    never on the size of the model (ZeRO's constant-size buffers, C_B).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, numel: int) -> torch.Tensor:
        """A buffer [numel] with any content."""
        free = self._free.get(numel)
        return free.pop() if free else torch.empty(numel, dtype=self.dtype, device=self.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Hand ``buffer`` back; nothing may still read or write it."""
        self._free.setdefault(buffer.numel(), []).append(buffer)

    def clear(self) -> None:
        """Free the idle buffers."""
        self._free.clear()


class Reducer:
    """Starts each bucket's reduction when told to and collects the results, at most ``in_flight`` at a time.

    Args:
        comm: the data-parallel ranks.
        params: the engine's parameters, by index.
        pool: where the send buffers of stages 2 and 3 come from.
        classic: stage 1 all-reduces whole buckets instead of scattering them.
        accumulate_dtype: dtype in which a shard sums micro-batches up at stages 2 and 3.
        in_flight: reductions under way before the oldest is waited for.
    """

    def __init__(
        self,
        comm: Collectives,
        params: Sequence[nn.Parameter],
        pool: Pool,
        *,
        classic: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        in_flight: int = 2,
    ) -> None:
        self.comm, self.params, self.pool = comm, params, pool
        self.classic, self.accumulate_dtype, self.in_flight = classic, accumulate_dtype, in_flight
        self.first_micro_batch = True
        # bucket, handle, result, send buffer to give back, whether the shard starts afresh
        self._work: deque[tuple[Bucket, dist.Work, torch.Tensor, torch.Tensor | None, bool]] = deque()

    def launch(self, bucket: Bucket) -> None:
        """Start the reduction of ``bucket``. At stages 2 and 3 this frees the gradients it has copied."""
        if bucket.stage == 0 or (bucket.stage == 1 and self.classic):
            assert bucket.grads is not None
            self._work.append((bucket, self.comm.all_reduce(bucket.grads), bucket.grads, None, True))
            return
        size = bucket.numel // self.comm.size
        if bucket.stage == 1:
            assert bucket.grads is not None
            out = torch.empty(size, dtype=bucket.grads.dtype, device=bucket.grads.device)
            self._work.append((bucket, self.comm.reduce_scatter(out, bucket.grads), out, None, True))
            return
        # The buffers are as many as the reductions in flight: wait for the oldest before filling another.
        while len(self._work) >= self.in_flight:
            self._finish()
        send = self._pack(bucket)
        accumulate = self.accumulate_dtype or send.dtype
        if bucket.grad_shard is None:
            bucket.grad_shard = torch.empty(size, dtype=accumulate, device=send.device)
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
            if piece.offset > end:
                send[end : piece.offset].zero_()
            end = piece.offset + piece.numel
            param = self.params[piece.param]
            if param.grad is None:
                send[piece.offset : end].zero_()
                continue
            into.append(send[piece.offset : end])
            source.append(param.grad.reshape(-1)[piece.start : piece.start + piece.numel])
        send[end:].zero_()
        if into:
            torch._foreach_copy_(into, source)
        for piece in bucket.pieces:
            param = self.params[piece.param]
            if piece.start == 0:  # buckets are reduced last to first, so this was the parameter's last piece
                param.grad = None
        return send

    def _finish(self) -> None:
        bucket, work, out, send, afresh = self._work.popleft()
        work.wait()
        if bucket.stage <= 1:
            size = out.numel() // self.comm.size
            mine = slice(self.comm.rank * size, (self.comm.rank + 1) * size)
            bucket.grad_shard = out[mine] if bucket.stage == 1 and self.classic else out
            return
        assert bucket.grad_shard is not None and send is not None
        if out is not bucket.grad_shard:
            if afresh:
                bucket.grad_shard.copy_(out)
            else:
                bucket.grad_shard.add_(out)
            self.pool.give(out)
        self.pool.give(send)
