"""Compute beside collectives, from a profile that shows both: what is exposed, and what the overlap costs the compute.

The same kernel (name, number of blocks) is compared beside one collective and alone. Kernels partly beside one are left
out: of two equal kernels the longer one overlaps more, whatever made it long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from .records import size_class

Array = np.ndarray[Any, Any]

#: Beside: so much of the kernel's time at least; alone: at most so much. Kernels of a kind that each side needs.
_BESIDE, _ALONE, _LEAST = 0.95, 0.01, 4
#: What ``events`` are grouped by: a slot, and what ran in it.
KEYS = ["n_ranks", "n_nodes", "func", "size_class", "algo", "proto", "n_channels"]


@dataclass(frozen=True)
class Overlap:
    """What one way to run a collective costs the compute beside it."""

    key: tuple[int, int, str, int, str, str, int]  # of KEYS
    slowdown: float  # kernels beside it take 1 + slowdown times as long
    low: float  # 95 %
    high: float
    error: float
    kernels: int  # that were beside it
    kinds: int
    lost: float  # part of the step's time that compute loses by it


def exposed_ns(events: pd.DataFrame, compute: pd.DataFrame) -> pd.Series[float]:
    """Of each event the ns in which its rank computes nothing; NaN where it has no times or its rank no kernels."""
    left = pd.Series(np.nan, index=events.index)
    for rank, kernels in compute.groupby("rank"):
        mine = events[(events["rank"] == rank) & events["start_ns"].notna()]
        start, end = (mine[c].astype("int64").to_numpy() for c in ("start_ns", "end_ns"))
        busy = _covered(*_union(kernels), end) - _covered(*_union(kernels), start)
        left.loc[mine.index] = (end - start) - busy
    return left


def slowdowns(events: pd.DataFrame, compute: pd.DataFrame, step_us: float) -> list[Overlap]:
    """What each slot, as it ran, costs the compute beside it, the dearest first; [] where nothing can be compared."""
    parts = []
    for rank, kernels in compute.groupby("rank"):
        mine = events[(events["rank"] == rank) & events["start_ns"].notna()].sort_values("start_ns")
        if mine.empty:
            continue
        start, end = (mine[c].astype("int64").to_numpy() for c in ("start_ns", "end_ns"))
        began, ended = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
        union = _union(mine)
        part = (_covered(*union, ended) - _covered(*union, began)) / np.maximum(ended - began, 1)
        at = np.searchsorted(start, (began + ended) // 2, side="right") - 1
        inside = (at >= 0) & (end[np.maximum(at, 0)] >= ended) & (start[np.maximum(at, 0)] <= began)
        # A kernel beside two collectives at once says nothing of either.
        two = (at > 0) & (np.maximum.accumulate(end)[np.maximum(at - 1, 0)] > began)
        beside = (part >= _BESIDE) & inside & ~two
        event = np.where(beside, mine.index.to_numpy()[np.maximum(at, 0)], -1)
        keep = beside | (part <= _ALONE)
        frame = kernels[["name", "blocks"]].assign(log=np.log(np.maximum(ended - began, 1)), event=event)
        parts.append(frame[keep])
    if not parts:
        return []
    rows = pd.concat(parts)
    told = events[[k for k in KEYS if k != "size_class"]].assign(
        size_class=[size_class(int(n)) for n in events["n_bytes"]]
    )[KEYS]
    rows = rows.join(told, on="event")
    n_steps = max(1, events["step"].nunique()) * max(1, compute["rank"].nunique())
    alone = {
        kind: g["log"].to_numpy() for kind, g in rows[rows["event"] < 0].groupby(["name", "blocks"], observed=True)
    }
    found = []
    for key, group in rows[rows["event"] >= 0].groupby(KEYS):
        one = _compare(key, group, alone, step_us * 1e3 * n_steps)
        if one is not None:
            found.append(one)
    return sorted(found, key=lambda o: -o.lost)


def _compare(key: Any, group: pd.DataFrame, alone: dict[Any, Array], total_ns: float) -> Overlap | None:
    """The mean over kinds of kernels of log (beside / alone), weighed by how well each is known and how they differ."""
    change, variance, time, n = [], [], [], 0
    for kind, mine in group.groupby(["name", "blocks"], observed=True):
        free, beside = alone.get(kind), mine["log"].to_numpy()
        if free is None or min(len(free), len(beside)) < _LEAST:
            continue
        change.append(float(np.median(beside) - np.median(free)))
        # Of a median: pi / 2 times that of a mean.
        variance.append(
            float(np.pi / 2 * (np.var(beside, ddof=1) / len(beside) + np.var(free, ddof=1) / len(free))) + 1e-8
        )
        time.append(float(np.exp(beside).sum()))
        n += len(beside)
    if not change:
        return None
    d, v, t = np.array(change), np.array(variance), np.array(time)
    w = 1 / v
    between = 0.0
    if len(d) > 1:  # DerSimonian and Laird 1986
        q, c = float((w * (d - (w * d).sum() / w.sum()) ** 2).sum()), float(w.sum() - (w**2).sum() / w.sum())
        between = max(0.0, (q - (len(d) - 1)) / max(c, 1e-12))
    w = 1 / (v + between)
    mean, error = float((w * d).sum() / w.sum()), float(np.sqrt(1 / w.sum()))
    slow, low, high = (float(np.expm1(x)) for x in (mean, mean - 1.96 * error, mean + 1.96 * error))
    lost = float((t * (1 - np.exp(-d))).sum()) / total_ns
    return Overlap(tuple(key), slow, low, high, error * (1 + slow), n, len(d), lost)


def _union(rows: pd.DataFrame) -> tuple[Array, Array]:
    """Begins and ends of the stretches that ``start_ns`` .. ``end_ns`` of the rows cover together, in order."""
    rows = rows.sort_values("start_ns")
    start, end = rows["start_ns"].astype("int64").to_numpy(), rows["end_ns"].astype("int64").to_numpy()
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1]]))
    return start[first], reach[np.concatenate([first[1:] - 1, [len(start) - 1]])]


def _covered(start: Array, end: Array, at: Array) -> Array:
    """How much of the stretches lies before each time of ``at``."""
    before = np.concatenate([[0], np.cumsum(end - start)])
    i = np.searchsorted(start, at, side="right")
    beyond = np.where(i > 0, np.maximum(end[np.maximum(i - 1, 0)] - at, 0), 0)
    return np.asarray(before[i] - beyond)
