"""The switch of all ranks to the next table, proven by exploring every state of the real protocol code.

Here small scopes, mutations and the soundness of what the explorer leaves out; the whole scope (three ranks, three
tables, a crash, a fault, a late joiner, a daemon that dies and comes back, jobs of any length) takes minutes:
``python tests/protocol_explore.py``, or ``make model-check``.
"""

from dataclasses import replace

import pytest
from dynamiccl.envs.nccl.protocol import NO_TABLE, STOP, Member, State
from protocol_explore import digest, explore
from protocol_model import Explorer, Scope


@pytest.mark.parametrize(
    "scope",
    [
        Scope(deaths=0, faults=0, restarts=0),
        Scope(n_ranks=2, generations=1),
        Scope(generations=1, restarts=0, skew=1),
    ],
    ids=[
        "three healthy ranks and a late one",
        "two ranks and everything that can fail",
        "three ranks, fault and death",
    ],
)
def test_no_interleaving_lets_two_ranks_differ(scope):
    result = explore(scope)
    print(f"{result.states} states, {result.transitions} transitions, {result.switched} states under a table")
    assert not result.violation, "\n" + result.story()
    assert result.switched > 0.1 * result.states


class FlipsAlone(Member):
    """Mutation: rank 0 does not wait for the round that carries the table."""

    def boundary(self, wanted: bytes = NO_TABLE) -> None:
        super().boundary(wanted)
        if self.wanted:
            self.active = self.wanted

    def received(self, message: bytes) -> None:
        super().received(self.wanted or message)


class KeepsTheOldTable(Member):
    """Mutation: a rank whose wait fails stops where it is and does not ask the log."""

    def failed(self) -> None:
        self.state = State.STOPPED


class SendsBeforeTheLog(Member):
    """Mutation: rank 0 sends the table although a rank has closed the log."""

    def committed(self, log: str) -> None:
        self.last, self.sent, self.state = self.round + 1, self.wanted, State.TRAINING


class ReplaysTooSoon(Member):
    """Mutation: a rank that fails to begin a round takes its outcome at once, not at the boundary where it is due."""

    def failed(self) -> None:
        super().failed()
        self.due = True


MUTANTS = (FlipsAlone, KeepsTheOldTable, SendsBeforeTheLog, ReplaysTooSoon)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_protocol_is_refuted(mutant):
    result = explore(Scope(n_ranks=2, generations=2, member=mutant))
    print(f"{mutant.__name__}:\n{result.story()}")
    assert "another rank" in result.violation[-1] and len(result.violation) < 40


def test_a_daemon_that_forgets_a_half_written_table_is_refuted():
    result = explore(Scope(n_ranks=2, reads_torn=False))
    assert result.violation[-1] == "there are two tables 1", result.story()
    assert any("the daemon dies" in step for step in result.violation)


def test_a_rank_that_waits_for_ever_is_found():
    class Waits(Member):
        def log_closed(self, log: str) -> None:
            self.state = State.LOG_TABLE if self.rank else State.WAIT
            self.due = True

    result = explore(Scope(n_ranks=2, generations=1, deaths=0, restarts=0, member=Waits))
    assert result.violation


def tables_seen(scope: Scope) -> set:
    """What the ranks can run under together: (is it rank 0, its table) of all that are between two boundaries."""
    explorer = Explorer(scope)
    start = explorer.start()
    seen, frontier, found = {digest(start)}, [start], set()
    while frontier:
        world = frontier.pop()
        members = [explorer.fields[m] for m, _ in world.ranks if m >= 0]
        found.add(tuple(sorted((first, active) for first, _, _, active, *_ in members)))
        for _, after, wrong in explorer.moves(world):
            assert not wrong
            after = explorer.canonical(after) if scope.reduce else after
            if (key := digest(after)) not in seen:
                seen.add(key)
                frontier.append(after)
    return found


def test_merging_and_leaving_out_loses_nothing():
    """Against the plain search of jobs of three steps: nothing merged, every order taken."""
    small = Scope(n_ranks=2, generations=2, restarts=0, late=False, skew=2)
    plain = replace(small, reduce=False, boundaries=4)
    assert tables_seen(plain) <= tables_seen(small)
    assert explore(small).ends >= explore(plain).ends
    for mutant in MUTANTS:
        assert explore(replace(plain, member=mutant, boundaries=5)).violation, mutant
        assert explore(replace(small, member=mutant)).violation, mutant


def test_stop_is_not_a_table():
    member = Member(1, 2, State.WAIT, round=1, due=True)
    member.received(STOP)
    assert member.state is State.STOPPED and member.active == NO_TABLE
