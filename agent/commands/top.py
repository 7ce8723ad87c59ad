"""``dynamiccl top``: list all runs of a machine or folder."""

from __future__ import annotations

import contextlib
import json as json_module
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import JSON, PATH, Number, argument, command, fail, option, refusing, results

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


#: Letters of a run's sparkline.
SPARKS = 16
#: State of the ranks' agreement, for people.
_AGREE = {"OPEN": "yes", "WAITING": "not yet", "LOSING": "not all", "SHUT": "no", "CLOSED": "no more"}


@command
@argument("runs", type=PATH, nargs=-1, metavar="RUN...", help="Runs, or folders of runs. Default: runs/tune.")
@option("--once", is_flag=True, help="Print once and end. Always so on a pipe.")
@JSON
@option("--every", type=Number(0.2), default=2.0, help="Seconds between updates.")
@option("--metrics", type=PATH, help="Also write a textfile for node_exporter (NAME.prom).")
def top(runs: Sequence[Path], once: bool, json: bool, every: float, metrics: Path | None) -> None:
    """List runs with their step, phase, current table, gain, cost of the search, agreement and lost records.

    It looks in each folder and two levels below it. "over the run" draws the step times from 0. state: tuning; waiting
    (nothing measured yet, or rank 0 is elsewhere); ended; no tuner.

    \b
    dynamiccl top
    dynamiccl top runs/tune --once --metrics /var/lib/node_exporter/dynamiccl.prom
    """
    from rich.live import Live

    from ...traces.outside import TraceError
    from ..report.outputs import ROOT
    from ..report.runs import find_runs, state, write_metrics
    from ..report.terminal import wide_terminal

    def look() -> list[dict[str, Any]]:
        found = [state(path) for path in find_runs(map(results, runs or ()))]
        if metrics is not None:
            with refusing(TraceError):
                write_metrics(metrics, found)
        return found

    found = look()
    if json:
        print(json_module.dumps(found, indent=1))
        return
    if not found and metrics is not None:
        return  # a node before its first run: the file is written, and an alert for old metrics stays silent
    if not found:
        places = ", ".join(map(str, runs or [ROOT]))
        fail(f"no run in {places}: give a folder of runs, or start a run with dynamiccl tune")
    console = wide_terminal()
    if once or not console.is_terminal:
        console.print(table(found, console))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True) as live:
        while True:
            live.update(table(found, console), refresh=True)
            time.sleep(every)
            found = look()


#: Columns of the table, and those that are left out first where a terminal has no room for all.
HEADS = (
    *("run", "state", "step", "phase", "step time", "over the run", "current table"),
    *("shorter", "cost", "ranks agree", "lost records"),
)
LEFT_OUT = ("lost records", "ranks agree", "over the run", "cost", "phase", "shorter", "state")
_NUMBERS = ("step", "step time", "lost records")


def table(found: list[dict[str, Any]], console: Console) -> Table:
    """Returns a table with one row per run; see ``runs.state``. ``console``: where it is to be shown."""
    rows = [dict(zip(HEADS, _row(one), strict=True)) for one in found]
    heads = list(HEADS)
    made = _grid(heads, rows)
    for head in LEFT_OUT:
        if made.__rich_measure__(console, console.options).maximum <= console.width:
            break
        heads.remove(head)
        made = _grid(heads, rows)
    return made


def _grid(heads: list[str], rows: list[dict[str, Any]]) -> Table:
    from rich import box

    from ..report.terminal import grid

    cells = [[row[head] for head in heads] for row in rows]
    return grid(heads, cells, _NUMBERS, no_wrap=True, box=box.SIMPLE)


def _name(out: Path) -> str:
    """The short name of a run: with its job's folder where a scheduler started several tasks."""
    return f"{out.parent.name}/{out.name}" if out.name.startswith("task-") else out.name


def _row(r: dict[str, Any]) -> list[Any]:
    from ..report.terminal import sparkline
    from ..report.verdict import PHASES, ms, seconds, side

    cost = None
    if r["cost_s"] is not None and r["budget_s"] is not None:
        cost = f"{seconds(max(r['cost_s'], 0))} of {seconds(r['budget_s'])}"
    gain = None
    if r["gain"] is not None:
        gain = f"{100 * r['gain']:.1f} % ({100 * r['gain_ci95'][0]:.1f} to {100 * r['gain_ci95'][1]:.1f})"
    in_force = f"{r['in_force'] or 'a table'}, {r['decisions']} rows" if r["kept"] else side(r["in_force"])
    return [
        f"{_name(Path(r['run']))}{' (emulated)' if r['emulated'] else ''}",
        r["state"],
        r["step"],
        PHASES.get(r["phase"], r["phase"]),
        None if r["step_ms"] is None else ms(r["step_ms"]),
        sparkline(r["step_times_ms"], SPARKS),
        in_force if r["phase"] or r["kept"] is not None else None,
        gain,
        cost,
        _AGREE.get(r["agreement"], r["agreement"]),
        r["records_lost"],
    ]
