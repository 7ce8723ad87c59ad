"""How the ranks of a job share it: over which it shards, which hold replicas, and which share experts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Cut:
    """How ``ranks`` share a job. Those that share experts lie next to each other, then those that share the rest of the
    model; its replicas lie apart.

    Args:
        ranks: all of them.
        shard: ranks over which ZeRO shards, in each replica; 0: all.
        experts: of the ranks of a shard, those that share the experts.
        apart: reduce-scatters have a communicator of their own.

    Raises:
        ValueError: the numbers do not divide each other.
    """

    ranks: int
    shard: int = 0
    experts: int = 1
    apart: bool = False

    def __post_init__(self) -> None:
        if math.prod(self.shape) != self.ranks:
            sharded = f"{self.shard or self.ranks} that shard (HSDP), a multiple of {self.experts} that share experts"
            raise ValueError(f"{self.ranks} ranks are not {sharded}, times replicas")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Replicas, ranks that hold the same experts, ranks that share them."""
        shard = self.shard or self.ranks
        return self.ranks // shard, shard // self.experts, self.experts

    def groups(self) -> dict[str, Any]:
        """New communicators by the names of ``zero``'s arguments, where it needs them; ``experts`` is the model's.
        Every rank has to call it.
        """
        n_replicas, _, n_experts = self.shape
        dims: dict[str, tuple[int, ...]] = {
            **({"group": (1, 2)} if n_replicas > 1 else {}),
            **({"reduce_scatter_group": (1, 2)} if self.apart else {}),
            **({"replicas": (0,)} if n_replicas > 1 else {}),
            **({"expert_group": (1,), "experts": (2,)} if n_experts > 1 else {}),
        }
        return {name: subgroup(self.shape, *along) for name, along in dims.items()}


def subgroup(shape: Sequence[int], *dims: int) -> dist.ProcessGroup:
    """A new communicator of the ranks that differ from this one along ``dims`` only, when all ranks are laid out in
    ``shape``, in order. Every rank has to call it, with the same arguments in the same order.
    """
    places = torch.arange(dist.get_world_size()).view(*shape).movedim(dims, tuple(range(-len(dims), 0)))
    groups = places.reshape(-1, math.prod(shape[dim] for dim in dims)).tolist()
    mine: dist.ProcessGroup = dist.new_subgroups_by_enumeration(groups)[0]
    return mine
