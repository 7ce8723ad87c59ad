"""How often is a comparison by turns wrong, and what does it find? No search, no policy: one table beside the default.

  python tests/tools/level_and_power.py [--jobs 400] [--steps 800]

Level: two tables that are the same, on every stretch of real steps in ``tests/data/node_steps.npz``, on simulated node
noise, and on the noise of each world of the simulator. Counted are comparisons that adopt the table, and those whose
interval does not hold 0 at some check if it is never stopped; the level of that is 2.5 %, a job's first comparison's.
Power: a table that truly saves 0.5, 1 or 2 % of the step: adopted, given up, or undecided when the steps end; and the
median steps to a decision. Intervals in brackets are 95 % (Wilson).
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from dynamiccl.envs.sim.family import HELD_OUT, STANDARD
from dynamiccl.envs.sim.noise import NODE
from dynamiccl.envs.sim.unseen import UNSEEN
from false_gains import interval
from step_series import LONG, all_series, simulated
from turns_race import one_slot, race

#: Stretches of real steps: at least so many, and of long runs so many each.
FEWEST, PART = 40, 400
GAINS = 0.005, 0.01, 0.02


def stretches():
    """Steps (n,) in ms of every stretch of real runs."""
    parts = []
    for one in all_series():
        steps = 1e3 * one.settled
        is_short = len(one.seconds) < LONG
        parts += [steps] if is_short else [steps[k : k + PART] for k in range(0, len(steps) - PART, PART)]
    return [steps for steps in parts if len(steps) >= FEWEST]


def simulated_ms(noise, n_steps, n, seed):
    """Steps (n_steps,) in ms of ``n`` simulated jobs."""
    return [1e3 * one.seconds for one in simulated(noise, n_steps, n, seed)]


def worlds():
    """The distinct noises of the simulator's worlds but node noise, by the first world that has them. The parts of a
    family are numbered: two may have one name."""
    found = {NODE: ""}
    for family in (STANDARD, HELD_OUT, UNSEEN):
        for number, world in enumerate(family.parts):
            found.setdefault(world.noise, f"{family.name} {number} {world.name}")
    del found[NODE]
    return {name: noise for noise, name in found.items()}


def share(races, of):
    """k of n, and the 95 % interval."""
    k, n = sum(bool(of(one)) for one in races), len(races)
    low, high = interval(k, n)
    return f"{k:4} of {n} [{100 * low:.1f}, {100 * high:.1f} %]"


def level(job, name, series):
    """A line: the table is the default itself."""
    races = [race(job, steps) for steps in series]
    endless = [race(job, steps, stops=False) for steps in series]
    adopted = share(races, lambda one: one.is_adopted)
    missed = share(endless, lambda one: one.missed)
    print(f"{name:24} adopts {adopted}   interval misses 0 {missed}", flush=True)


def power(job, name, series, gain):
    """A line: the table saves ``gain``, a part of the step."""
    races = [race(job, steps, -math.log(1 - gain)) for steps in series]
    adopted = share(races, lambda one: one.is_adopted)
    lost = sum(one.is_decided and not one.is_adopted for one in races)
    after = [one.steps for one in races if one.is_adopted]
    print(
        f"{name:24} {100 * gain:3.1f} %: adopted {adopted}, given up {lost}, undecided "
        f"{len(races) - lost - len(after)}; adopted after {np.median(after) if after else math.nan:.0f} steps",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    job = one_slot()
    real, node = stretches(), simulated_ms(NODE, args.steps, args.jobs, args.seed)
    print(f"{len(real)} stretches of real steps; simulated jobs of {args.steps} steps")
    level(job, "real nodes", real)
    level(job, "node noise", node)
    for name, noise in worlds().items():
        level(job, name, simulated_ms(noise, args.steps, args.jobs, args.seed))
    for gain in GAINS:
        power(job, "real nodes", real, gain)
        power(job, "node noise", node, gain)


if __name__ == "__main__":
    main()
