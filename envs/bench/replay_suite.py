"""A recorded job as a suite: the same searches on it, under the noise of other places in the record.

Its truth is what :mod:`.replay` makes of the trace: measured where it was measured, else predicted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...traces import spaces
from ...traces.files import Trace
from ..live.windows import LiveWindows
from ..replay import decisions as replay
from ..replay.job import LEAST, RecordedJob
from ..search.belief import Prior
from ..search.watch import SearchConfig
from ..search.windows import Job, Measured, Plan
from ..sim.windows import SimSearch
from ..sim.workloads import SLOTS
from .job_arena import Accounted
from .scores import LossAccount, Scores

Array = np.ndarray[Any, Any]


class RecordedJobs:
    """What a :class:`scores.LossAccount` asks of jobs, of ``n`` times the recorded one."""

    def __init__(self, recorded: replay.Recorded, n: int) -> None:
        saved = np.where(np.isfinite(recorded.truth), recorded.truth, 0.0) * recorded.share[:, None]
        self.saved = np.zeros((n, SLOTS, spaces.N_CONFIGS))
        self.default_us = np.full(n, recorded.default_ms * 1e3)
        self.by_slot = dict(zip(recorded.slots, saved, strict=True))
        self.connecting_us = np.zeros(n)

    def __len__(self) -> int:
        return len(self.default_us)

    def step_us(self, configs: Array, rows: Array | None = None) -> tuple[Array, Array]:
        """As ``sim.jobs.Jobs.step_us``."""
        rows = np.arange(len(self)) if rows is None else np.asarray(rows)
        total = self.saved[rows[:, None], np.arange(SLOTS), configs].sum(axis=1)
        return self.default_us[rows] * (1 - np.minimum(total, 1 - LEAST)), np.full(np.shape(configs), np.nan)

    def usual_us(self, configs: Array, rows: Array | None = None) -> Array:
        """As ``sim.jobs.Jobs.usual_us``."""
        return self.step_us(configs, rows)[0]


class RecordedWindows:
    """Windows of the same recorded job, ``n`` times, as ``sim_windows.SimWindows`` has them of simulated ones."""

    def __init__(self, trace: Trace, recorded: replay.Recorded, seeds: Sequence[int], min_share: float) -> None:
        self.jobs = RecordedJobs(recorded, len(seeds))
        self.each = [LiveWindows(RecordedJob(trace, recorded, s), 8, min_share) for s in seeds]
        self.running = np.zeros((len(seeds), SLOTS), np.int64)

    def begin(self, n_steps: int) -> tuple[list[Job], list[Measured]]:
        """Default steps of each. Raises ValueError where there is nothing to tune, or more than can be played."""
        found = []
        for i, windows in enumerate(self.each):
            windows.profile_steps = n_steps
            found.append(windows.begin())
            if len(windows.profiles) > SLOTS:
                raise ValueError(f"the recorded job has {len(windows.profiles)} slots, at most {SLOTS} can be played")
            for s, profile in enumerate(windows.profiles):
                self.jobs.saved[i, s] = self.jobs.by_slot.get(profile.slot, 0.0)
        return [job for job, _ in found], [seen for _, seen in found]

    def measure(self, rows: Sequence[int], plans: Sequence[Plan]) -> list[Measured]:
        """One window for each of the jobs at ``rows``."""
        for row, plan in zip(rows, plans, strict=True):
            self.running[row, : len(plan.configs)] = plan.configs
        return [self.each[row].measure(plan) for row, plan in zip(rows, plans, strict=True)]


class _Billed(Accounted, RecordedWindows):
    def begin(self, n_steps: int) -> tuple[list[Job], list[Measured]]:
        told, seen = super().begin(n_steps)
        self.ledger.bill(np.arange(len(seen)), self.running, np.array([m.billed for m in seen]))
        return told, seen


class RecordedSuite:
    """``repeats`` searches on one recorded job. Raises TraceError when the trace holds nothing to tune."""

    def __init__(self, trace: Trace, repeats: int = 16, min_share: float = 0.01) -> None:
        self.trace, self.repeats, self.min_share = trace, repeats, min_share
        self.recorded = replay.load(trace, min_share)
        self.name = "replay"

    def __len__(self) -> int:
        return self.repeats

    @property
    def digest(self) -> str:
        """Twelve hex digits that change with what the trace tells."""
        r = self.recorded
        parts = (r.truth.tobytes(), r.share.tobytes(), np.float64(r.default_ms).tobytes())
        return hashlib.sha256(b"".join(parts) + str((self.repeats, self.min_share)).encode()).hexdigest()[:12]

    @property
    def n_slots(self) -> Array:
        """Of each, (repeats,)."""
        return np.full(self.repeats, len(self.recorded.slots))

    @property
    def strata(self) -> Array:
        """All are of one."""
        return np.full(self.repeats, "recorded")

    @property
    def _best_us(self) -> float:
        r = self.recorded
        gain = float((np.where(np.isfinite(r.truth), r.truth, 0.0).max(axis=1) * r.share).sum())
        return r.default_ms * 1e3 * (1 - min(gain, 1 - LEAST))

    def open(self, rows: Array, seed: int, prior: Prior, rules: SearchConfig) -> tuple[SimSearch, LossAccount]:
        """Searches, each from another place in the record on, and their bill."""
        seeds = [1_000_003 * seed + int(row) for row in rows]
        windows = _Billed(self.trace, self.recorded, seeds, self.min_share)
        ledger = windows.ledger = LossAccount(windows.jobs, np.full(len(rows), self._best_us))
        return SimSearch(windows.jobs, prior, np.random.default_rng(seed), rules, windows), ledger

    def told(self) -> dict[str, Scores]:
        """The oracle: the best of what was measured or predicted, in every slot."""
        jobs = RecordedJobs(self.recorded, self.repeats)
        best = np.zeros((self.repeats, SLOTS), np.int64)
        for s, saved in enumerate(list(jobs.by_slot.values())[:SLOTS]):
            jobs.saved[:, s], best[:, s] = saved, int(np.argmax(saved))
        ledger = LossAccount(jobs, np.full(self.repeats, self._best_us))
        ledger.end(np.arange(self.repeats), best)
        return {"oracle": ledger.scores()}
