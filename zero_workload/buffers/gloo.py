"""Two collectives over gloo that cost less than gloo's own; NCCL needs neither."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .comm import Collectives


class GatherInPlace(dist.Work):
    """All-gather where each shard already lies in its place of ``full``: gloo's own would copy all of it twice."""

    def __init__(self, comm: "Collectives", full: torch.Tensor) -> None:
        super().__init__()
        self._works = []
        for rank, part in enumerate(full.chunk(comm.size)):
            work = dist.broadcast(part, group=comm.group, group_src=rank, async_op=True)
            self._works.append(work)

    def wait(self, timeout: Any = None) -> bool:
        """As torch's."""
        for work in self._works:
            work.wait()
        return True


class Exchange(dist.Work):
    """Reduce-scatter as an all-to-all, after which each rank adds up its slices. Gloo's own is a whole all-reduce."""

    def __init__(self, comm: "Collectives", shard: torch.Tensor, full: torch.Tensor) -> None:
        super().__init__()
        self._comm, self._shard = comm, shard
        received = comm.take(full.numel(), full)
        self._received: torch.Tensor | None = received
        self._work = dist.all_to_all_single(received, full, group=comm.reduce_group, async_op=True)

    def wait(self, timeout: Any = None) -> bool:
        """As torch's; the sum is made here."""
        if self._received is None:
            return True
        self._work.wait()
        first, second, *rest = self._received.chunk(self._comm.size)
        torch.add(first, second, out=self._shard)  # torch.sum over the ranks takes twice as long
        for part in rest:
            self._shard.add_(part)
        self._shard.div_(self._comm.size)
        self._comm.give(self._received)
        self._received = None
        return True
