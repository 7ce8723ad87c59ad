"""Of recorded traces: did all ranks run each collective alike? The traces of several nodes are compared together.

The tuner makes the same check while it runs (``envs.live.obedience``), but only of the ranks of its own node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from ..files import Trace
from .lives import starts

_NO_STARTS: Mapping[int, str] = MappingProxyType({})

#: What has to agree on all ranks of one collective, call by call.
MUST_AGREE = ("algo", "proto", "n_channels", "n_bytes", "table_generation", "step")

#: What a table sets. The size of a message is the job's word.
SETTING = ("algo", "proto", "n_channels")

#: Collectives that concern two ranks only: their sides need not agree.
_POINT_TO_POINT = ("send", "recv", "send_recv")


@dataclass(frozen=True)
class Consistency:
    """Result of :func:`audit`."""

    calls_checked: int  # collectives seen by two ranks or more
    mismatches: int  # those on which two ranks differ in any of MUST_AGREE
    examples: list[dict[str, Any]] = field(default_factory=list)  # the first mismatches, each rank's view


def audit(
    events: pd.DataFrame,
    max_examples: int = 5,
    must_agree: Sequence[str] = MUST_AGREE,
    starts: Mapping[int, str] = _NO_STARTS,
) -> Consistency:
    """Compare every collective that two ranks or more have seen.

    A call is (communicator, func, seq). Sequence numbers start again when a communicator is made anew under an
    old id or when an elastic job restarts its processes: such lives are told apart, each is compared by itself.
    ``starts``: see :func:`.lives.starts`.
    """
    rows = numbered(events[~events["func"].isin(_POINT_TO_POINT)], starts)
    if rows.empty:
        return Consistency(0, 0)
    call = rows["call"]
    calls = rows.groupby(call)
    columns = list(must_agree)
    differs = (rows[columns] != calls[columns].transform("first")).any(axis=1)
    bad = np.unique(call[differs])
    examples = [_example(rows[call == c]) for c in bad[:max_examples]]
    ranks_seen = calls["rank"].nunique()
    return Consistency(int((ranks_seen > 1).sum()), len(bad), examples)


def numbered(events: pd.DataFrame, starts: Mapping[int, str] = _NO_STARTS) -> pd.DataFrame:
    """``events`` in the order of time with a column ``call``: what has one number is one collective, as its ranks saw
    it."""
    rows = events.sort_values("enqueue_ns", kind="stable").reset_index(drop=True)
    rows = rows.assign(life=_lives(rows, starts), again=_restarts(rows))
    calls = rows.groupby(["comm_id", "func", "seq", "life", "again"], sort=False)
    return rows.assign(call=calls.ngroup())


@dataclass(frozen=True)
class AcrossNodes:
    """Result of :func:`across_nodes`."""

    settings: Consistency  # of collectives whose sizes agree
    sizes: Consistency  # ranks that issue messages of different sizes: a fault of the job


def across_nodes(traces: Sequence[Trace]) -> AcrossNodes:
    """Compare the collectives in the traces of one job's nodes.

    Left out are communicators with captured calls, as NCCL does not count these alike on all ranks, and the recordings
    of other tools, which do not number the calls of a communicator. A trace may be given twice.
    """
    ours = [trace.events for trace in traces if "source" not in trace.header]
    if not ours:
        return AcrossNodes(Consistency(0, 0), Consistency(0, 0))
    events = pd.concat(ours, ignore_index=True)
    events = events.drop_duplicates(["comm_id", "func", "seq", "rank", "pid", "enqueue_ns"])
    captured = events.loc[events["captured"], "comm_id"].unique()
    events = events[~events["comm_id"].isin(captured)]
    of_job = starts(traces)
    sizes = audit(events, must_agree=("n_bytes",), starts=of_job)
    by_size = events.groupby(["comm_id", "func", "seq"])["n_bytes"]
    is_one_size = by_size.transform("nunique") == 1
    return AcrossNodes(audit(events[is_one_size], must_agree=SETTING, starts=of_job), sizes)


def _restarts(rows: pd.DataFrame) -> pd.Series[int]:
    """How often the sequence had begun anew, per row in time order: a number that comes again is a restart."""
    who = ["comm_id", "func", "rank", "pid"]  # pids alone may repeat on other hosts
    again = rows.groupby([*who, "seq"], sort=False).cumcount()
    return again.groupby([rows[name] for name in who], sort=False).cummax()


def _lives(rows: pd.DataFrame, starts: Mapping[int, str]) -> pd.Series[str]:
    """The start of the job that each row is of; "" in communicators of which no rank was seen in two processes."""
    n_processes = rows.groupby(["comm_id", "rank"])["pid"].nunique()
    again = n_processes.index[n_processes > 1].get_level_values("comm_id")
    start = rows["pid"].map(lambda pid: starts.get(pid, "")).astype(str)
    return start.where(rows["comm_id"].isin(again), "")


def _example(rows: pd.DataFrame) -> dict[str, Any]:
    head = rows.iloc[0]
    views = {}
    for row in rows.to_dict("records"):
        rank = int(row["rank"])
        views[rank] = {name: row[name] for name in MUST_AGREE}
    return {
        "comm_id": int(head["comm_id"]),
        "func": str(head["func"]),
        "seq": int(head["seq"]),
        "ranks": views,
    }
