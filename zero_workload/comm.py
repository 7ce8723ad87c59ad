"""The collectives of the workload, asynchronous, under one spelling for every PyTorch release from 2.8."""

import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Renamed in 2.13: the old names warn there, the new ones do not exist before.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
NO_LIMIT = timedelta(0)  # to wait: but for the process group's own


class Collectives:
    """All-gather, reduce-scatter and all-reduce on one process group; each returns a work handle at once.

    Args:
        group: process group of the data-parallel ranks; ``None`` is the default group.
        reduce_op: ``"mean"`` or ``"sum"``: what gradients are reduced with.
        reduce_group: the same ranks as a second communicator, for reduce-scatters; ``None``: ``group``.
        replicas: ranks that hold the same shards, one of each copy of ``group``.

    Raises:
        ValueError: ``reduce_op`` is neither, or no process group was initialised.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        reduce_op: str = "mean",
        reduce_group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        ops = {"mean": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM}
        if reduce_op not in ops:
            raise ValueError(f"reduce_op is 'mean' or 'sum', not {reduce_op!r}")
        if not dist.is_initialized():
            raise ValueError("call torch.distributed.init_process_group() before zero()")
        self.group, self.op = group, ops[reduce_op]
        self.rank, self.size, self.backend = dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)
        self.reduce_group = reduce_group or group
        self.replicas = Collectives(replicas, reduce_op) if replicas else None

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        """``shard`` [S] of every rank into ``full`` [size * S]; ``shard`` may be this rank's slice of ``full``."""
        return _ALL_GATHER(full, shard, group=self.group, async_op=True)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> dist.Work:
        """``full`` [size * S] reduced over the ranks; slice ``rank`` of it into ``shard`` [S]."""
        if self.backend == "gloo":
            return _Exchange(self, shard, full)
        return _REDUCE_SCATTER(shard, full, op=self.op, group=self.reduce_group, async_op=True)

    def all_reduce(self, tensor: torch.Tensor, op: Any = None) -> dist.Work:
        """``tensor`` reduced over the ranks, in place; ``op`` defaults to the gradients' own."""
        return dist.all_reduce(tensor, op=op or self.op, group=self.group, async_op=True)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """``tensor`` of the group's first rank on every rank, replicas included; returns when done."""
        dist.broadcast(tensor, group=self.group, group_src=0)
        if self.replicas:
            self.replicas.broadcast(tensor)

    def agree(self, tensor: torch.Tensor, op: Any, patience: timedelta = NO_LIMIT) -> None:
        """``tensor`` reduced over the ranks and their replicas, in place; returns when done. Raises RuntimeError."""
        for comm in filter(None, (self, self.replicas)):
            comm.all_reduce(tensor, op).wait(patience)

    def require_same(self, about: dict[str, Any], what: str) -> None:
        """End with the same error on every rank when ``about``, which prints alike where it is equal, is not on all.

        Raises:
            ValueError: names the ranks that differ from the group's first, and the first entry in which one does.
        """
        if self.backend == "fake":  # a dry run: there is nobody to differ
            return
        if self.replicas:
            self.replicas.require_same(about, what)
        digest = zlib.crc32(repr(about).encode())
        mine = torch.tensor([digest], device="cuda" if self.backend == "nccl" else "cpu")
        seen = mine.new_zeros(self.size)
        self.all_gather(seen, mine).wait()
        odd = [rank for rank, value in enumerate(seen.tolist()) if value != seen[0].item()]
        if odd:
            everyone: list[Any] = [None] * self.size
            dist.all_gather_object(everyone, about, group=self.group)
            here, there = everyone[0], everyone[odd[0]]
            name = next((n for n in {**here, **there} if here.get(n) != there.get(n)), "their order")
            values = f"{there.get(name)} on rank {odd[0]}, {here.get(name)} on rank 0"
            raise ValueError(f"ranks {odd} have {what} that differs from rank 0's: {name} is {values}")


class _Exchange(dist.Work):
    """Reduce-scatter over gloo, whose own is an all-reduce: slices change places, each rank adds up what it got."""

    def __init__(self, comm: Collectives, shard: torch.Tensor, full: torch.Tensor) -> None:
        super().__init__()
        self._comm, self._shard, self._slices = comm, shard, torch.empty_like(full)
        self._work = dist.all_to_all_single(self._slices, full, group=comm.reduce_group, async_op=True)

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        torch.sum(self._slices.view(self._comm.size, -1), 0, out=self._shard)
        if self._comm.op == dist.ReduceOp.AVG:
            self._shard.div_(self._comm.size)
        return True
