"""``dynamiccl lab promises``: what the search promises its user, measured in simulation against what is aimed at."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from . import fail, one_thread, refusing


@dataclass(frozen=True)
class Promise:
    """One figure: at least, or at most, what is aimed at."""

    part: str
    text: str
    value: float
    aim: float
    at_most: bool
    of: int  # jobs
    holds: bool


def _row(part: str, text: str, value: float, aim: float, of: int, at_most: bool = True) -> Promise:
    value = round(float(value), 4)
    return Promise(part, text, value, aim, at_most, of, value <= aim if at_most else value >= aim)


def _watch(n: int, seed: int, policy: Any, family: Any) -> Iterator[Promise]:
    """What becomes of a table that was confirmed."""
    import numpy as np

    from ...envs import promises as p
    from ...envs.sim.jobs import draw_jobs

    def part(share: float) -> int:
        return max(round(share * n), 4)

    few = part(0.5)
    for steps in (500, 20_000):
        seen = p.watch(few, steps, 0.97, 0.97, policy, seed=seed, family=family)
        text = f"share of the first {steps:,} later steps at the default"
        yield _row("watch", text, seen.default_share.mean(), 0.01, few)
    yield _row("watch", "jobs searched anew in 20,000 unchanged steps", (seen.anew > 0).mean(), 0.0, few)
    jobs = draw_jobs(family, np.random.default_rng([seed, 15]), few)
    whole = p.lived(jobs, policy, (500, 2_000), seed)
    for steps, share in zip((500, 2_000), whole.default_share, strict=True):
        text = f"whole jobs, searched first: share of the first {steps:,} later steps at the default"
        yield _row("watch", text, np.nanmean(share), 0.01, int(np.isfinite(share).sum()))
    seen = p.watch(n, 4_000, 0.95, 1.2, policy, change_at=1000, seed=seed, family=family)
    soon = (seen.windows <= 2).mean()
    yield _row("watch", "tables that became 20 % slower, gone within 2 windows", soon, 0.95, n, at_most=False)
    yield _row("watch", "... gone at all", np.isfinite(seen.windows).mean(), 1.0, n, at_most=False)
    seen = p.watch(n, 100_000, 0.99, 0.99, policy, seed=seed, family=family)
    kept = seen.in_force.mean()
    yield _row("watch", "tables of a true gain of 1 % in force after 100,000 steps", kept, 0.95, n, at_most=False)


def _nothing(n: int, seed: int, policy: Any, family: Any) -> Iterator[Promise]:
    """Jobs in which nothing can be gained."""
    from ...envs import promises as p

    for worse, said in ((0.0, "all alike"), (0.03, "up to 3 % worse than the default")):
        found = p.ended(p.nothing_to_gain(10 * n, seed, family, worse), policy, seed)
        yield _row("nothing", f"configs {said}: jobs that end slower", found.is_harmed.mean(), 0.0, 10 * n)
        yield _row("nothing", "... that end with a table", found.has_table.mean(), 0.15, 10 * n)


def _change(n: int, seed: int, policy: Any, family: Any) -> Iterator[Promise]:
    """Jobs that change for good."""
    from ...envs import promises as p

    seen = p.recovery(n, policy, (300, 1000), seed=seed, family=family)
    whole = seen.possible.sum()
    for steps, saved in zip((300, 1000), seen.in_force, strict=True):
        text = f"gain in force {steps} steps after a lasting change, of the new best's"
        yield _row("change", text, saved.sum() / whole, 0.9, n, at_most=False)
    yield _row("change", "... that the table of before still has", seen.before.sum() / whole, 0.0, n, at_most=False)


def _suite(n: int, seed: int, policy: Any, family: Any) -> Iterator[Promise]:
    """The jobs of the board."""
    import numpy as np

    from ...envs.belief import Prior
    from ...envs.job_arena import play
    from ...envs.job_suites import JobSuite
    from ...envs.scores import summary
    from ...envs.watch import Rules

    suite = JobSuite.load(family.name, 4 * n if 4 * n < 400 else None)
    rows = np.arange(len(suite))
    scores = play(policy, *suite.open(rows, seed, Prior.load(), Rules().of(policy))).scores
    told, jobs = summary(scores), len(rows)
    yield _row("suite", "steps to the verdict, median", told["steps_to_verdict"][1], 400, jobs)
    yield _row("suite", "... p90", told["steps_to_verdict"][2], 800, jobs)
    yield _row("suite", "steps to the first confirmed gain, median", told["steps_to_first_gain"][1], 120, jobs)
    for said, low, high, aim in (("2 to 4", 0, 4, 0.92), ("5 to 7", 5, 7, 0.88), ("8 to 10", 8, 99, 0.88)):
        some = scores.take(np.flatnonzero((suite.n_slots >= low) & (suite.n_slots <= high)))
        if len(some.gain):
            part = some.gain.sum() / max(float(some.oracle_gain.sum()), 1e-9)
            text = f"gain delivered of the oracle's, {said} slots"
            yield _row("suite", text, part, aim, len(some.gain), at_most=False)
    yield _row("suite", "jobs that end slower", told["slower"], 0.0, jobs)


def _memory(n: int, seed: int, policy: Any, family: Any) -> Iterator[Promise]:
    """The second job of a cluster."""
    from ...envs.belief import Prior
    from ...envs.second_jobs import CHANGED, OTHER, SAME, STRANGE, compare

    pairs = max(round(2.56 * n), 4)  # one job with nothing to gain and a bad first window weighs as much as ten
    for kind in (SAME, OTHER, CHANGED, STRANGE):
        found = compare(policy, kind, family, pairs, Prior.load(), seed)
        if kind in (SAME, OTHER):
            first = found["of_delivered"]["with"]
            text = f"{kind}: gain in its first window under a table, of what it comes to"
            yield _row("memory", text, first, 0.9 if kind == SAME else 0.6, pairs, at_most=False)
        if kind == SAME:
            median = found["with"]["steps_to_verdict"][1]
            yield _row("memory", f"{kind}: steps to the verdict, median", median, 300, pairs)
        worse = found["with_against_without"]["steps_ci95"][0]  # all of the interval above 0: worse for sure
        yield _row("memory", f"{kind}: steps lost beyond a job without memory, at least", worse, 0.0, pairs)


PARTS = {part.__name__.removeprefix("_"): part for part in (_watch, _nothing, _change, _suite, _memory)}


def promises(
    part: Annotated[list[str] | None, typer.Option(help=f"Only {', '.join(PARTS)}; again for more than one.")] = None,
    family: Annotated[str, typer.Option(help="What jobs are drawn from: standard or held-out.")] = "standard",
    jobs: Annotated[int, typer.Option(min=4, help="Of each figure; some take more or fewer in proportion.")] = 100,
    policy: Annotated[str, typer.Option(help="A policy without a memory of its own, as in `dynamiccl bench`.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same figures.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure in simulation what a search promises its user: how soon it is over and what it brings, that a table stays
    while it is worth having and no longer, that nothing is harmed where nothing is to be gained, how a job that changes
    recovers, and what the memory of a job before is worth. All of it takes about 30 minutes of one core.

    \b
    dynamiccl lab promises --part watch --jobs 20
    dynamiccl lab promises --family held-out --json
    """
    one_thread()
    from ...envs.job_suites import FAMILIES
    from ..choosing import DEFAULT, make_chooser

    asked = part or list(PARTS)
    if unknown := sorted(set(asked) - set(PARTS)):
        fail(f"--part is one of {', '.join(PARTS)}, not {', '.join(unknown)}")
    if family not in FAMILIES:
        fail(f"--family is {' or '.join(FAMILIES)}, not {family!r}")
    with refusing(ValueError):
        chosen = make_chooser(policy or DEFAULT, seed)
    found, begun = list[Promise](), time.monotonic()
    if not as_json:
        print(f"{policy or DEFAULT}, jobs of the {family} family, simulated")
    for name in asked:
        if sys.stderr.isatty():
            print(f"{name}: {time.monotonic() - begun:.0f} s so far", file=sys.stderr)
        for row in PARTS[name](jobs, seed, chosen, FAMILIES[family]):
            found.append(row)
            if not as_json:
                sign = "holds" if row.holds else "MISSED"
                bound = f"{'at most' if row.at_most else 'at least'} {row.aim:g}"
                print(f"{sign:7} {row.value:9.4g}  ({bound}; {row.of} jobs)  {row.text}", flush=True)
    if as_json:
        told = {"family": family, "policy": policy or DEFAULT, "seed": seed, "emulated": True}
        print(json_module.dumps({**told, "promises": [asdict(row) for row in found]}, indent=1))
