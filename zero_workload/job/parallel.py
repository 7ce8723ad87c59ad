"""How the ranks of a job share it: over which it shards, and which hold replicas of the shards (HSDP)."""

from typing import Any

import torch.distributed as dist


def groups(shard: int = 0, apart: bool = False) -> dict[str, Any]:
    """New communicators by the names of ``zero``'s arguments, where it needs them. Every rank has to call it.

    Args:
        shard: neighbouring ranks over which ZeRO shards, the rest are replicas; 0: all.
        apart: reduce-scatters have a communicator of their own.

    Raises:
        ValueError: the ranks are not a multiple of ``shard``.
    """
    ranks = dist.get_world_size()
    shard, found = shard or ranks, dict[str, Any]()
    if ranks % shard:
        raise ValueError(f"{ranks} ranks are not {shard} that shard (HSDP), times replicas")
    if shard < ranks:
        found["group"] = dist.new_subgroups(shard)[0]
    if apart:
        found["reduce_scatter_group"] = dist.new_subgroups(shard)[0]
    if shard < ranks:
        peers = [list(range(place, ranks, shard)) for place in range(shard)]
        found["replicas"] = dist.new_subgroups_by_enumeration(peers)[0]
    return found
