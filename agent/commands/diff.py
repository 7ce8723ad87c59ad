"""``dynamiccl diff``: what an upgrade of NCCL changes for a job."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from . import ClusterName, fail


def diff(
    what: Annotated[
        list[Path], typer.Argument(metavar="RECORDING|TABLE...", help="A recording (as for advise), or a table's file.")
    ],
    nccl: Annotated[list[str] | None, typer.Option(help="The two releases: --nccl 2.28.9 --nccl 2.30.7.")] = None,
    cluster: ClusterName = None,
    table: Annotated[
        Path | None, typer.Option(help="Check this table against a recording's messages.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """What NCCL itself would choose otherwise after an upgrade, and whether a table still holds.

    By NCCL's own cost model, which follows the plans of the real releases; nothing runs. For a table the messages are
    the sizes that its rows are for, for a recording those that were recorded.

    \b
    dynamiccl diff --nccl 2.28.9 --nccl 2.30.7 runs/tune/latest/trace --cluster dgx-h100-2x8
    dynamiccl diff --nccl 2.28.9 --nccl 2.31.2 table.json --cluster nccl_debug.log
    """
    from ...envs import upgrade
    from ...envs.nccl.tables import load_table
    from ...envs.recordings import named
    from ...traces.files import TraceError
    from ..recordings import read

    if nccl is None or len(nccl) != 2:
        fail("name two releases: --nccl 2.28.9 --nccl 2.30.7")
    if cluster is None:
        fail("name the cluster with --cluster: what NCCL chooses depends on it")
    before, after = nccl
    try:
        c = named(cluster, before)
        named(cluster, after)
        held = None
        if len(what) == 1 and what[0].is_file() and _is_table(what[0]):
            rules = load_table(what[0], n_ranks=c.n_ranks, n_nodes=c.n_nodes)
            messages = upgrade.messages_in(rules.rules, c)
            held = upgrade.holds(rules, c, after)
        else:
            messages = upgrade.messages_of(read(what, cluster, before))
            if table is not None:
                held = upgrade.holds(load_table(table, n_ranks=c.n_ranks, n_nodes=c.n_nodes), c, after, messages)
        found = upgrade.changes(messages, c, before, after)
    except (TraceError, ValueError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename} cannot be read: {error.strerror}")
    told = {"before": before, "after": after, "cluster": c.name, "messages": len(found), "rules": held}
    told["changes"] = [_row(x) for x in found if x.is_change]
    told["dearer"] = [_row(x) for x in found if not x.is_change and abs(x.price - 1) > 0.01]
    if json:
        typer.echo(json_module.dumps(told, indent=1))
    else:
        _show(told)


def _is_table(path: Path) -> bool:
    """A file of ours, of NVIDIA's tuner, or of NCCL's variables; anything else is a recording."""
    with path.open("rb") as file:
        head = file.read(1 << 14)
    lines = [line for line in head.splitlines() if line.strip() and not line.startswith(b"#")]
    is_csv = bool(lines) and lines[0].count(b",") in (7, 8, 9) and b"size_bytes" not in head
    return b'"dynamiccl_table"' in head or b"NCCL_ALGO=" in head or is_csv


def _row(x: Any) -> dict[str, Any]:
    m = x.message
    row = {"func": m.func, "n_bytes": m.n_bytes, "n_ranks": m.n_ranks, "n_nodes": m.n_nodes, "before": x.before}
    return {**row, "after": x.after, "gone": list(x.gone), "new": list(x.new), "price": round(x.price, 6)}


def _show(told: dict[str, Any]) -> None:
    from ...traces.records import format_bytes

    say = typer.echo
    say(f"NCCL {told['before']} -> {told['after']} on {told['cluster']}, by its own model: {told['messages']} messages")
    for row in told["changes"]:
        extra = "".join(f"  no more {p}" for p in row["gone"]) + "".join(f"  new {p}" for p in row["new"])
        size = f"{row['func']} {format_bytes(row['n_bytes'])} on {row['n_ranks']} ranks"
        say(f"  {size:42} {row['before']} -> {row['after']}{extra}")
    if not told["changes"]:
        say("  nothing that runs or is offered changes")
    if told["dearer"]:
        prices = [row["price"] for row in told["dearer"]]
        say(f"  {len(prices)} more keep their choice at {min(prices):.2f} to {max(prices):.2f} times its price")
    for rule in told["rules"] or ():
        size = f"{rule['func']} {format_bytes(rule['min_bytes'])} to {format_bytes(min(rule['max_bytes'], 2**40))}"
        say(f"  table: {size:38} {rule['decision']:18} {rule['state']}{'  ' if rule['why'] else ''}{rule['why']}")
