"""Two collectives over gloo that cost less than gloo's own; NCCL needs neither."""

from typing import Any

import torch
import torch.distributed as dist

Collectives = Any  # comm.Collectives, which imports this file


class GatherInPlace(dist.Work):
    """All-gather where each shard already lies in its place of ``full``: gloo's own would copy all of it twice."""

    def __init__(self, comm: Collectives, full: torch.Tensor) -> None:
        super().__init__()
        self._works = []
        shards = full.chunk(comm.size)
        for rank, shard in enumerate(shards):
            work = dist.broadcast(shard, group=comm.group, group_src=rank, async_op=True)
            self._works.append(work)

    def wait(self, timeout: Any = None) -> bool:
        """As torch's."""
        for work in self._works:
            work.wait()
        return True


class Exchange(dist.Work):
    """Reduce-scatter as an all-to-all, after which each rank adds up its slices. Gloo's own is a whole all-reduce."""

    def __init__(self, comm: Collectives, shard: torch.Tensor, full: torch.Tensor) -> None:
        super().__init__()
        self._comm = comm
        self._shard = shard
        received = comm.take(full.numel(), full)
        self._received: torch.Tensor | None = received
        self._work = dist.all_to_all_single(received, full, group=comm.reduce_group, async_op=True)

    def wait(self, timeout: Any = None) -> bool:
        """As torch's; the sum is made here."""
        if self._received is None:
            return True
        self._work.wait()
        ranks = self._comm.size
        first, second, *rest = self._received.chunk(ranks)
        torch.add(first, second, out=self._shard)  # torch.sum over the ranks takes twice as long
        for part in rest:
            self._shard.add_(part)
        self._shard.div_(ranks)
        self._comm.give(self._received)
        self._received = None
        return True
