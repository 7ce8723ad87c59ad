"""What a search comes to, as events of the log: read from the search's own comparisons."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...envs.live.obedience import Disobeyed
from ...envs.live.windows import LiveWindows
from ...envs.search.comparison import OPEN, Comparison, SequentialTest, detectable_gain
from ...envs.search.config import ABORT, ALPHA
from ...envs.search.search import Search
from ...traces.queries.slots import SlotProfile
from ...traces.reasons import RowRefused, RunEnds, Why
from ...traces.records import Decision, Slot
from ...traces.spaces import decision_of
from ..report.summary import COMPARISON, DEFAULT, FIELDS, NAMED, SEARCHES, RunSummary
from .account import Costs, TableNames, comparison_row, row_of, speedups
from .events import Events


class Outcome:
    """Tells in the log what a search comes to. ``summary`` is the fold of it."""

    def __init__(self, windows: LiveWindows, events: Events, before: RunSummary | None = None) -> None:
        """``before``: the summary of an earlier tuner, which holds until this one searches."""
        self.windows, self.events = windows, events
        self.goes_on = before is not None
        known = before.tables if before is not None else None
        self.tables = TableNames(lambda letter, rows: events.tell(NAMED, letter=letter, rows=rows), known)
        self.n_comparisons = 0  # of the search that were told
        self._open = dict[int, Comparison]()  # not decided yet, by number
        self._n_dropped = 0  # tables of the search that were dropped, and are told or history
        self.default_share: float | None = (
            None  # part of the steps after the verdict that ran under the default
        )
        # Rows that NCCL did not follow, and what it did.
        self._disobeyed: dict[tuple[Slot, Decision], Why] = {}

    @property
    def summary(self) -> RunSummary:
        """What the run came to, as far as is known."""
        return self.events.summary

    def begin_anew(self, dropped: Why | None) -> None:
        """Another search begins, under the default. ``dropped``: why the table that was kept holds no more."""
        self._n_dropped = 0
        self.searches()
        self.no_table(dropped=dropped or self.summary.dropped)

    def searches(self) -> None:
        """From here on a search of this tuner tells what is compared."""
        self.goes_on, self.n_comparisons = False, 0
        self._open.clear()
        self.events.tell(SEARCHES)

    def no_table(self, dropped: Why | None) -> None:
        """The default holds, without a verdict."""
        self.events.tell(
            "stand",
            kept=False,
            in_force=DEFAULT,
            dropped=dropped,
            steps_to_first_gain=None,
            steps_to_verdict=None,
        )

    def ended(self, why: Why | None) -> None:
        """Why tuning is over; None: it is not."""
        self.events.tell("end", ended=why)

    def disobeyed(self, row: Disobeyed) -> None:
        """NCCL did not follow a row."""
        self._disobeyed[row.slot, row.decision] = row.why
        self.events.tell("refusals", not_obeyed=[*self.summary.not_obeyed, row.why])

    def sides(self, comparison: Comparison) -> tuple[str, str]:
        """The letters of its table and of its reference."""
        table = self.windows.decisions(comparison.table)
        reference = self.windows.decisions(comparison.reference)
        return self.tables.of(table), self.tables.of(reference)

    def compared(self, search: Search) -> tuple[list[Comparison], list[Comparison]]:
        """Tell what comparisons have come to since the last call; returns those that began, and those that ended."""
        begun = search.comparisons[self.n_comparisons :]
        self._open |= enumerate(begun, self.n_comparisons)
        self.n_comparisons = len(search.comparisons)
        self._tell_open()
        over = [one for one in self._open.values() if one.outcome != OPEN]
        self._open = {number: one for number, one in self._open.items() if one.outcome == OPEN}
        return begun, over

    def _tell_open(self) -> None:
        for number, comparison in self._open.items():
            table, against = self.sides(comparison)
            if comparison.steps and not self.goes_on:
                self.events.tell(COMPARISON, number=number, row=comparison_row(comparison, table, against))

    def cost(self, costs: Costs) -> None:
        """Tell what the windows have cost, and what the steps after the verdict ran under."""
        self.events.tell(
            "costs",
            default_share_after=self.default_share,
            windows=costs.windows,
            cost_s=costs.search_ms / 1e3,
            budget_s=costs.budget_ms / 1e3,
            trials=costs.trials,
            trials_cost_s=costs.trials_ms / 1e3,
        )

    def conclude(self, search: Search) -> None:
        """Tell what the search has come to."""
        state = search.state
        self._stands(search)
        guard = state.guard
        refused = np.argwhere(guard.refused | guard.is_guilty)
        self.events.tell("refusals", refused=[self._refusal(*at) for at in refused.tolist()])
        if self.goes_on:
            return
        self._tell_open()
        # A table that was adopted has its figures, however the job ends.
        is_decided = search.is_over or bool(state.current.comparisons)
        rows = {"exposed": self.exposed()}
        if is_decided or not search.is_comparing:
            profiles = enumerate(self.windows.profiles)
            rows["decisions"] = [self._decision(i, profile, search) for i, profile in profiles]
        self.events.tell("rows", **rows)
        none = dict.fromkeys(FIELDS["against_default"])
        self.events.tell("against_default", **(self._verdict(search) if is_decided else none))

    def exposed(self) -> list[dict[str, Any]]:
        """Of each slot its share of the step and the exposed part of its time; empty if the job does not tell."""
        known = self.windows.exposed
        rows = []
        for profile in self.windows.profiles:
            slot = profile.slot
            if slot in known:
                row = _named(slot)
                row |= {"share": profile.share, "exposed": known[slot]}
                rows.append(row)
        return rows

    def _stands(self, search: Search) -> None:
        """Tell what the current table is, and at which step of the job that came."""
        summary, marks, now = self.summary, search.marks, self.windows.job.last_step
        account = search.state.account
        kept = bool(search.confirmed.any())
        dropped = None if kept else summary.dropped  # what became of a table before it is history
        if not kept and marks.dropped > self._n_dropped:
            dropped = dropped or RunEnds.SLOWER()
        self._n_dropped = marks.dropped
        gained, decided = summary.steps_to_first_gain, summary.steps_to_verdict
        self.events.tell(
            "stand",
            kept=kept,
            in_force=self.tables.of(self.windows.decisions(search.confirmed)),
            dropped=dropped,
            steps_to_first_gain=now if gained is None and marks.first_gain >= 0 else gained,
            steps_to_verdict=now if decided is None and marks.verdict >= 0 else decided,
        )
        steps = account.since_verdict
        self.default_share = account.default_since_verdict / steps if steps else None

    def _refusal(self, i: int, config: int) -> dict[str, Any]:
        slot = self.windows.profiles[i].slot
        decision = decision_of(config, slot.func)
        too_slow = RowRefused.TOO_SLOW(decision=decision, slot=slot, times=ABORT)
        key = slot, decision
        why = self._disobeyed.get(key, too_slow)
        row = _named(slot)
        row |= {"decision": str(decision), "why": why}
        return row

    def _decision(self, i: int, profile: SlotProfile, search: Search) -> dict[str, Any]:
        """The row of a slot; how many other configs were tried, and why NCCL's own choice stays if it does."""
        config = int(search.confirmed[i])
        decision = decision_of(config, profile.slot.func)
        guard = search.state.guard
        windows = guard.windows[i, 1:]
        tried = int((windows > 0).sum())
        why = None
        if decision.is_auto and tried:
            why = RowRefused.NOT_BETTER(own=profile.own, tried=tried)
        elif decision.is_auto:
            why = RowRefused.NOT_TRIED(own=profile.own)
        row = row_of(profile.slot, decision)
        return row | {"own": profile.own, "tried": tried, "why": why}

    def _verdict(self, search: Search) -> dict[str, Any]:
        """The verdict: the table against the default, and the default against itself. Intervals hold however often the
        search looked (:mod:`envs.search.comparison`). None: not measured."""
        found: dict[str, Any] = dict.fromkeys(FIELDS["against_default"])
        state = search.state
        logs_of_default = state.comparisons.default_logs
        same = SequentialTest(state.noise.of_quads(1), ALPHA, logs_of_default)
        if same.has_interval:
            found["aa_speedup_ci95"] = speedups(*same.interval)
        rejected = state.comparisons.last_rejected
        # More than one comparison are a chain, from the default to the current table.
        chain = state.current.comparisons
        if not chain and rejected is not None:
            chain = [rejected]
        tests = [one.test for one in chain]
        if tests and tests[0].has_interval:
            first = tests[0]
            is_adopted = bool(state.current.comparisons)
            logs = search.gain if is_adopted else (first.mean, *first.interval)
            found["speedup"], *found["speedup_ci95"] = speedups(*logs)
        if chain:
            found |= self._step_times(chain[0], chain[-1])
        deviations = [test.deviation for test in tests]
        largest = max([state.noise.of_quads(1), *deviations])
        gain = detectable_gain(largest)
        return found | {"detectable": gain}

    def _step_times(self, first: Comparison, last: Comparison) -> dict[str, Any]:
        """Of the default, from the comparison with it, and of the last table."""
        of_default = comparison_row(first, *self.sides(first))
        of_table = comparison_row(last, *self.sides(last))
        steps = [*first.steps[:1], *last.steps[1:]]
        return {
            "compared": of_table["table"],
            "compared_steps": steps or None,
            "default_step_ms": of_default["against_ms"],
            "default_windows": of_default["against_windows"],
            "tuned_step_ms": of_table["table_ms"],
            "tuned_windows": of_table["table_windows"],
        }


def _named(slot: Slot) -> dict[str, Any]:
    """A slot as rows of a summary name it: two groups may have calls of one collective and size class."""
    return {"slot": str(slot), "n_ranks": slot.n_ranks, "n_nodes": slot.n_nodes}
