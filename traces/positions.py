"""Positions of records in a ring, as spans [from, to): which a segment of a trace covers, and which it lacks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Span = tuple[int, int]
Spans = list[Span]


def size_of(spans: Iterable[Span]) -> int:
    """How many positions spans have that do not overlap."""
    return sum(end - start for start, end in spans)


def spans_of(positions: Array) -> Spans:
    """Rising positions (n,) as spans.

    >>> spans_of(np.array([3, 4, 9]))
    [(3, 5), (9, 10)]
    """
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    runs = np.split(positions, breaks)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


def union(*many: Iterable[Span]) -> Spans:
    """All positions of these spans, in order and joined where they meet.

    >>> union([(5, 7), (0, 2)], [(2, 4)])
    [(0, 4), (5, 7)]
    """
    found: Spans = []
    for start, end in sorted(span for spans in many for span in spans):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def without(end: int, *many: Iterable[Span]) -> Spans:
    """The positions before ``end`` that are in none of these spans.

    >>> without(8, [(2, 4)], [(4, 5), (7, 9)])
    [(0, 2), (5, 7)]
    """
    edges = [(0, 0), *union(*many), (end, end)]
    return [(before, start) for (_, before), (start, _) in pairwise(edges) if before < min(start, end)]


def common(one: Spans, other: Spans) -> Spans:
    """The positions that are in both.

    >>> common([(0, 4), (6, 9)], [(3, 7)])
    [(3, 4), (6, 7)]
    """
    found = []
    for start, end in one:
        for first, last in other:
            if max(start, first) < min(end, last):
                found.append((max(start, first), min(end, last)))
    return found


def are_in(positions: Array, spans: Iterable[Span]) -> Array:
    """(n,) bool: which positions (n,) are in these spans."""
    joined = union(spans)
    starts = np.array([start for start, _ in joined], np.int64)
    ends = np.array([np.iinfo(np.int64).min, *(end for _, end in joined)], np.int64)
    at = np.searchsorted(starts, positions, side="right")
    return np.asarray(positions < ends[at])
