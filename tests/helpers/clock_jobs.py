"""Random jobs of a few ranks in one process: each has a copy of the plugin, and NCCL tells each of them in its own way.

A seed says it all: which calls the program makes (alone, in groups, captured into graphs, replayed), which release of
NCCL, whether launches block, when each rank goes on, when NCCL tells of what it has launched, and when the ranks agree
on another table. What each call was answered with is compared over the ranks, and so is what the daemon would compare.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamiccl.envs.live.obedience import CallAudit
from dynamiccl.envs.nccl.agreement.protocol import CommVote, LeftOut, Vote, decide
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.shm import RunFolder, encode_table
from dynamiccl.traces.records import COLL, Decision, Rule, Table, Trial
from nccl_groups import Groups
from nccl_halves import Call
from nccl_late import LATE, HostStream
from plugin_run import offer

RELEASES = ("2.28.9", "2.29.7", "2.30.7", "2.31.2", "2.32.3")
#: In half of the jobs the host stream is behind at few moments: the ranks have agreed on tables by then.
RARELY = 0.02
COMM, OWNER, SIZE = 7, 1, 2**18
#: How often a program calls so, and the chance that a rank is asked to do something else than its next call.
KINDS = {"one": 8, "group": 3, "reduce": 2, "odd": 2, "captured": 1, "replay": 2}


@dataclass
class Job:
    """What its seed drew."""

    seed: int
    release: str
    n_ranks: int
    n_nodes: int
    blocks: bool  # launches block, so NCCL tells late of what goes over the network
    script: tuple[str, ...]
    captures_from: int  # the first call that may be captured
    late: float  # the chance that a group is told later, where NCCL tells late

    @classmethod
    def of(cls, seed: int, calls: int = 160) -> Job:
        draw = random.Random(seed)
        release = RELEASES[seed % len(RELEASES)]
        blocks = draw.random() < 0.4
        captures_from = draw.choice([0, calls // 3, calls])
        script = draw.choices(list(KINDS), list(KINDS.values()), k=calls)
        for at, kind in enumerate(script):
            if kind in ("captured", "replay") and at < captures_from:
                script[at] = "one"
        return cls(
            seed,
            release,
            draw.choice([2, 3]),
            draw.choice([2, 2, 2, 1]),
            blocks,
            tuple(script),
            captures_from,
            draw.choice([LATE, RARELY]),
        )


@dataclass
class Rank:
    """One rank: its plugin, its communicator, and how far it is."""

    number: int
    plugin: Plugin
    comm: Any
    random: random.Random
    at: int = 0
    answers: dict[int, set[int]] = field(default_factory=dict)  # channels, by place in the script
    vote: CommVote | None = None
    has_captured: bool = False

    def is_held(self) -> bool:
        """Whether its next question would wait."""
        vote = self.vote
        return vote is not None and 0 < vote.limit <= self.plugin.comms()[COMM].made


@dataclass
class Outcome:
    job: Job
    two_ways: int = 0  # calls that ranks were answered otherwise
    compared: int = 0
    under_a_trial: int = 0
    accused: str = ""  # of what the ranks or the daemon accuse the job


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def table(generation: int) -> bytes:
    """A table that is known by its channels; each fourth is empty."""
    row = Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "simple", 1 + generation % 60))
    return encode_table(Table(generation, (row,) if generation % 4 else ()))


class Run:
    """A job under way."""

    def __init__(self, job: Job, library: Path, folder: RunFolder, copies: Path) -> None:
        self.job, self.random = job, random.Random(f"moments {job.seed}")
        self.outcome, self.generation = Outcome(job), 0
        self._gone: dict[int, str] = {}
        self._round: Iterator[None] | None = None
        self.ranks = [self._rank(number, library, folder, copies) for number in range(job.n_ranks)]

    def _rank(self, number: int, library: Path, folder: RunFolder, copies: Path) -> Rank:
        copy = copies / f"{self.job.seed}-{number}.so"
        shutil.copy(library, copy)
        with variable("DYNAMICCL_RUN", str(folder.path)), variable("RANK", str(number)):
            plugin = Plugin.load(copy)
            plugin.open()
            other = Groups(copy, 8, 2, 1, number % 2, self.job.release)  # the first, on this node alone
            shape = (self.job.n_ranks, self.job.n_nodes, number, self.job.release)
            comm = Groups(copy, COMM, *shape)
        other.finalize()
        return Rank(number, plugin, comm, random.Random(f"{self.job.seed} {number}"))

    def goes(self) -> Outcome:
        """Run it to its end. A question that waits, which nobody could end, is let go and held against the clock."""
        over = threading.Event()
        watch = threading.Thread(target=self._lets_go, args=(over,))
        watch.start()
        try:
            return self._goes()
        finally:
            over.set()
            watch.join()

    def _lets_go(self, over: threading.Event) -> None:
        while not over.wait(0.05):
            for rank in self.ranks:
                if rank.plugin.waiting():
                    self.outcome.accused = "a question beyond the limit"
                    rank.plugin.lift(OWNER, 0)

    def _goes(self) -> Outcome:
        while waiting := [rank for rank in self.ranks if rank.at < len(self.job.script)]:
            able = [rank for rank in waiting if not rank.is_held()]
            if not able or self.random.random() < 0.3:
                self._agree()
            else:
                self._call(self.random.choice(able))
        for rank in self.ranks:
            if rank.comm.host_stream is not None:
                rank.comm.host_stream.catches_up()
        self._compare()
        return self.outcome

    # -- calls -----------------------------------------------------------------------------------------------------

    def _call(self, rank: Rank) -> None:
        kind, place = self.job.script[rank.at], rank.at
        sizes = random.Random(f"{self.job.seed} {place}")
        calls = [
            Call("all_gather", SIZE << sizes.randrange(3))
            for _ in range(1 + (kind == "group") * sizes.randrange(1, 4))
        ]
        if kind == "reduce":  # alone, or in one group with calls that count, before them or after
            calls = [Call("all_reduce", SIZE), *calls][: sizes.choice([1, 2])][:: sizes.choice([1, -1])]
        rank.at += 1
        if rank.random.random() < 0.1:
            rank.comm.group(
                calls, offer(ring_ll128=10, ring_simple=30), runs=False
            )  # priced alone, on this rank
        if random.Random(f"sends {self.job.seed} {rank.number} {place}").random() < 0.1:
            rank.comm.send_recv()  # of this rank: NCCL tells of their launch
        self._may_be_late(rank)
        if kind == "captured":
            self._capture(rank, calls)
        elif kind == "replay" and rank.has_captured:
            self._replay(rank, calls)
        elif kind == "odd":
            self._odd(rank, calls, sizes)
        else:
            rank.comm.answers = []
            rank.comm.group(
                calls, offer(ring_ll128=10, ring_simple=30), moment=lambda: self._in_between(rank)
            )
            rank.answers[place] = set(rank.comm.answers)

    def _odd(self, rank: Rank, calls: list[Call], draw: random.Random) -> None:
        """A group with collectives that NCCL does not launch with the others, and with sends of some ranks."""
        n_windows, n_broadcasts = draw.choice([(1, 0), (0, 1), (1, 1), (0, 2)])
        windows = [Call("all_gather", SIZE)] * n_windows
        others = [Call("broadcast", SIZE)] * n_broadcasts + calls * draw.randrange(2)
        rank.comm.answers = []
        cost, sends = offer(ring_ll128=10, ring_simple=30), rank.random.random() < 0.5
        rank.comm.group(others, cost, moment=lambda: self._in_between(rank), windows=windows, sends=sends)
        rank.answers[rank.at - 1] = set(rank.comm.answers)

    def _in_between(self, rank: Rank) -> None:
        """Between the last question of a group and its launch the ranks may agree, as between calls."""
        if rank.random.random() < 0.1:
            self._agree()

    def _may_be_late(self, rank: Rank) -> None:
        """NCCL tells late of what goes over the network, where launches block or graphs hold the communicator."""
        goes_out = self.job.n_nodes > 1 or rank.comm.profiler.mask & 64
        if rank.comm.host_stream is None and goes_out and (self.job.blocks or rank.has_captured):
            rank.comm.host_stream = HostStream(f"{self.job.seed} {rank.number}", self.job.late)

    def _capture(self, rank: Rank, calls: list[Call]) -> None:
        rank.comm.captures(calls, offer(ring_ll128=10, ring_simple=30))
        rank.has_captured = True

    def _replay(self, rank: Rank, calls: list[Call]) -> None:
        """NCCL tells of a replay where it goes over the network, from the thread of CUDA's."""
        if self.job.n_nodes > 1:
            self._may_be_late(rank)
            rank.comm.replays(calls)

    # -- the agreement ---------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """The next thing that happens in a round."""
        if self._round is None:
            self._round = self._rounds()
        next(self._round)

    def _rounds(self) -> Iterator[None]:
        while True:
            self.generation += 1
            for rank in self._shuffled():
                rank.plugin.stage(OWNER, table(self.generation))
                rank.vote = self._vote(rank)
                yield
            votes = [
                Vote(rank.number, 1, "same", {COMM: rank.vote} if rank.vote else {}) for rank in self.ranks
            ]
            steps = self.random.choice([0, 1, 2])
            decision, left_out = decide(votes, self.generation, Trial(steps), self._gone)
            self._hear(left_out)
            for rank in self._shuffled():
                if rank.vote is not None and COMM in decision.switches:
                    rank.plugin.switch(OWNER, COMM, *decision.switches[COMM])
                rank.plugin.lift(OWNER, self.generation if decision.switches else 0)
                rank.vote = None
                yield
            for _ in range(self.random.randrange(4)):
                yield

    def _shuffled(self) -> list[Rank]:
        return self.random.sample(self.ranks, len(self.ranks))

    def _vote(self, rank: Rank) -> CommVote | None:
        view = rank.plugin.comms()[COMM]
        if not view.marks:
            return None
        limit = rank.plugin.limit(OWNER, COMM, rank.random.randrange(1, 8))
        return CommVote(view.n_ranks, view.n_nodes, limit, 5.0, view.marks) if limit else None

    def _hear(self, left_out: dict[int, LeftOut]) -> None:
        for comm, one in left_out.items():
            if one.for_good:
                self._gone[comm] = one.why
                self.outcome.accused = str(one.why)

    def _compare(self) -> None:
        for place in range(len(self.job.script)):
            found = [rank.answers[place] for rank in self.ranks if place in rank.answers]
            together = set.union(set(), *found)
            if not together:  # nothing that a table decides
                continue
            self.outcome.compared += 1
            self.outcome.two_ways += len(together) > 1
            self.outcome.under_a_trial += together != {0}


def run_job(job: Job, library: Path, copies: Path) -> Outcome:
    """Run a job with this build of the plugin. Copies of it go into a folder."""
    folder = RunFolder.create()
    with ExitStack() as ends:
        ends.callback(folder.close)
        run = Run(job, library, folder, copies)
        outcome = run.goes()
        audit = CallAudit()
        for number, ring in enumerate(folder.rings()):
            rows = ring.drain()
            audit.add(rows[(rows["kind"] == COLL) & (rows["comm_id"] == COMM)], number)
        if audit.mismatches:
            outcome.accused = audit.example
        for rank in run.ranks:
            rank.comm.finalize()
    return outcome
