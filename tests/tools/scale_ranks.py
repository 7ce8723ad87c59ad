"""What the agreement costs many ranks: ``python scale_ranks.py --ranks 256`` forks so many on this machine.

Prints requests to the store a rank and round, and how long rounds took. The store here is one thread of Python: that of
a job is quicker; ``store_rates.py`` asks that one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from dynamiccl.envs.nccl.shm import RunFolder

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

from light_ranks import LightRank, Publisher, run, splits
from light_store import StoreServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=1.0)
    args = parser.parse_args()

    def program(rank: LightRank) -> None:
        for i in range(args.steps):
            rank.step(i, 4, args.step_s)

    folder, daemons = RunFolder.create(), list[Publisher]()

    def beside(server: StoreServer, pids: list[int]) -> None:
        daemons.append(Publisher(folder, server, 1.0, 20))

    try:
        ranks, server = run(args.ranks, program, folder, beside, attach_s=60)
        daemons[0].alive = False
    finally:
        folder.close()
    rounds = ranks[0]["rounds"]
    found = {
        "ranks": args.ranks,
        "rounds": rounds,
        "requests_a_rank_and_round": server.of_rounds / args.ranks / rounds,
        "requests_a_rank_and_second": server.requests / args.ranks / (args.steps * args.step_s),
        "round_s_median": statistics.median(ranks[0]["round_s"]),
        "round_s_longest": max(ranks[0]["round_s"]),
        "cpu_s_a_rank": statistics.median(rank["cpu_s"] for rank in ranks),
        "waited_ms": max(rank["waited_ms"] for rank in ranks),
        "split": splits(ranks)[0],
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
