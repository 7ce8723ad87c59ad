"""Do slots interact? An all-gather and a reduce-scatter side by side on two communicators, under a GEMM."""

from __future__ import annotations

import random
import statistics
from itertools import product
from typing import Any

from .....traces.records import AUTO, Decision
from .contention import COLLECTIVE, GEMMS, LONGER, Load, timed
from .rank import Buffers, Rank

#: What each of the two collectives is run as.
DECISIONS = (AUTO, *(Decision("ring", "simple", n) for n in (1, 2, 4, 8, 16)))
#: Timed runs of one pair of decisions.
CALLS = {"nccl": 5, "emulated": 2}
#: Times that the whole square is measured.
REPEATS = 2


def joint(rank: Rank) -> dict[str, Any]:
    """Rows of joint.csv, all pairs of decisions in random order, twice, or until the time is over."""
    n_bytes = COLLECTIVE[rank.backend]
    first = Buffers("all_gather", n_bytes, rank.device)
    second = Buffers("reduce_scatter", n_bytes, rank.device)
    load = Load(rank, "gemm", GEMMS[rank.backend][0])
    alone = timed(rank, lambda: second.call(rank.comms["second"]))
    load.last_for(LONGER * rank.agreed(alone))
    cells = list(product(DECISIONS, DECISIONS))
    calls = CALLS[rank.backend]
    rows = 0
    for repeat in range(REPEATS):
        random.Random(repeat).shuffle(cells)  # the same on all ranks
        for one, other in cells:
            if not rank.has_time():
                return {"ok": rows > 0, "rows": rows}
            rank.set_table(first.rules(one) + second.rules(other))
            _side_by_side(rank, load, first, second)  # a first use costs
            times = [_side_by_side(rank, load, first, second) for _ in range(calls)]
            row = {"repeat": repeat, "first": str(one), "second": str(other), "calls": calls}
            row["total_us"] = round(statistics.median(times), 2)
            rank.write("joint", [row])
            rows += 1
    return {"ok": rows > 0, "rows": rows}


def _side_by_side(rank: Rank, load: Load, first: Buffers, second: Buffers) -> float:
    """Microseconds until both collectives and the compute have ended; the maximum over ranks."""
    rank.meet()
    begin = rank.mark()
    works = [first.call(rank.comms["raised"], later=True)]
    works.append(second.call(rank.comms["second"], later=True))
    load.run()
    for work in works:
        work.wait()
    end = rank.mark()
    rank.finish()
    return rank.slowest([rank.us(begin, end)])[0]
