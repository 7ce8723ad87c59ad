"""A job without processes: step times come from a function of the decisions. Stands in for ``envs.live.job.Job``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from dynamiccl.envs.live.job import Window
from dynamiccl.envs.live.job_ends import JobEnded
from dynamiccl.envs.live.turns import Turns
from dynamiccl.envs.search.interfaces import arms_of
from dynamiccl.traces.assemble import WAIT_COLUMNS, Offer, empty
from dynamiccl.traces.reasons import RunEnds
from dynamiccl.traces.records import ALGOS, PROTOS, Decision, Slot, Table

GATHER = Slot(16, 2, "all_gather", 27)
SCATTER = Slot(16, 2, "reduce_scatter", 28)
STEP_MS = 100.0

COST = np.full((len(ALGOS), len(PROTOS)), -1, np.float32)
COST[1] = (900, 400, 300)  # ring: ll, ll128, simple


class _Assembler:
    def __init__(self) -> None:
        self.offers = {
            (7, "all_gather", 100_000_000): Offer(COST, "ring", "simple", 1),
            (7, "reduce_scatter", 200_000_000): Offer(COST, "ring", "simple", 1),
        }


class FakeJob:
    """Two slots of 8 calls a step each; ``step_ms(decisions)`` is the truth, ``noise`` its relative spread.

    As with a real job, a table that is published but not confirmed is a trial: it ends by itself some steps after its
    window, and what was confirmed last is in force.
    """

    def __init__(
        self,
        step_ms: Callable[[Mapping[Slot, Decision]], float],
        noise: float = 0.0,
        steps: int = 10**9,
        seed: int = 0,
    ) -> None:
        self.step_ms, self.noise, self.steps = step_ms, noise, steps
        self.rng = np.random.default_rng(seed)
        self.assembler = _Assembler()
        self.waits = empty(WAIT_COLUMNS)
        self.memory_pressure, self.all_reduce = 0.0, ""
        self.memory_free = self.held_ms = 0
        self.generation = self.last_step = 0
        self.confirmed: dict[Slot, Decision] = {}
        self.in_force: dict[Slot, Decision] = {}  # what the ranks run
        self.tables: list[Table] = []
        self._events: list[pd.DataFrame] = []

    def publish(self, decisions: Mapping[Slot, Decision], trial_steps: int = 0) -> int:
        self.generation += 1
        self.tables.append(Table.of(self.generation, decisions, trial_steps))
        self.in_force = dict(decisions)
        return self.generation

    def confirm(self, decisions: Mapping[Slot, Decision]) -> int:
        self.confirmed = {s: d for s, d in decisions.items() if not d.is_auto}
        return self.publish(self.confirmed)

    def release(self) -> None:
        self.confirm(self.confirmed)

    def end_of_trial(self) -> None:
        """Steps go by, and no table comes: what a job runs under once its tuner is gone."""
        if self.tables and self.tables[-1].trial_steps:
            self.in_force = dict(self.confirmed)

    def window(
        self,
        decisions: Mapping[Slot, Decision],
        n_steps: int,
        discard: int = 1,
        give_up_ms: float = float("inf"),
        one_of: int = 0,
    ) -> Window:
        assert one_of == 0
        chosen = {s: d for s, d in decisions.items() if not d.is_auto}
        generation = self.publish(chosen, 100 if chosen != self.confirmed else 0)
        self.last_step += discard
        steps, times = [], []
        for _ in range(n_steps):
            self.last_step += 1
            if self.last_step > self.steps:
                raise JobEnded(RunEnds.JOB_STATUS(status=0))
            steps.append(self.last_step)
            times.append(self.step_ms(self.in_force) * (1 + self.noise * self.rng.standard_normal()))
            if times[-1] > give_up_ms:
                break
        if not chosen:  # of other configs no kernel is sampled
            self._note(steps)
        return Window(generation, np.array(steps), np.array(times))

    def check(self) -> None:
        """Nothing ends tuning here."""

    def alternate(
        self,
        decisions: Mapping[Slot, Decision],
        n_steps: int,
        turn_steps: int = 1,
        discard: int = 0,
        give_up_ms: float = float("inf"),
    ) -> Turns:
        """Two steps wait for the turns."""
        chosen = {s: d for s, d in decisions.items() if not d.is_auto}
        generation = self.publish(chosen, 100)
        self.check()  # a real one looks at each poll
        self.last_step += discard + 2
        steps, times, arms = [], [], arms_of(n_steps, turn_steps)
        for arm in arms:
            self.last_step += 1
            if self.last_step > self.steps:
                raise JobEnded(RunEnds.JOB_STATUS(status=0))
            steps.append(self.last_step)
            took = self.step_ms(chosen if arm else self.confirmed)
            times.append(took * (1 + self.noise * self.rng.standard_normal()))
            if arm and times[-1] > give_up_ms:
                break
        arms = arms[: len(steps)]
        if not chosen:
            self._note(np.array(steps)[arms == 1].tolist())
        self.confirm(self.confirmed)
        return Turns((generation,), np.array(steps), np.array(times), arms, turn_steps)

    def poll(self):
        """Nothing goes by between two windows."""

    def take_events(self) -> pd.DataFrame:
        events, self._events = self._events, []
        return pd.concat(events, ignore_index=True) if events else pd.DataFrame()

    def _note(self, steps: list[int]) -> None:
        rows = [
            {
                "seq": 8 * step + i,
                "comm_id": 7,
                "rank": 0,
                "n_ranks": 16,
                "n_nodes": 2,
                "func": func,
                "n_bytes": n_bytes,
                "dtype": "bfloat16",
                "algo": "ring",
                "proto": "simple",
                "n_channels": 16,
                "table_generation": self.generation,
                "enqueue_ns": 8 * step + i,
                "pid": 1,
                "start_ns": 0,
                "end_ns": 4_000_000,
                "step": step,
            }
            for step in steps
            for func, n_bytes in (("all_gather", 100_000_000), ("reduce_scatter", 200_000_000))
            for i in range(8)
        ]
        self._events.append(pd.DataFrame(rows))
