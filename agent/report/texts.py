"""Texts that several views of a run share: its result in lines, its windows, the times of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from ...traces.queries.exposed import critical
from ...traces.reasons import revived
from .summary import RunSummary
from .verdict import MEASURED, OWN, PHASES, ms, outcome, own_of, rows_text, seconds, side, verdict

#: Heads of :func:`cost_rows`; the columns in NUMBERS are aligned to the right.
COSTS = (
    "slot",
    "calls/step",
    "default setting",
    "table's setting",
    "default",
    "tuned",
    "change",
    "per step",
    "sampled",
    "timed by",
)
#: Those columns that a terminal of 80 columns has room for; the reasons below the table tell the settings.
NARROW = ("slot", "calls/step", "default", "tuned", "change")
NUMBERS = ("calls/step", "default", "tuned", "change", "per step", "sampled")
COSTS_NOTE = (
    "default, tuned: median time of one call under NCCL's default and under the table, while the step computes. Only "
    "the step time says what the step gains. per step: all calls of a default step. timed by: from the latest start to "
    "the latest stop of all ranks, or from a rank's own start to its own stop, waiting included."
)


def policy_text(name: str) -> str:
    """A policy by its name, and what it is."""
    known = {
        "lstm": "an LSTM that corrects the rule's scores",
        "expected-improvement": "the rule: the largest expected improvement",
    }
    return f"{name} ({known[name]})" if name in known else name


def emulation_text(facts: Mapping[str, Any]) -> str:
    """The emulated cluster of a run, from its summary or the header of its trace, and what its times are."""
    compute = facts.get("compute_scale") or 1
    return (
        f"emulated cluster {facts.get('cluster')}, bytes x {facts.get('bytes_scale') or 1:g}, compute x {compute:g}: "
        "not GPU times; they are counted, not waited, so your own prints show this machine's speed"
    )


def window_parts(line: Mapping[str, Any]) -> list[str]:
    """The result of a logged window in parts; unknown parts are left out."""
    step, default, phase = line.get("step_ms"), line.get("default_ms"), line.get("phase")
    table = line.get("table")
    parts = [
        f"steps {line.get('first_step', '?')} to {line.get('last_step', '?')}",
        PHASES.get(str(phase), phase),
    ]
    if table:
        parts.append(side(table))
    if step is not None:
        parts.append(ms(step) + (f", {OWN} {ms(default)}" if default and phase != "profile" else ""))
    measured = MEASURED.get(str(line.get("verdict")), line.get("verdict"))
    return [str(part) for part in [*parts, measured, *revived(line.get("events") or [])] if part]


def nothing_decided(summary: RunSummary, header: Mapping[str, Any]) -> str:
    """Why a trace has no decisions."""
    if "source" in header:
        return "a recording of another tool: nothing was tuned in it"
    if summary.ended:
        return str(summary.ended)
    return f"{OWN} stays" if summary.is_decided else "the run goes on, or was cut off before its verdict"


def measured(s: RunSummary) -> str:
    """Step times of the two sides of the verdict, and when; empty if nothing was compared."""
    if s.default_step_ms is None or s.tuned_step_ms is None:
        return ""
    steps = f", steps {s.compared_steps[0]} to {s.compared_steps[1]}" if s.compared_steps else ""
    own = own_of(s)
    sides = [
        (side(s.compared, own), s.tuned_step_ms, s.tuned_windows),
        (own, s.default_step_ms, s.default_windows),
    ]
    parts = [
        f"{name} {ms(value)}" + (f" (median of {n} window{'s' * (n > 1)})" if n else "")
        for name, value, n in sides
    ]
    return f"{parts[0]} against {parts[1]}{steps}"


def _ratio(s: RunSummary) -> str:
    """The speed-up with its interval, and the interval of the default compared with itself."""
    if s.speedup is None or not s.speedup_ci95:
        return ""
    parts = ["95 %: {:.3f} to {:.3f}".format(*s.speedup_ci95)]
    parts += ["against itself: {:.3f} to {:.3f}".format(*s.aa_speedup_ci95)] if s.aa_speedup_ci95 else []
    own = own_of(s)
    return f"{own} takes {s.speedup:.3f} times as long as {side(s.compared, own)} ({'; '.join(parts)})"


def result_lines(summary: RunSummary) -> list[str]:
    """The verdict first, then its step times, all comparisons, and the rows of each table."""
    shown = [c for c in summary.comparisons if c["outcome"] == "kept" or not c["trial"]]
    outcomes = map(str, map(partial(outcome, own=own_of(summary)), shown))
    found = [verdict(summary), measured(summary), _ratio(summary), *outcomes]
    if summary.trials:
        found.append(
            f"trials after the verdict: {summary.trials} windows, cost {seconds(summary.trials_cost_s or 0)}"
        )
    found += map(str, critical(summary.exposed))
    named = {letter for c in shown for letter in (c["table"], c["against"])}
    found += [f"{name} = {rows_text(rows)}" for name, rows in summary.tables.items() if name in named]
    return [line for line in found if line]


#: The command that compares the ranks of all hosts; each host's results hold its own ranks.
ACROSS_HOSTS = "dynamiccl doctor --trace RESULTS_OF_HOST_0 --trace RESULTS_OF_HOST_1 ..."


def consistency_text(found: Mapping[str, Any]) -> str:
    """Whether the ranks ran their collectives in the same way; empty if nothing is known."""
    if not found:
        return ""
    elsewhere = found.get("ranks_elsewhere", 0)
    if found["calls_checked"]:
        of_whom = " of this host" if elsewhere else ""
        counts = f"{found['calls_checked']} collectives compared across ranks{of_whom}"
        told = f"consistency: {counts}, {found['mismatches']} mismatches"
    else:
        told = "consistency: no collective was recorded here by two ranks, so nothing was compared"
    if held_ms := found.get("held_ms"):
        told += (
            f"; while the ranks agreed on tables, calls waited: on the rank with the most {held_ms} ms in all"
        )
    if elsewhere:
        ranks = "1 other rank is" if elsewhere == 1 else f"{elsewhere} other ranks are"
        told += f"; {ranks} recorded on other hosts: {ACROSS_HOSTS} compares all"
    return told


def cost_rows(costs: Sequence[Mapping[Any, Any]]) -> list[list[str | None]]:
    """Times of each slot; ``costs`` are rows of ``traces.queries.costs.slot_costs``."""
    in_ms = any(c[key] and c[key] >= 2000 for c in costs for key in ("default_us", "tuned_us"))

    def time(us: float | None) -> str | None:
        return None if pd.isna(us) else f"{us / 1e3:.2f} ms" if in_ms else f"{us:.1f} us"

    rows = []
    for c in costs:
        before, after, sampled = c["default_us"], c["tuned_us"], (c["n_default"], c["n_tuned"])
        is_timed = pd.notna(before) and pd.notna(after)
        row = [c["slot"], f"{c['calls']:.3g}", c["own"], c["ran"], time(before), time(after)]
        row.append(f"{round(100 * (after / before - 1)):+d} %".replace("+0", "0") if is_timed else None)
        row.append(f"{c['calls'] * before / 1e3:.2f} ms" if pd.notna(before) else None)
        rows.append([*row, f"{sampled[0]} / {sampled[1]}", c["timed_by"] if any(sampled) else None])
    return rows
