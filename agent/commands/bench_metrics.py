"""``dynamiccl bench metrics``: what a scrape every second costs the job."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from . import fail


def bench_metrics(
    pairs: Annotated[int, typer.Option(min=3, help="Pairs of jobs, one that is scraped and one that is not.")] = 10,
    steps: Annotated[int, typer.Option(min=150, help="Steps of each job.")] = 150,
    cluster: Annotated[str, typer.Option(help="Emulated cluster that the jobs run on.")] = "dgx-h100-2x8",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Step time of a job under a tuner whose endpoint is scraped every second, against one without an endpoint.

    Both are our ZeRO-3 job on the emulated cluster under a tuner that tries nothing; jobs in turn, the order within a
    pair alternates. The interval is over the pairs.
    """
    from ...envs.sim.clusters import cluster as preset
    from ..overhead import measure_scrapes
    from ..terminal import terminal

    try:
        preset(cluster)
        console = terminal(stderr=True, quiet=json)
        result, scrapes = measure_scrapes(pairs, steps, cluster, lambda text: console.print(text, highlight=False))
    except ImportError:
        fail("the endpoint needs prometheus-client: pip install 'dynamiccl[metrics]'")
    except (OSError, ValueError, RuntimeError) as error:
        fail(str(error))
    percent = [100 * (x - 1) for x in (result.speedup, result.low, result.high)]
    if json:
        told = {"overhead_percent": percent[0], "ci95": percent[1:], "pairs": result.n_pairs, "scrapes": scrapes}
        print(json_module.dumps(told))
    else:
        said = f"a scrape every second costs {percent[0]:+.2f} % [{percent[1]:+.2f}, {percent[2]:+.2f}] of a step"
        print(f"{said}, {result.n_pairs} pairs, {scrapes} scrapes")
