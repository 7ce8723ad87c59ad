"""``dynamiccl model``: what NCCL would do on a cluster, from its own cost model."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from . import fail

#: NCCL's name of each collective, as in its logs.
_NAMES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}


def model(
    cluster: Annotated[str, typer.Option(help="Cluster preset, its kind, or a .toml file.")] = "dgx-h100-1x8",
    nodes: Annotated[int | None, typer.Option(help="Number of nodes, where it is not the preset's.")] = None,
    nccl: Annotated[str | None, typer.Option(help="NCCL release, for example 2.28.9.")] = None,
    func: Annotated[str | None, typer.Option(help="Only all_gather or only reduce_scatter.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print NCCL's prices, choice and channels for 1 KiB to 4 GiB: its own model, not a measurement."""
    from ...envs.sim import clusters

    if func is not None and func not in _NAMES:
        fail(f"unknown collective {func!r}: give all_gather or reduce_scatter")
    if csv and json_:
        fail("give --csv or --json, not both")
    if nodes is not None and nodes < 1:
        fail(f"--nodes must be at least 1, not {nodes}")
    try:
        preset = clusters.resize(clusters.find(cluster, nodes), nodes, nccl)
    except ValueError as error:
        fail(str(error))
    rows = [row for name in _NAMES if func in (None, name) for row in _rows(preset, name)]
    if json_:
        json.dump(rows, sys.stdout, indent=1)
        print()
    elif csv:
        import csv as csv_module

        writer = csv_module.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        _show(preset.name, preset.nccl, rows)


def _rows(preset: Any, func: str) -> list[dict[str, Any]]:
    """One row a message size, with the columns of the plans in tests/data."""
    from ...envs.sim import cost_model
    from ...traces.records import PAIRS, pair_costs

    offered = [i for i, cost in enumerate(pair_costs(cost_model.cost_table(preset, func, 1024))) if cost >= 0]
    rows = []
    for exponent in range(10, 33):
        n_bytes = 2**exponent
        costs = pair_costs(cost_model.cost_table(preset, func, n_bytes))
        algo, proto = cost_model.choice(preset, func, n_bytes)
        n_channels, n_warps = cost_model.channels(preset, func, n_bytes, algo, proto)
        row: dict[str, Any] = {
            "nccl": preset.nccl,
            "nNodes": preset.n_nodes,
            "nRanks": preset.n_ranks,
            "coll": _NAMES[func],
            "nBytes": n_bytes,
            "algo": algo.upper(),
            "proto": proto.upper(),
            "nChannels": n_channels,
            "nWarps": n_warps,
        }
        row |= {"us_" + "_".join(PAIRS[i]).upper(): float(f"{costs[i]:.9g}") for i in offered}
        rows.append(row)
    return rows


def _show(name: str, nccl: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ...traces.records import format_bytes

    prices = [key for key in rows[0] if key.startswith("us_")]
    table = Table(title=f"NCCL {nccl}'s own view of {name} (predicted us)")
    for head in ("collective", "bytes", "choice", "channels", "warps"):
        table.add_column(head, justify="left" if head in ("collective", "choice") else "right")
    for key in prices:
        table.add_column(key[3:].lower().replace("_", "/"), justify="right")
    for row in rows:
        chosen = f"{row['algo']}/{row['proto']}".lower()
        cells = [row["coll"], format_bytes(row["nBytes"]), chosen, str(row["nChannels"]), str(row["nWarps"])]
        table.add_row(*cells, *(f"{row[key]:,.1f}" for key in prices))
    Console().print(table)
