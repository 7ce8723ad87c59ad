"""Of recorded traces: did all ranks run each collective alike? The traces of several nodes are compared together.

The tuner makes the same check while it runs (``envs.live.obedience``), but only of the ranks of its own node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from ..files import Trace

Array = np.ndarray[Any, Any]

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


def audit(events: pd.DataFrame, max_examples: int = 5, must_agree: Sequence[str] = MUST_AGREE) -> Consistency:
    """Compare every collective that two ranks or more have seen.

    A call is (communicator, func, seq). Sequence numbers start again when a communicator is made anew under an
    old id or when an elastic job restarts its processes: such lives are told apart, each is compared by itself.
    """
    rows = numbered(events[~events["func"].isin(_POINT_TO_POINT)])
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


def numbered(events: pd.DataFrame) -> pd.DataFrame:
    """``events`` in the order of time with a column ``call``: what has one number is one collective, as its ranks saw
    it."""
    rows = events.sort_values("enqueue_ns", kind="stable").reset_index(drop=True)
    rows = rows.assign(life=_lives(rows), again=_restarts(rows))
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
    sizes = audit(events, must_agree=("n_bytes",))
    by_size = events.groupby(["comm_id", "func", "seq"])["n_bytes"]
    is_one_size = by_size.transform("nunique") == 1
    return AcrossNodes(audit(events[is_one_size], must_agree=SETTING), sizes)


def _restarts(rows: pd.DataFrame) -> pd.Series[int]:
    """How often the sequence had begun anew, per row in time order: a number that comes again is a restart."""
    who = ["comm_id", "func", "rank", "pid"]  # pids alone may repeat on other hosts
    again = rows.groupby([*who, "seq"], sort=False).cumcount()
    return again.groupby([rows[name] for name in who], sort=False).cummax()


def _lives(rows: pd.DataFrame) -> Array:
    """Number of the job's life within its communicator: 0 unless some rank was seen in two processes.

    Clocks of several hosts may differ, so time is only consulted where there was a restart: processes whose
    spans overlap then belong to one life.
    """
    lives = np.zeros(len(rows), np.int64)
    by_rank = rows.groupby(["comm_id", "rank"])
    processes = by_rank["pid"].nunique()
    restarted = processes.index[processes > 1]
    for comm_id in restarted.get_level_values("comm_id").unique():
        of_comm = rows["comm_id"] == comm_id
        by_process = rows[of_comm].groupby(["rank", "pid"])
        spans = by_process["enqueue_ns"].agg(["min", "max"]).sort_values("min")
        began = spans["min"].iloc[0]
        reached = spans["max"].cummax().shift(fill_value=began)
        spans["life"] = (spans["min"] > reached).cumsum()
        index = pd.MultiIndex.from_frame(rows.loc[of_comm, ["rank", "pid"]])
        lives[of_comm.to_numpy()] = spans["life"].reindex(index).to_numpy()
    return lives


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
