"""What is each part of the search worth? The rule plays fresh jobs whole, and the same jobs without one part.

  python tests/tools/worth_of_parts.py near-tables together --jobs 125
  python tests/tools/worth_of_parts.py few-calls --suite held-out --jobs 25 --seed 2

``--jobs`` are those of each world; they are drawn by ``--seed`` and are in no suite. In its step t a job meets the same
noise, whatever is left out. A row goes from the whole to the rest: a positive difference is what the part saves, in
default steps of 20,000. Losses count against the default. Intervals are 95 %, bootstrapped over jobs. All of it is
simulated.
"""

import argparse
import contextlib
import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
from dynamiccl.agent.policies import near_tables, rule
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.envs.bench.job_suites import FAMILIES
from dynamiccl.envs.bench.scores import Scores
from dynamiccl.envs.bench.submissions import play_part
from dynamiccl.envs.search import change, comparison, loop, monitor, step_guard
from dynamiccl.envs.search.belief.belief import Belief
from dynamiccl.traces.spaces import N_CONFIGS
from joblib import delayed
from paired_boards import line
from paired_policies import PART, fresh, gathered

#: Log of a step time over the usual one that no step reaches: then none ends a trial.
NEVER = 50.0


class Forgets(change.StepLevel):
    """The usual step time, without a memory of levels that the job was seen at before."""

    @property
    def levels(self):
        return []

    @levels.setter
    def levels(self, _):
        pass


BEGIN = Belief.begin


def without_call_times(self, noise, reveal, _):
    """The belief of a job whose kernels are never sampled."""
    BEGIN(self, noise, reveal, False)


def never(*_):
    return False


#: What leaves each part out. Parts that gain, then those that protect, then those that watch a kept table.
WITHOUT = {
    "near-tables": (patch.object(near_tables, "NearTables", lambda policy: policy),),
    "together": (patch.object(rule, "TOGETHER", 0),),  # windows in which several slots try something
    "early-comparison": (patch.object(rule, "is_proven", lambda seen: np.zeros(len(seen.open), bool)),),
    "call-times": (patch.object(Belief, "begin", without_call_times),),
    "price-of-risk": tuple(patch.object(rule, name, 0.0) for name in ("RISK_PRICE", "RISK_PRICE_AFTER")),
    "few-calls": (
        patch.object(step_guard.StepGuard, "_needs_few_calls", lambda *_: np.zeros(N_CONFIGS, bool)),
    ),
    "slow-step": (patch.object(loop, "SLOWER_LOG", NEVER),),  # the end of a trial with its first slow step
    "abort": (
        patch.object(step_guard.StepGuard, "limit_ms", lambda *_: np.inf),
    ),  # what is new ends with such a step
    "warm-up": (
        patch.object(step_guard, "WARM_STEPS", 0),
    ),  # steps and quads that do not count after a new algorithm
    "long-steps": (
        patch.object(comparison.LongSteps, "allows", lambda *_: True),
        patch.object(comparison.LongSteps, "forbids", never),
    ),
    "carried": (patch.object(comparison.Comparison, "drop_carried", never),),  # turns of two steps
    "scheduled-looks": (patch.object(change.VisitSchedule, "wants", lambda self, _: self.is_due),),
    "looks-out-of-turn": (
        patch.object(monitor.Monitor, "_count_harm", lambda *_: None),
    ),  # for what may be lost
    "changes": tuple(patch.object(change, name, 10**9) for name in ("ODD", "ODD_LONG")),  # of the job's pace
    "levels": (patch.object(monitor, "StepLevel", Forgets),),  # seen before: no change
}
WHOLE = "whole"


def played(part, suite, world, seed, first):
    """PART fresh jobs, without ``part``."""
    with contextlib.ExitStack() as stack:
        for left_out in WITHOUT.get(part, ()):
            stack.enter_context(left_out)
        jobs = fresh(suite, world, seed, first)
        return play_part(make_chooser("expected-improvement"), jobs, list(range(PART)))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts",
        nargs="*",
        choices=[*WITHOUT, []],
        metavar="PART",
        help=f"all, if none is named: {', '.join(WITHOUT)}",
    )
    parser.add_argument("--jobs", type=int, default=PART, help=f"of each world, a multiple of {PART}")
    parser.add_argument("--suite", default="standard")
    parser.add_argument("--worlds", default="", help="all of the suite, if none are named")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a JSON file of all scores, for each part and world")
    args = parser.parse_args()
    if args.jobs % PART:
        parser.error(f"--jobs {args.jobs}: a multiple of {PART}")
    parts = [WHOLE, *(args.parts or WITHOUT)]
    worlds = args.worlds.split(",") if args.worlds else list(FAMILIES[args.suite].worlds)
    plays = [
        (part, world, delayed(played)(part, args.suite, world, args.seed, first))
        for first in range(0, args.jobs, PART)
        for world in worlds
        for part in parts
    ]
    records = gathered(plays, args.processes)
    if args.out:
        args.out.write_text(
            json.dumps({f"{part} {place}": found for (part, place), found in records.items()})
        )
    for part in parts[1:]:
        print(f"{args.suite}, seed {args.seed}, simulated: whole -> without {part}")
        for place in [*worlds, "all"]:
            print(line(place, *(Scores.of(records[one, place]) for one in (WHOLE, part))))


if __name__ == "__main__":
    main()
