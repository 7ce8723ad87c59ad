"""``dynamiccl import``: recordings of other tools as traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import fail


def import_(
    source: Annotated[str, typer.Argument(metavar="FORMAT", help="kineto, flight-recorder, inspector or nccl-tests.")],
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE... OUT", help="The recordings (one a rank), then the folder to make.")
    ],
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks on a node, where the recording does not tell.")
    ] = None,
) -> None:
    """Make an ordinary trace from recordings of other tools.

    \b
    kineto            PyTorch profiler traces: one .json or .json.gz a rank
    flight-recorder   PyTorch Flight Recorder dumps: one pickle or JSON file a rank
    inspector         NCCL Inspector logs: JSON lines
    nccl-tests        results of nccl-tests: the JSON of -J, what it printed, or CSV
    """
    from ...traces.files import TraceError
    from ...traces.importers import import_files

    if len(paths) < 2:
        fail("give the files to import and then the folder to make, e.g. kineto rank0.json rank1.json trace")
    if ranks_per_node is not None and ranks_per_node < 1:
        fail(f"--ranks-per-node is at least 1, not {ranks_per_node}")
    try:
        result = import_files(source, paths[:-1], paths[-1], ranks_per_node)
    except TraceError as error:
        fail(str(error))
    typer.echo(f"{result.n_events} collectives ({result.n_timed} with times), {result.n_steps} steps: {result.folder}")
    for note in result.notes:
        typer.echo(f"note: {note}")
