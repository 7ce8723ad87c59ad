"""NCCL's own channel counts, read from a run without ``--headroom`` and held against our model of NCCL."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ...traces.files import Trace
from ..nccl.untouched import FUNCS, ClassChannels, Untouched
from ..nccl_model.channels import filled_channels
from ..nccl_model.clusters import release_number

Array = np.ndarray[Any, Any]
#: Threads that a ring's block may have under Simple, the usual number first.
THREADS = (512, 256)
#: A table of a running job has 126 rows, and each class takes five before anything is tuned.
MOST_CLASSES = 12
#: Algorithms with channels of their own, which the option leaves alone.
_OWN = ("nvls", "nvls_tree")
#: Bytes of traffic per byte of a message (NCCL 2.28.9 src/include/enqueue.h); of the others one a rank.
_TRAFFIC = {"all_reduce": 2, "broadcast": 1, "reduce": 1}


def own_limit(events: pd.DataFrame, n_channels: int, threads: int) -> Array:
    """Channels that NCCL allows each call, (n,), on communicators of ``n_channels``.

    ``threads``: of a ring's block under Simple. Source: 2.28.9 src/enqueue.cc, topoGetAlgoInfo. The plugin computes the
    same (tuner.c).
    """
    is_ring = (events["algo"] == "ring").to_numpy()
    ranks = np.where(is_ring, events["n_ranks"].to_numpy(np.int64), 1)
    proto = events["proto"].to_numpy()
    simple = np.where(is_ring, threads, 512) * 64
    block = np.where(proto == "ll", 512 * 8 * ranks, np.where(proto == "ll128", 640 * 8, simple))
    filled = np.clip(events["n_bytes"].to_numpy(np.int64) // block, 1, n_channels)
    return np.where(events["algo"] == "pat", n_channels, filled)


def as_run(events: pd.DataFrame, n_channels: int, threads: int, release: int) -> Array:
    """Channels that run each call, (n,), if it is alone in its group. ``release``: 22809 is 2.28.9."""
    limit = own_limit(events, n_channels, threads)
    n_bytes = events["n_bytes"].to_numpy(np.int64)
    ranks = events["n_ranks"].to_numpy(np.int64)
    func = events["func"]
    is_shared = ~func.isin(list(_TRAFFIC)).to_numpy()
    size = np.where(is_shared, -(-n_bytes // ranks), n_bytes)
    traffic = np.where(is_shared, ranks, func.map(_TRAFFIC).fillna(1).to_numpy(np.int64))
    proto = np.where(events["proto"] == "ll", 0, 2)
    return np.minimum(filled_channels(release, size, traffic, proto, limit), limit)


def of_run(folder: Path | str, headroom: int) -> Untouched:
    """What NCCL did untouched in an earlier run of the job. ``folder``: its results.

    Raises TraceError or ValueError, with the cure, where the run does not show it, or NCCL counts otherwise than our
    model says.
    """
    path = Path(folder)
    trace = Trace.read(path / "trace" if (path / "trace").is_dir() else path)
    if trace.header.get("headroom"):
        raise ValueError(f"{path} is a run with --headroom: give one without it")
    default = [generation for generation, rules in trace.tables.items() if not rules]
    events = trace.events
    events = events[events["table_generation"].isin(default) & events["func"].isin(FUNCS)]
    events = events[is_alone(events) & (events["n_ranks"] > 0)]
    if events.empty:
        raise ValueError(
            f"{path} shows no call of its own that NCCL asked a tuner about: give a run that was watched"
        )
    releases = releases_of(trace.header)
    classes = [class_of(path, key, rows, releases) for key, rows in events.groupby(["n_ranks", "n_nodes"])]
    if len(classes) > MOST_CLASSES:
        raise ValueError(
            f"{path} has {len(classes)} classes of communicators; --headroom has room for {MOST_CLASSES}"
        )
    return Untouched(headroom, tuple(sorted(classes)))


def is_alone(events: pd.DataFrame) -> pd.Series[bool]:
    """Calls that NCCL asked about by themselves, outside of CUDA graphs."""
    return (events["asked_bytes"] == events["n_bytes"]) & ~events["captured"]


def releases_of(header: dict[str, Any]) -> list[int]:
    """NCCL's release as a number, of the header of a trace. One of each rule where it does not tell: NCCL cuts messages
    finer up to 2.28."""
    try:
        return [release_number(str(header.get("nccl")))]
    except ValueError:
        return [22809, 22907]


def class_of(path: Path | str, key: Any, rows: pd.DataFrame, releases: list[int]) -> ClassChannels:
    """The channels of the class ``key`` (n_ranks, n_nodes), by which our model runs all ``rows`` as NCCL did. ``path``
    names them in an error. Raises ValueError."""
    n_ranks, n_nodes = map(int, key)
    of_their_own = rows["algo"].isin(_OWN) & ~((rows["algo"] == "nvls") & (n_nodes > 1))
    counted = rows[~of_their_own]
    where = f"communicators of {n_ranks} ranks on {n_nodes} nodes"
    other = counted[~counted["algo"].isin(["ring", "tree", "pat"])]
    if len(other):
        raise ValueError(
            f"{path}: NCCL runs {other['algo'].iloc[0]} on {where}, and our model does not know its channels: "
            "--headroom cannot hold NCCL untouched here"
        )
    most = int(counted["n_channels"].max()) if len(counted) else 64
    for threads, release in itertools.product(THREADS, releases):
        expected = as_run(counted, most, threads, release)
        differs = counted.assign(expected=expected)[expected != counted["n_channels"].to_numpy()]
        if differs.empty:
            return ClassChannels(n_ranks, n_nodes, most, threads)
    one = differs.iloc[0]
    call = f"{one['func']} of {one['n_bytes']} bytes by {one['algo']}/{one['proto']}"
    raise ValueError(
        f"{path}: NCCL ran {call} on {one['n_channels']} channels on {where}, and our model says {one['expected']}: "
        "--headroom cannot hold NCCL untouched here"
    )


def fault(untouched: Untouched, events: pd.DataFrame, is_default: bool = True) -> str:
    """Why a run with ``--headroom`` is not untouched where no table decides; '' if nothing shows that.

    ``is_default``: the events are of steps in which no table decides anything.
    """
    if events.empty:
        return ""
    rows = events[events["func"].isin(FUNCS) & (events["n_ranks"] > 0)]
    for (n_ranks, n_nodes), of_class in rows.groupby(["n_ranks", "n_nodes"]):
        known = next(
            (one for one in untouched.classes if (one.n_ranks, one.n_nodes) == (n_ranks, n_nodes)), None
        )
        where = f"communicators of {n_ranks} ranks on {n_nodes} nodes"
        if known is None:
            return f"the run without it shows no {where}"
        if of_class["captured"].any():
            return f"{where} have calls in CUDA graphs, where no table holds"
        asked = of_class[of_class["asked_bytes"] > 0]
        if (asked["asked_bytes"] != asked["n_bytes"]).any():
            return f"{where} have calls in groups, which share all channels"
        ran = asked[~asked["algo"].isin(_OWN)]
        if is_default and (ran["n_channels"] > known.n_channels).any():
            return f"{where} ran on {int(ran['n_channels'].max())} channels, without it on {known.n_channels}"
    return ""
