"""``dynamiccl lab model``: what NCCL would do on a cluster, from its own cost model."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from . import fail, refusing

#: Columns: ring first, as the one algorithm that is always there (numbers are NCCL's).
_ORDER = (1, 4, 2, 6, 0, 3, 5)
#: NCCL's name of each collective, as in its logs.
_NAMES = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}


def model(
    cluster: Annotated[
        str, typer.Option(help="Cluster preset, its kind, a .toml file or a NCCL .log.")
    ] = "dgx-h100-1x8",
    nodes: Annotated[int | None, typer.Option(help="Number of nodes, where it is not the preset's.")] = None,
    nccl: Annotated[str | None, typer.Option(help="NCCL release, for example 2.28.9.")] = None,
    func: Annotated[str | None, typer.Option(help="Only all_gather, reduce_scatter or all_reduce.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    toml: Annotated[bool, typer.Option("--toml", help="Print the cluster itself, as a file for --cluster.")] = False,
) -> None:
    """Print NCCL's prices, choice and channels for 1 KiB to 4 GiB: its own model, not a measurement."""
    from ...envs.sim import clusters

    if func is not None and func not in _NAMES:
        fail(f"unknown collective {func!r}: give one of {', '.join(_NAMES)}")
    if csv + json_ + toml > 1:
        fail("give one of --csv, --json and --toml")
    if nodes is not None and nodes < 1:
        fail(f"--nodes must be at least 1, not {nodes}")
    with refusing(ValueError):
        preset = clusters.resize(clusters.find(cluster, nodes), nodes, nccl)
    if toml:
        from ...envs.sim.nccl_log import to_toml

        print(to_toml(preset), end="")
        return
    rows = [row for name in _NAMES if func in (None, name) for row in _rows(preset, name)]
    if json_:
        print(json.dumps(rows, indent=1))
    elif csv:
        import csv as csv_module

        columns = list(dict.fromkeys(key for row in rows for key in row))  # all_reduce has more of them
        writer = csv_module.DictWriter(sys.stdout, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        for name in _NAMES.values():
            _show(preset.name, preset.nccl, name, [row for row in rows if row["coll"] == name])


def _rows(preset: Any, func: str) -> list[dict[str, Any]]:
    """One row a message size, with the columns of the plans in tests/data."""
    from ...envs.sim import cost_model
    from ...traces.records import ALGOS, PROTOS

    table = cost_model.cost_table(preset, func, 1024)
    offered = [(a, p) for a in _ORDER for p in range(len(PROTOS)) if table[a, p] >= 0]
    rows = []
    for exponent in range(10, 33):
        n_bytes = 2**exponent
        costs = cost_model.cost_table(preset, func, n_bytes)
        algo, proto = cost_model.choice(preset, func, n_bytes)
        n_channels, n_warps = cost_model.channels(preset, func, n_bytes, algo, proto)
        row: dict[str, Any] = {
            "nccl": preset.nccl,
            "nNodes": preset.n_nodes,
            "nRanks": preset.n_ranks,
            "coll": _NAMES[func],
            "nBytes": n_bytes,
            "host_us": None,  # of planning, which a model does not do; kept for the column's sake
            "algo": algo.upper(),
            "proto": proto.upper(),
            "nChannels": n_channels,
            "nWarps": n_warps,
            "argmin": f"{algo}/{proto}".upper(),
        }
        row |= {
            f"us_{ALGOS[a]}_{PROTOS[p]}".upper().replace("US_", "us_", 1): float(f"{costs[a, p]:.9g}")
            for a, p in offered
        }
        rows.append(row)
    return rows


def _show(cluster: str, nccl: str, func: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    from rich import box
    from rich.table import Table

    from ...traces.records import format_bytes
    from ..terminal import terminal

    prices = [key for key in rows[0] if key.startswith("us_")]
    table = Table(title=f"{func} on {cluster} as NCCL {nccl} sees it (predicted us)", box=box.SIMPLE)
    for head in ("bytes", "choice", "channels", "warps"):
        table.add_column(head, justify="left" if head == "choice" else "right", no_wrap=True)
    for key in prices:
        table.add_column(key[3:].lower().replace("_", "/"), justify="right", no_wrap=True)
    for row in rows:
        chosen = f"{row['algo']}/{row['proto']}".lower()
        cells = [format_bytes(row["nBytes"]), chosen, str(row["nChannels"]), str(row["nWarps"])]
        table.add_row(*cells, *(f"{row[key]:,.{1 if row[key] < 1000 else 0}f}" for key in prices))
    terminal().print(table)
