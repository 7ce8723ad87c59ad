"""How many jobs end slower than under NCCL's own choice: ``python tests/tools/check_slower.py FAMILY WORLD
[JOBS] [POLICY]``.

POLICY (the rule) is played on JOBS (1,000) fresh jobs of one world, such as ``unseen nothing`` or ``held-out tails``,
for 20,000 steps each, the watch included. Then each job runs 20,000 steps under the table that it ended with and as
many under the default, beside other noise, and their means are compared, long steps and all. The same is done with the
default against itself (A/A), twenty times over. A difference is beyond what A/A shows where it is larger, in standard
errors, than every one of those twenty times as many: without any difference that happens in one such check of twenty.
All of it is simulated. Takes more than an hour of a core.
"""

import sys

import numpy as np
from dynamiccl.agent.policies.choosing import DEFAULT, make_chooser
from dynamiccl.envs.bench.job_arena import AccountedWindows, play
from dynamiccl.envs.bench.job_suites import FAMILIES
from dynamiccl.envs.bench.scores import HARM, HORIZON, LossAccount
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.sim.jobs import draw_jobs
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.envs.sim.windows import SimSearch

#: Jobs side by side; parts that HORIZON steps are measured in, whose scatter tells how sure their mean is; times that
#: the default is set against itself.
BATCH, PARTS, AGAIN = 125, 40, 20


def measured(jobs, rows, tables, noise):
    """Mean step of HORIZON steps under ``tables`` (n, jobs.width), (n,), and its standard error; ``jobs`` stay.

    The parts are long: noise that lasts for a hundred steps counts as what it is.
    """
    jobs, stream, parts = jobs.take(slice(None)), NoiseStream(noise, rows, jobs.width), []
    for _ in range(PARTS):
        steps, _ = jobs.window(tables, np.full(len(jobs), HORIZON // PARTS), stream)
        parts.append(steps.mean(axis=1))
    return np.mean(parts, axis=0), np.std(parts, axis=0, ddof=1) / np.sqrt(PARTS)


def beside(one, other):
    """By how much ``one`` is slower, as a part, and in standard errors, each (n,)."""
    (a, a_error), (b, b_error) = one, other
    return a / b - 1, (a - b) / np.hypot(a_error, b_error)


def main():
    family, world = FAMILIES[sys.argv[1]].only(sys.argv[2]), sys.argv[2]
    most, policy = (
        int(sys.argv[3]) if len(sys.argv) > 3 else 1000,
        sys.argv[4] if len(sys.argv) > 4 else DEFAULT,
    )
    rng, told, gains = np.random.default_rng([2026, 11]), [], []
    for first in range(0, most, BATCH):
        rows = np.arange(first, min(first + BATCH, most))
        jobs = draw_jobs(family, rng, len(rows))
        start = jobs.take(slice(None))
        ledger = LossAccount(jobs, jobs.default_us)
        search = SimSearch(
            AccountedWindows(jobs, NoiseStream(0, rows, jobs.width), ledger), Prior.load(), SearchConfig()
        )
        scores = play(make_chooser(policy), search, ledger, after=HORIZON).scores
        tables, none = search.tables, np.zeros_like(search.tables)
        noises = np.arange(1, 2 * AGAIN + 3).reshape(AGAIN + 1, 2)  # those of the search were others
        pairs = zip([tables, *[none] * AGAIN], noises, strict=True)
        told.append(
            [beside(measured(start, rows, one, a), measured(start, rows, none, b)) for one, (a, b) in pairs]
        )
        gains.append(scores.gain)
        print(f"{rows[-1] + 1} of {most}", file=sys.stderr, flush=True)
    gain = np.concatenate(gains)
    slower, errors = np.moveaxis(np.concatenate(told, axis=-1), 1, 0)  # each (AGAIN + 1, jobs)
    slower[0, gain == 0] = errors[0, gain == 0] = -np.inf  # those have no table
    worst, surest = 100 * slower.max(axis=1), errors.max(axis=1)
    print(
        f"{policy}, {most} jobs of {world}, {family.name}, simulated; {(gain != 0).sum()} end under a table"
    )
    print(
        f"true step slower by more than {HARM:.1%}: {(gain < -HARM).sum()} jobs, most by {-100 * gain.min():.2f} %"
    )
    print(
        f"in {HORIZON} steps under the table slower by {worst[0]:.2f} %, by {surest[0]:.1f} standard errors, at most"
    )
    print(f"A/A, {AGAIN} times: by {worst[1:].min():.2f} to {worst[1:].max():.2f} %, ", end="")
    print(f"by {surest[1:].min():.1f} to {surest[1:].max():.1f} standard errors")
    print(f"beyond what A/A shows: {(errors[0] > errors[1:].max()).sum()} jobs")


if __name__ == "__main__":
    main()
