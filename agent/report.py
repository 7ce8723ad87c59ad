"""The report of a run: one self-contained HTML file that opens from the file system and asks no network."""

from __future__ import annotations

import json
import os
import sys
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from ..traces.audit import audit
from ..traces.costs import Generations, decision_text, generations, size_text, slot_costs
from ..traces.files import Trace, TraceError
from ..traces.reasons import RunEnds
from .page import config, facts, interval_chart, page, plot, section, table
from .report_figures import slot_colours, timeline_figure, windows_figure
from .why import chains, lines

_HEADLINE = ("default_step_ms", "tuned_step_ms", "speedup", "speedup_ci95", "aa_speedup_ci95")


#: Seconds after which the page of a run that goes on loads itself anew.
RELOAD_S = 30


def write_report(path: Path | str, summary: dict[str, Any], trace: Trace, running: bool = False) -> Path:
    """Write the report of a run, at once, and return its path; one of a run that is ``running`` reloads itself.

    ``summary`` is what ``summary.json`` holds; any key may be missing or None (a job that ended early): the report then
    says what it lacks. Raises OSError if the file cannot be written.
    """
    decisions = summary.get("decisions")
    which = generations(trace, decisions or None)
    costs = slot_costs(trace.events, which.default, which.tuned)
    colours = slot_colours(costs["slot"].drop_duplicates().tolist())
    figures = {
        name: figure
        for name, figure in (
            ("windows", windows_figure(trace.windows)),
            ("timeline", timeline_figure(trace, which, colours)),
        )
        if figure
    }
    parts = [
        _masthead(summary, trace),
        _headline(summary),
        _missing(summary, trace, costs),
        _windows(figures),
        _decisions(decisions or [], summary),
        _why(summary, trace),
        _costs(costs, which, colours, summary),
        _timeline(figures, which),
        _consistency(summary, trace),
        _settings(summary, trace),
    ]
    plotly_js = ""
    if figures:
        from plotly.offline import get_plotlyjs

        plotly_js = get_plotlyjs()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(path.name + ".tmp")
    title = f"dynamiccl: {_place(summary, trace)}"
    html = page(title, "\n".join(parts), figures, plotly_js, RELOAD_S if running else 0)
    tmp.write_text(html, encoding="utf-8")
    os.replace(tmp, path)
    return path


def _known(summary: dict[str, Any], trace: Trace, name: str) -> Any:
    """A fact of the run: the summary's word, else the trace header's."""
    value = summary.get(name)
    return trace.header.get(name) if value is None else value


def _place(summary: dict[str, Any], trace: Trace) -> str:
    return str(_known(summary, trace, "cluster") or trace.header.get("host") or "a run")


def _masthead(summary: dict[str, Any], trace: Trace) -> str:
    stage = _known(summary, trace, "stage")
    words = [_place(summary, trace), f"ZeRO stage {stage}" if stage is not None else summary.get("regime")]
    words += [f"{n} ranks" if (n := summary.get("n_ranks")) else None, str(trace.header.get("date", ""))[:10]]
    line = f'<span class="quiet">{escape(" · ".join(str(w) for w in words if w))}</span>'
    badge = ""
    if _known(summary, trace, "emulated"):
        scales = [f"{_known(summary, trace, k) or 1:g}" for k in ("bytes_scale", "compute_scale")]
        text = f"emulated cluster {_place(summary, trace)}, bytes x {scales[0]}, compute x {scales[1]}: not GPU times"
        badge = f'<p style="margin-top:10px"><span class="badge">{escape(text)}</span></p>'
    return f"<header><h1>dynamiccl</h1>{line}</header>{badge}"


