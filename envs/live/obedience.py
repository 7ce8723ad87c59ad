"""Two checks while a job runs, on what NCCL reports of each collective: do all ranks run it alike, is a table obeyed?

Both work on the raw records and keep a bounded window of them: they cost milliseconds a second at 20,000 a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...traces.assemble import Communicator, hash_of
from ...traces.reasons import RowRefused, Why
from ...traces.records import (
    ALGOS,
    COLL_DTYPE,
    FLAG_CAPTURED,
    FUNCS,
    PROTOS,
    UNSET,
    Decision,
    Rule,
    Slot,
    Table,
    names,
    size_class,
)

Array = np.ndarray[Any, Any]

#: Point-to-point calls concern two ranks only: their sides need not agree.
_POINT_TO_POINT = [FUNCS.index(name) for name in ("send_recv", "send", "recv")]
#: What has to agree on all ranks of one collective.
_MUST_AGREE = ("algo", "proto", "n_channels", "n_bytes", "generation")
#: A row counts as obeyed when this share of its collectives ran as it says: some calls ask no tuner.
OBEYED = 0.9
#: So often may records of one rank of a communicator come before it counts as the only one on this node.
PATIENCE = 100


def _comparable(rows: Array) -> Array:
    """Without replays of captured calls, of which NCCL does not tell on each rank."""
    return rows[rows["flags"] & FLAG_CAPTURED == 0]


class CallAudit:
    """Compares each collective over the ranks whose rings lie here, as their records come in."""

    def __init__(self, window: int = 200_000) -> None:
        """``window``: most records that wait for their other ranks; older ones are let go unchecked."""
        self.window = window
        self.calls_checked = 0
        self.mismatches = 0
        self.example = ""  # the first mismatch in words
        self.is_told = False  # the tuner has withdrawn the table for it
        self._waiting = np.empty(
            0, [("key", "u8"), ("value", "u8"), ("comm_id", "u8"), ("actor", "u8"), ("row", "V128")]
        )
        self._actors: dict[int, dict[int, int]] = {}  # comm_id -> rank -> pid of its present life
        self._adds: dict[int, int] = {}  # comm_id -> how often records of it came

    def add(self, rows: Array, pid: int) -> None:
        """Take in COLL records of process ``pid``, shape (n,)."""
        rows = _comparable(rows[~np.isin(rows["func"], _POINT_TO_POINT)])
        if not len(rows):
            return
        for comm_id, rank in np.unique(rows[["comm_id", "rank"]]):
            self._note(int(comm_id), int(rank), pid)
        new = np.empty(len(rows), self._waiting.dtype)
        new["key"] = hash_of(rows[name] for name in ("comm_id", "func", "seq"))
        new["value"] = hash_of(rows[name] for name in _MUST_AGREE)
        new["comm_id"] = rows["comm_id"]
        process = np.uint64(pid) << np.uint64(32)
        new["actor"] = process | rows["rank"].astype(np.uint64)
        new["row"] = rows.view("V128")
        waiting = np.concatenate([self._waiting, new])
        self._compare(waiting[-self.window :])

    def _note(self, comm_id: int, rank: int, pid: int) -> None:
        """Records of this rank of a communicator came from process ``pid``."""
        known = self._actors.setdefault(comm_id, {})
        if known.get(rank, pid) != pid:  # the job was restarted: its former life is over
            others = self._waiting["comm_id"] != comm_id
            self._waiting = self._waiting[others]
            known.clear()
        known[rank] = pid
        self._adds[comm_id] = self._adds.get(comm_id, 0) + 1

    def _compare(self, rows: Array) -> None:
        """Check the calls that are complete, and keep the records of the others, (n,)."""
        order = np.lexsort((rows["actor"], rows["key"]))
        rows = rows[order]
        new_call = np.r_[True, rows["key"][1:] != rows["key"][:-1]]
        start = np.flatnonzero(new_call)
        call = np.cumsum(new_call) - 1
        size = np.bincount(call)
        # A rank that has the same number twice began a communicator anew under its old id: no telling which is which.
        actor = rows["actor"]
        before = np.r_[actor[:1], actor[:-1]]
        again = ~new_call & (actor == before)
        twice = np.bincount(call, again) > 0

        value = rows["value"]
        first = value[start][call]
        bad = np.bincount(call, value != first) > 0
        bad = bad & ~twice

        comms = [int(c) for c in rows["comm_id"][start]]
        expected = np.array([len(self._actors.get(c, {})) for c in comms])
        done = twice | bad | ((size >= expected) & (size > 1))
        self.calls_checked += int((done & ~twice).sum())
        if bad.any() and not self.mismatches:
            of_first = call == np.flatnonzero(bad)[0]
            self.example = _words(rows["row"][of_first])
        self.mismatches += int(bad.sum())
        # Alone on this node for long: there will never be anything to compare.
        alone = np.array([self._adds[c] > PATIENCE for c in comms])
        alone = alone & (expected < 2)
        keep = ~(done | alone)[call]
        as_they_came = np.argsort(order[keep])
        self._waiting = rows[keep][as_they_came]


@dataclass(frozen=True)
class Disobeyed:
    """A row of a table that NCCL did not follow."""

    slot: Slot
    decision: Decision
    ran: str  # what it ran mostly; "": it is not tried, since the ranks have ended in its trial

    @property
    def why(self) -> Why:
        """It is not tried again."""
        if not self.ran:
            return RowRefused.FATAL(decision=self.decision, slot=self.slot)
        return RowRefused.NOT_OBEYED(ran=self.ran, decision=self.decision, slot=self.slot)


class Obedience:
    """Compares what ran with the table of that generation."""

    def __init__(self, generations: int = 8, enough: int = 4000) -> None:
        """Keeps the last ``generations`` tables; of each ``enough`` collectives are looked at."""
        self.generations, self.enough = generations, enough
        self._tables: dict[int, tuple[Table, list[Array]]] = {}

    def expect(self, table: Table) -> None:
        """A table was published."""
        if table.rules:
            self._tables[table.generation] = (table, [])
            while len(self._tables) > self.generations:
                del self._tables[next(iter(self._tables))]

    def add(self, rows: Array) -> None:
        """Take in COLL records, shape (n,)."""
        rows = _comparable(rows)
        for generation, (_, seen) in self._tables.items():
            if sum(map(len, seen)) < self.enough:
                found = rows[rows["generation"] == generation]
                if len(found):
                    seen.append(found[: self.enough].copy())

    def verdict(self, generation: int, comms: Mapping[int, Communicator]) -> tuple[Disobeyed, ...]:
        """The rows of that table that were not followed, as far as collectives that they bear on were seen."""
        table, seen = self._tables.get(generation, (Table(), []))
        if not seen:
            return ()
        rows = np.concatenate(seen)
        unknown = Communicator(0, 0, 0, "")
        of_rows = [comms.get(int(i), unknown) for i in rows["comm_id"]]
        shape = np.array([(c.n_ranks, c.n_nodes) for c in of_rows])
        found = list[Disobeyed]()
        for rule in table.rules:
            item = _judge(rule, rows, shape)
            if item is not None:
                found.append(item)
        return tuple(found)


def _judge(rule: Rule, rows: Array, shape: Array) -> Disobeyed | None:
    of_class = rows["func"] == FUNCS.index(rule.func)
    if rule.n_ranks:
        of_class &= (shape == (rule.n_ranks, rule.n_nodes)).all(axis=1)
    asked = rows["asked_bytes"]  # of the whole group where calls are grouped; 0 = no tuner was asked
    within = (asked >= rule.min_bytes) & (asked <= rule.max_bytes)
    ours = of_class & within & (asked > 0)
    d = rule.decision
    alike = np.ones(len(rows), bool)
    if d.algo is not None and d.proto is not None:
        same_algo = rows["algo"] == ALGOS.index(d.algo)
        same_proto = rows["proto"] == PROTOS.index(d.proto)
        alike = same_algo & same_proto
    if d.n_channels:  # NCCL may use fewer, for a message that is too small for all; never more
        alike &= rows["n_channels"] <= d.n_channels
    if not ours.any() or alike[ours].mean() >= OBEYED:  # without a call in the row there is no verdict on it
        return None
    otherwise = rows[ours & ~alike]
    ran, count = np.unique(otherwise[["algo", "proto", "n_channels"]], return_counts=True)
    mostly = ran[count.argmax()]
    return Disobeyed(slot_of(rule), d, _config(mostly))


def slot_of(rule: Rule) -> Slot:
    """The slot that a row was made for."""
    return Slot(rule.n_ranks, rule.n_nodes, rule.func, size_class(rule.max_bytes))


def _config(row: np.void) -> str:
    (algo,) = names([row["algo"]], ALGOS)
    (proto,) = names([row["proto"]], PROTOS)
    return f"{algo}/{proto}/{int(row['n_channels'])}"


def _words(raw: Array) -> str:
    rows = np.ascontiguousarray(raw).view(COLL_DTYPE)
    number = int(rows["func"][0])
    func = "collective" if number == UNSET else FUNCS[number]
    views = "; ".join(
        f"rank {int(r['rank'])}: {_config(r)}, {int(r['n_bytes'])} bytes, table {int(r['generation'])}"
        for r in rows[:4]
    )
    return f"{func} {int(rows['seq'][0])}: {views}"
