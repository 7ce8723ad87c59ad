"""What comes of each event that is not the normal course: one table. Whoever decides reads it here.

A run always is in one of three states: under NCCL's default, under the confirmed table as it is, or under one of these
without tuning, until something begins anew. ``OPERATING.md`` shows this table.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ...traces.reasons import NotAgreeing, Reason, RowRefused, RunEnds, Why


class Holds(Enum):
    """Which table holds then."""

    DEFAULT = "NCCL's default"
    CONFIRMED = "the confirmed table, as it is"


class Until(Enum):
    """How long nothing is tuned then."""

    ANSWER = "until it is there again: the ranks are asked without end, ever more seldom"
    MADE_ANEW = "on that communicator, until it is made anew; others are tuned"
    NEXT_TUNER = "until a tuner begins on the job"
    NEXT_LIFE = "until the next life of the job"
    ASKED = "until somebody asks for it: `tune --attach RUN --again`"


class Row(NamedTuple):
    """An event, by the reasons that tell of it, and what comes of it."""

    event: str
    reasons: tuple[Reason, ...]
    holds: Holds
    until: Until


_OURS_FAILED = Row(
    "our code failed on rank 0",
    (
        NotAgreeing.FAULT,
        NotAgreeing.NO_PLUGIN,
        NotAgreeing.NO_GROUP,
        NotAgreeing.NOT_SWITCHED,
        NotAgreeing.TOO_MANY,
    ),
    Holds.CONFIRMED,
    Until.NEXT_LIFE,
)
#: A life of the job ends untuned only by the rows with NEXT_LIFE; of a communicator by those with MADE_ANEW.
TABLE: tuple[Row, ...] = (
    Row(
        "the job's store is silent or refuses",
        (NotAgreeing.LATE_STORE, NotAgreeing.NO_STORE, NotAgreeing.NOT_CONNECTED),
        Holds.CONFIRMED,
        Until.ANSWER,
    ),
    Row(
        "a rank is silent, late, frozen or gone, or has no tuner",
        (
            *(NotAgreeing.NOT_ALL_VOTED, NotAgreeing.NOT_REPORTED, NotAgreeing.NOT_SERVED),
            *(NotAgreeing.NO_COMMON_COUNT, NotAgreeing.NOTHING_COUNTED),
        ),
        Holds.CONFIRMED,
        Until.ANSWER,
    ),
    Row(
        "ranks have another version of our code or of NCCL",
        (NotAgreeing.NOT_ALIKE, RowRefused.PLUGIN_REFUSES),
        Holds.CONFIRMED,
        Until.ANSWER,
    ),
    Row(
        "NCCL gives no count (calls under graph capture keep the default), or ranks issue different calls",
        (NotAgreeing.NO_CLOCK, NotAgreeing.OTHER_CALLS),
        Holds.CONFIRMED,
        Until.MADE_ANEW,
    ),
    Row(
        "a rank gave up at its limit and decided alone",
        (NotAgreeing.GAVE_UP,),
        Holds.CONFIRMED,
        Until.MADE_ANEW,
    ),
    Row(
        "the tuner is gone: killed, interrupted, or the disk of its results is full",
        (RunEnds.INTERRUPTED, RunEnds.TERMINATED, RunEnds.CANNOT_WRITE, RunEnds.ONCE),
        Holds.CONFIRMED,
        Until.NEXT_TUNER,
    ),
    Row(
        "two ranks ran one collective in two ways (seen on a node without rank 0: run `dynamiccl stop` on rank 0's)",
        (RunEnds.TWO_WAYS, RunEnds.TWO_WAYS_STILL),
        Holds.DEFAULT,
        Until.NEXT_TUNER,
    ),
    Row("the plans of two ranks differ", (NotAgreeing.OTHER_PLANS,), Holds.DEFAULT, Until.NEXT_LIFE),
    _OURS_FAILED,
    Row(
        "`dynamiccl stop`, or the site's switch",
        (RunEnds.STOPPED, RunEnds.SWITCHED_OFF),
        Holds.DEFAULT,
        Until.ASKED,
    ),
)


def row_of(why: Why) -> Row:
    """The row of the innermost reason that has one. What nobody has foreseen counts as a failure of ours."""
    for reason in reversed(list(why)):
        for row in TABLE:
            if reason in row.reasons:
                return row
    return _OURS_FAILED


def page() -> str:
    """The table for people."""
    lines = ["| event | what holds then | nothing is tuned |", "|---|---|---|"]
    lines += [f"| {row.event} | {row.holds.value} | {row.until.value} |" for row in TABLE]
    return "\n".join(lines)
