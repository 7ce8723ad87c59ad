"""A model of the agreement around the real protocol code, to be explored exhaustively by protocol_explore.py.

:class:`Member` and :class:`Leader` of ``dynamiccl.envs.nccl.agreement.protocol`` are driven, with a network, a store,
a daemon
and a training program around them. In each state every step is taken that a rank, the daemon or bad luck could take
next.

The program of every rank: a backward pass, a collective, an optimizer step, and again. A rank may run ahead of the
others (a GPU works behind it) by ``skew`` collectives. What must hold:

* a collective runs under the same table on all ranks;
* a rank that stands at a place can always leave by itself, whatever the others do;
* from every state, once bad luck ends, a table that nobody confirmed leaves force on all ranks (:meth:`Model.settles`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dynamiccl.envs.nccl.agreement.place import Report
from dynamiccl.envs.nccl.agreement.protocol import ABORT, COMMIT, Leader, Member, Phase, Stage, Stop
from protocol_world import LEADER, MEMBER, Rank, Scope, World, at, flipped, pack, put, where_of

Move = tuple[str, World, str]  # what happened, the world after it, what is wrong with it


class Model:
    """The worlds that a scope reaches."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.bounded = True  # by the scope's numbers

    def start(self) -> World:
        """Nothing was published, no rank has done anything."""
        n = self.scope.n_ranks
        member, leader = self.scope.member(), self.scope.leader(ahead=1)
        return World((Rank(pack(member, MEMBER)),) * n, pack(leader, LEADER), up=((),) * n, down=((),) * n)

    def leader(self, w: World) -> Leader:
        """The leader in a world."""
        return self.scope.leader(*w.leader)

    def member(self, rank: Rank) -> Member:
        """A rank's member."""
        return self.scope.member(*rank.member)

    # -- every step that may come next -----------------------------------------------------------------------------

    def moves(self, w: World) -> Iterator[Move]:
        """All that can happen next."""
        for r, rank in enumerate(w.ranks):
            if rank is not None:
                yield from self._rank_moves(w, r, rank)
        if w.ranks[0] is not None:
            yield from self._leader_moves(w)
        yield from self._daemon_moves(w)
        yield from self._bad_luck(w)

    def _rank_moves(self, w: World, r: int, rank: Rank) -> Iterator[Move]:
        member, who = self.member(rank), f"rank {r}"
        if member.phase is Phase.MET:
            yield from self._tires(w, r, rank)
        elif member.phase is Phase.DOUBT:
            if r and "doubt keeps" in self.scope.broken:
                log, logs = ABORT, w.logs
            elif r and "doubt flips" in self.scope.broken:
                log, logs = COMMIT, w.logs
            else:
                logs = w.logs if member.attempt in dict(w.logs) else put(w.logs, member.attempt, ABORT)
                log = dict(logs)[member.attempt]
            member.log_read(log)
            yield f"{who} finds '{log}' in the log", self._with(w, r, flipped(rank, member))._replace(logs=logs), ""
        elif rank.owes:
            after, wrong = self._boundary(w, r, rank, rank.steps + 1)
            yield f"{who} ends step {rank.made}", after, wrong
            if r and w.skips < self.scope.skips:
                after = self._with(w, r, rank._replace(owes=False))._replace(skips=w.skips + 1)
                yield f"{who} leaves out the optimizer step {rank.made}", after, ""
        elif self._may_go_on(w, rank):
            yield self._works(w, r, rank, 1)
            if r and w.extras < self.scope.extras:
                what, after, wrong = self._works(w, r, rank, 2)
                yield what + " after a pass of its own", after._replace(extras=w.extras + 1), wrong
        if w.down[r]:
            yield from self._delivered_down(w, r, rank)
        if w.up[r] and w.ranks[0] is not None:
            yield self._delivered_up(w, r)

    def _may_go_on(self, w: World, rank: Rank) -> bool:
        slowest = min(other.made for other in w.ranks if other is not None)
        within = not self.bounded or rank.made < self.scope.steps
        return within and all(w.ranks) and rank.made <= slowest + self.scope.skew

    def _works(self, w: World, r: int, rank: Rank, passes: int) -> Move:
        """A backward pass and a collective, under the table in force."""
        made = rank.made + 1
        before = dict(w.history).get(made)
        wrong = ""
        if before is not None and before != rank.table:
            wrong = f"collective {made} runs under {rank.table!r} on rank {r}, under {before!r} elsewhere"
        after = self._with(w, r, rank._replace(made=made, owes=True, backwards=rank.backwards + passes))
        slowest = min(other.made for other in after.ranks if other is not None)
        history = tuple(entry for entry in put(w.history, made, rank.table) if entry[0] > slowest)
        return f"rank {r} makes collective {made}", after._replace(history=history), wrong

    def _boundary(self, w: World, r: int, rank: Rank, steps: int) -> tuple[World, str]:
        rank = rank._replace(owes=False, steps=steps)
        member = self.member(rank)
        stop = member.boundary(where_of(rank))
        w = self._with(w, r, rank._replace(member=pack(member, MEMBER)))
        if stop is Stop.MEET:
            w = self._send_up(w, r, ("stands", member.attempt, where_of(rank), rank.made))
        elif stop is Stop.TELL:
            w = self._send_up(w, r, ("missed", member.attempt, where_of(rank)))
        return w, ""

    def _tires(self, w: World, r: int, rank: Rank) -> Iterator[Move]:
        """The rank has stood long enough. Rank 0 needs no log unless it is being set."""
        member, leader = self.member(rank), self.leader(w)
        if r == 0:
            if leader.stage is Stage.APPOINTED:
                yield "rank 0 has waited long enough", self._lose(w, leader, "late"), ""
            return
        member.overdue()
        yield f"rank {r} has waited long enough", self._with(w, r, rank._replace(member=pack(member, MEMBER))), ""

    def _delivered_down(self, w: World, r: int, rank: Rank) -> Iterator[Move]:
        message, *rest = w.down[r]
        kind, attempt, *more = message
        member = self.member(rank)
        if kind == "prepare" and not member.is_free() and "prepares in doubt" not in self.scope.broken:
            return  # it waits in the queue until the rank trains on
        after = w._replace(down=at(w.down, r, tuple(rest)))
        wrong = ""
        if kind == "prepare":
            rank = rank._replace(staged=more[0])
            if member.is_free():
                member.prepared(attempt)
            after = self._send_up(after, r, ("staged", attempt, where_of(rank)))
        elif kind == "appoint":
            if not member.appointed(attempt, more[0]):
                after = self._send_up(after, r, ("missed", attempt, where_of(rank)))
        else:
            member.answered(attempt, more[0])
        yield f"rank {r} hears: {kind} {attempt} {more}", self._with(after, r, flipped(rank, member)), wrong

    def _delivered_up(self, w: World, r: int) -> Move:
        message, *rest = w.up[r]
        kind, attempt, *more = message
        w = w._replace(up=at(w.up, r, tuple(rest)))
        leader = self.leader(w)
        what = f"rank 0 hears from rank {r}: {kind} {attempt}"
        if attempt != leader.attempt:
            return what, w, ""
        if kind == "staged":
            return what, self._staged(w._replace(acks=put(w.acks, r, more[0])), leader), ""
        if kind == "stands":
            return what, self._stands(w._replace(stand=put(w.stand, r, tuple(more))), leader), ""
        if leader.stage is Stage.APPOINTED and "ignores who missed" not in self.scope.broken:
            return what, self._lose(w, leader, "missed"), ""
        if "ignores who missed" in self.scope.broken:
            return what, self._stands(w._replace(stand=put(w.stand, r, (more[0], -1))), leader), ""
        return what, w, ""

    # -- rank 0 ----------------------------------------------------------------------------------------------------

    def _leader_moves(self, w: World) -> Iterator[Move]:
        rank = w.ranks[0]
        assert rank is not None
        leader, member = self.leader(w), self.member(rank)
        open_ = not w.lost and (not self.bounded or leader.attempt < self.scope.attempts)
        if leader.stage is Stage.QUIET and member.is_free() and open_:
            begun = leader.next(where_of(rank))
            after = w._replace(leader=pack(leader, LEADER), acks=(), stand=())
            if begun:
                member.prepared(leader.attempt)
                after = self._with(after, 0, rank._replace(member=pack(member, MEMBER), staged=leader.message))
                after = self._send_down(after, ("prepare", leader.attempt, leader.message))
                after = self._staged(after._replace(acks=((0, where_of(rank)),)), leader)
                yield f"rank 0 announces {leader.message!r}, attempt {leader.attempt}", after, ""
            elif after != w:
                yield "rank 0 has what it wants", after, ""
        if leader.stage is Stage.COMMIT and not w.asked:
            log = dict(w.logs).get(leader.attempt, COMMIT)
            if "commits without the log" in self.scope.broken:
                log = COMMIT
            yield "the store takes rank 0's word", w._replace(logs=put(w.logs, leader.attempt, log), asked=True), ""
        elif leader.stage is Stage.COMMIT:
            log = dict(w.logs)[leader.attempt]
            if "does not obey the log" in self.scope.broken:
                log = COMMIT
            if leader.log_read(log):
                after = w._replace(leader=pack(leader, LEADER), asked=False)
                yield "rank 0 hears that it stands", self._answer(after, leader.attempt, True), ""
            else:
                yield "rank 0 finds 'abort' in the log", self._lose(w._replace(asked=False), leader, "late"), ""

    def _staged(self, w: World, leader: Leader) -> World:
        if len(w.acks) < len(w.ranks):
            return w
        (_, farthest), *others = w.acks
        for _, where in others:
            farthest = farthest.farther(where)
        place = leader.acknowledged(leader.attempt, farthest)
        w = w._replace(leader=pack(leader, LEADER))
        if place is None:
            return w
        rank = w.ranks[0]
        assert rank is not None
        member = self.member(rank)
        if not member.appointed(leader.attempt, place):
            return self._lose(w, leader, "missed")
        w = self._with(w, 0, rank._replace(member=pack(member, MEMBER)))
        return self._send_down(w, ("appoint", leader.attempt, place))

    def _stands(self, w: World, leader: Leader) -> World:
        if len(w.stand) < len(w.ranks):
            return w
        reports = []
        for r, (where, made) in w.stand:
            counts = {7: made} if self.scope.profiler and made >= 0 else {}
            where = where if self.scope.profiler else where._replace(asked=made)
            reports.append(Report.of(where._replace(rank=r), counts))
        verdict = Report.merged(reports).verdict()
        if "does not compare" in self.scope.broken:
            verdict = verdict._replace(same=True, same_collectives=True)
        if "compares steps only" in self.scope.broken:
            verdict = verdict._replace(same_collectives=True)
        if leader.arrived(leader.attempt, verdict):
            return w._replace(leader=pack(leader, LEADER))
        return self._lose(w, leader, verdict.words) if leader.stage is Stage.APPOINTED else w

    def _lose(self, w: World, leader: Leader, why: str) -> World:
        rank = w.ranks[0]
        assert rank is not None
        leader.lost(where_of(rank), why)
        leader.ahead, leader.not_before, leader.failures = 1, 0, leader.failures % 2  # any distance, any patience
        return self._answer(w._replace(leader=pack(leader, LEADER), asked=False), leader.attempt, False)

    def _answer(self, w: World, attempt: int, commit: bool) -> World:
        rank = w.ranks[0]
        assert rank is not None
        member = self.member(rank)
        member.answered(attempt, commit)
        return self._send_down(self._with(w, 0, flipped(rank, member)), ("answer", attempt, commit))

    # -- the daemon, and bad luck ----------------------------------------------------------------------------------

    def _daemon_moves(self, w: World) -> Iterator[Move]:
        if w.ranks[0] is None:
            return
        if w.published < self.scope.tables and w.daemon:
            new = f"t{w.published + 1}".encode()
            for trial in (True, False):
                after = w._replace(file=(new, trial), published=w.published + 1)
                if not trial:
                    after = after._replace(confirmed=(*w.confirmed, new))
                if not self.scope.daemon_deaths:  # then nothing comes of a delay
                    after = self._taken(after)
                yield f"the daemon publishes {new!r}, {'a trial' if trial else 'confirmed'}", after, ""
        if w.file is not None:
            yield "rank 0 sees what was published", self._taken(w), ""
            if w.file[1] and not w.daemon:
                stale = (w.file[0] if "keeps what a dead daemon tried" in self.scope.broken else w.confirmed[-1]), False
                yield "rank 0 sees the trial of a daemon that is gone", self._taken(w._replace(file=stale)), ""
        if w.daemon and w.daemon_deaths < self.scope.daemon_deaths:
            yield "the daemon dies", w._replace(daemon=False, daemon_deaths=w.daemon_deaths + 1), ""
        if not w.daemon:
            back = w._replace(daemon=True, file=(w.confirmed[-1], False))
            yield "a daemon comes back and goes on with what was confirmed", back, ""
        leader = self.leader(w)
        if leader.trial and leader.wanted_trial:
            yield "the lease runs out", self._expired(w), ""
        if self.scope.closes and not leader.closing:
            leader.close("patience is at an end")
            yield "rank 0 closes", w._replace(leader=pack(leader, LEADER)), ""

    def _taken(self, w: World) -> World:
        """Rank 0 has read what the daemon has published last."""
        leader = self.leader(w)
        assert w.file is not None
        leader.want(*w.file)
        return w._replace(leader=pack(leader, LEADER), file=None)

    def _expired(self, w: World) -> World:
        leader = self.leader(w)
        leader.expire()
        return w._replace(leader=pack(leader, LEADER))

    def _bad_luck(self, w: World) -> Iterator[Move]:
        if not w.lost and w.breaks < self.scope.breaks:
            yield "the network is lost", w._replace(lost=True, breaks=w.breaks + 1), ""
        if w.lost and all(w.ranks):
            yield "the network is open again", self._reopened(w), ""
        if sum(rank is None for rank in w.ranks) < self.scope.deaths:
            for r, rank in enumerate(w.ranks):
                if rank is not None:
                    yield f"rank {r} dies", w._replace(ranks=at(w.ranks, r, None), lost=True), ""

    def _reopened(self, w: World) -> World:
        ranks = []
        for rank in w.ranks:
            assert rank is not None
            member = self.member(rank)
            member.disconnected()
            ranks.append(rank._replace(member=pack(member, MEMBER)))
        leader = self.leader(w)
        leader.disconnected()
        n = len(w.ranks)
        w = w._replace(ranks=tuple(ranks), leader=pack(leader, LEADER), up=((),) * n, down=((),) * n, lost=False)
        first = self.member(ranks[0])
        if first.phase is Phase.MET and leader.stage is Stage.QUIET:  # what rank 0 waited for will not come
            first.answered(first.attempt, False)
            w = self._with(w, 0, ranks[0]._replace(member=pack(first, MEMBER)))
        return w

    # -- what must come to pass ------------------------------------------------------------------------------------

    def is_stuck(self, w: World) -> str:
        """A rank that stands and has no way to leave by itself: its own moves, or for rank 0 those of the leader."""
        for r, rank in enumerate(w.ranks):
            if rank is None or self.member(rank).phase not in (Phase.MET, Phase.DOUBT):
                continue
            silent = w._replace(down=((),) * len(w.ranks), up=((),) * len(w.ranks))
            leaves = any(after != silent for _, after, _ in self._rank_moves(silent, r, rank))
            if not leaves and not (r == 0 and [*self._leader_moves(w)]):
                return f"rank {r} stands for ever"
        return ""

    def settles(self, w: World, known: Callable[[World], bool], steps: int = 40) -> tuple[list[World], str]:
        """Let all go well from here on, without a daemon: the worlds on the way, and what is wrong at the end."""
        self.bounded, path = False, []
        try:
            if not all(w.ranks):
                return path, ""
            for _ in range(steps * 20):
                if known(w):
                    return path, ""
                path.append(w)
                after, wrong = self._best(w)
                if wrong:
                    return path, wrong
                if after is None or min(rank.made for rank in after.ranks if rank) > self.scope.steps + steps:
                    break
                w = after
        finally:
            self.bounded = True
        tables = {rank.table for rank in w.ranks if rank}
        if len(tables) > 1 or tables.pop() not in w.confirmed:
            now = [rank and rank.table for rank in w.ranks]
            return path, f"the tables stay {now}, the leader is at {self.leader(w)}"
        return path, ""

    def _best(self, w: World) -> tuple[World | None, str]:
        """The next world when nothing goes wrong: messages and the leader first, then the rank that is behind."""
        leader = self.leader(w)
        if w.lost:
            return self._reopened(w), ""
        if w.file is not None:
            return self._taken(w), ""
        if leader.trial and leader.wanted_trial and "ignores the lease" not in self.scope.broken:
            return self._expired(w), ""
        for _, after, wrong in self._leader_moves(w):
            return after, wrong
        order = sorted(range(len(w.ranks)), key=lambda r: (w.ranks[r].made, not w.ranks[r].owes))  # type: ignore
        for r in order:
            rank = w.ranks[r]
            assert rank is not None
            if w.up[r]:
                return self._delivered_up(w, r)[1:]
            for _, after, wrong in self._delivered_down(w, r, rank) if w.down[r] else ():
                return after, wrong
        for r in order:
            rank = w.ranks[r]
            assert rank is not None
            for _, after, wrong in self._rank_moves(w, r, rank) if self.member(rank).phase is not Phase.MET else ():
                return after, wrong
        for r in order:
            rank = w.ranks[r]
            assert rank is not None
            for _, after, wrong in self._tires(w, r, rank) if self.member(rank).phase is Phase.MET else ():
                return after, wrong
        return None, ""

    def _with(self, w: World, r: int, rank: Rank) -> World:
        return w._replace(ranks=at(w.ranks, r, rank))

    def _send_up(self, w: World, r: int, message: tuple[Any, ...]) -> World:
        if w.lost:
            return w
        if r == 0:  # rank 0 hears itself at once
            return self._delivered_up(w._replace(up=at(w.up, 0, (message,))), 0)[1]
        return w._replace(up=at(w.up, r, (*w.up[r], message)))

    def _send_down(self, w: World, message: tuple[Any, ...]) -> World:
        if w.lost:
            return w
        return w._replace(down=tuple((*queue, message) if r else () for r, queue in enumerate(w.down)))
