"""A recording placed on a cluster: what NCCL's cost model would have offered there, which other tools do not record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from ...traces.assemble import EVENT_COLUMNS, OFFER_COLUMNS, complete
from ...traces.files import Trace, TraceError
from ...traces.importers.steps import step_rows
from ...traces.records import PAIRS, TUNED_FUNCS
from ..nccl_model import clusters, cost_model
from ..nccl_model.clusters import Cluster


def named(text: str, nccl: str | None = None, recorded: Any = None) -> Cluster:
    """The cluster of a preset, a kind of preset, a .toml file or an NCCL log, under the release ``nccl``.

    Without one the release ``recorded`` counts, where it is one of NCCL's, else the cluster's own. Raises ValueError.
    """
    c = clusters.find(text)
    if nccl is None:
        try:
            nccl = str(recorded) if recorded and clusters.release_number(str(recorded)) else None
        except ValueError:
            nccl = None
    return clusters.resize(c, nccl=nccl)


def of_size(c: Cluster, n_ranks: int, n_nodes: int = 0) -> Cluster:
    """The same kind of cluster for a communicator of that size; 0 nodes: packed on as few as it fits.

    Raises ValueError for fewer than two ranks, and for ranks that do not divide over the nodes.
    """
    n_nodes = n_nodes or -(-n_ranks // c.gpus_per_node)
    if (n_ranks, n_nodes) == (c.n_ranks, c.n_nodes):
        return c
    if n_ranks < 2 or n_ranks % n_nodes or n_ranks // n_nodes > c.gpus_per_node:
        raise ValueError(f"{n_ranks} ranks on {n_nodes} nodes do not lie evenly on {c.name}")
    grown, per_node = clusters.resize(c, n_nodes), n_ranks // n_nodes
    if per_node == grown.gpus_per_node:
        return grown
    return replace(grown, gpus_per_node=per_node, name=f"{c.name}[{n_ranks} ranks on {n_nodes} nodes]")


def on_cluster(trace: Trace, c: Cluster) -> Trace:
    """``trace`` with NCCL's offers for every message, by the cost model of ``c``, unless it holds offers already.

    What the recording does not tell is filled in: nodes of each communicator, the pair and the channels that NCCL's
    model takes, a step where there is none. The header's ``notes`` then say so. Raises TraceError when no
    communicator of the recording fits the cluster.
    """
    if len(trace.offers):
        return trace
    events, notes = trace.events.copy(), list(trace.header.get("notes") or ())
    places: dict[tuple[int, int], Cluster] = {}
    sizes = events[["n_ranks", "n_nodes"]].drop_duplicates().itertuples(index=False)
    for n_ranks, n_nodes in ((int(n), int(m)) for n, m in sizes):
        try:
            places[n_ranks, n_nodes] = of_size(c, n_ranks or c.n_ranks, n_nodes)
        except ValueError as error:
            notes.append(f"a communicator is left out: {error}")
    if not places:
        raise TraceError(f"{notes[-1]}: name the cluster that was recorded with --cluster")
    size = list(zip(events["n_ranks"].astype(int), events["n_nodes"].astype(int), strict=True))
    events["n_ranks"] = [places[s].n_ranks if s in places else s[0] for s in size]
    events["n_nodes"] = [places[s].n_nodes if s in places else s[1] for s in size]
    offers: dict[tuple[int, str, int], tuple[Any, ...]] = {}
    assumed: list[tuple[str, str, int] | None] = []
    for s, comm_id, func, n in zip(size, events["comm_id"], events["func"], map(int, events["n_bytes"]), strict=True):
        if s not in places or func not in TUNED_FUNCS or n <= 0:
            assumed.append(None)
            continue
        algo, proto = cost_model.choice(places[s], func, n)
        assumed.append((algo, proto, cost_model.channels(places[s], func, n, algo, proto)[0]))
        cost = cost_model.cost_table(places[s], func, n).ravel()
        offers[int(comm_id), func, n] = int(comm_id), func, n, algo, proto, 1, cost
    known = {algo for algo, _ in PAIRS}
    unknown = [a is not None and algo not in known for a, algo in zip(assumed, events["algo"], strict=True)]
    no_count = [a is not None and not n for a, n in zip(assumed, events["n_channels"], strict=True)]
    for column, at, where in (("algo", 0, unknown), ("proto", 1, unknown), ("n_channels", 2, no_count)):
        values = zip(assumed, where, events[column], strict=True)
        events[column] = [a[at] if a is not None and w else v for a, w, v in values]
    if any(unknown):
        notes.append("which algorithm and protocol ran is not recorded: taken to be NCCL's own choice by its model")
    if any(no_count):
        notes.append("how many channels ran is not recorded: taken to be what NCCL's model uses")
    events = complete(events, EVENT_COLUMNS)
    rows = list(zip(*offers.values(), strict=True)) or [()] * len(OFFER_COLUMNS)
    columns = {n: pd.Series(list(v), dtype=object) for n, v in zip(OFFER_COLUMNS, rows, strict=True)}
    header = {**trace.header, "cluster": c.name, "nccl_model": c.nccl, "comm_channels": c.comm_channels}
    made = replace(trace, events=events, offers=pd.DataFrame(columns).astype(OFFER_COLUMNS), header=header)
    made.steps, note = _steps(made)
    header |= {"notes": [*notes, note], "steps_from": "none"} if note else {"notes": notes}
    return made


def _steps(trace: Trace) -> tuple[pd.DataFrame, str]:
    """The recording's steps; where it has none, one that lasts from its first call to the end of its last."""
    if len(trace.steps) and (trace.steps["duration_ns"] > 0).all():
        return trace.steps, ""
    events = trace.events
    ends = events["end_ns"].fillna(events["enqueue_ns"]).astype("int64")
    keys = zip(events["comm_id"], events["func"], events["n_bytes"], strict=True)
    price = {
        (o["comm_id"], o["func"], o["n_bytes"]): min(float(x) for x in o["cost_us"] if x >= 0)
        for o in trace.offers.to_dict("records")
    }
    rows, note = [], "no step is recorded: shares are of the time from the first call to the last"
    told = events.assign(end=ends, price=[price.get(k, 0.0) for k in keys])
    told["step"] = trace.events["step"] = 0
    for (rank, pid, step), group in told.groupby(["rank", "pid", "step"]):
        begin, end = int(group["enqueue_ns"].min()), int(group["end"].max())
        if end <= begin:
            note = "no times are recorded: shares are of the calls' prices in NCCL's model alone"
            end = begin + max(1, round(1e3 * group["price"].sum()))
        rows.append({"index": step, "rank": rank, "pid": pid, "end_ns": end, "duration_ns": end - begin})
    return step_rows(rows), note
