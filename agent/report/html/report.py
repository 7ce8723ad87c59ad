"""The report of a run: one self-contained HTML file that opens from the file system and asks no network."""

from __future__ import annotations

import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from ....traces.files import Trace, TraceError
from ....traces.here import pip_install
from ....traces.outside import write_whole
from ....traces.queries.costs import generations, slot_costs
from ....traces.queries.lives import last_life
from .. import slow_rank
from ..losses import Losses, loss_lines, read_losses
from ..summary import RunSummary
from ..texts import (
    COSTS,
    COSTS_NOTE,
    NUMBERS,
    consistency_text,
    cost_rows,
    emulation_text,
    policy_text,
    result_lines,
)
from ..verdict import seconds, what_changed
from ..why import chains, lines
from . import run_plot
from .course import Course, course_of, in_words
from .figures import timeline_figure
from .page import facts, legend, page, section, table
from .points import write_sparks

#: What the header of a trace tells as well, of a run that left no summary.
_IN_HEADER = ("cluster", "emulated", "bytes_scale", "compute_scale", "stage", "n_processes", "policy")

_COURSE = (
    "Each step of the lowest rank that recorded about as many as any. The background shows the current table, a dashed "
    "line a switch to another one, a solid line a verdict. Orange: steps on trial under another table, their times and "
    "where they are."
)
_LOSS = (
    "A table changes the time of a collective, and at most the order of its sums: the loss stays what it was."
)
_NO_PLOT = f"The plot needs matplotlib: {pip_install('plot')}. In words:"
_TIMELINE = (
    "Every bar is one collective from its kernel's start to its end, on the ranks that were recorded. Each step is the "
    "one nearest the median of its kind; the dashed line is its end. AG: all_gather, and so on."
)


def write_report(path: Path | str, summary: RunSummary, trace: Trace) -> Path:
    """Write the report of a run, at once, and return its path.

    What the summary lacks (of a job that ended early), the report says it lacks. Raises TraceError if the file cannot
    be written. For ``dynamiccl top`` it leaves the step times in short beside the report.
    """
    lacking: dict[str, Any] = {k: trace.header.get(k) for k in _IN_HEADER if getattr(summary, k) is None}
    s = replace(summary, **lacking)
    place = str(s.cluster or trace.header.get("host") or "a run")
    which = generations(trace, s.decisions or None)
    costs = slot_costs(trace.events, which.default, which.tuned)
    course = course_of(trace)
    parts = [
        _masthead(s, trace, place),
        _headline(s, trace),
        _missing(s, replace(trace, warnings=last_life(trace).warnings), costs),
        _course(course, read_losses(trace)),
        _figure("Timeline of a step", _TIMELINE, timeline_figure(trace, which, s)),
        _why(s, trace),
        _costs(costs, s, bool(which.tuned)),
        _settings(s, trace),
    ]
    html = page(f"dynamiccl: {place}", "\n".join(parts))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, html)
    write_sparks(path.parent, course)
    return path


def _masthead(s: RunSummary, trace: Trace, place: str) -> str:
    words = [place, s.stage is not None and f"ZeRO stage {s.stage}", s.n_ranks and f"{s.n_ranks} ranks"]
    words.append(str(trace.header.get("date", ""))[:10])
    badge = f'<p class="badge">{escape(emulation_text(vars(s)))}</p>' if s.emulated else ""
    line = " · ".join(str(word) for word in words if word)
    return f'<header><h1>dynamiccl</h1><span class="quiet">{escape(line)}</span></header>{badge}'


def _headline(s: RunSummary, trace: Trace) -> str:
    verdict, *rest = result_lines(s)
    big = what_changed(s) or [verdict]
    notes = [*rest, consistency_text(s.consistency), slow_rank.find(trace) or ""]
    lines = [escape(line).replace("-&gt;", "&rarr;") for line in big]  # an arrow of two letters may be broken
    said = "".join(f'<div class="big">{line}</div>' for line in lines)
    said += f'<div class="verdict">{escape(verdict)}</div>' if verdict not in big else ""
    said += "".join(f'<div class="note">{escape(line)}</div>' for line in filter(None, notes))
    return f'<div class="card">{said}</div>'


