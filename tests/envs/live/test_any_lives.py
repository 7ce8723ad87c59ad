"""Ranks and tuners are killed and started again at random: each record of a ring is in one segment of the trace, once,
or that segment says that it lacks it."""

import numpy as np
import pytest
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.nccl import rings
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.files import Trace
from dynamiccl.traces.positions import size_of, union
from dynamiccl.traces.records import COLL, COLL_DTYPE, STEP
from dynamiccl.traces.segments import LOST, UNWATCHED, Segment
from dynamiccl.traces.writer import TraceWriter
from ring_files import CAPACITY, RingFile, kernel, step
from test_live import Clock
from test_obedience import calls


class Killed(Exception):
    """A tuner was killed in the middle of what it did."""


class Rank:
    """A process of the job, and what it has put at each position of its ring: (kind, number)."""

    def __init__(self, folder, rank, number):
        self.ring = RingFile(folder, rank, 100 + rank, moment=number)
        self.key = f"{self.ring.life:016x}/ring-{rank}-{number}"
        self.rank, self.told, self.dropped, self.n_steps = rank, [], set(), 0

    def runs(self, rng, n_steps):
        for _ in range(n_steps):
            for _ in range(int(rng.integers(0, 4))):
                seq = len(self.told)
                row = calls(self.rank, [seq])
                row["step"] = self.n_steps
                self.put(rng, row, (COLL, seq))
                if rng.random() < 0.3:
                    self.put(rng, kernel(self.rank, seq).view(COLL_DTYPE), None)
            self.put(rng, step(self.n_steps, self.rank), (STEP, self.n_steps))
            self.n_steps += 1

    def put(self, rng, row, told):
        self.ring.put(row)
        self.told.append(told)
        if rng.random() < 0.005:  # its writer sleeps for ever
            self.ring.places["stamp"][(self.ring.head - 1) % CAPACITY] = 0
            self.dropped.add(self.ring.head - 1)


