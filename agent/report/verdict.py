"""The result of a run in sentences. Console, log, report, ``show``, ``why`` and ``top`` share them.

All figures come from the summary. A comparison always names its two sides; tables have letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...traces.reasons import Happened, Why, changed
from ...traces.reasons import ms as ms
from ...traces.reasons import seconds as seconds
from ...traces.records import decided, format_range
from .summary import DEFAULT as DEFAULT
from .summary import RunSummary

#: The default instead of a table's letter, for people.
OWN = "NCCL's default"
#: The same in a run with --headroom: the default has the channels of a run without it.
UNTOUCHED = "NCCL untouched"
#: Phase of a window in the log -> its name for people.
PHASES = {"verify": "comparison", "refine": "trial"}
#: How a window was measured -> the same for people.
MEASURED = {"few-calls": "few calls", "given-up": "given up"}


def side(letter: str | None, own: str = OWN) -> str:
    """One side of a comparison, for people; ``own``: the default's name, see :func:`own_of`."""
    return own if letter in (DEFAULT, None) else str(letter)


def own_of(s: RunSummary) -> str:
    """The name of the run's default, for people."""
    return UNTOUCHED if s.headroom else OWN


def change(speedup: float, ends: Sequence[float] | None = None, note: str = "", than: str = "") -> str:
    """A speed-up as a change of the step time: ``12.8 % shorter than A (1.6 to 22.8: note)``."""
    bounds = _percent(speedup, ends or ())
    inside = [*([f"{min(bounds):.1f} to {max(bounds):.1f}"] if bounds else []), *([note] if note else [])]
    text = f"{changed(speedup)}{than}"
    return f"{text} ({': '.join(inside)})" if inside else text


def _percent(speedup: float, ends: Sequence[float]) -> list[float]:
    """The ends of a speed-up's interval as changes of the step time in its direction, in percent."""
    sign = 1 if speedup >= 1 else -1
    return [round(100 * sign * (1 - 1 / x), 1) + 0.0 for x in ends]


def outcome(c: Mapping[str, Any], own: str = OWN) -> Why:
    """The result of one comparison of the summary; ``own``: the default's name."""
    sides = {"table": side(c["table"], own), "against": side(c["against"], own)}
    if c["speedup"] is None:
        return Happened.NOT_COMPARED(**sides)
    ends, n = _percent(c["speedup"], c["speedup_ci95"]), c["pairs"]
    unit = f"alternation{'s' * (n > 1)}"
    happened = {"kept": Happened.KEPT, "lost": Happened.LOST}.get(c["outcome"], Happened.NOT_DECIDED)
    return happened(**sides, speedup=c["speedup"], low=min(ends), high=max(ends), count=n, unit=unit)


def cost(s: RunSummary) -> str:
    """The cost of finding the table, and the number of steps that repay it."""
    if s.cost_s is None:
        return ""
    paid = f", repaid after {s.repaid_after:,} steps" if s.repaid_after is not None else ""
    return f"found at the cost of {seconds(s.cost_s)}{paid}" if s.cost_s > 0 else "found at no cost"


def verdict(s: RunSummary) -> str:
    """The run in one sentence."""
    return _without_verdict(s) or _decided(s)


def _without_verdict(s: RunSummary) -> str:
    """The sentence of a run that failed or has no verdict; empty for any other run."""
    if s.failure:
        return f"FAILED: {s.failure}"
    if (
        not s.is_decided and not s.dropped
    ):  # a dropped table had its verdict, whatever the new search comes to
        return f"NO VERDICT: {s.ended or 'the run goes on, or was cut off'}"
    if s.job_failed:
        before = f"; {s.in_force or 'a table'} had been kept" if s.kept else ""
        return f"NO VERDICT{_emulated(s)}: the job failed with status {s.job_status}{before}"
    return ""


def _emulated(s: RunSummary) -> str:
    return " (emulated times)" if s.emulated else ""


