"""From the raw records that the rings deliver to tables of events and steps.

A process writes a COLL record when a collective is enqueued and, where sampled, a KERNEL record when it has run, maybe
hundreds of collectives later. Rows are held back until their kernel time came or never will.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # imported where tables are made: `dynamiccl stop` only reads records
    import pandas as pd

from .names import COMM_COLUMNS as COMM_COLUMNS
from .names import COMPUTE_COLUMNS as COMPUTE_COLUMNS
from .names import DTYPES, Columns
from .names import EVENT_COLUMNS as EVENT_COLUMNS
from .names import OFFER_COLUMNS as OFFER_COLUMNS
from .names import STEP_COLUMNS as STEP_COLUMNS
from .names import WAIT_COLUMNS as WAIT_COLUMNS
from .records import (
    ALGOS,
    COLL,
    COLL_DTYPE,
    COMM,
    COMM_DTYPE,
    FLAG_CAPTURED,
    FLAG_REGISTERED,
    FLAG_SAMPLED,
    FUNCS,
    KERNEL,
    KERNEL_DTYPE,
    N_ALGOS,
    N_PROTOS,
    OFFER,
    OFFER_DTYPE,
    PROTOS,
    RECORD_BYTES,
    STEP,
    STEP_DTYPE,
    UNSET,
    WAIT,
    WAIT_DTYPE,
    names,
)
from .records import Communicator as Communicator
from .records import Offer as Offer

Array = np.ndarray[Any, Any]
Row = tuple[Any, ...]

#: Offers that are kept of one communicator and function, the newest. Sizes that follow the lengths of texts are many.
MOST_OFFERS = 2048

#: What a row that waits takes from its COLL record as it is; its rank may be -1.
_KEPT = tuple(n for n in COLL_DTYPE.names or () if n not in ("kind", "rank", "spare", "_pad"))
_NO_TIME = np.iinfo(np.int64).min
_CALL = ("comm_id", "rank", "func", "seq")  # of one process
_MIX, _29, _32 = np.uint64(0x9E3779B97F4A7C15), np.uint64(29), np.uint64(32)
_TIMES = [("pid", "i8"), ("rank", "i4"), ("start_ns", "i8"), ("end_ns", "i8")]
_PENDING = np.dtype(_TIMES + [(name, COLL_DTYPE[name]) for name in _KEPT])


#: Columns that hold names -> the names by number, and what an unset number is called.
_NAMES = {
    "func": (FUNCS, "unknown"),
    "dtype": (DTYPES, "unknown"),
    "algo": (ALGOS, "auto"),
    "proto": (PROTOS, "auto"),
}


@cache
def _texts() -> dict[str, Any]:
    """Of each such column the text of every number, as pandas strings: to take from these at every poll is far cheaper
    than to turn objects into strings."""
    import pandas as pd

    texts = {}
    for name, (known, unset) in _NAMES.items():
        all_names = [*names(range(UNSET), known), unset]
        texts[name] = pd.array(all_names, dtype="str")
    return texts


def as_records(records: Array, dtype: np.dtype[Any]) -> Array:
    """Any contiguous array of whole 128-byte records, seen as ``dtype``; shape (n,), no copy where possible.

    Raises ValueError when the bytes are not a whole number of records.
    """
    whole = np.ascontiguousarray(records)
    flat = whole.view(np.uint8).reshape(-1)
    if flat.size % RECORD_BYTES:
        raise ValueError(f"{flat.size} bytes are not a whole number of {RECORD_BYTES}-byte records")
    return flat.view(dtype)


class Assembler:
    """Joins records of all processes into tables.

    Call :meth:`add` with what each ring delivered and :meth:`take` when tables are wanted. A row waits for
    its kernel time until ``hold`` newer collectives of its process were seen, or the second optimizer step after its
    own has ended there.
    """

    def __init__(self, hold: int = 256) -> None:
        self.hold = hold
        self.comms: dict[int, Communicator] = {}
        self.offers: dict[tuple[int, str, int], Offer] = {}
        self.n_new_offers = 0  # about messages that were not among `offers`
        self._offered: dict[tuple[int, str], dict[int, None]] = {}  # of `offers`, the oldest first
        self._registering: set[int] = set()  # communicators with registered buffers
        self._pending: list[Array] = []
        self._kernels: list[tuple[Array, Array]] = []  # records, and the process of each
        self._steps: list[tuple[Array, int]] = []
        self._waits: list[tuple[Array, int]] = []
        self._last_step: dict[int, int] = {}  # pid -> newest step that has ended
        self._ended = set[int]()  # pids from which nothing more comes

    def add(self, records: Array, pid: int) -> None:
        """Take in what the ring of process ``pid`` delivered: (n,) records of mixed kinds, in ring order."""
        rows = as_records(records, COLL_DTYPE)
        kind = rows["kind"]
        coll = rows[kind == COLL]
        if coll.size:
            self._pending.append(_pending(coll, pid))
        kernel = rows[kind == KERNEL].view(KERNEL_DTYPE)
        if kernel.size:
            pids = np.full(kernel.size, pid, np.int64)
            self._kernels.append((kernel, pids))
        step = rows[kind == STEP].view(STEP_DTYPE)
        if step.size:
            self._steps.append((step, pid))
            self._last_step[pid] = int(step["step"].max())
        wait = rows[kind == WAIT].view(WAIT_DTYPE)
        if wait.size:
            self._waits.append((wait, pid))
        for row in rows[kind == COMM].view(COMM_DTYPE):
            self._add_comm(row, pid)
        for row in rows[kind == OFFER].view(OFFER_DTYPE):
            self._add_offer(row)

    def end(self, pid: int) -> None:
        """Nothing more comes from process ``pid``: its rows wait for no kernel times any more."""
        self._ended.add(pid)

    def take(self, everything: bool = False) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Events and steps that are complete since the last call, as EVENT_COLUMNS and STEP_COLUMNS tables.

        Events of one call are in the order in which they were enqueued, but one whose kernel is late leaves
        in a later call than its successors. ``everything`` also releases the rows still waiting (when the job
        has ended).
        """
        rows = np.empty(0, _PENDING)
        if self._pending:
            rows = np.concatenate(self._pending)
        self._join(rows)
        release = np.ones(len(rows), bool)
        if not everything:
            release = self._is_complete(rows)
        self._pending = [rows[~release]] if not release.all() else []
        steps = [_step_frame(records, pid) for records, pid in self._steps]
        self._steps = []
        return self._event_frame(rows[release]), joined(steps, STEP_COLUMNS)

    def take_waits(self) -> pd.DataFrame:
        """The waits that were told since the last call (WAIT_COLUMNS)."""
        waits, self._waits = self._waits, []
        return joined([_wait_frame(records, pid) for records, pid in waits], WAIT_COLUMNS)

    def held_back(self, pid: int) -> Array:
        """Stamps of the records of process ``pid`` whose rows wait for their kernel times, (n,): no table has them."""
        found = [np.empty(0, np.uint64)]
        for rows in self._pending:
            is_its = rows["pid"] == pid
            found.append(rows["stamp"][is_its])
        return np.concatenate(found)

    def _is_complete(self, rows: Array) -> Array:
        """Which rows wait for nothing more, (n,) bool."""
        complete_rows = rows["start_ns"] != _NO_TIME
        for pid in np.unique(rows["pid"]):
            of_pid = np.flatnonzero(rows["pid"] == pid)
            complete_rows[of_pid[: -self.hold]] = True
            last_step = self._last_step.get(int(pid), -1)
            two_later = rows["step"][of_pid] + np.int64(2)
            complete_rows[of_pid] |= two_later <= last_step
            complete_rows[of_pid] |= int(pid) in self._ended
        return np.asarray(complete_rows)

    def comms_frame(self) -> pd.DataFrame:
        """The communicators, one row per communicator and process (COMM_COLUMNS)."""
        rows: list[Row] = []
        for comm in self.comms.values():
            of_all = (comm.comm_id, comm.n_ranks, comm.n_nodes, comm.name)
            for rank, pid in comm.ranks.items():
                rows.append((*of_all, rank, pid))
        return _typed(rows, COMM_COLUMNS)

    def offers_frame(self) -> pd.DataFrame:
        """The offers, one row per (comm_id, func, n_bytes) (OFFER_COLUMNS)."""
        rows: list[Row] = []
        for message, offer in self.offers.items():
            own = (offer.algo, offer.proto, offer.n_pipe_ops)
            rows.append((*message, *own, offer.cost_us.ravel()))
        return _typed(rows, OFFER_COLUMNS)

    def _add_comm(self, row: np.void, pid: int) -> None:
        comm_id = int(row["comm_id"])
        if comm_id not in self.comms:
            text = bytes(row["name"]).split(b"\0", 1)[0]
            name = text.decode("utf-8", "replace")
            n_ranks = int(row["n_ranks"])
            n_nodes = int(row["n_nodes"])
            self.comms[comm_id] = Communicator(comm_id, n_ranks, n_nodes, name)
        rank = int(np.int32(row["rank"]))  # -1: NCCL has no profiler to say it
        self.comms[comm_id].ranks[rank] = pid

    def _add_offer(self, row: np.void) -> None:
        texts = _texts()
        func, algo, proto = (str(texts[name][row[name]]) for name in ("func", "algo", "proto"))
        costs = np.array(row["cost_us"], np.float32)
        costs = costs.reshape(N_ALGOS, N_PROTOS)
        comm_id = int(row["comm_id"])
        n_bytes = int(row["n_bytes"])
        message = (comm_id, func, n_bytes)
        n_pipe_ops = int(row["n_pipe_ops"])
        # Older records may come after newer ones, and buffers may be registered at any time: once so, always so.
        if row["flags"] & FLAG_REGISTERED:
            self._registering.add(comm_id)
        self.n_new_offers += self.offers.pop(message, None) is None
        self.offers[message] = Offer(costs, algo, proto, n_pipe_ops, comm_id in self._registering)
        sizes = self._offered.setdefault((comm_id, func), {})
        sizes.pop(n_bytes, None)
        sizes[n_bytes] = None
        if len(sizes) > MOST_OFFERS:
            oldest = next(iter(sizes))
            del sizes[oldest], self.offers[comm_id, func, oldest]

    def _join(self, rows: Array) -> None:
        """Write the times of all waiting kernels into ``rows``; keep the newest that found no row."""
        if not self._kernels:
            return
        records, processes = zip(*self._kernels, strict=True)
        kernels = np.concatenate(records)
        pids = np.concatenate(processes)
        found = np.zeros(len(kernels), bool)
        if len(rows):
            at = _newest_rows(rows, kernels, pids)
            found = rows["pid"][at] == pids
            for name in _CALL:
                found &= rows[name][at] == kernels[name]
            _add_times(rows, at[found], kernels[found])
        waiting = np.flatnonzero(~found)[-4 * self.hold :]
        self._kernels = [(kernels[waiting], pids[waiting])]

    def _event_frame(self, rows: Array) -> pd.DataFrame:
        import pandas as pd

        order = np.argsort(rows["enqueue_ns"], kind="stable")
        rows = rows[order]
        columns: dict[str, Any] = self._sizes(rows)
        columns["captured"] = (rows["flags"] & FLAG_CAPTURED) != 0
        unset = rows["start_ns"] == _NO_TIME
        texts = _texts()
        for name, kind in EVENT_COLUMNS.items():
            if kind == "Int64":
                values = np.where(unset, 0, rows[name])
                columns[name] = pd.arrays.IntegerArray(values, unset.copy())
            elif kind == "str":
                numbers = rows[name].astype(np.intp)
                columns[name] = texts[name].take(numbers)
            elif name not in columns:
                source = "generation" if name == "table_generation" else name
                columns[name] = rows[source].astype(kind)
        in_order = {name: columns[name] for name in EVENT_COLUMNS}
        return pd.DataFrame(in_order, copy=False)

    def _sizes(self, rows: Array) -> dict[str, Array]:
        """Ranks and nodes of each row's communicator, 0 where it was never announced."""
        n_ranks = np.zeros(len(rows), np.int32)
        n_nodes = np.zeros(len(rows), np.int32)
        for comm_id in np.unique(rows["comm_id"]):
            comm = self.comms.get(int(comm_id))
            if comm is not None:
                of_comm = rows["comm_id"] == comm_id
                n_ranks[of_comm] = comm.n_ranks
                n_nodes[of_comm] = comm.n_nodes
        return {"n_ranks": n_ranks, "n_nodes": n_nodes}


