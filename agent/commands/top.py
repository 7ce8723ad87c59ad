"""``dynamiccl top``: all runs of a machine or folder at a glance."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from . import Argument, Json, Option, fail

if TYPE_CHECKING:
    from rich.table import Table


def top(
    runs: Annotated[
        list[Path] | None, Argument(metavar="[RUN...]", help="Runs, or folders of runs. Default: runs/tune.")
    ] = None,
    once: Annotated[bool, Option(help="Print once and end, as on a pipe.")] = False,
    json: Json = False,
    every: Annotated[float, Option(min=0.2, help="Seconds between looks.")] = 2.0,
    metrics: Annotated[
        Path | None, Option(help="Also write a file for node_exporter's textfile collector (NAME.prom).")
    ] = None,
) -> None:
    """How runs stand: job, step, phase, table, gain, the search's cost, agreement, lost records.

    Read from the folders that runs leave: the jobs notice nothing.

    \b
    dynamiccl top
    dynamiccl top runs/tune --once --metrics /var/lib/node_exporter/dynamiccl.prom
    """
    from rich.live import Live

    from ..report.outputs import ROOT
    from ..report.runs import find_runs, state
    from ..report.terminal import wide_terminal

    def look() -> list[dict[str, Any]]:
        found = [state(path) for path in find_runs(runs or ())]
        if metrics is not None:
            try:
                from ..report.metrics import write_metrics

                write_metrics(metrics, found)
            except ImportError:
                fail("--metrics needs prometheus-client: pip install 'dynamiccl[metrics]'")
            except OSError as error:
                fail(f"cannot write {metrics}: {error.strerror}")
        return found

    found = look()
    if json:
        print(json_module.dumps(found, indent=1))
        return
    if not found:
        places = ", ".join(map(str, runs or [ROOT]))
        fail(f"no run in {places}: name a folder of runs, or start one with dynamiccl tune")
    console = wide_terminal()
    if once or not console.is_terminal:
        console.print(table(found))
        return
    try:
        with Live(table(found), console=console, screen=True) as live:
            while True:
                time.sleep(every)
                live.update(table(look()))
    except KeyboardInterrupt:
        pass


def table(found: list[dict[str, Any]]) -> Table:
    """Runs as a table, a row a run; see ``runs.state``."""
    from rich import box

    from ..report.terminal import grid

    heads = ("run", "state", "step", "phase", "step time", "table", "gain", "search cost", "agreement", "lost")
    return grid(heads, map(_row, found), ("step", "step time", "lost"), no_wrap=True, box=box.SIMPLE)


def _row(r: dict[str, Any]) -> list[Any]:
    def said(key: str, look: str) -> str | None:
        return None if r[key] is None else format(r[key], look)

    gain = said("gain", ".1%") if r["kept"] is not False else None  # a table that was not kept brings nothing
    if gain and r["gain_ci95"]:
        gain += " [{:.1%}, {:.1%}]".format(*r["gain_ci95"])
    return [
        f"{Path(r['run']).name}{' (emulated)' if r['emulated'] else ''}",
        r["state"],
        r["step"],
        f"{r['phase']} {r['window']}/{r['windows']}" if r["phase"] else None,
        None if r["step_ms"] is None else f"{r['step_ms']:.1f} ms",
        {True: f"kept, {r['decisions']} rows", False: "NCCL decides", None: None}[r["kept"]],
        gain,
        said("search_cost", ".1%"),
        r["agreement"],
        r["records_lost"],
    ]
