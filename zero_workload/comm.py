"""The collectives of the workload, asynchronous, under one spelling for every PyTorch release from 2.8."""

import zlib
from collections import defaultdict, deque
from typing import Any

import torch
import torch.distributed as dist

# Renamed in 2.13: the old names warn there, the new ones do not exist before.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Group = dist.ProcessGroup | None
#: Reductions under way at once, where each has buffers of its own.
IN_FLIGHT = 2


class Collectives:
    """All-gather, reduce-scatter and all-reduce (to the mean) on one process group; each returns a work handle at once.

    Args:
        group: process group of the data-parallel ranks; ``None`` is the default group.
        reduce_group: the same ranks as a second communicator, for reduce-scatters; ``None``: ``group``.
        replicas: ranks that hold the same shards, one of each copy of ``group``.

    Raises:
        ValueError: no process group was initialised.
    """

    def __init__(self, group: Group = None, reduce_group: Group = None, replicas: Group = None) -> None:
        if not dist.is_initialized():
            raise ValueError("call torch.distributed.init_process_group() before zero()")
        self.group = group
        self.rank, self.size, self.backend = (
            dist.get_rank(group),
            dist.get_world_size(group),
            dist.get_backend(group),
        )
        self.reduce_group = reduce_group or group
        self.replicas = Collectives(replicas) if replicas else None
        self.buffer_bytes = 0  # of all that were made
        self._free: defaultdict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self._exchanges: deque[_Exchange] = deque()

    def take(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer [numel] of that dtype, whatever is in it: few are used again and again (ZeRO's constant C_B)."""
        if self._free[numel, like.dtype]:
            return self._free[numel, like.dtype].pop()
        buffer = like.new_empty(numel)
        self.buffer_bytes += buffer.nbytes
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Back, to be taken again."""
        self._free[buffer.numel(), buffer.dtype].append(buffer)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        """``shard`` [S] of every rank into ``full`` [size * S]; ``shard`` may be this rank's slice of ``full``."""
        if self.backend == "gloo" and full.untyped_storage()._cdata == shard.untyped_storage()._cdata:
            return _InPlace(self, full)
        return _ALL_GATHER(full, shard, group=self.group, async_op=True)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> dist.Work:
        """The mean of ``full`` [size * S] over the ranks; slice ``rank`` of it into ``shard`` [S]."""
        if self.backend == "gloo" and self.size > 1:
            while len(self._exchanges) >= IN_FLIGHT:
                self._exchanges.popleft().wait()
            self._exchanges.append(_Exchange(self, shard, full))
            return self._exchanges[-1]
        return _REDUCE_SCATTER(shard, full, op=dist.ReduceOp.AVG, group=self.reduce_group, async_op=True)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.AVG) -> dist.Work:
        """``tensor`` reduced over the ranks, in place."""
        return dist.all_reduce(tensor, op=op, group=self.group, async_op=True)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """``tensor`` of the group's first rank on every rank, replicas included; returns when done."""
        dist.broadcast(tensor, group=self.group, group_src=0)
        if self.replicas:
            self.replicas.broadcast(tensor)

    def agree(self, tensor: torch.Tensor, op: Any) -> None:
        """``tensor`` reduced over the ranks and their replicas, in place; returns when done. Raises RuntimeError."""
        for comm in filter(None, (self, self.replicas)):
            comm.all_reduce(tensor, op).wait()

    def require_same(self, about: Any) -> None:
        """Raise ValueError on every rank when a model ``about``, which prints alike where it is equal, is not the same
        on all.
        """
        if self.backend == "fake":  # a dry run: there is nobody to differ
            return
        if self.replicas:
            self.replicas.require_same(about)
        digests: list[Any] = [None] * self.size
        dist.all_gather_object(digests, zlib.crc32(repr(about).encode()), group=self.group)
        if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise ValueError(
                f"ranks {odd} have another model or other settings than rank 0: names, shapes, groups of the optimizer"
            )


class _InPlace(dist.Work):
    """All-gather over gloo where shards lie in the whole already: gloo's own copies all of it, twice."""

    def __init__(self, comm: Collectives, full: torch.Tensor) -> None:
        super().__init__()
        shards = enumerate(full.chunk(comm.size))
        self._work = [
            dist.broadcast(part, group=comm.group, group_src=rank, async_op=True) for rank, part in shards
        ]

    def wait(self, timeout: Any = None) -> bool:
        for work in self._work:
            work.wait()
        return True


class _Exchange(dist.Work):
    """Reduce-scatter over gloo, whose own is an all-reduce: slices change places, each rank adds up what it got."""

    def __init__(self, comm: Collectives, shard: torch.Tensor, full: torch.Tensor) -> None:
        super().__init__()
        self._comm, self._shard = comm, shard
        self._got: torch.Tensor | None = comm.take(full.numel(), full)
        self._work = dist.all_to_all_single(self._got, full, group=comm.reduce_group, async_op=True)

    def wait(self, timeout: Any = None) -> bool:
        if self._got is not None:
            self._work.wait()
            first, second, *rest = self._got.chunk(self._comm.size)
            torch.add(first, second, out=self._shard)  # torch.sum over the ranks takes twice as long
            for part in rest:
                self._shard.add_(part)
            self._shard.div_(self._comm.size)
            self._comm.give(self._got)
            self._got = None
        return True
