"""``dynamiccl model``: what a release of NCCL would choose on a cluster, and what another release changes."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

from . import Argument, Json, Option, fail, refusing

if TYPE_CHECKING:
    from ...envs.nccl_model.clusters import Cluster


def model(
    cluster: Annotated[str, Argument(help="Cluster preset, its kind, or a .toml file.")] = "dgx-h100-1x8",
    nodes: Annotated[int | None, Option(min=1, help="Number of nodes, where it is not the preset's.")] = None,
    release: Annotated[list[str] | None, Option(help="Of NCCL, e.g. 2.28.9; a second one: what it changes.")] = None,
    json: Json = False,
) -> None:
    """NCCL's prices, choice and channels for 1 KiB to 4 GiB, and what an upgrade changes of them.

    By NCCL's own cost model, which follows the plans of the real releases; nothing runs, nothing is measured.

    \b
    dynamiccl model dgx-h100-2x8
    dynamiccl model dgx-h100-2x8 --release 2.28.9 --release 2.30.7
    """
    from ...envs.nccl_model import clusters
    from ...traces.records import TUNED_FUNCS

    releases: list[str | None] = [*release] if release else [None]
    if len(releases) > 2:
        fail("one --release, or two to see what changes")
    with refusing(ValueError):
        found = [clusters.resize(clusters.find(cluster, nodes), nodes, one) for one in releases]
    tables = [{func: _rows(c, func) for func in TUNED_FUNCS} for c in found]
    if len(found) == 2:
        told = {name: changes(tables[0][name], tables[1][name]) for name in tables[0]}
        print(json_module.dumps(told, indent=1)) if json else _show_changes(found, told)
    elif json:
        print(json_module.dumps([row for rows in tables[0].values() for row in rows], indent=1))
    else:
        for name, rows in tables[0].items():
            _show(found[0], name, rows)


def _rows(c: Cluster, func: str) -> list[dict[str, Any]]:
    """One row a message size; ``us``: NCCL's prices of the pairs that it offers."""
    from ...envs.nccl_model import cost_model
    from ...traces.records import PAIRS, pair_costs

    rows = []
    for n_bytes in (2**exponent for exponent in range(10, 33)):
        costs = pair_costs(cost_model.cost_table(c, func, n_bytes))
        algo, proto = cost_model.choice(c, func, n_bytes)
        n_channels, n_warps = cost_model.channels(c, func, n_bytes, algo, proto)
        row: dict[str, Any] = {"nccl": c.nccl, "n_nodes": c.n_nodes, "n_ranks": c.n_ranks, "func": func}
        row |= {"n_bytes": n_bytes, "choice": f"{algo}/{proto}", "n_channels": n_channels, "n_warps": n_warps}
        offered = {"/".join(pair): float(f"{us:.9g}") for pair, us in zip(PAIRS, costs, strict=True) if us >= 0}
        rows.append({**row, "us": offered})
    return rows


def changes(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of two releases' rows of one collective: sizes at which something else runs or is offered, equal neighbours as
    one: ``min_bytes``, ``max_bytes``, ``before``, ``after`` (algo/proto/channels), pairs ``gone`` and ``new``, and
    ``price``: the least and the most of NCCL's price after / before."""
    found: list[dict[str, Any]] = []
    for old, new in zip(before, after, strict=True):
        ran = [f"{row['choice']}/{row['n_channels']}" for row in (old, new)]
        gone, fresh = (sorted(one["us"].keys() - other["us"].keys()) for one, other in ((old, new), (new, old)))
        price = round(new["us"][new["choice"]] / old["us"][old["choice"]], 6)
        if ran[0] == ran[1] and not gone and not fresh:
            continue
        row = {"before": ran[0], "after": ran[1], "gone": gone, "new": fresh}
        last = found[-1] if found else {}
        if last.get("max_bytes") == old["n_bytes"] // 2 and all(last[key] == row[key] for key in row):
            last |= {"max_bytes": old["n_bytes"], "price": [min(*last["price"], price), max(*last["price"], price)]}
        else:
            found.append({"min_bytes": old["n_bytes"], "max_bytes": old["n_bytes"], **row, "price": [price, price]})
    return found


def _show_changes(found: list[Cluster], told: dict[str, list[dict[str, Any]]]) -> None:
    from ...traces.records import format_bytes

    print(f"NCCL {found[0].nccl} -> {found[1].nccl} on {found[0].name}, by its own model, 1 KiB to 4 GiB:")
    for func, rows in told.items():
        for row in rows:
            sizes = " to ".join(dict.fromkeys(format_bytes(row[key]) for key in ("min_bytes", "max_bytes")))
            said = row["after"] if row["before"] == row["after"] else f"{row['before']} -> {row['after']}"
            said += "".join([f", no more {p}" for p in row["gone"]] + [f", new {p}" for p in row["new"]])
            low, high = row["price"]
            price = "" if low == high == 1 else f", at {low:.2f} to {high:.2f} times the price"
            print(f"  {func} {sizes}: {said}{price}")
        if not rows:
            print(f"  {func}: nothing that runs or is offered changes")


def _show(c: Cluster, func: str, rows: list[dict[str, Any]]) -> None:
    from rich import box

    from ...traces.records import format_bytes
    from ..report.terminal import grid, wide_terminal

    pairs = list(rows[0]["us"])
    heads = ["bytes", "choice", "channels", "warps", *pairs]
    cells = [
        [format_bytes(row["n_bytes"]), row["choice"], row["n_channels"], row["n_warps"]]
        + [f"{row['us'][pair]:,.{1 if row['us'][pair] < 1000 else 0}f}" for pair in pairs]
        for row in rows
    ]
    title = f"{func} on {c.name} as NCCL {c.nccl} sees it (predicted us)"
    wide_terminal().print(grid(heads, cells, {*heads} - {"choice"}, no_wrap=True, title=title, box=box.SIMPLE))
