"""How the agreement grows: forked ranks on this machine, measured, and more ranks than that, simulated from it.

``python tests/scale_ranks.py --ranks 256`` prints one JSON object. Measured: descriptors and connections a rank, time
to open, CPU time of the agreement's thread a change of table, requests at the job's store. Simulated up to 10,000
ranks: the meeting at the appointed boundary (reports up the tree, the log, the answer down), each node handling its
sixteen children one after the other at the CPU time measured here, a hop of the network taking ``--hop-us``, the store
``--store-us``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import Any

from dynamiccl.envs.nccl.agreement.tree import children
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.records import Decision, Rule, Table
from light_ranks import LightRank, run


def measured(n_ranks: int, n_steps: int, every_s: float, step_s: float) -> dict[str, Any]:
    """One job of ``n_ranks`` processes whose table changes all the time."""
    folder = RunFolder.create()
    rules = [Rule(0, 0, "all_gather", 100 * i, 100 * i + 99, Decision("ring", "ll", 1 + i % 64)) for i in range(120)]
    last: dict[str, float] = {"at": 0.0}

    def before(rank: LightRank, i: int) -> None:
        agreement = rank.agreement
        if rank.rank == 0 and time.monotonic() - last["at"] > every_s:  # rank 0 is its own daemon
            last["at"] = time.monotonic()
            folder.table.publish(Table(i + 1, tuple(rules)))
        if agreement is not None and i == n_steps - 1:
            clock = time.pthread_getcpuclockid(agreement._thread.ident or 0)
            rank.more = {
                "cpu_us": 1e6 * time.clock_gettime(clock),
                "attempts": agreement.desk.member.attempt,
                "connections": len(agreement._tree._by_fd) if agreement._tree else 0,
            }

    try:
        said, server = run(n_ranks, n_steps, folder, before, step_s=step_s, attach_s=120, meet_ms=5000, prompt_s=5.0)
    finally:
        folder.close()
    assert all(said), "a rank died"
    first = said[0]
    assert all(rank["generations"] == first["generations"] for rank in said), "two tables at one collective"
    changes = len(set(first["generations"])) - 1
    assert changes > 2, "too few changes of table: more --steps"
    return {
        "ranks": n_ranks,
        "changes": changes,
        "open_s": first["open_s"],
        "descriptors_most": max(rank["descriptors"] - rank["descriptors_before"] for rank in said),
        "connections_most": max(rank["connections"] for rank in said),
        "cpu_us_a_change_rank_0": first["cpu_us"] / changes,
        "cpu_us_a_change_leaf": said[-1]["cpu_us"] / changes,
        "held_ms_median": sorted(rank["held_ms"] for rank in said)[n_ranks // 2],
        "store_requests_a_rank_to_open": server.requests_at_open / n_ranks,
        "store_requests_a_rank_and_change": (server.requests - server.requests_at_open) / n_ranks / changes,
    }


def meeting_ms(n_ranks: int, message_us: float, hop_us: float, store_us: float, rng: random.Random) -> float:
    """One simulated meeting, from the last rank's arrival to the last rank's answer."""
    said = [0.0] * n_ranks  # when a rank has reported for all below it
    for rank in range(n_ranks - 1, -1, -1):
        at = 0.0
        for child in sorted(children(rank, n_ranks), key=said.__getitem__):
            at = max(at, said[child] + hop_us * rng.expovariate(1)) + message_us * rng.uniform(0.7, 1.5)
        said[rank] = at
    heard = [0.0] * n_ranks
    heard[0] = said[0] + store_us * rng.expovariate(1)
    for rank in range(n_ranks):
        at = heard[rank]
        for child in children(rank, n_ranks):
            at += message_us * rng.uniform(0.7, 1.5)
            heard[child] = at + hop_us * rng.expovariate(1)
    return max(heard) / 1e3


def simulated(n_ranks: int, message_us: float, hop_us: float, store_us: float) -> dict[str, float]:
    """Meetings of ``n_ranks``: median and worst of a hundred."""
    rng = random.Random(1)
    times = sorted(meeting_ms(n_ranks, message_us, hop_us, store_us, rng) for _ in range(100))
    return {"ranks": n_ranks, "meeting_ms_median": times[50], "meeting_ms_worst_of_100": times[-1]}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64, help="processes of the large job")
    parser.add_argument("--steps", type=int, default=150, help="of the large job")
    parser.add_argument("--hop-us", type=float, default=30.0, help="one way between two nodes, TCP")
    parser.add_argument("--store-us", type=float, default=100.0, help="a compare-and-set at the job's store")
    args = parser.parse_args()
    small = measured(17, 300, 0.03, 0.002)  # rank 0 has its full sixteen children, and the cores are not fought for
    large = measured(args.ranks, args.steps, 0.2, 0.01)
    # A change takes five messages for each child: announced, staged, appointed, standing, answered.
    message_us = (small["cpu_us_a_change_rank_0"] - small["cpu_us_a_change_leaf"]) / (16 * 5)
    found = {
        "measured": [small, large],
        "message_us": message_us,
        "simulated": [simulated(n, message_us, args.hop_us, args.store_us) for n in (256, 1000, 4096, 10_000)],
        "core_share_at_a_change_a_second": small["cpu_us_a_change_rank_0"] / 1e6,
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
