"""``dynamiccl bench plugin``: what the plugin costs a job, call by call."""

from typing import Annotated

import typer

from . import refusing


def bench_plugin(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time the plugin's calls (C against C, no Python in between) on this machine."""
    import json as json_module

    from ...envs.nccl.build import PluginBuildError
    from ...envs.nccl.timing import time_plugin

    with refusing(PluginBuildError, OSError):
        rows = time_plugin()
    if json:
        print(json_module.dumps({row.name: row.percentiles for row in rows}))
        return
    print(f"{'nanoseconds a call':34} {'median':>8} {'p90':>8} {'p99':>8} {'p99.9':>8}")
    for row in rows:
        p = row.percentiles
        print(f"{row.name:34} {p['p50']:8.1f} {p['p90']:8.1f} {p['p99']:8.1f} {p['p99.9']:8.1f}")
    (itself,) = (row.percentiles["p50"] for row in rows if row.name == "getCollInfo, 64 rows, itself")
    print(f"\na lookup among 64 rows costs {itself:.1f} ns in the median (aim: at most 40)")
