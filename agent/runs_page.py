"""A page of several runs beside each other, from what they left in their folders."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from .page import config, interval_chart, page, section, table

#: Intervals that are drawn, at most; the table has all runs.
_DRAWN = 40


def write_runs_page(path: Path, states: list[dict[str, Any]]) -> None:
    """Write the page of ``runs.state`` of each run, at once. Raises OSError."""
    body = "<header><h1>dynamiccl: runs beside each other</h1></header>"
    if any(s["emulated"] for s in states):
        body += '<p><span class="badge">emulated clusters among them: those are not GPU times</span></p>'
    drawn = []
    for s in states:
        if s["gain"] is not None and s["gain_ci95"]:
            low, high = (1 / (1 - x) for x in s["gain_ci95"])
            drawn.append((Path(s["run"]).name, 1 / (1 - s["gain"]), [low, high], "--tuned"))
    lead = "Default step time / tuned step time of each run's own comparison, with its 95 % interval."
    chart = f'<div class="card">{interval_chart(drawn[:_DRAWN])}</div>' if drawn else '<p class="quiet">None yet.</p>'
    body += section("Speed-up", lead, chart)
    columns = [("run", False), ("state", False), ("step", True), ("step time", True), ("table", False)]
    columns += [("gain", True), ("search cost", True), ("lost records", True), ("why it ended", False)]
    rows = []
    for s in states:
        kept = {True: config(f"kept, {s['decisions']} rows", on=True), False: "NCCL decides", None: "-"}[s["kept"]]
        name = f'<code title="{escape(s["run"])}">{escape(Path(s["run"]).name)}</code>'
        name += " (emulated)" if s["emulated"] else ""
        cells = [name, escape(s["state"]), _text(s["step"], "{:,}"), _text(s["step_ms"], "{:.1f} ms"), kept]
        cells += [_text(s["gain"], "{:.1%}"), _text(s["search_cost"], "{:.1%}"), _text(s["records_lost"], "{:,}")]
        rows.append([*cells, escape(str(s["why"] or ""))])
    body += section("All runs", "The newest last.", table(columns, rows, "All runs"))
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(page("dynamiccl: runs", body, {}, ""), encoding="utf-8")
    os.replace(draft, path)


def _text(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
