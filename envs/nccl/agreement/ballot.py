"""What one rank says: of its own communicators in a vote, and what rank 0 has heard of it."""

from __future__ import annotations

from ..plugin.bindings import CommView, NoRoom, Plugin
from .pace import Pace
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
        self.has_news = False  # another communicator that rank 0 has not heard of

    def counts(self) -> dict[int, int]:
        """Collectives made on each communicator of this rank."""
        found = {}
        for comm, view in self._told():
            found[comm] = view.made
        return found

    def _told(self) -> list[tuple[int, CommView]]:
        """The communicators on which this rank has a word."""
        views = self._plugin.comms()
        return [(comm, view) for comm, view in views.items() if view.marks or view.no_clock]

    def staged(self, message: bytes) -> tuple[str, str]:
        """Lay a table ready; why the plugin refuses it, and why it has no room now, each empty if it does not."""
        try:
            self._plugin.stage(self._owner, message)
        except NoRoom as error:
            return "", str(error)
        except ValueError as error:
            return str(error), ""
        return "", ""

    def limits(self) -> dict[int, CommVote]:
        """Set the limits of all communicators that have a clock; the word on each, also on the others."""
        votes = {}
        for comm, view in self._told():
            vote = self._vote_on(comm, view)
            if vote.limit or vote.no_clock:
                votes[comm] = vote
        return votes

    def _vote_on(self, comm: int, view: CommView) -> CommVote:
        limit = 0
        pace = self._pace.calls_a_step(comm)
        if not view.no_clock:
            store = self._store
            answer_s = store.answer_s
            spread_s = store.lookout.spread_s()
            distance = self._pace.distance(comm, answer_s, spread_s, view.a_step)
            limit = self._plugin.limit(self._owner, comm, distance)
        rhythm = view.a_step, view.offset
        return CommVote(view.n_ranks, view.n_nodes, limit, pace, view.marks, view.no_clock, *rhythm)
