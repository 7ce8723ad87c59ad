"""One file per command of ``dynamiccl``: its options and help text; the work lies in the package that owns it."""

import sys
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


def fail(message: str) -> NoReturn:
    """Say in one line what is wrong and how to cure it, and exit with status 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
