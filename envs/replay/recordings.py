"""A recording placed on a cluster: what NCCL's cost model would have offered there, which other tools do not record."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from ...traces.assemble import EVENT_COLUMNS, OFFER_COLUMNS, complete
from ...traces.files import Trace, TraceError
from ...traces.header import OF_ONE_RANK
from ...traces.importers.found import PER_RANK
from ...traces.names import PAIRS_OF, tuned_funcs
from ..nccl_model import clusters, cost_model
from ..nccl_model.clusters import Cluster

#: Kinds of messages, where each is placed, and what NCCL's model says of it where it may be tuned.
_MESSAGE = ["n_ranks", "n_nodes", "func", "n_bytes"]
_MODELLED = [*_MESSAGE, "ranks", "nodes", "model_algo", "model_proto", "model_channels", "cost_us"]
#: Key of a header for all that is known of its cluster: a file that described it may be gone, and so is ``--nccl``.
_VALUES = "cluster_values"


def named(text: str, nccl: str | None = None, recorded: Any = None) -> Cluster:
    """The cluster of a preset, a kind of preset or a .toml file, under the release ``nccl``.

    Without one the release ``recorded`` counts, where it is one of NCCL's, else the cluster's own. Raises ValueError.
    """
    c = clusters.find(text)
    if nccl is not None:
        return clusters.resize(c, nccl=nccl)
    with contextlib.suppress(ValueError):
        return clusters.resize(c, nccl=str(recorded))
    return c


def of_size(c: Cluster, n_ranks: int, n_nodes: int = 0) -> Cluster:
    """The same kind of cluster for a communicator of that size; 0 nodes: packed on as few as it fits.

    Raises ValueError for fewer than two ranks, and for ranks that do not divide over the nodes.
    """
    n_nodes = n_nodes or -(-n_ranks // c.gpus_per_node)
    if (n_ranks, n_nodes) == (c.n_ranks, c.n_nodes):
        return c
    if n_ranks < 2:
        raise ValueError("a group of 1 rank sends nothing: record all ranks, or the size of their group")
    if n_ranks % n_nodes or n_ranks // n_nodes > c.gpus_per_node:
        raise ValueError(f"{n_ranks} ranks on {n_nodes} nodes do not lie evenly on {c.name}")
    grown, per_node = clusters.resize(c, n_nodes), n_ranks // n_nodes
    if per_node == grown.gpus_per_node:
        return grown
    return replace(grown, gpus_per_node=per_node, name=f"{c.name}[{n_ranks} ranks on {n_nodes} nodes]")


def is_placed(trace: Trace) -> bool:
    """The recording was placed on a cluster by :func:`on_cluster`."""
    return _VALUES in trace.header


def cluster_in(header: Mapping[str, Any]) -> Cluster | None:
    """The cluster that a header names: the one that :func:`on_cluster` or the tuner kept in it, else the preset; None:
    neither."""
    name = str(header.get("cluster"))
    kept = header.get(_VALUES, header.get("cluster_file"))
    try:
        if kept:
            return clusters.from_mapping(Path(name).stem if name.endswith(clusters.FILE) else name, kept)
        return clusters.cluster(name)
    except ValueError:
        return None


def on_cluster(trace: Trace, c: Cluster) -> Trace:
    """``trace`` with NCCL's offers for every message, by the cost model of ``c``, unless it holds offers already.

    What the recording does not tell is filled in: nodes of each communicator, the pair and the channels that NCCL's
    model takes. The header's ``notes`` then say so. Raises TraceError when no communicator fits the cluster.
    """
    if len(trace.offers):
        return trace
    notes = list(trace.header.get("notes") or ())
    told = _whole(trace, c, notes)
    modelled = _modelled(told, c, notes, tuned_funcs(trace.all_reduce))
    events = told.merge(modelled, "left", _MESSAGE)
    placed, priced = events["ranks"].notna(), events["model_algo"].notna()
    unknown = priced & (events["algo"] == "unknown")
    no_count = priced & (events["n_channels"] == 0)
    for rows, names in (
        (placed, {"n_ranks": "ranks", "n_nodes": "nodes"}),
        (unknown, {"algo": "model_algo", "proto": "model_proto"}),
        (no_count, {"n_channels": "model_channels"}),
    ):
        for name, source in names.items():
            events[name] = events[source].where(rows, events[name])
    if unknown.any():
        notes.append(
            "which algorithm and protocol ran, no kernel's name tells: taken to be NCCL's default by its model"
        )
    if no_count.any():
        notes.append("how many channels ran is not recorded: taken to be what NCCL's model uses")
    offers = events[priced].drop_duplicates(["comm_id", "func", "n_bytes"])
    offers = offers.assign(algo=offers["model_algo"], proto=offers["model_proto"], n_pipe_ops=1)
    header = {
        **trace.header,
        "cluster": c.name,
        _VALUES: clusters.values_of(c),
        "nccl_model": c.nccl,
        "notes": notes,
    }
    return replace(
        trace, events=complete(events, EVENT_COLUMNS), offers=complete(offers, OFFER_COLUMNS), header=header
    )


def _whole(trace: Trace, c: Cluster, notes: list[str]) -> pd.DataFrame:
    """The events; where their ranks are not told with the bytes of all ranks of the cluster. ``notes`` then say so."""
    events = trace.events
    untold = (events["n_ranks"] == 0) & events["func"].isin(tuned_funcs(trace.all_reduce))
    if untold.any():
        notes.append(
            f"the ranks of {untold.sum()} calls are not told: taken to be all {c.n_ranks} of the cluster"
        )
    if not trace.header.get(OF_ONE_RANK):
        return events
    n_bytes = events["n_bytes"]
    is_part = untold & events["func"].isin(PER_RANK)
    return events.assign(n_bytes=n_bytes.where(~is_part, n_bytes * c.n_ranks))


def _modelled(events: pd.DataFrame, c: Cluster, notes: list[str], funcs: Sequence[str]) -> pd.DataFrame:
    """Each kind of message with the ranks and nodes that it is placed on, and what NCCL's model says of it.

    Into ``notes`` goes what fits nowhere. Raises TraceError where nothing does.
    """
    found: list[dict[str, Any]] = []
    for n_ranks, n_nodes in events[["n_ranks", "n_nodes"]].drop_duplicates().itertuples(index=False):
        group = events[(events["n_ranks"] == n_ranks) & (events["n_nodes"] == n_nodes)]
        try:
            place = of_size(c, int(n_ranks) or c.n_ranks, int(n_nodes))
        except ValueError as error:
            notes.append(f"a communicator is left out: {error}")
            continue
        for func, n_bytes in group[["func", "n_bytes"]].drop_duplicates().itertuples(index=False):
            row = {"n_ranks": n_ranks, "n_nodes": n_nodes, "func": func, "n_bytes": n_bytes}
            row |= {"ranks": place.n_ranks, "nodes": place.n_nodes}
            if func in funcs and n_bytes > 0:
                algo, proto = cost_model.choice(place, func, int(n_bytes))
                count = place.nvls_channels
                if (algo, proto) in PAIRS_OF[func]:
                    count, _ = cost_model.channels(place, func, int(n_bytes), algo, proto)
                cost = cost_model.cost_table(place, func, int(n_bytes)).ravel()
                row |= {"model_algo": algo, "model_proto": proto, "model_channels": count, "cost_us": cost}
            found.append(row)
    if not found:
        raise TraceError(f"{notes[-1]}: name the cluster that was recorded with --cluster")
    return pd.DataFrame(found, columns=_MODELLED)