def _course(course: Course, losses: Losses | None) -> str:
    """The plot of the whole run; in words where matplotlib is not installed."""
    if not course.steps.size:
        return ""
    heading, lead = "Step time over the run", [_COURSE, run_plot.beyond(course)]
    if losses:
        heading = "Step time and loss over the run"
        lead += [_LOSS, f"Here: {'; '.join(loss_lines(losses))}."]
    try:
        plots = run_plot.run_plots(course, losses)
    except ImportError:
        items = "".join(f"<li>{escape(text)}</li>" for text in in_words(course))
        told = " ".join([_NO_PLOT, *lead[2:]])
        return section(heading, told, f'<div class="card"><ul>{items}</ul></div>')
    colours = {name: f"var(--{colour})" for name, colour in run_plot.legend(course, losses).items()}
    drawn = f'{legend(colours)}<div class="plot run">{"".join(plots.values())}</div>'
    return section(heading, " ".join(part for part in lead if part), drawn)


def _missing(s: RunSummary, trace: Trace, costs: pd.DataFrame) -> str:
    """What this report lacks, and why; empty when it lacks nothing."""
    lacks = list(trace.warnings)
    if not s.is_decided:
        lacks.append("the search did not come to its verdict, hence no speed-up and no times of a step")
    if trace.windows.empty:
        lacks.append("no measuring window was finished")
    if trace.events.empty:
        lacks.append("no collective was seen")
    elif costs.empty or not costs["n_default"].any():
        lacks.append("no kernel time was sampled: there are no costs and no timeline")
    if s.records_lost:
        lacks.append(f"{s.records_lost} records were lost: the rings were not read fast enough")
    items = "".join(f"<li>{escape(text)}</li>" for text in lacks)
    return f'<div class="missing">What this report lacks:<ul>{items}</ul></div>' if lacks else ""


def _why(s: RunSummary, trace: Trace) -> str:
    """The chain behind each decision, as `dynamiccl show` tells it."""
    try:
        found = [lines(chain, s) for chain in chains(trace, s)]
    except TraceError:  # no steps, no slot: said above
        return ""
    told = "".join(
        f"<details><summary>{escape(first)}</summary><pre>{escape(chr(10).join(rest))}</pre></details>"
        for first, *rest in found
    )
    lead = "What NCCL chose and its prices, what was tried, and what comparisons of this row alone came to."
    return section("Why", lead, f'<div class="card">{told}</div>') if told else ""


def _costs(costs: pd.DataFrame, s: RunSummary, is_tuned: bool) -> str:
    if costs.empty:
        return ""
    lead = COSTS_NOTE + "."
    if s.emulated:
        lead += " Emulated times."
    if not is_tuned:
        lead += " No table was used long enough to compare."
    heading = "What each collective costs"
    return section(heading, lead, table(heading, COSTS, cost_rows(costs.to_dict("records")), NUMBERS))


def _figure(heading: str, lead: str, drawn: str) -> str:
    return section(heading, lead, drawn) if drawn else ""


def _settings(s: RunSummary, trace: Trace) -> str:
    h = trace.header
    run = {name: h.get(name) for name in ("command", "job", "seed")}
    run |= {"policy": s.policy and policy_text(s.policy), "ended": s.ended, "cluster": s.cluster}
    run |= {"steps": s.steps, "windows to the verdict": s.windows}
    if s.cost_s is not None:
        allowed = f" of {seconds(s.budget_s)} allowed" if s.budget_s else ""
        run["cost of the search"] = f"{seconds(max(s.cost_s, 0))}{allowed}"
    run |= {"bytes scale": s.bytes_scale, "compute scale": s.compute_scale, "ZeRO stage": s.stage}
    run |= {"processes": s.n_processes, "ranks": s.n_ranks, "trace": s.trace or trace.folder}
    machine = {name: h.get(name) for name in ("host", "kernel", "date", "commit")}
    versions = h.get("versions")
    machine |= {"NCCL": h.get("nccl"), **(versions if isinstance(versions, dict) else {})}
    machine["trace format"] = h.get("format")
    if s.loss_first is not None and s.loss_last is not None:
        run["loss, first and last step"] = f"{s.loss_first:.3f}, {s.loss_last:.3f}"
    cards = "".join(f'<div class="card">{facts(pairs)}</div>' for pairs in (run, machine))
    return section("Settings and versions", "", f'<div class="two">{cards}</div>')


if __name__ == "__main__":  # for the daemon: python -m ... FOLDER MOST_EVENTS
    _out = Path(sys.argv[1])
    _trace = Trace.read(_out / "trace", most_events=int(sys.argv[2]))
    write_report(_out / "report.html", RunSummary.of_trace(_trace), _trace)
