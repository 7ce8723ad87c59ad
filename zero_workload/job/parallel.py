"""How the ranks of a job share it: over which it shards, which hold replicas (HSDP), which share matrices."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def require_fit(ranks: int, shard: int, tensor: int) -> None:
    """Raise ValueError where ``ranks`` cannot be laid out so."""
    data = ranks // tensor
    if ranks % tensor or data % (shard or data):
        shared = f"{tensor} that share matrices, times " if tensor > 1 else ""
        raise ValueError(
            f"{ranks} ranks are not {shared}{shard or 'those'} that shard (HSDP), times replicas"
        )


def groups(shard: int = 0, apart: bool = False, tensor: int = 1) -> dict[str, Any]:
    """New communicators by the names of ``zero``'s arguments, where it needs them. Every rank has to call it.

    Args:
        shard: neighbouring ranks over which ZeRO shards, the rest are replicas; 0: all.
        apart: a communicator for reduce-scatters.
        tensor: neighbouring ranks that share each matrix, and the data.

    Raises:
        ValueError: the ranks are not a multiple of these.
    """
    ranks = dist.get_world_size()
    require_fit(ranks, shard, tensor)
    shard = shard or ranks // tensor
    places = torch.arange(ranks).view(-1, shard, tensor)  # replica, place in the shard, place in the matrices
    found = dict[str, Any]()
    sharing = places.transpose(1, 2).flatten(0, 1)
    if shard < ranks:
        found["group"] = _among(sharing)
    if apart:
        found["reduce_scatter_group"] = _among(sharing)
    if len(places) > 1:
        found["replicas"] = _among(places.flatten(1).t())
    if tensor > 1:
        found["model_group"] = _among(places.flatten(0, 1))
    return found


def _among(rows: Iterable[Any]) -> dist.ProcessGroup:
    """The communicator of this rank, of one for each row of ranks."""
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration([row.tolist() for row in rows])[0]
    return group
