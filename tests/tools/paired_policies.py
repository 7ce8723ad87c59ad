"""Which of two policies loses less, world by world? Both play the same jobs of a suite under the same noise.

  python tests/tools/paired_policies.py lstm expected-improvement --jobs 125 [--worlds lasting,many] [--suite held-out]
  python tests/tools/paired_policies.py lstm expected-improvement --jobs 500 --suite held-out --drawn 1
  PYTHONPATH=tests/tools python tests/tools/paired_policies.py lstm paired_policies:Forgetful --jobs 125

``--jobs`` are those of each world. ``Forgetful`` is the LSTM whose memory is emptied before each decision: the
difference to it is what the memory is worth. Beside it stands by how much training moved the recurrent weights
(correlation with those that it began with; 1: not at all). Steps are lost of 20,000, against the best
table; intervals are 95 %, bootstrapped over jobs. All of it is simulated.

A suite has 125 jobs of each world. ``--drawn SEED`` draws other jobs of the suite's worlds, as many as are wanted.
Their best tables are not known. So their losses count against the default: the difference stays the same, but a ratio
says nothing.
"""

import argparse
import sys

import numpy as np
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.agent.policies.lstm import LstmPolicy
from dynamiccl.envs.bench.job_suites import FAMILIES, JobSuite
from dynamiccl.envs.bench.scores import Scores
from dynamiccl.envs.bench.submissions import play_part
from dynamiccl.envs.sim.family import WORLDS
from dynamiccl.envs.sim.jobs import draw_jobs
from dynamiccl.envs.sim.regimes import MOST_REGIMES
from joblib import Parallel, delayed
from paired_boards import line

PART = 25
#: Nothing trains on seeds from here on (see make_job_suites.py).
KEPT = 3_000_001_000


class Forgetful:
    """The LSTM, as if each decision were the first of its job."""

    def __init__(self):
        self.policy = make_chooser("lstm")

    def predict(self, observation, state=None, episode_start=None, deterministic=True):
        """The state is the LSTM's and that of what tries neighbours after it: only the LSTM's is emptied."""
        kept = None if state is None else (None, state[1])
        return self.policy.predict(observation, kept, episode_start, deterministic)


def fresh(name, world, seed, first):
    """PART jobs of a world of a suite's family that are in no suite: others for each seed and each ``first``.

    Returns a JobSuite without best tables: losses count against the default.
    """
    family = FAMILIES[name]
    place = WORLDS.index(world)
    rng = np.random.default_rng([KEPT + seed, place, first])
    jobs = draw_jobs(family.only(world), rng, PART)
    numbers = 100_000 * place + first + np.arange(PART)  # so each job has noise of its own
    tables = np.zeros((PART, MOST_REGIMES, jobs.width), np.int64)
    return JobSuite(name, family, seed, PART, jobs, tables, jobs.default_us, numbers)


def played(name, suite, world, rows, seed, draw):
    if draw is None:
        return play_part(make_chooser(name), JobSuite.load(suite), rows, seed)
    jobs = fresh(suite, world, draw, rows[0])
    return play_part(make_chooser(name), jobs, list(range(len(rows))), seed)


def gathered(plays, processes):
    """The scores by (who, place) of ``plays``: (who, world, a delayed call that returns a PlayedPart). A place is a
    world, or "all".
    """
    records = {}
    parts = Parallel(processes, return_as="generator")(play for _, _, play in plays)
    for done, ((who, world, _), part) in enumerate(zip(plays, parts, strict=True), 1):
        for place in (world, "all"):
            whole = records.setdefault((who, place), {})
            for figure, values in part.scores.items():
                whole.setdefault(figure, []).extend(values)
        print(f"{done} of {len(plays)} parts", file=sys.stderr, flush=True)
    return records


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy")
    parser.add_argument("rival")
    parser.add_argument("--jobs", type=int, default=125, help="of each world")
    parser.add_argument("--worlds", default="", help="all, if none are named")
    parser.add_argument("--suite", default="standard")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--drawn", type=int, metavar="SEED", help="other jobs than the suite's")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    suite = JobSuite.load(args.suite)
    worlds = args.worlds.split(",") if args.worlds else list(dict.fromkeys(suite.strata.tolist()))
    if args.drawn is None:
        rows = {world: np.flatnonzero(suite.strata == world)[: args.jobs].tolist() for world in worlds}
    elif args.jobs % PART:
        parser.error(f"--jobs {args.jobs}: with --drawn a multiple of {PART}")
    else:
        rows = {world: list(range(args.jobs)) for world in worlds}
    names = (args.policy, args.rival)
    tasks = [
        (name, world, some[i : i + PART])
        for world, some in rows.items()
        for name in names
        for i in range(0, len(some), PART)
    ]
    records = gathered(
        [
            (name, world, delayed(played)(name, args.suite, world, some, args.seed, args.drawn))
            for name, world, some in tasks
        ],
        args.processes,
    )
    print(
        f"{args.suite}, noise {args.seed}, simulated: {args.rival} -> {args.policy}, default steps in 20,000, "
        f"lost against the {'best table' if args.drawn is None else 'default'}"
    )
    for place in [*worlds, "all"]:
        mine, other = (Scores.of(records[name, place]) for name in names)
        print(line(place, other, mine))
    if "Forgetful" in args.rival:
        told = LstmPolicy.load().record.get("correlation with the first weights", "not on record")
        print(f"correlation of the recurrent weights with those that training began with: {told}")


if __name__ == "__main__":
    main()
