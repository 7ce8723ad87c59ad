"""``dynamiccl compare``: launches of a job beside each other."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from . import fail, refusing


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Runs, traces, or imported recordings.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Set launches beside each other: what a setting made when communicators are created is worth.

    A table cannot change such settings in a running job, so launches are compared: the median step under NCCL's own
    choice, its error, and how far launches with the same settings differ. Give at least two of each kind: without, what
    looks like a setting may be the nodes that a launch got.

    \b
    dynamiccl compare runs/plain-1 runs/plain-2 runs/nvls-1 runs/nvls-2
    """
    from ...traces.files import Trace, TraceError
    from ..launches import launch, side_by_side

    if len(runs) < 2:
        fail("give two runs at least: dynamiccl compare runs/a runs/b")
    with refusing(TraceError):
        found = side_by_side([launch(Trace.read(run)) for run in runs])
    if json:
        typer.echo(json_module.dumps(found, indent=1, allow_nan=False))
        return
    for one in found["launches"]:
        typer.echo(
            f"{one['run']:40} {one['median_ms']:9.2f} ms +- {1.96 * one['error_ms']:.2f}  ({one['steps']} steps)"
        )
    between = found["between_equal_launches"]
    if between is None:
        typer.echo("how far equal launches differ is not known: run one of them twice before you believe a difference")
    else:
        typer.echo(f"equal launches differ by {between:.2%} (one sigma)")
    for row in found["against_the_first"]:
        what = ", ".join(f"{k} {v}" for k, v in row["differs_in"].items()) or "other settings"
        span = f"{row['ratio']:.4f} [{row['low']:.4f}, {row['high']:.4f}]"
        typer.echo(f"{what}: {span} times the first's step ({row['verdict']})")
