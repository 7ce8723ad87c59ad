"""``dynamiccl import``: recordings of other tools as traces."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import ClusterName, Nccl, RanksPerNode, fail, refusing


def import_(
    source: Annotated[str, typer.Argument(metavar="FORMAT", help="One of the formats below, or auto.")],
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE... OUT", help="The recordings (one a rank) or their folder, then the trace to make."
        ),
    ],
    cluster: ClusterName = None,
    nccl: Nccl = None,
    ranks_per_node: RanksPerNode = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was imported as JSON.")] = False,
) -> None:
    """Make an ordinary trace from recordings of other tools. With --cluster it can be replayed too.

    \b
    kineto            PyTorch profiler traces: one .json or .json.gz a rank
    flight-recorder   PyTorch Flight Recorder dumps: one pickle or JSON file a rank
    inspector         NCCL Inspector logs: JSON lines
    nccl-tests        results of nccl-tests: the JSON of -J, what it printed, or CSV
    nccl-log          NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL,TUNING: one file or one a process
    nsys              Nsight Systems: nsys export --type sqlite
    chakra            Chakra execution traces: one .et a rank

    Files may be large: they are read in blocks. The ranks' clocks are aligned by the collectives that they share; what
    a format cannot tell is said.

    \b
    dynamiccl import kineto profiles/ runs/imported --cluster dgx-h100-2x8
    dynamiccl bench --suite replay --trace runs/imported
    """
    from ...traces.files import TraceError
    from ...traces.importers import read_recording, write_recording
    from ..recordings import read

    if len(paths) < 2:
        fail("give the files to import and then the folder to make, e.g. kineto rank0.json rank1.json trace")
    form = None if source == "auto" else source
    with refusing(TraceError, ValueError):
        if cluster:
            trace = read(paths[:-1], cluster, nccl, form, ranks_per_node)
        else:
            trace = read_recording(paths[:-1], form, ranks_per_node)
        result = write_recording(trace, paths[-1])
    if json:
        typer.echo(json_module.dumps({**asdict(result), "folder": str(result.folder)}))
        return
    typer.echo(f"{result.n_events} collectives ({result.n_timed} with times), {result.n_steps} steps: {result.folder}")
    for note in result.notes:
        typer.echo(f"note: {note}")
