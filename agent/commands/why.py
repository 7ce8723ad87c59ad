"""``dynamiccl why``: the chain behind each row of a run's table."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

from . import Argument, Json, fail, refusing


def why(
    run: Annotated[Path, Argument(help="A trace folder, or the folder of a run.")],
    slot: Annotated[str, Argument(help="Only slots whose name contains this, e.g. all_gather or '<=256 MiB'.")] = "",
    json: Json = False,
) -> None:
    """Why each decision was made: NCCL's prices, what was tried, and what the run's comparisons came to.

    \b
    dynamiccl why runs/tune/latest
    dynamiccl why runs/tune/latest reduce_scatter
    """
    from ...traces.files import Trace, TraceError
    from ..report.summary import RunSummary
    from ..report.why import chains, lines

    with refusing(TraceError):
        trace = Trace.read(run)
        summary = RunSummary.read(trace.folder, trace.folder.parent)
        found = chains(trace, summary, slot)
    if not found:
        fail(f"no slot of {run} is called {slot!r}: `dynamiccl show {run}` lists them")
    if json:
        print(json_module.dumps(found, indent=1, allow_nan=False))
        return
    for chain in found:
        for line in lines(chain, summary):
            print(line)