def _newest_rows(rows: Array, kernels: Array, pids: Array) -> Array:
    """For each kernel the place of the row that it may belong to, (k,); one that belongs to none gets any place."""
    keys = _keys(rows, rows["pid"])
    wanted = _keys(kernels, pids)
    order = np.argsort(keys, kind="stable")
    in_order = keys[order]
    # 'right' - 1: the newest row, should a communicator have been made anew under its old id.
    place = np.searchsorted(in_order, wanted, side="right") - 1
    place = np.maximum(place, 0)
    return np.asarray(order[place])


def _keys(records: Array, pids: Array) -> Array:
    """A hash of each record's call, of its process, (n,)."""
    columns = [pids]
    for name in _CALL:
        columns.append(records[name])
    return hash_of(columns)


def _add_times(rows: Array, at: Array, kernels: Array) -> None:
    """Widen the times of the rows at these places, (k,), by the times of the kernels, (k,)."""
    start = rows["start_ns"]
    end = rows["end_ns"]
    is_new = start[at] == _NO_TIME
    start[at[is_new]] = np.iinfo(np.int64).max
    np.minimum.at(start, at, kernels["start_ns"])
    np.maximum.at(end, at, kernels["end_ns"])


def hash_of(columns: Iterable[Array]) -> Array:
    """64-bit hash of each row of whole-number columns (n,), shape (n,): numbers sort far faster than records."""
    key: Any = np.uint64(0)
    for column in columns:
        key = key ^ (key >> _29)
        key = key ^ column.astype(np.uint64)
        key = key * _MIX
        key = key ^ (key >> _32)
    return np.asarray(key)


