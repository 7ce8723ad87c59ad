"""The rings of a job as one tuner reads them: what is news to it, and what of them its segment of the trace covers.

What the rings held before a tuner came is history: it shows how the job stands, and is written if no earlier segment
covers it. After another tuner, it judges none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...traces.assemble import Assembler
from ...traces.positions import Spans, are_in, common, size_of, spans_of, union, without
from ...traces.records import COMM, OFFER
from ...traces.segments import LOST, UNWATCHED, Coverage, Segment
from ..nccl.rings import Ring

Array = np.ndarray[Any, Any]

_TOLD_ONCE = COMM, OFFER  # kinds of which a tuner must know, whoever has written them
_FAR = np.iinfo(np.int64).max


@dataclass
class Source:
    """One ring. A record's stamp is its position and one more; one that is told again has none."""

    ring: Ring
    since: int  # the first position that is news
    unwatched: int  # no tuner of this trace was there before that position
    is_past: (
        bool  # its process had ended when it was found, and others lived: it tells nothing of the job now
    )
    earlier: Spans  # positions that earlier segments of the trace name
    named: set[int]  # the rank in its name, if any
    ranks: set[int] = field(default_factory=set)  # whose steps were seen in it
    start: str = ""  # of the job that its process is of, see Ring.start
    stepped_at: float = 0.0  # when the first of them was seen (monotonic seconds)

    def is_unwritten(self, rows: Array) -> Array:
        """(n,) bool: which records (n,) no earlier segment has, or a tuner must know in any case."""
        positions = _positions(rows)
        if not self.earlier or positions.min(initial=_FAR) >= self.earlier[-1][1]:
            return np.ones(len(rows), bool)
        return ~are_in(positions, self.earlier) | np.isin(rows["kind"], _TOLD_ONCE)

    def is_news(self, rows: Array) -> Array:
        """(n,) bool: which records (n,) came while this tuner was there."""
        return np.asarray(_positions(rows) >= self.since)

    def gaps(self) -> tuple[Spans, Spans]:
        """The positions that this segment lacks: those of before any tuner, and those that were lost."""
        missing = without(self.ring.tail, without(self.ring.tail, self.ring.gaps), self.earlier)
        before = [(0, self.unwatched)]
        return common(missing, before), common(missing, [(self.unwatched, self.ring.tail)])

    @property
    def n_lost(self) -> int:
        """Records that were lost to this tuner."""
        return size_of(self.gaps()[1])


class Sources:
    """Of all rings of a run, by their names."""

    def __init__(self, was_tuned: bool = False) -> None:
        """``was_tuned``: a tuner was here before, and has judged what went before."""
        self._was_tuned = was_tuned
        self.is_joining = True  # the rings are looked at for the first time
        self.by_name: dict[str, Source] = {}
        self._earlier: Sequence[Segment] = ()
        self._has_begun = False  # an earlier tuner of the trace has looked at the rings
        self._gone = Coverage()

    def begin_trace(self, earlier: Sequence[Segment], gone: dict[str, int]) -> None:
        """Before the rings are looked at. ``earlier``: the segments that the trace has; ``gone``: how many records each
        ring had that is not there any more. What no segment names of it is missing. A segment without any reason is of
        a tuner that was killed before it had looked."""
        self._earlier = earlier
        self._has_begun = any(segment.coverage.gaps for segment in earlier)
        missing = {key: without(n, self._named(key)) for key, n in gone.items()}
        self._gone.gaps = {
            LOST if self._has_begun else UNWATCHED: {key: spans for key, spans in missing.items() if spans}
        }

    def _named(self, key: str) -> Spans:
        return union(*(segment.coverage.named(key) for segment in self._earlier))

    def begin(self, ring: Ring, living: Sequence[Ring]) -> Source:
        """A ring is looked at for the first time; ``living``: the rings whose processes live. Raises OSError,
        ValueError."""
        head = ring.head() if self.is_joining else 0
        since, unwatched = head if self._was_tuned else 0, 0 if self._has_begun else head
        is_past = bool(living) and ring not in living
        source = Source(ring, since, unwatched, is_past, self._named(ring.key), rank_in_name(ring))
        self.by_name[ring.name] = source
        return source

    @property
    def lost_before(self) -> int:
        """Records that the trace lacks by earlier tuners, or that went while none of this trace was there."""
        return self._gone.n_lost + sum(segment.coverage.n_lost for segment in self._earlier)

    def coverage(self, assembler: Assembler) -> Coverage:
        """What this segment has of the rings by now, but for what ``assembler`` holds back."""
        found = Coverage(gaps={UNWATCHED: {}, LOST: {}})
        for why, gaps in self._gone.gaps.items():
            found.gaps[why].update(gaps)
        for one in self.by_name.values():
            ring = one.ring
            held_back = assembler.held_back(ring.process).astype(np.int64)
            waiting = spans_of(np.sort(held_back) - 1)
            found.starts[ring.process] = one.start
            found.covers[ring.key] = without(ring.tail, ring.gaps, waiting, one.earlier)
            found.gaps[UNWATCHED][ring.key], found.gaps[LOST][ring.key] = one.gaps()
        return found

    def is_needless(self, ring: Ring, on_disk: Coverage) -> bool:
        """Whether the trace names all of a ring, from which nothing more comes."""
        one = self.by_name[ring.name]
        return not without(ring.tail, one.earlier, on_disk.named(ring.key))


def _positions(rows: Array) -> Array:
    return rows["stamp"].astype(np.int64) - 1


def rank_in_name(ring: Ring) -> set[int]:
    """The rank that the launcher gave a ring's process; empty where there was none: the name has the process's number
    then."""
    _, number, *_ = f"{ring.name}-".split("-")
    return {int(number)} - {ring.pid} if number.isdecimal() else set()
