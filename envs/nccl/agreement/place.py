"""Where in its program a rank stands, and whether several ranks stand at the same place.

A rank's place is given by what it has done since it started: steps ended, backward passes made, and for each of its
communicators the collectives enqueued (which NCCL itself requires to be equal on all ranks that share it).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ....traces.reasons import NotAgreeing

Array = np.ndarray[Any, Any]
#: Collectives of a communicator, and a rank that counted them.
COUNT_DTYPE = np.dtype([("comm", "<u8"), ("count", "<u8"), ("rank", "<u4")])
NO_COUNTS: Array = np.zeros(0, COUNT_DTYPE)


class Progress(NamedTuple):
    """One rank's place."""

    rank: int
    backwards: int  # backward passes
    steps: int  # boundaries
    asked: int = 0  # times that NCCL has asked the tuner, on all communicators

    def farther(self, other: Progress) -> Progress:
        """The most that either has done, by each measure."""
        return Progress(self.rank, max(self.backwards, other.backwards), max(self.steps, other.steps))


class SwitchPoint(NamedTuple):
    """The first boundary at which a rank has done so much."""

    by: str  # "backwards" or "steps"
    number: int

    def reached(self, here: Progress) -> bool:
        """Whether a rank that is ``here`` is at the place or beyond it."""
        return int(getattr(here, self.by)) >= self.number


class Verdict(NamedTuple):
    """What a report of all ranks amounts to."""

    same: bool  # all at one place, as far as can be told
    same_collectives: bool  # proven by the collectives alone, whatever the steps
    words: str = ""  # which rank is elsewhere


_WORDS = {"steps": "ended {} steps", "backwards": "made {} backward passes", "asked": "begun {} collectives"}


def elsewhere(by: str, one: Progress, other: Progress) -> str:
    """How two ranks differ in the field ``by``, in words."""
    done, others = (_WORDS[by].format(getattr(where, by)) for where in (one, other))
    return NotAgreeing.OTHER_PLACE(rank=one.rank, done=done, other=other.rank, others=others)


@dataclass(frozen=True)
class Report:
    """The places of one rank or of several."""

    here: Progress  # of one of them
    odd: dict[str, Progress] = field(default_factory=dict)  # by field: a rank that differs from `here` in it
    counts: Array = field(default_factory=lambda: NO_COUNTS)  # one entry a communicator
    clash: str = ""  # two ranks that share a communicator and have counted differently
    bare: bool = False  # some rank has no counts: its NCCL has no profiler

    @classmethod
    def of(cls, here: Progress, counts: Mapping[int, int]) -> Report:
        """One rank's report; ``counts`` has its collectives by communicator, empty where nothing counts them."""
        used = sorted(
            (comm, count, here.rank) for comm, count in counts.items() if count
        )  # others may lag in making it
        return cls(here, {}, np.array(used, COUNT_DTYPE), "", not used)

    @classmethod
    def merged(cls, reports: Iterable[Report]) -> Report:
        """One report for the ranks of all of them."""
        first, *others = reports
        if not others:
            return first
        odd = dict(first.odd)
        for other in others:
            for name in _WORDS:
                if getattr(other.here, name) != getattr(first.here, name):
                    odd.setdefault(name, other.here)
                elif name in other.odd:
                    odd.setdefault(name, other.odd[name])
        every = np.concatenate([r.counts for r in (first, *others)])
        every = every[np.argsort(every["comm"], kind="stable")]
        again = every["comm"][1:] == every["comm"][:-1]
        differ = np.flatnonzero(again & (every["count"][1:] != every["count"][:-1]))
        clash = next((r.clash for r in (first, *others) if r.clash), "")
        if len(differ) and not clash:
            one, two = every[differ[0]], every[differ[0] + 1]
            counts = {"done": two["count"], "others": one["count"]}
            clash = NotAgreeing.OTHER_COUNT(rank=two["rank"], other=one["rank"], **counts)
        kept = np.concatenate([[True], ~again]) if len(every) else slice(None)
        return cls(first.here, odd, every[kept], clash, any(r.bare for r in (first, *others)))

    def verdict(self) -> Verdict:
        """Whether these ranks are at the same place."""
        words = self.clash
        for name in ("steps", "backwards"):
            if name in self.odd and not words:
                words = elsewhere(name, self.odd[name], self.here)
        proven = not self.clash and (not self.bare or "asked" not in self.odd)
        return Verdict(not words, proven, words)

    def encode(self) -> bytes:
        """For the network."""
        head = [self.here, self.odd, self.clash, self.bare]
        return json.dumps(head).encode() + b"\n" + self.counts.tobytes()

    @classmethod
    def decode(cls, raw: bytes) -> Report:
        """Inverse of :meth:`encode`. Raises ValueError."""
        head, _, counts = raw.partition(b"\n")
        here, odd, clash, bare = json.loads(head)
        where = {name: Progress(*values) for name, values in odd.items()}
        return cls(Progress(*here), where, np.frombuffer(counts, COUNT_DTYPE), clash, bare)


def one_of(reports: list[list[Any]]) -> list[Any]:
    """Many ranks' [identity, rank, what is wrong] as one: a rank that has something wrong, or differs, is named."""
    first = reports[0]
    for report in reports:
        if report[2]:
            return report
        if report[0] != first[0]:
            ranks = {"rank": report[1], "other": first[1]}
            return [first[0], report[1], NotAgreeing.NOT_ALIKE(**ranks, what=report[0], others=first[0])]
    return first