def _headline(summary: dict[str, Any]) -> str:
    speedup, interval, same = (summary.get(k) for k in ("speedup", "speedup_ci95", "aa_speedup_ci95"))
    if speedup is None:
        ended = summary.get("ended") or "the run ended before its verdict"
        wide = f'<div class="big">No result</div><p class="note">{escape(str(ended))}</p>'
    else:
        wins = summary.get("kept", interval is None or interval[0] > 1)
        none = RunEnds.NO_GAIN()
        verdict = "The table stays in force." if wins else f"{none[0].upper()}{none[1:]}."
        wide = f'<div class="big">{speedup:.3f} x</div>'
        wide += f'<p class="note">default step time / tuned step time, 95 % intervals. {verdict}</p>'
        rows = [("tuned", float(speedup), interval, "--tuned")] if interval else []
        rows += [("A/A", (same[0] * same[1]) ** 0.5, same, "--default")] if same else []
        if rows:
            wide += interval_chart(rows)
    cards = [f'<div class="card wide"><div class="name">speed-up of a training step</div>{wide}</div>']
    before, after = summary.get("default_step_ms"), summary.get("tuned_step_ms")
    if before and after:
        saved = 100 * (1 - after / before)
        note = f"{saved:.1f} % of the step saved" if saved > 0 else f"{-saved:.1f} % longer"
        cards.append(_card("step, NCCL's own choice", f"{before:.1f} ms", "before the verdict"))
        cards.append(_card("step, tuned", f"{after:.1f} ms", note))
    first, last = summary.get("loss_first"), summary.get("loss_last")
    if first is not None and last is not None:
        cards.append(_card("loss", f"{first:.3f} → {last:.3f}", "first and last step"))
    steps, windows = summary.get("steps"), summary.get("windows")
    if steps:
        cards.append(_card("steps", f"{steps:,}", f"{windows} measuring windows" if windows is not None else ""))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(name: str, value: str, note: str) -> str:
    return (
        f'<div class="card"><div class="name">{escape(name)}</div><div class="big">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )


def _missing(summary: dict[str, Any], trace: Trace, costs: pd.DataFrame) -> str:
    """What this report lacks, and why; empty when it lacks nothing."""
    lacks = list(trace.warnings)
    if any(summary.get(key) is None for key in _HEADLINE):
        lacks.append("the search did not come to its verdict, hence no speed-up and no times of a step")
    if summary.get("loss_first") is None:
        lacks.append("the job reported no loss")
    if trace.windows.empty:
        lacks.append("no measuring window was finished")
    if trace.events.empty:
        lacks.append("no collective was seen")
    elif costs.empty or not costs["n_default"].any():
        lacks.append("no kernel time was sampled: there are no costs and no timeline")
    if lost := summary.get("records_lost"):
        lacks.append(f"{lost} records were lost: the rings were not read fast enough")
    if not lacks:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in lacks)
    return f'<div class="missing">What this report lacks:<ul>{items}</ul></div>'


def _windows(figures: dict[str, Any]) -> str:
    if "windows" not in figures:
        return ""
    lead = (
        "Each point is a window of some steps; the line is NCCL's own choice as measured so far. Filled points ran "
        "under a table, grey rings under NCCL's own choice, crosses were rolled back; point at one to read it."
    )
    return section(
        "Step time over windows", lead, plot("windows", "Step time of each window, and of NCCL's own choice in between")
    )


