"""``dynamiccl clusters``: what was learned of clusters, and what is to be forgotten of it."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from . import fail, refusing

Where = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="URL",
        help="The memory: a folder, or a URL that fsspec opens (s3://bucket/folder). Default: DYNAMICCL_MEMORY, else "
        "dynamiccl/clusters in the user's data folder.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Key = Annotated[str, typer.Argument(metavar="CLUSTER", help="As the list names it; its beginning is enough.")]


def clusters(context: typer.Context, memory: Where = None, json: Json = False) -> None:
    """What was learned of clusters in jobs before, and what is begun with there.

    A tuner leaves at its verdict what it measured: durations of the collectives under each config, what whole tables
    did to the step, what was confirmed. The next job on a cluster of the same GPUs, nodes x ranks and NCCL begins from
    that, behind the same guard: older evidence counts for less (half every 30 days), durations that are not those
    remembered throw it away before a step is spent, and so does the first window that contradicts it. `dynamiccl tune
    --no-memory` does without; `dynamiccl learn` adds recorded jobs.

    \b
    dynamiccl clusters                      list them
    dynamiccl clusters show 3f2a            what is known of one
    dynamiccl clusters forget 3f2a          forget it; --older 90: only what is older than 90 days
    dynamiccl clusters --memory s3://team/dynamiccl
    """
    if context.invoked_subcommand is not None:
        return
    store = _store(memory)
    found = [_summary(store.read(key)) for key in _try(store.keys)]
    if json:
        typer.echo(json_module.dumps({"memory": store.url, "clusters": found}, indent=1))
        return
    if not found:
        typer.echo(f"nothing is known of any cluster in {store.url}: `dynamiccl tune` and `dynamiccl learn` fill it")
    for one in found:
        text = f"{one['cluster']}  {one['hardware']}, {one['layout']}, NCCL {one['nccl']}: {one['jobs']} jobs, "
        typer.echo(text + f"{one['slots']} slots, last {one['last'] or 'never'}")


def show(cluster: Key, memory: Where = None, json: Json = False) -> None:
    """What is known of one cluster: its jobs, their slots, the tables that were confirmed.

    \b
    dynamiccl clusters show 3f2a
    """
    store = _store(memory)
    known = _try(lambda: store.read(_find(store, cluster)))
    summary, records = _summary(known), known.in_use
    if json:
        typer.echo(json_module.dumps({"memory": store.url, **summary, "records": records}, indent=1))
        return
    typer.echo(f"{summary['cluster']}: {summary['hardware']}, {summary['layout']}, NCCL {summary['nccl']}")
    for record in records:
        gain = record.get("gain")
        text = "nothing confirmed"
        if gain:
            low, high = (100 * (1 - 2.718281828**-x) for x in (gain["low"], gain["high"]))
            text = f"saves {low:.1f} to {high:.1f} % of the step"
        typer.echo(f"\n{record['written']}  {record.get('job') or record['run']}: {text}")
        for slot in record["slots"]:
            name = f"{slot['func']} of {slot['fingerprint']['n_bytes'] / 2**20:.1f} MiB"
            tried = f"{len(slot['durations'])} configs timed"
            typer.echo(f"  {name:32} {slot['share']:6.1%} of the step  {slot['confirmed']:22} {tried}")
    for text in known.damaged:
        typer.echo(f"\nnot read: {text}")


def forget(
    cluster: Key,
    older: Annotated[float, typer.Option(min=0, help="Only what is at least so many days old.")] = 0.0,
    memory: Where = None,
    json: Json = False,
) -> None:
    """Remove what is known of a cluster; the next job there begins from nothing.

    \b
    dynamiccl clusters forget 3f2a --older 90
    """
    store = _store(memory)
    key = _find(store, cluster)
    n = _try(lambda: store.forget(key, older))
    typer.echo(json_module.dumps({"cluster": key, "removed": n}) if json else f"{n} records of {key} removed")


def _store(url: str | None) -> Any:
    from ..clusters import VARIABLE, Store, default_url

    where = url or default_url()
    if where is None:
        fail(f"the memory is switched off by {VARIABLE}: name one with --memory")
    with refusing(ValueError):
        return Store(where)


def _try(work: Any) -> Any:
    try:
        return work()
    except Exception as error:  # whatever a file system or an object store can raise
        fail(f"the memory cannot be used: {error}")


def _find(store: Any, beginning: str) -> str:
    keys: list[str] = _try(store.keys)
    found = [key for key in keys if key.startswith(beginning)]
    if len(found) != 1:
        fail(f"{len(found)} clusters begin with {beginning!r}; known are: {', '.join(keys) or 'none'}")
    return found[0]


def _summary(known: Any) -> dict[str, Any]:
    records = known.in_use
    return {
        "cluster": known.key,
        **known.facts,
        "jobs": len(records),
        "slots": sum(len(record["slots"]) for record in records),
        "last": records[0]["written"] if records else None,
        "not_read": known.damaged,
    }
