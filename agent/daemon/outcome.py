"""What a run came to: its summary, read from the search's own comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...envs.live.obedience import Disobeyed
from ...envs.live.windows import LiveWindows
from ...envs.search.comparison import Comparison, SequentialTest, detectable_gain
from ...envs.search.config import ABORT, ALPHA
from ...envs.search.search import Search
from ...traces.queries.slots import SlotProfile
from ...traces.reasons import RowRefused, RunEnds, Why
from ...traces.records import Decision, Slot
from ...traces.spaces import decision_of
from ..report.summary import RunSummary
from ..report.verdict import DEFAULT
from .account import Costs, TableNames, comparison_row, row_of, speedups

#: Fields of a summary that only a verdict has.
_VERDICT = (
    *("speedup", "speedup_ci95", "aa_speedup_ci95", "detectable", "compared", "compared_steps"),
    *("default_step_ms", "default_windows", "tuned_step_ms", "tuned_windows"),
)


class Outcome:
    """Keeps the summary of one run up to date."""

    def __init__(self, windows: LiveWindows, tables: TableNames) -> None:
        self.windows = windows
        self.tables = tables
        self.summary = RunSummary(kept=False, in_force=DEFAULT)
        self.n_comparisons = 0  # of the search that were told
        self._n_dropped = 0  # tables of the search that were dropped, and are told or history
        # Rows that NCCL did not follow, and what it did.
        self._disobeyed: dict[tuple[Slot, Decision], Why] = {}

    def begin_anew(self, dropped: Why | None) -> None:
        """Another search begins, under the default. ``dropped``: why the table that was kept holds no more."""
        self.n_comparisons = self._n_dropped = 0
        self.summary.kept = False
        self.summary.in_force = DEFAULT
        self.summary.steps_to_first_gain = self.summary.steps_to_verdict = None
        self.summary.dropped = dropped or self.summary.dropped

    def disobeyed(self, row: Disobeyed) -> None:
        """NCCL did not follow a row."""
        self._disobeyed[row.slot, row.decision] = row.why
        self.summary.not_obeyed.append(row.why)

    def sides(self, comparison: Comparison) -> tuple[str, str]:
        """The letters of its table and of its reference."""
        table = self.windows.decisions(comparison.table)
        reference = self.windows.decisions(comparison.reference)
        return self.tables.of(table), self.tables.of(reference)

    def sum_up(self, comparisons: Sequence[Comparison], costs: Costs) -> RunSummary:
        """The summary with all tables, comparisons and costs."""
        rows = []
        named = {self.summary.in_force}
        for comparison in comparisons:
            if comparison.steps:
                table, against = self.sides(comparison)
                rows.append(comparison_row(comparison, table, against))
                named |= {table, against}
        tables = {}
        for name in self.tables.rows:
            if name in named:
                tables[name] = self.tables.table(name)
        return replace(
            self.summary,
            windows=costs.windows,
            cost_s=costs.search_ms / 1e3,
            budget_s=costs.budget_ms / 1e3,
            trials=costs.trials,
            trials_cost_s=costs.trials_ms / 1e3,
            comparisons=rows,
            tables=tables,
        )

    def conclude(self, search: Search) -> None:
        """Bring the summary up to what the search has come to."""
        summary = self.summary
        state = search.state
        self._note_milestones(search)
        confirmed = self.windows.decisions(search.confirmed)
        summary.in_force = self.tables.of(confirmed)
        # A table that was adopted has its figures, however the job ends.
        is_decided = search.is_over or bool(state.current.comparisons)
        if is_decided or not search.is_comparing:
            rows = []
            for i, profile in enumerate(self.windows.profiles):
                row = self._decision(i, profile, search)
                rows.append(row)
            summary.decisions = rows
        summary.exposed = self.exposed()
        fields: dict[str, Any] = dict.fromkeys(_VERDICT)
        if is_decided:
            fields = self._verdict(search)
        vars(summary).update(fields)
        guard = state.guard
        refused = np.argwhere(guard.refused | guard.is_guilty)
        summary.refused = []
        for slot, config in refused.tolist():
            row = self._refusal(slot, config)
            summary.refused.append(row)

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

    def _note_milestones(self, search: Search) -> None:
        """What the current table is, and at which step of the job that came."""
        summary = self.summary
        marks = search.marks
        now = self.windows.job.last_step
        account = search.state.account
        summary.kept = bool(search.confirmed.any())
        if marks.first_gain >= 0 and summary.steps_to_first_gain is None:
            summary.steps_to_first_gain = now
        if marks.verdict >= 0 and summary.steps_to_verdict is None:
            summary.steps_to_verdict = now
        steps = account.since_verdict
        summary.default_share_after = None
        if steps:
            by_default = account.default_since_verdict
            summary.default_share_after = by_default / steps
        if summary.kept:  # what became of a table before it is history
            summary.dropped = None
        elif marks.dropped > self._n_dropped and not summary.dropped:
            summary.dropped = RunEnds.SLOWER()
        self._n_dropped = marks.dropped

    def _refusal(self, i: int, config: int) -> dict[str, Any]:
        slot = self.windows.profiles[i].slot
        decision = decision_of(config)
        too_slow = RowRefused.TOO_SLOW(decision=decision, slot=slot, times=ABORT)
        key = slot, decision
        why = self._disobeyed.get(key, too_slow)
        row = _named(slot)
        row |= {"decision": str(decision), "why": why}
        return row

    def _decision(self, i: int, profile: SlotProfile, search: Search) -> dict[str, Any]:
        """The row of a slot; how many other configs were tried, and why NCCL's own choice stays if it does."""
        config = int(search.confirmed[i])
        decision = decision_of(config)
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
        """The fields _VERDICT: the table against the default, and the default against itself. Intervals hold however
        often the search looked (:mod:`envs.search.comparison`). None: not measured."""
        found: dict[str, Any] = dict.fromkeys(_VERDICT)
        state = search.state
        logs_of_default = state.comparisons.default_logs
        of_pair = state.noise.of_pair
        same = SequentialTest(of_pair, ALPHA, logs_of_default)
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
        gain = detectable_gain(largest, search.config.quads)
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