def _decisions(decisions: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    if not decisions:
        return section("Decisions", "", '<p class="quiet">None was made: NCCL decides everywhere.</p>')
    rows = []
    for d in decisions:
        text = decision_text(d)
        sizes = size_text(d["min_bytes"], d["max_bytes"])
        shown = '<span class="quiet">left to NCCL</span>' if text == "auto" else config(text, on=True)
        rows.append([f"<code>{escape(str(d['func']))}</code>", sizes, shown, escape(str(d.get("reason") or ""))])
    lead = (
        "One per kind of collective and size of message (whole buffers, as NCCL counts). Sizes not listed are NCCL's."
    )
    if summary.get("kept") is False:
        lead += " The table as a whole did not win a comparison and is not in force."
    columns = [("collective", False), ("messages", True), ("decision", False), ("why", False)]
    return section("Decisions", lead, table(columns, rows, "Decisions"))


def _why(summary: dict[str, Any], trace: Trace) -> str:
    """The chain behind each decision, as `dynamiccl why` tells it."""
    try:
        found = [lines(chain) for chain in chains(trace, summary)]
    except TraceError:  # no steps, no slot: said above
        return ""
    told = "".join(
        f"<details><summary>{escape(first)}</summary><pre>{escape(chr(10).join(rest))}</pre></details>"
        for first, *rest in found
    )
    lead = "What NCCL chose and its prices, what was tried and measured, how sure it is, why not the next best."
    return section("Why", lead, f'<div class="card">{told}</div>') if told else ""


def _costs(costs: pd.DataFrame, which: Generations, colours: dict[str, str], summary: dict[str, Any]) -> str:
    if costs.empty:
        return ""
    most = float(costs[["default_us", "tuned_us"]].max().max())
    rows = []
    for c in costs.to_dict("records"):
        key = f'<span class="key" style="background:var({colours[c["slot"]]})"></span>'
        change = ""
        if pd.notna(c["default_us"]) and pd.notna(c["tuned_us"]):
            percent = 100 * (c["tuned_us"] / c["default_us"] - 1)
            change = (
                f'<span class="{"good" if percent < -1 else "bad" if percent > 1 else "quiet"}">{percent:+.0f} %</span>'
            )
        bars = _bar(c["default_us"], c["n_default"], most, "") + _bar(c["tuned_us"], c["n_tuned"], most, " tuned")
        per_step = c["calls"] * c["default_us"] / 1e3
        rows.append(
            [
                f'<span class="slot">{key}<code>{escape(_slot(c["slot"]))}</code></span>',
                f"{c['calls']:.3g}",
                config(c["own"]),
                config(c["ran"], on=c["ran"] not in (None, c["own"])),
                f'<div class="bars">{bars}</div>',
                change,
                f"{per_step:.2f} ms" if pd.notna(per_step) else "-",
            ]
        )
    tuned = "tuned" if summary.get("speedup") is not None else "last table"
    columns = [("slot", False), ("calls a step", True), ("NCCL's own", False), (tuned, False)]
    columns += [("median time of a call", False), ("change", True), ("per default step", True)]
    lead = "Median duration of one call over all ranks and n sampled calls, from the first channel's start to the "
    lead += "last one's end: grey NCCL's own choice, coloured under the table."
    if summary.get("emulated"):
        lead += " Emulated times."
    if not which.tuned:
        lead += " No table was in force long enough to compare."
    return section("What each collective costs", lead, table(columns, rows, "What each collective costs"))


def _slot(text: str) -> str:
    return text.replace("<=", "≤ ")


def _bar(us: float, n: int, most: float, kind: str) -> str:
    if pd.isna(us):
        return ""
    text = f"{us / 1e3:.2f} ms" if most >= 2000 else f"{us:.0f} µs"
    strip = f'<i style="width:{max(1.0, 84 * us / most):.0f}px"></i>'
    return f'<div class="bar{kind}">{strip}{text} <span class="quiet">n {n:,}</span></div>'


def _timeline(figures: dict[str, Any], which: Generations) -> str:
    if "timeline" not in figures:
        return ""
    lead = "Every bar is one collective from its kernel's start to its end, on the ranks that were recorded. "
    if which.tuned:
        lead += "Both steps are the ones nearest the median of their kind; the dotted line is the end of the step."
    else:
        lead += "The step nearest the median; the dotted line is its end."
    return section(
        "Timeline of a step", lead, plot("timeline", "Every collective of a step from its start to its end, by rank")
    )


def _consistency(summary: dict[str, Any], trace: Trace) -> str:
    found = summary.get("consistency")
    if not found:
        check = audit(trace.events)
        found = {"calls_checked": check.calls_checked, "mismatches": check.mismatches}
    calls, bad = int(found["calls_checked"]), int(found["mismatches"])
    if not calls:
        text = '<p class="quiet">No collective was seen by two ranks: nothing could be compared.</p>'
    elif bad:
        text = f'<p class="bad">{bad:,} of {calls:,} collectives ran differently on different ranks.</p>'
    else:
        text = f"<p>{calls:,} collectives were compared call by call: none ran differently on any two ranks.</p>"
    lead = "All ranks must run a collective with the same algorithm, protocol, channels and table, at the same step."
    return section("Rank consistency", lead, text)


def _settings(summary: dict[str, Any], trace: Trace) -> str:
    h = trace.header
    run = [
        ("command", h.get("command")),
        ("job", h.get("job")),
        ("policy", _known(summary, trace, "policy")),
        ("regime recognised", summary.get("regime")),
        ("ended", summary.get("ended")),
        ("cluster", _known(summary, trace, "cluster")),
        ("bytes scale", _known(summary, trace, "bytes_scale")),
        ("compute scale", _known(summary, trace, "compute_scale")),
        ("ZeRO stage", _known(summary, trace, "stage")),
        ("processes", _known(summary, trace, "n_processes")),
        ("ranks", summary.get("n_ranks")),
        ("seed", _known(summary, trace, "seed")),
        ("trace", summary.get("trace") or trace.folder),
    ]
    versions = h.get("versions")
    names = [("NCCL", h.get("nccl")), *(versions.items() if isinstance(versions, dict) else ())]
    machine = [
        ("host", h.get("host")),
        ("kernel", h.get("kernel")),
        ("date", h.get("date")),
        ("commit", h.get("commit")),
    ]
    machine += [*names, ("trace format", h.get("format"))]
    content = f'<div class="two"><div class="card">{facts(run)}</div><div class="card">{facts(machine)}</div></div>'
    return section("Settings and versions", "", content)


if __name__ == "__main__":  # the daemon's page of a run that goes on: python -m ... FOLDER MOST_EVENTS < summary
    _out = Path(sys.argv[1])
    write_report(
        _out / "report.html", json.load(sys.stdin), Trace.read(_out / "trace", most_events=int(sys.argv[2])), True
    )
