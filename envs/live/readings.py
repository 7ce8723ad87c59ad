"""How far the rings of a run were read, by this tuner and by those before it."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...traces.outside import TraceError, atomically, parse_json
from ...traces.records import COMM, OFFER
from ...traces.writer import TraceWriter

log = logging.getLogger("dynamiccl.live")

#: In the run folder: by the name of each ring, how many of its records lie in the trace; that a tuner was there.
READ, SERVED = "read", "served"


@dataclass
class Reading:
    """Of one ring."""

    before: int = 0  # records that an earlier tuner has written to its trace; it has judged them too
    read: int = 0  # records that came by until now
    lost_before: int = 0  # records that were gone when this tuner came: no fault of its own
    is_begun: bool = False  # this tuner has looked into the ring
    is_past: bool = False  # its process had ended by then, and others lived: it tells nothing of the job now
    ranks: set[int] = field(default_factory=set)  # whose steps were seen in it

    def joined(self, gone: int) -> None:
        """So many records are gone. Those that an earlier tuner should have read are lost; else nobody was there."""
        self.lost_before = min(gone, self.before) if self.before else gone

    def is_new(self, records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """(n,) bool: which records (n,) no earlier tuner has read. What a job tells once is always new."""
        newest = int(records["stamp"].max(initial=0))
        if newest < self.before and not self.read:  # another ring of that name: a process had the same number
            self.before = 0
        self.read = max(self.read, newest)
        is_told_once = np.isin(records["kind"], (COMM, OFFER))
        return np.asarray(is_told_once | (records["stamp"] > self.before) | (not self.before))


def was_served(run: Path) -> bool:
    """Whether a tuner was at this run before; from now on one was. Its path may come again, for another job."""
    mark = run / SERVED
    found = mark.exists()
    with contextlib.suppress(OSError):
        mark.touch()
    return found


class Readings:
    """Of all rings of a run folder, by their names."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.goes_on = False  # what an earlier tuner has read lies in the trace that is written now
        self.is_joining = True  # the rings are looked at for the first time
        self._by_name = self._before()
        self._lost_before: int | None = None  # records that earlier tuners lost of the trace

    def of(self, name: str) -> Reading:
        """Of one ring; a new one if it was not read before."""
        return self._by_name.setdefault(name, Reading())

    def _before(self) -> dict[str, Reading]:
        """What an earlier tuner has left; nothing where there was none, or its word is damaged."""
        try:
            known = parse_json((self._run / READ).read_text())
            return {str(name): Reading(before=int(count)) for name, count in known.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def note_lost(self, writer: TraceWriter, lost: int) -> None:
        """In the header of the trace: ``lost`` records, and those that it lacks by earlier tuners."""
        known = int(writer.header.get("records_lost") or 0)
        if self._lost_before is None:
            self._lost_before = known if self.goes_on else 0
        lost += self._lost_before
        if lost != known:
            writer.update_header(records_lost=lost)
            log.warning("%d records of the job were lost so far", lost)

    def note(self) -> None:
        """All that was read is on disk: a later tuner neither writes nor judges it again."""
        counts = {name: max(one.before, one.read) for name, one in self._by_name.items()}
        with contextlib.suppress(TraceError):
            atomically(self._run / READ, lambda draft: draft.write_text(json.dumps(counts)))