class World:
    """A run with its ranks and its tuner, which writes into one of two traces; ``rng`` says what happens."""

    def __init__(self, folder, tmp_path, clock, rng):
        self.folder, self.tmp_path, self.clock, self.rng = folder, tmp_path, clock, rng
        self.ranks, self.all, self.tuner, self.n = [], [], None, 0
        self.beside = Job(RunFolder(folder.path))  # it writes no trace, as `dynamiccl stop`
        self.traces = ["x"]
        self.begun_at = {}  # trace -> of each ring by then: how many records it had, and whether it was still there

    def restart(self, which):
        for rank in which:
            for old in [one for one in self.ranks if one.rank == rank]:
                old.ring.die()
                self.ranks.remove(old)
            self.n += 1
            new = Rank(self.folder.path, rank, self.n)
            new.ring.put()  # its file is there
            self.ranks.append(new)
            self.all.append(new)

    def begin_tuner(self, name="x"):
        if self.tuner is None:
            run = RunFolder(self.folder.path)
            part_rows = int(self.rng.choice([1, 10_000, 10_000]))
            writer = TraceWriter(self.tmp_path / name, {}, existing="resume", part_rows=part_rows)
            there = {path.name for path in self.folder.path.iterdir()}
            heads = {one.key: (one.ring.head, one.key.partition("/")[2] in there) for one in self.all}
            self.begun_at.setdefault(name, heads)
            self.tuner = Job(run, writer=writer)
            self.tuner.poll()

    def look(self, everything=False):
        if self.tuner is not None:
            self.tuner.poll()
            self.tuner.take(everything)

    def end_tuner(self):
        if self.tuner is not None:
            for _ in range(40):  # a record that was never finished holds up those behind it
                self.look()
                self.clock.now += 5
            self.look(everything=True)
            self.tuner.writer.close()
            self.tuner = None

    def kill_tuner(self, monkeypatch):
        """Between two looks, or after the parts are on disk and before they count."""
        if self.tuner is None:
            return
        if self.rng.random() < 0.5:
            with monkeypatch.context() as patch:
                patch.setattr(Segment, "write", self._dies)
                try:
                    self.look()
                    self.tuner.writer.flush()
                except Killed:
                    pass
        self.tuner = None

    @staticmethod
    def _dies(segment, folder):
        raise Killed

    def happens(self, monkeypatch):
        rng = self.rng
        match int(rng.integers(14)):
            case 0:
                self.restart([0, 1])
            case 1:
                self.restart([int(rng.integers(2))])
            case 2:
                self.kill_tuner(monkeypatch)
            case 3:
                self.end_tuner()
            case 4:
                self.begin_tuner(str(rng.choice(self.traces)))
            case 5:
                self.clock.now += 5
            case 6 | 7:
                for _ in range(int(rng.integers(1, 4))):
                    self.look()
            case 8 | 9:
                self.kill_tuner(monkeypatch)
                self.begin_tuner("x")
            case 10:
                for _ in range(3):
                    self.beside.poll()
            case _:
                for one in self.ranks:
                    one.runs(rng, int(rng.choice([1, 10, 30, 3 * CAPACITY], p=[0.5, 0.3, 0.14, 0.06])))

    def check(self, name):
        trace = Trace.read(self.tmp_path / name)
        rows = {}
        for kind, frame, number in ((COLL, trace.events, "seq"), (STEP, trace.steps, "index")):
            for pid, one in zip(frame["pid"], frame[number], strict=True):
                rows.setdefault(pid, []).append((kind, one))
        lost = 0
        for one in self.all:
            coverages = [segment.coverage for segment in trace.segments]
            covers = [c.covers.get(one.key, []) for c in coverages]
            gaps = {
                why: [c.gaps[why].get(one.key, []) for c in coverages if c.gaps] for why in (UNWATCHED, LOST)
            }
            named = [*covers, *gaps[UNWATCHED], *gaps[LOST]]
            assert union(*named) == ([(0, one.ring.head)] if one.ring.head else []), "each position is named"
            assert sum(map(size_of, named)) == one.ring.head, "once"
            has = {one.told[at] for start, end in union(*covers) for at in range(start, end)} - {None}
            process = type("Ring", (rings.Ring,), {"__init__": lambda ring: None})()
            process.life, process.name, process.pid = int(one.key[:16], 16), one.key[17:], 100 + one.rank
            assert sorted(rows.pop(process.process, [])) == sorted(has), "rows are those of the positions"
            lost += sum(map(size_of, gaps[LOST]))
            # Of what was there as the trace began: the first position that its tuner could read.
            head, is_there = self.begun_at[name].get(one.key, (0, True))
            first = (head - CAPACITY // 2 if head > CAPACITY else 0) if is_there else head
            for start, end in union(*gaps[LOST]):
                for at in range(start, end):
                    # Another trace's tuner removes rings that it has read: nobody reads them into this one.
                    is_gone = one not in self.ranks and len(self.begun_at) > 1
                    is_over = at < one.ring.head - CAPACITY // 2 or is_gone
                    assert is_over or at in one.dropped, "nothing is lost without a reason"
                    assert at >= first, "nor before the trace began"
            for start, end in union(*gaps[UNWATCHED]):
                is_dropped = end <= head and set(range(start, end)) <= one.dropped
                assert end <= first or is_dropped, "it was over before the trace began"
        assert not rows, "of no other process"
        assert trace.header.get("records_lost", 0) == lost


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 40))]
)
def test_every_record_is_in_one_segment_once_or_named_as_missing(tmp_path, folder, monkeypatch, seed):
    clock = Clock()
    monkeypatch.setattr(rings, "time", clock)
    world = World(folder, tmp_path, clock, np.random.default_rng(seed))
    world.traces += ["y"] * (seed % 4 == 0)
    world.restart([0, 1])
    for _ in range(60):
        world.happens(monkeypatch)
    world.end_tuner()
    for name in ("x", "y"):
        world.begin_tuner(name)
        world.end_tuner()
        world.check(name)