def complete(frame: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """``frame`` with these columns and types. Raises KeyError if one is missing."""
    return frame[list(columns)].astype(columns)


def empty(columns: Columns) -> pd.DataFrame:
    """A table with these columns and no row."""
    return _empty(tuple(columns.items())).copy()


@cache
def _empty(columns: tuple[tuple[str, str], ...]) -> pd.DataFrame:
    """Pandas takes 5 ms to make one, and each look at a job without news has three."""
    return _typed([], dict(columns))


def joined(frames: Sequence[pd.DataFrame], columns: Columns) -> pd.DataFrame:
    """Tables with these columns as one."""
    import pandas as pd

    return pd.concat(frames, ignore_index=True) if frames else empty(columns)


def _typed(rows: list[Row], columns: Columns) -> pd.DataFrame:
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(columns), dtype=object)
    return frame.astype(columns)


def _pending(coll: Array, pid: int) -> Array:
    rows = np.empty(coll.size, _PENDING)
    rows["pid"], rows["start_ns"], rows["end_ns"] = pid, _NO_TIME, _NO_TIME
    for name in ("rank", *_KEPT):
        rows[name] = coll[name]
    return rows


def _step_frame(rows: Array, pid: int) -> pd.DataFrame:
    import pandas as pd

    source = {"index": "step", "table_generation": "generation"}
    sampled = (rows["flags"] & FLAG_SAMPLED) != 0
    columns: dict[str, Any] = {"pid": pid, "sampled": sampled}
    for name in STEP_COLUMNS:
        if name not in columns:
            columns[name] = rows[source.get(name, name)]
    columns = {name: columns[name] for name in STEP_COLUMNS}
    return pd.DataFrame(columns).astype(STEP_COLUMNS)


def _wait_frame(rows: Array, pid: int) -> pd.DataFrame:
    import pandas as pd

    columns: dict[str, Any] = {"pid": pid}
    for name in ("start_ns", "end_ns"):
        columns[name] = rows[name]
    return pd.DataFrame(columns).astype(WAIT_COLUMNS)
