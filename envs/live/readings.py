"""How far the rings of a run were read, by this tuner and by those before it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...traces.assemble import Assembler
from ...traces.outside import TraceError, atomically, parse_json
from ...traces.records import COMM, OFFER
from ...traces.segments import SEGMENTED, segments
from ...traces.writer import TraceWriter
from ..nccl.rings import Ring
from ..nccl.shm import PIDS

log = logging.getLogger("dynamiccl.live")

#: In the run folder: by the words of this run's traces and the names of the rings, what came by for each trace.
READ = "read"
#: The word of a trace that a release before has begun, which knew of one trace only.
_OF_OLD = ""
_TOLD_ONCE = COMM, OFFER  # kinds that a trace may get again


@dataclass
class CameBy:
    """What one trace has got."""

    lost: int | None = None  # records that it lacks; None: its header tells
    #: By the names of the rings: how many records came by, and the stamps of those that it does not have.
    rings: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def of(self, name: str) -> tuple[int, list[int]]:
        """Of one ring."""
        return self.rings.get(name, (0, []))


@dataclass
class Reading:
    """Of one ring. A record's stamp is its number, from 1 on."""

    judged: int = 0  # records that an earlier tuner has read, for whichever trace
    before: int = 0  # those that came by for the trace that is written now
    held_back: list[int] = field(
        default_factory=list
    )  # of these the ones that it does not have: their stamps
    read: int = 0  # records that came by until now
    lost_before: int = 0  # records that were gone when this tuner came: no fault of its own
    pid: int = 0  # of its process
    is_past: bool = False  # its process had ended by then, and others lived: it tells nothing of the job now
    is_replaced: bool = False  # its process had ended when another one of the job began
    is_begun: bool = False  # this tuner has looked into the ring
    ranks: set[int] = field(default_factory=set)  # whose steps were seen in it
    named: set[int] = field(default_factory=set)  # the rank in its name, if any

    @property
    def is_present(self) -> bool:
        """Whether its process belongs to the job's present life, though it may have ended by now."""
        return self.is_begun and not self.is_past and not self.is_replaced

    def joined(self, gone: int, is_ours: bool) -> None:
        """So many records are gone after those that came by. Those that an earlier tuner should have read for this
        trace, or could not write yet, are lost. Where no earlier tuner wrote it (``is_ours``), nobody was there."""
        nobodys = gone
        if is_ours:
            nobodys = min(gone, self.before - self.read)
        newest = self.read + gone
        unwritten = sum(self.read < stamp <= newest for stamp in self.held_back)
        self.lost_before += nobodys - unwritten

    def came(self, records: np.ndarray[Any, Any]) -> None:
        """Records (n,) came by."""
        newest = int(records["stamp"].max(initial=0))
        self.read = max(self.read, newest)

    def is_unwritten(self, records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """(n,) bool: which records (n,) the trace does not have. What a job tells once is always new."""
        stamps = records["stamp"]
        is_told_once = np.isin(records["kind"], _TOLD_ONCE)
        held_back = np.array(self.held_back, np.uint64)
        is_held_back = np.isin(stamps, held_back)
        is_new = stamps > self.before
        if not self.before:
            is_new[:] = True
        return np.asarray(is_told_once | is_held_back | is_new)

    def is_unjudged(self, records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """(n,) bool: which records (n,) no earlier tuner has read."""
        is_new = records["stamp"] > self.judged
        if not self.judged:
            is_new[:] = True
        return np.asarray(is_new)


class Readings:
    """Of all rings of a run folder, by their names."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.is_joining = True  # the rings are looked at for the first time
        self.lost_before = 0  # records that the trace lacks by earlier tuners
        self._trace = ""  # the word of the trace that is written now
        self.is_ours = False  # an earlier tuner wrote it, and told what it has
        self._is_forgotten = False  # it has rows, and nobody knows which
        self._known = self._on_disk()  # by the words of the traces
        self._by_name: dict[str, Reading] = {}

    def begin_trace(self, writer: TraceWriter) -> None:
        """Before the rings are looked at. Where the trace has the word of one that an earlier tuner of this run wrote,
        what is in it is not written again."""
        self._trace = str(writer.header["trace_id"])
        self.lost_before = int(writer.header.get("records_lost") or 0)
        self.is_ours = self._trace in self._known
        lost = self._known.get(self._trace, CameBy()).lost
        if lost is not None:  # the header is ahead of it: what came since is read again, and counted
            self.lost_before = lost
        has_rows = any(segments(writer.folder, kind) for kind in SEGMENTED)
        self._is_forgotten = has_rows and not self.is_ours
        self._note_removed()

    def _note_removed(self) -> None:
        """What others have read of rings that are gone is lost to a trace that an earlier tuner wrote. To one that
        begins now it is of a time before, also later."""
        ours = self._known.setdefault(self._trace, CameBy())
        names = {name for trace in self._known.values() for name in trace.rings}
        for name in names:
            if (self._run / name).exists():
                continue
            before, held_back = ours.of(name)
            newest = self._newest(name)
            lost = newest - before + len(held_back)
            if self.is_ours:
                self.lost_before += lost
            ours.rings[name] = newest, []

    def _newest(self, name: str) -> int:
        """How many records of a ring came by, for whichever trace."""
        newest = 0
        for trace in self._known.values():
            count, _ = trace.of(name)
            newest = max(newest, count)
        return newest

    def skip_forgotten(self, reading: Reading, records: np.ndarray[Any, Any]) -> None:
        """A ring holds these records as a tuner joins. Where nobody knows any more which rows the trace
        has, these count as lost: it would have many of them twice."""
        if self._is_forgotten:
            is_told_once = np.isin(records["kind"], _TOLD_ONCE)
            stamps = records["stamp"][~is_told_once]
            reading.before = int(stamps.max(initial=0))
            self.lost_before += len(stamps)

    def of(self, name: str) -> Reading:
        """Of one ring; a new one if it was not read before."""
        if name not in self._by_name:
            self._by_name[name] = self._before(name)
        return self._by_name[name]

    def _before(self, name: str) -> Reading:
        """A ring as earlier tuners have left it."""
        judged = self._newest(name)
        ours = self._known.get(self._trace, CameBy())
        before, held_back = ours.of(name)
        return Reading(judged, before, held_back)

    def begin(self, ring: Ring, living: Sequence[Ring]) -> None:
        """A ring is looked at for the first time; ``living``: the rings whose processes live.

        A process that begins replaces all that have ended: one that lives on keeps none of them here.
        """
        reading = self.of(ring.name)
        is_alive = ring in living
        names = {one.name for one in living}
        for name, other in self._by_name.items():
            has_ended = other.is_begun and name not in names
            other.is_replaced |= is_alive and has_ended
        reading.pid = ring.pid
        reading.named = rank_in_name(ring)
        reading.is_begun = True
        reading.is_past = bool(living) and not is_alive

    def ranks(self) -> set[int]:
        """Ranks of the job's present life. A process that has told no step stands for the rank in its name."""
        found = set[int]()
        for one in self._by_name.values():
            if one.is_present:
                found |= one.ranks or one.named
        return found

    def has_stepped(self) -> bool:
        """Whether a process of the job's present life has told a step."""
        return any(one.ranks for one in self._by_name.values() if one.is_present)

    def _on_disk(self) -> dict[str, CameBy]:
        """What earlier tuners have left; nothing where there was none, or its word is damaged."""
        known: dict[str, CameBy] = {}
        try:
            text = (self._run / READ).read_text()
            for word, trace in parse_json(text).items():
                if isinstance(trace, int):  # of a release before, which has told the count of a ring
                    of_old = known.setdefault(_OF_OLD, CameBy())
                    of_old.rings[word] = trace, []
                    continue
                lost = trace["lost"]
                if lost is not None:
                    lost = int(lost)
                known[word] = CameBy(lost)
                for name, (count, held_back) in trace["rings"].items():
                    stamps = [int(stamp) for stamp in held_back]
                    known[word].rings[name] = int(count), stamps
        except (OSError, ValueError, AttributeError, TypeError, LookupError):
            return {}
        return known

    def note_lost(self, writer: TraceWriter, lost: int) -> None:
        """In the header of the trace: ``lost`` records, and those that it lacks by earlier tuners."""
        lost += self.lost_before
        told = int(writer.header.get("records_lost") or 0)
        if lost != told:
            writer.update_header(records_lost=lost)
        if lost > told:
            log.warning("%d records of the job were lost so far", lost)

    def note(self, writer: TraceWriter, assembler: Assembler, lost: int) -> None:
        """Where all rows that the writer has got are on disk: a later tuner writes none of them again, only what the
        assembler still holds back, and judges none. ``lost``: as for :meth:`note_lost`."""
        if not writer.is_all_on_disk:
            return
        came_by = self._known.setdefault(self._trace, CameBy())
        came_by.lost = lost + self.lost_before
        for name, one in self._by_name.items():
            held_back = one.held_back
            if one.is_begun:
                stamps = assembler.held_back(one.pid)
                unread = [stamp for stamp in one.held_back if stamp > one.read]
                held_back = stamps.tolist() + unread
            count = max(one.before, one.read)
            came_by.rings[name] = count, held_back
        text = json.dumps(self._known, default=vars)
        with contextlib.suppress(TraceError):
            atomically(self._run / READ, lambda draft: draft.write_text(text))

    def is_noted(self, name: str) -> bool:
        """Whether no later tuner needs the ring of that name: the trace has all that came by, or there is no trace."""
        one = self._by_name[name]
        if not self._trace and not self._known:
            return True
        ours = self._known.get(self._trace, CameBy())
        count = max(one.before, one.read)
        return ours.rings.get(name) == (count, [])


def rank_in_name(ring: Ring) -> set[int]:
    """The rank that the launcher gave a ring's process; empty where there was none: the name has the process's number
    then."""
    _, number, *_ = f"{ring.name}-".split("-")
    if not number.isdecimal():
        return set()
    own = ring.pid % PIDS
    return {int(number)} - {own}
