"""``dynamiccl demo``: see a job being tuned, on any machine."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path

import click

from ...traces.here import pip_install, program
from . import JSON, OUTPUT, PATH, command, fail, option

#: What the demo's job is made of, and the extra that brings it.
_NEEDS, _EXTRA = ("torch", "pandas", "rich"), "train,plot"


@command
@option("--steps", type=click.IntRange(100), default=600, help="Optimizer steps of the job.")
@option(
    "--out",
    type=PATH,
    default=Path("runs/demo"),
    group=OUTPUT,
    help="Folder; old results in it are replaced.",
)
@option("--quiet", is_flag=True, group=OUTPUT, help="Print only the verdict.")
@JSON
def demo(steps: int, out: Path, quiet: bool, json: bool) -> None:
    """Train the built-in ZeRO-3 job and tune it while it trains. Takes about a minute; needs no GPU and no checkout.

    Without two GPUs the job runs on an emulated cluster: a model gives the times of its collectives, on 2 nodes with 8
    H100 each, under heavy congestion. These are not GPU times.

    \b
    dynamiccl demo
    dynamiccl show runs/demo
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"the demo trains a job, which needs {missing[0]}: {pip_install(_EXTRA)}")
    words = ["tune", "--out", str(out), "--no-memory", "--steps", str(steps)]
    words += ["--quiet"] if quiet else []
    words += ["--json"] if json else []
    print(f"dynamiccl {shlex.join(words)}", file=sys.stderr, flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two ranks share the processors
    os.execv(sys.executable, [*program(), *words])
