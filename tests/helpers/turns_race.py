"""One comparison by turns, run as a search runs it, over steps whose times under both tables are known."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.comparison import ADOPTED, Comparison
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.search.interfaces import COMPARE, Job, Measured, Plan, arms_of
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.sim.family import STANDARD
from dynamiccl.envs.sim.jobs import draw_jobs
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.envs.sim.windows import SWITCH_STEPS, OneJob, SimWindows

Array = np.ndarray[Any, Any]
RULES = SearchConfig()
PRIOR = Prior.load()


@dataclass
class Race:
    """What came of a comparison. ``missed``: the interval of the gain did not hold the true one at some check."""

    comparison: Comparison
    steps: int  # of the comparison
    is_decided: bool
    missed: bool

    @property
    def is_adopted(self) -> bool:
        return self.comparison.outcome == ADOPTED


def one_slot() -> Job:
    """A job of one slot, which takes turns."""
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(11), 1)
    job, _ = OneJob(SimWindows(jobs, NoiseStream(0, np.zeros(1), jobs.width)), 8).begin()
    return Job(
        features=job.features[:1],
        mask=job.mask[:1],
        share=job.share[:1],
        call_us=np.full(1, np.nan),
        families=job.families[:1],
        calls=np.zeros(1),
    )


def race(job: Job, steps: Array, gain: float = 0.0, carry: float = 0.0, stops: bool = True) -> Race:
    """Compare a table of that ``gain`` (log) with the default. ``steps`` (n,): what the job's steps take under the
    default. A part ``carry`` of the gain is seen one step later. Without ``stops`` nothing is ever decided."""
    at = RULES.profile_steps
    search = Search(job, measured(steps[:at], at), PRIOR)
    if not stops:
        search.state.decide = lambda _: None  # type: ignore[method-assign]
    config = int(np.flatnonzero(job.mask[0])[-1])
    search.decide(config, COMPARE)
    (comparison,) = search.comparisons
    missed = False
    while search.is_comparing:
        plan = search.plan()
        assert plan is not None and plan.turns
        at += SWITCH_STEPS
        if at + plan.discard + plan.n_steps > len(steps):
            break
        seen = in_turns(plan, steps[at:], gain, carry)
        at += plan.discard + plan.n_steps + SWITCH_STEPS
        search.record(plan, seen)
        low, high = comparison.test.interval
        missed |= not low <= gain <= high
    return Race(comparison, at - RULES.profile_steps, not search.is_comparing, missed)


def in_turns(plan: Plan, steps: Array, gain: float, carry: float) -> Measured:
    """What turns of the table and the default show of the next steps; they end with a step that is too slow."""
    n = plan.discard + plan.n_steps
    arms = arms_of(n, plan.turns)
    before = np.append(0, arms[:-1])
    part = (1 - carry) * arms + carry * before
    ms = steps[:n] * np.exp(-gain * part)
    too_slow = np.flatnonzero((ms > plan.limit_ms) & (arms == 1) & (np.arange(n) >= plan.discard))
    end = int(too_slow[0]) + 1 if too_slow.size else n
    counted = slice(plan.discard, end)
    return measured(ms[counted], end + 2 * SWITCH_STEPS, arms[counted], plan.turns)


def measured(ms: Array, billed: int, arms: Array | None = None, turns: int = 0) -> Measured:
    """Steps of which no kernel was timed."""
    none = np.zeros(0, np.int64)
    no_calls = np.full(1, np.nan)
    obeyed = np.ones(1, bool)
    counted = none if arms is None else arms
    return Measured(ms, no_calls, obeyed, billed, float(ms.sum()), arms=counted, turns=turns)
