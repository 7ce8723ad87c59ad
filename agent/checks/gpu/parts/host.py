"""What a call costs the host: nanoseconds until a small collective is enqueued."""

from __future__ import annotations

import time
from typing import Any

from .rank import Buffers, Rank

#: Calls of one batch: fewer than a GPU's queue takes without waiting.
CALLS = 200
BATCHES = 15


def host(rank: Rank) -> dict[str, Any]:
    """Nanoseconds a call of each batch, on this node's first rank. The first batch warms up and is left out."""
    small = Buffers("all_gather", 1 << 12, rank.device)
    batches: list[float] = []
    for _ in range(BATCHES + 1):
        if not rank.has_time():
            break
        rank.meet()
        begin = time.perf_counter_ns()
        for _ in range(CALLS):
            small.call(None)
        batches.append((time.perf_counter_ns() - begin) / CALLS)
    return {"ok": len(batches) > 1, "ns": [round(ns) for ns in batches[1:]]}
