"""The collectives of the workload, asynchronous, under one spelling for every PyTorch release from 2.8."""

import zlib
from collections import defaultdict, deque
from typing import Any

import torch
import torch.distributed as dist

from .gloo import Exchange, GatherInPlace

# Renamed in 2.13: the old names warn there, the new ones do not exist before.
_ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Group = dist.ProcessGroup | None
#: What free buffers are sorted by: their elements and dtype.
Kind = tuple[int, torch.dtype]
#: Reductions under way at once, where each has buffers of its own.
IN_FLIGHT = 2


def same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two lie in the same allocation."""
    here = one.untyped_storage()
    there = other.untyped_storage()
    return here._cdata == there._cdata


def current_stream(device: torch.device) -> Any:
    """Where ``device`` is given work now; ``None`` on the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class Collectives:
    """All-gather, reduce-scatter and all-reduce (to the mean) on one process group; each returns a work handle at once.

    Args:
        group: of the data-parallel ranks; ``None``: the default group.
        reduce_group: the same ranks as a second communicator, for reduce-scatters; ``None``: ``group``.
        replicas: ranks that hold the same shards.
        model_group: ranks that hold the model's other parts.

    Raises:
        ValueError: no process group was initialised.
    """

    def __init__(
        self,
        group: Group = None,
        reduce_group: Group = None,
        replicas: Group = None,
        model_group: Group = None,
    ) -> None:
        if not dist.is_initialized():
            raise ValueError("call torch.distributed.init_process_group() before zero()")
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.backend = dist.get_backend(group)
        self.reduce_group = reduce_group or group
        self.replicas = Collectives(replicas) if replicas else None
        self.model = Collectives(model_group) if model_group else None
        self.buffer_bytes = 0  # of all buffers that were made
        self._free: defaultdict[Kind, list[torch.Tensor]] = defaultdict(list)
        self._exchanges: deque[Exchange] = deque()

    def take(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer [numel] of that dtype with any content: a few are used again and again (ZeRO's constant C_B)."""
        kind = numel, like.dtype
        free = self._free[kind]
        if free:
            return free.pop()
        buffer = like.new_empty(numel)
        self.buffer_bytes += buffer.nbytes
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """Return a buffer that :meth:`take` gave out."""
        kind = buffer.numel(), buffer.dtype
        self._free[kind].append(buffer)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> dist.Work:
        """``shard`` [S] of every rank into ``full`` [size * S]; ``shard`` may be this rank's slice of ``full``."""
        if self.backend == "gloo" and same_storage(full, shard):
            return GatherInPlace(self, full)
        return _ALL_GATHER(full, shard, group=self.group, async_op=True)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> dist.Work:
        """The mean of ``full`` [size * S] over the ranks; slice ``rank`` of it into ``shard`` [S]."""
        if self.backend == "gloo" and self.size > 1:
            while len(self._exchanges) >= IN_FLIGHT:
                oldest = self._exchanges.popleft()
                oldest.wait()
            exchange = Exchange(self, shard, full)
            self._exchanges.append(exchange)
            return exchange
        how = {"op": dist.ReduceOp.AVG, "group": self.reduce_group}
        return _REDUCE_SCATTER(shard, full, async_op=True, **how)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.AVG) -> dist.Work:
        """``tensor`` reduced over the ranks, in place."""
        return dist.all_reduce(tensor, op=op, group=self.group, async_op=True)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """``tensor`` of the group's first rank on every rank, replicas included; returns when done."""
        dist.broadcast(tensor, group=self.group, group_src=0)
        if self.replicas:
            self.replicas.broadcast(tensor)

    def agree(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """``tensor`` reduced over the ranks and their replicas, in place; returns when done. Raises RuntimeError."""
        self.all_reduce(tensor, op).wait()
        if self.replicas:
            self.replicas.agree(tensor, op)

    def require_same(self, about: Any) -> None:
        """Raise ValueError on every rank where a model's description ``about`` prints differently on some rank."""
        if self.backend == "fake":  # a dry run has no second rank
            return
        if self.replicas:
            self.replicas.require_same(about)
        digests: list[Any] = [None] * self.size
        text = repr(about)
        raw = text.encode()
        mine = zlib.crc32(raw)
        dist.all_gather_object(digests, mine, group=self.group)
        first = digests[0]
        others = [rank for rank, digest in enumerate(digests) if digest != first]
        if others:
            where = "names, shapes, groups of the optimizer"
            raise ValueError(f"ranks {others} have another model or other settings than rank 0: {where}")
