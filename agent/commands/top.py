"""``dynamiccl top``: all runs of a machine or folder at a glance."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from . import fail


def top(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN...]", help="Runs, or folders of runs. Default: runs/tune.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end, as on a pipe.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON once and end.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
    metrics: Annotated[
        Path | None,
        typer.Option(help="Also write a file for node_exporter's textfile collector (NAME.prom).", show_default=False),
    ] = None,
) -> None:
    """How runs stand: job, step, phase, table, gain, the search's cost, agreement, lost records, heartbeat.

    Read from the folders that runs leave: the jobs notice nothing.

    \b
    dynamiccl top
    dynamiccl top runs/tune --once --metrics /var/lib/node_exporter/dynamiccl.prom
    """
    from rich.live import Live

    from ..outputs import ROOT
    from ..runs import find_runs, state
    from ..terminal import wide_terminal

    def look() -> list[dict[str, Any]]:
        found = [state(path) for path in find_runs(runs or ())]
        if metrics is not None:
            try:
                from ..metrics import write_metrics

                write_metrics(metrics, found)
            except ImportError:
                fail("--metrics needs prometheus-client: pip install 'dynamiccl[metrics]'")
            except OSError as error:
                fail(f"cannot write {metrics}: {error.strerror}")
        return found

    found = look()
    if json:
        typer.echo(json_module.dumps(found, indent=1))
        return
    if not found:
        places = ", ".join(map(str, runs or [ROOT]))
        fail(f"no run in {places}: name a folder of runs, or start one with dynamiccl tune")
    console = wide_terminal()
    if once or not console.is_terminal:
        console.print(grid(found))
        return
    try:
        with Live(grid(found), console=console, screen=True) as live:
            while True:
                time.sleep(every)
                live.update(grid(look()))
    except KeyboardInterrupt:
        pass


def grid(found: list[dict[str, Any]]) -> Any:
    """Runs as a table, a row a run; see ``runs.state``."""
    from rich import box
    from rich.table import Table

    grid = Table(box=box.SIMPLE)
    heads = ("run", "state", "step", "phase", "step time", "table", "gain", "search cost", "agreement", "lost", "beat")
    for head in heads:
        grid.add_column(head, no_wrap=True, justify="right" if head in ("step", "step time", "lost") else "left")
    for r in found:
        phase = f"{r['phase']} {r['window']}/{r['windows']}" if r["phase"] else ""
        table = {True: f"kept, {r['decisions']} rows", False: "NCCL decides", None: ""}[r["kept"]]
        beat = "" if r["heartbeat_s"] is None or r["state"] != "tuning" else f"{r['heartbeat_s']:.0f} s ago"
        grid.add_row(
            f"{Path(r['run']).name}{' (emulated)' if r['emulated'] else ''}",
            r["state"],
            "" if r["step"] is None else str(r["step"]),
            phase,
            "" if r["step_ms"] is None else f"{r['step_ms']:.1f} ms",
            table,
            _gain(r),
            "" if r["search_cost"] is None else f"{r['search_cost']:.1%}",
            r["agreement"] or "",
            "" if r["records_lost"] is None else str(r["records_lost"]),
            beat,
        )
    return grid


def _gain(r: dict[str, Any]) -> str:
    if r["gain"] is None or r["kept"] is False:  # a table that was not kept brings nothing
        return ""
    low, high = r["gain_ci95"] or (None, None)
    return f"{r['gain']:.1%}" + (f" [{low:.1%}, {high:.1%}]" if low is not None else "")
