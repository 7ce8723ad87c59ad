"""One file per command of ``dynamiccl``: its options and help text; the work lies in the package that owns it."""

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

Headroom = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=64,
        help="Make communicators with at least so many channels (NCCL_MIN_CTAS), or a tuner can only use fewer than "
        "NCCL would. Costs GPU memory for the buffers of each, and NCCL's own choice may use them too.",
        show_default=False,
    ),
]
Recording = Annotated[
    list[Path],
    typer.Argument(
        metavar="RECORDING...",
        help="A trace folder of ours, or another tool's files (one a rank), or their folder; `dynamiccl import --help` "
        "lists the formats.",
        show_default=False,
    ),
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="Where it was recorded, which other tools do not say: a preset of `dynamiccl model`, a .toml file, or "
        "the .log of NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING.",
        show_default=False,
    ),
]
Nccl = Annotated[
    str | None,
    typer.Option(help="NCCL's release, e.g. 2.28.9. Default: the recording's, else the cluster's.", show_default=False),
]
Format = Annotated[str | None, typer.Option("--format", help="The format; else the files tell.", show_default=False)]
RanksPerNode = Annotated[
    int | None,
    typer.Option(help="Ranks on a node. Default: the recording's, else the cluster's.", show_default=False),
]


def fail(message: str) -> NoReturn:
    """Say in one line what is wrong and how to cure it, and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