def _decided(s: RunSummary) -> str:
    emulated, own = _emulated(s), own_of(s)
    than = f" than {own}" if s.kept and s.headroom else ""
    note = s.strength if s.kept else ""
    came = change(s.speedup, s.speedup_ci95, note, than) if s.speedup is not None else ""
    if s.kept:
        what = f"steps {came}, {cost(s)}" if came else "a table that was kept earlier is still used"
        return f"KEPT {s.in_force or 'the table'}{emulated}: {what}".rstrip(", ")
    if s.dropped:
        return f"REVERTED{emulated}: {s.dropped}; {own} is used again"
    if s.budget_s == 0:
        return f"NOTHING TRIED{emulated}: no trial was allowed (a budget of 0, or no free search slot); {own} stays"
    seen = (
        f"; its first comparison would have seen a gain of {s.detectable:.1%} or more"
        if s.detectable is not None
        else ""
    )
    if came:
        what = f"steps under {side(s.compared, own)} were {came} than under {own}, which stays"
        return f"NOTHING KEPT{emulated}: {what}{seen}"
    return f"NOTHING FOUND{emulated}: no table promised enough to be compared; {own} stays{seen}"


#: Names of protocols and algorithms for people.
_WORDS = {"ll": "LL", "ll128": "LL128", "simple": "Simple", "nvls": "NVLS", "pat": "PAT"}


def what_changed(s: RunSummary) -> list[str]:
    """What the current table changes, one line per change: ``all-gather 33-64 MiB: Simple, 16 channels -> LL128, 8
    channels``. Empty if NCCL's default is used."""
    if not s.kept:
        return []
    places: dict[str, dict[str, list[str]]] = {}  # change -> function -> sizes
    for row in sorted(s.decisions, key=lambda row: int(row["max_bytes"])):
        new = decided(row)
        own = str(row.get("own") or "")
        if new == "auto" or new == own:
            continue
        funcs = places.setdefault(_arrow(own, new), {})
        sizes = format_range(int(row.get("min_bytes") or 0), int(row["max_bytes"]))
        funcs.setdefault(row["func"].replace("_", "-"), []).append(sizes)
    return [f"{_place(funcs)}: {change}" for change, funcs in places.items()]


def _arrow(own: str, new: str) -> str:
    """Two settings as ``Simple, 16 channels -> LL128, 8 channels``; an algorithm that both share is left out."""
    old_parts, new_parts = own.split("/"), new.split("/")
    is_same = old_parts[0] == new_parts[0]
    sides = [_setting(parts[is_same:]) for parts in (old_parts, new_parts)]
    return " -> ".join(sides) if own else sides[1]


def _setting(parts: Sequence[str]) -> str:
    words = [f"{part} channels" if part.isdigit() else _WORDS.get(part, part) for part in parts]
    return ", ".join(words)


def _place(funcs: Mapping[str, Sequence[str]]) -> str:
    """Functions and sizes; functions with equal sizes together."""
    by_sizes: dict[str, list[str]] = {}
    for func, sizes in sorted(funcs.items()):
        by_sizes.setdefault(ranges_text(sizes), []).append(func)
    return "; ".join(f"{', '.join(names)} {sizes}" for sizes, names in by_sizes.items())


def rows_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table in short, equal settings together: ``ring/ll128/8: all_gather, reduce_scatter 33-64, 129-256 MiB``."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: int(row["max_bytes"])):
        if decided(row) != "auto":
            text = format_range(int(row.get("min_bytes") or 0), int(row["max_bytes"]))
            sizes.setdefault((decided(row), row["func"]), []).append(text)
    funcs: dict[tuple[str, str], list[str]] = {}  # by decision and sizes
    for (decision, func), those in sorted(sizes.items()):
        funcs.setdefault((decision, ranges_text(those)), []).append(func)
    calls: dict[str, list[str]] = {}
    for (decision, ranges), those in funcs.items():
        calls.setdefault(decision, []).append(f"{', '.join(those)} {ranges}")
    return " | ".join(f"{decision}: {'; '.join(those)}" for decision, those in calls.items()) or OWN


def ranges_text(ranges: Sequence[str]) -> str:
    """``5-8, 33-64 MiB``: neighbours with the same unit name it once."""
    units = [text.split()[-1] for text in ranges]
    texts = []
    for text, unit, next_unit in zip(ranges, units, [*units[1:], ""], strict=True):
        texts.append(text.split()[0] if unit == next_unit else text)
    return ", ".join(texts)
