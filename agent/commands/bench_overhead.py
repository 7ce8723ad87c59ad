"""``dynamiccl bench overhead``: what being watched costs a job."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from . import refusing

#: A step of our own job, of which the processor has some 100 ms to do.
_LARGER = ("--layers", "4", "--width", "192", "--heads", "6", "--seq", "128", "--batch", "4")


def bench_overhead(
    pairs: Annotated[int, typer.Option(min=3, help="Pairs of jobs, one with the probe and one without.")] = 10,
    steps: Annotated[int, typer.Option(min=10, help="Steps of each job; the first five do not count.")] = 40,
    cluster: Annotated[str, typer.Option(help="Emulated cluster that the jobs run on.")] = "dgx-h100-2x8",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Step time with probe and plugin, tuning idle, against the same job without: jobs in turn, medians, interval.

    Both jobs run our ZeRO-3 workload on the emulated cluster, where nothing but the two CPU cores is shared. The
    order within a pair alternates.
    """
    from ...envs.sim.clusters import cluster as preset
    from ...envs.sim.emulated import Emulated
    from ..overhead import measure
    from ..request import workload
    from ..terminal import terminal

    with refusing(OSError, ValueError, RuntimeError):
        preset(cluster)
        console = terminal(stderr=True, quiet=json)
        emulated = Emulated(cluster)
        result = measure(
            pairs,
            lambda log: workload(3, steps, 2, log, backend="emulated", extra=["--quiet", *_LARGER]),
            emulated.env(),
            lambda text: console.print(text, highlight=False),
        )
    percent = [100 * (x - 1) for x in (result.speedup, result.low, result.high)]
    if json:
        print(json_module.dumps({"overhead_percent": percent[0], "ci95": percent[1:], "pairs": result.n_pairs}))
    else:
        print(f"overhead {percent[0]:+.2f} % [{percent[1]:+.2f}, {percent[2]:+.2f}] of a step, {result.n_pairs} pairs")
