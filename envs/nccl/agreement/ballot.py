"""What one rank says of its own communicators: in a vote, and in a report of their plans."""

from __future__ import annotations

from collections.abc import Mapping

from ....traces.reasons import Why
from ..plugin.bindings import CommView, NoRoom, Plan, Plugin, Refused
from ..shm import rows_hash
from .pace import Pace
from .plans import Told
from .protocol import CommVote
from .store import RoundStore


class Ballot:
    """Of one agreement: ``owner`` is its number in the plugin."""

    def __init__(self, plugin: Plugin, owner: int, pace: Pace, store: RoundStore) -> None:
        self._plugin = plugin
        self._owner = owner
        self._pace = pace
        self._store = store
        self.comms: frozenset[int] = frozenset()  # communicators that were seen
        self.is_here = False  # this rank has presented itself in this life
        self.reported: dict[int, Plan] = {}  # rank 0 was told these plans, but for their counts

    def plans(self) -> dict[int, Told]:
        """The communicators on which this rank has a word, and what each will answer."""
        return {comm: Told(view.n_ranks, view.plan) for comm, view in self._told()}

    def _told(self) -> list[tuple[int, CommView]]:
        views = self._plugin.comms()
        return [(comm, view) for comm, view in views.items() if view.marks or view.no_clock]

    def has_news(self, plans: Mapping[int, Told], is_quiet: bool) -> bool:
        """Whether rank 0 shall hear of these plans though no round has changed them: of another communicator at once,
        of a trial that is over once no rounds run."""
        now = _without_counts(plans)
        return bool(now.keys() - self.reported.keys()) or (is_quiet and now != self.reported)

    def was_told(self, plans: Mapping[int, Told]) -> None:
        """Rank 0 has these plans."""
        self.reported = _without_counts(plans)

    def staged(self, message: bytes) -> tuple[Why | None, Why | None]:
        """Lay a table ready; why the plugin refuses it, and why it has no room now, each None if it does not."""
        try:
            self._plugin.stage(self._owner, message)
        except NoRoom as error:
            return None, error.why
        except Refused as error:
            return error.why, None
        return None, None

    def limits(self, message: bytes, again: bool) -> dict[int, CommVote]:
        """Set the limits of all communicators that have a clock; the word on each, also on the others.

        ``again``: the table was led before. What has its rows to stay sets no limit: nothing changes there.
        """
        votes, rows = {}, rows_hash(message)
        for comm, view in self._told():
            plan = view.plan
            keeps = again and plan.stays == rows and plan.last <= plan.since
            votes[comm] = self._vote_on(comm, view, keeps)
        return votes

    def _vote_on(self, comm: int, view: CommView, keeps: bool) -> CommVote:
        limit = 0
        pace = self._pace.calls_a_step(comm)
        if not (view.no_clock or keeps):
            store = self._store
            answer_s = store.answer_s
            spread_s = store.lookout.spread_s()
            distance = self._pace.distance(comm, answer_s, spread_s, view.a_step)
            limit = self._plugin.limit(self._owner, comm, distance)
        rhythm = view.a_step, view.offset
        told = view.marks, view.no_clock
        return CommVote(view.n_ranks, view.n_nodes, limit, pace, *told, *rhythm, view.plan, keeps, view.steps)


def _without_counts(plans: Mapping[int, Told]) -> dict[int, Plan]:
    found = {}
    for comm, (_, plan) in plans.items():
        found[comm] = plan._replace(made=0) if plan.tries else plan._replace(made=0, trial=0, first=0, last=0)
    return found
