"""Who lacks what: the plans that ranks report against the table that is wanted. Pure functions.

A communicator's plan is what its plugin will answer from its next call on (:class:`Plan`). Ranks report them in each
vote, and after a round that changed them; rank 0 keeps the last. What one member's count has passed is past for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ....traces.reasons import NotAgreeing, Why
from ..plugin.bindings import Plan


class Told(NamedTuple):
    """A communicator in a report."""

    n_ranks: int
    plan: Plan


class Report(NamedTuple):
    """What a rank has told last."""

    number: int  # it was made after this round, and before any later one in which the rank has a vote
    comms: Mapping[int, Told]


class Lack(NamedTuple):
    """A communicator that lacks what is wanted."""

    why: Why
    has_table: bool = False  # it runs another table; else NCCL decides there, or it is not known yet
    is_for_good: bool = False  # a member takes no table any more


#: The last report of each rank.
Reports = Mapping[int, Report]
#: The last round that has given each communicator a table: an older report proves nothing of it.
Rounds = Mapping[int, int]
_Members = list[tuple[int, Told]]


def lacking(
    rows: int, reports: Reports, rounds: Rounds, *, default: int = 0, may_try: bool = False
) -> dict[int, Lack]:
    """The communicators that will not answer ``rows`` (a hash as in a plan) throughout on all their members.

    ``default``: rows that leave NCCL untouched. ``may_try``: but for a trial, after which ``rows`` hold again.
    One that runs the default and of which not all members report lacks nothing: it cannot have a table.
    """
    found = {}
    for comm, members in _members_of(reports).items():
        late = _late(comm, reports, rounds)
        if (lack := _lack(members, rows, default, late, may_try)) is not None:
            found[comm] = lack
        elif late:
            found[comm] = Lack(NotAgreeing.NOT_REPORTED(rank=late[0]))
    return found


def _lack(members: _Members, rows: int, default: int, late: list[int], may_try: bool) -> Lack | None:
    now = _now(told.plan for _, told in members)
    known = {rank: told.plan for rank, told in members if rank not in late}
    other = _others(known, rows, 2**64 if may_try else now)
    if not other:
        return None
    has_table = bool(late) or _runs_table(known, default, now)
    if not has_table and len(members) < members[0][1].n_ranks:
        return None
    if stuck := [rank for rank in other if known[rank].gave_up]:
        return Lack(NotAgreeing.GAVE_UP(rank=stuck[0]), has_table, True)
    return Lack(NotAgreeing.NOT_SERVED(rank=other[0]), has_table)


def _runs_table(known: Mapping[int, Plan], default: int, now: int) -> bool:
    """Whether these plans come to a table: neither all to no rows, nor all to those of the ``default``."""
    return bool(_others(known, 0, now) and _others(known, default, now))


def _others(known: Mapping[int, Plan], rows: int, now: int) -> list[int]:
    """The ranks whose plans do not come to these rows."""
    return [rank for rank, plan in known.items() if not has(plan, rows, now)]


def has(plan: Plan, rows: int, now: int) -> bool:
    """Whether a plan comes to ``rows`` for good; ``now``: collectives made. One that was cut short counts as over."""
    tries = plan.trial and plan.last > max(now, plan.since)
    return plan.stays == rows and not tries


def mismatch(reports: Reports, rounds: Rounds) -> Why | None:
    """Which two members of a communicator would answer one collective differently; None if none do."""
    for comm, members in _members_of(reports).items():
        late = _late(comm, reports, rounds)
        plans = [(rank, told.plan) for rank, told in members if rank not in late]
        if why := differ(plans):
            return why
    return None


def differ(plans: list[tuple[int, Plan]]) -> Why | None:
    """The same of the members of one communicator, by rank."""
    now = _now(plan for _, plan in plans)
    edges = {now}
    for _, plan in plans:
        edges |= {edge for edge in (plan.since, plan.first, plan.last) if edge > now}
    for edge in edges:
        answers = [(rank, _answer(plan, edge)) for rank, plan in plans]
        known = [(rank, answer) for rank, answer in answers if answer is not None]
        for rank, answer in known[1:]:
            if answer != known[0][1]:
                return NotAgreeing.OTHER_PLANS(rank=known[0][0], other=rank, count=edge)
    return None


def _answer(plan: Plan, count: int) -> tuple[int, int] | None:
    """What answers a collective: (hash of it, where its turns begin); None: not told."""
    if plan.trial and plan.first <= count < plan.last:
        return plan.trial, plan.first
    return (plan.stays, 0) if count >= plan.since else None


def _now(plans: Iterable[Plan]) -> int:
    return max((plan.made for plan in plans), default=0)


def _members_of(reports: Reports) -> dict[int, _Members]:
    found: dict[int, _Members] = {}
    for rank, report in sorted(reports.items()):
        for comm, told in report.comms.items():
            found.setdefault(comm, []).append((rank, told))
    return found


def _late(comm: int, reports: Reports, rounds: Rounds) -> list[int]:
    """The members whose report is older than the round that is asked about."""
    asked = rounds.get(comm, 0)
    return [rank for rank, one in sorted(reports.items()) if comm in one.comms and one.number < asked]


def all_there(comm: int, reports: Reports) -> bool:
    """Whether all members of a communicator have reported it."""
    members = _members_of(reports).get(comm, [])
    return bool(members) and len(members) >= members[0][1].n_ranks
