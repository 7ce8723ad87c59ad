"""How the ranks of a job share it: over which it shards, and which hold replicas."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Cut:
    """How ``ranks`` share a job. Those that share a model lie next to each other, its replicas apart.

    Args:
        ranks: all of them.
        shard: ranks over which ZeRO shards, in each replica; 0: all.
        apart: reduce-scatters have a communicator of their own.

    Raises:
        ValueError: the numbers do not divide each other.
    """

    ranks: int
    shard: int = 0
    apart: bool = False

    def __post_init__(self) -> None:
        if math.prod(self.shape) != self.ranks:
            raise ValueError(f"{self.ranks} ranks are not {self.shard} that shard (HSDP), times replicas")

    @property
    def shape(self) -> tuple[int, int]:
        """Replicas, and ranks that share one."""
        shard = self.shard or self.ranks
        return self.ranks // shard, shard

    def groups(self) -> dict[str, Any]:
        """New communicators by the names of ``zero``'s arguments, where it needs them. Every rank has to call it."""
        has_replicas = self.shape[0] > 1
        along = {"group": 1} if has_replicas else {}
        along |= {"reduce_scatter_group": 1} if self.apart else {}
        along |= {"replicas": 0} if has_replicas else {}
        return {name: subgroup(self.shape, dim) for name, dim in along.items()}


def subgroup(shape: Sequence[int], dim: int) -> dist.ProcessGroup:
    """A new communicator of the ranks that differ from this one along ``dim`` only, when all ranks are laid out in
    ``shape``, in order. Every rank has to call it, with the same arguments in the same order.
    """
    groups = torch.arange(dist.get_world_size()).view(*shape).movedim(dim, -1).flatten(0, -2).tolist()
    mine: dist.ProcessGroup = dist.new_subgroups_by_enumeration(groups)[0]
    return mine
