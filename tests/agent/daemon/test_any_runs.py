"""Whatever happens to a job and its tuners, in any order: what is told, what lies on disk and what the ranks run agree,
one budget holds for all searches, and once it is quiet the job runs no table that costs."""

import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.agent.daemon import daemon as daemons
from dynamiccl.agent.daemon.daemon import config_of
from dynamiccl.agent.daemon.memory import Memory
from dynamiccl.agent.daemon.stopping import ended_politely
from dynamiccl.agent.report.runs import state
from dynamiccl.agent.report.summary import DEFAULT, RunSummary, read_object
from dynamiccl.agent.report.verdict import verdict
from dynamiccl.envs.live import windows as live_windows
from dynamiccl.envs.live.job_ends import Closed
from dynamiccl.envs.nccl.run_folder import STOP
from dynamiccl.envs.nccl.tables import DROPPED, TABLE, load_table
from dynamiccl.traces.reasons import NotAgreeing, NotTuning, RunEnds
from dynamiccl.traces.records import Slot
from fake_job import GATHER
from test_begun_anew import Guard
from test_events import told
from watched_job import GOOD, OTHER, WatchedJob, tuner_of

#: The agreement of the ranks is away for a while: what its last word was.
AWAY = (
    RunEnds.NEVER_SWITCHED(why=NotAgreeing.NO_PLUGIN(rank=3)),
    RunEnds.NO_MORE_SWITCHES(why=NotAgreeing.FAULT(rank=1, error="x")),
)
#: A row of calls that the job makes no more.
STRANGE = Slot(8, 1, "all_gather", 27)
#: The budget of a job whose tables only cost, so that searches come to its end; steps that a window may cost beyond it.
LITTLE, A_WINDOW = 0.005, 12
#: Looks of a tuner until its job is over; of the last one, in which nothing happens any more.
LOOKS, QUIET_LOOKS = 60, 400
#: Looks of the last one after which the watch has dropped a table that costs, if no search did.
WATCHED = 150


class Killed(BaseException):
    """A tuner is gone from one moment to the next."""


class AnyGuard(Guard):
    """It reports a reason."""

    def look(self, assembler):
        return [NotTuning.NOTHING() for _ in super().look(assembler)]


class AnyJob(WatchedJob):
    """``away``: why the ranks change no tables now. With ``best`` None each row of a table costs a fifth."""

    def __init__(self, run, look):
        super().__init__(run, look)
        self.away = None

    def _ms(self, decisions):
        if self.best is None:
            return self.base_ms * (1 + 0.2 * sum(not d.is_auto for d in decisions.values()))
        return super()._ms(decisions)

    def check(self):
        if (self.run.path / STOP).exists():
            raise Closed(RunEnds.STOPPED())
        if self.away is not None:
            raise Closed(self.away)
        super().check()


class World:
    """A run and its tuners, one after the other; ``rng`` says what happens, and when."""

    def __init__(self, folder, tmp_path, rng, guard):
        self.folder, self.tmp_path, self.rng, self.guard = folder, tmp_path, rng, guard
        self.job = AnyJob(folder, self.lives)
        self.job.best = None if rng.random() < 0.3 else GOOD
        self.one, self.is_quiet, self.has_changed = None, False, False
        self.n_looks = self.back_at = self.n_windows = 0
        self.saved = None  # what the ranks run as a tuner is killed
        often = self.is_another if self.job.best is None else self.has_other_best
        self.events = [self.is_slow, self.is_away, self.is_another, self.has_two_ways, self.is_stopped]
        self.events += [self.ends, often, often]

    def lives(self, job):
        search = self.one.tuner.search
        is_done = self.is_quiet and search is not None and search.is_over and self.n_looks > WATCHED
        is_done = is_done and bool(job.confirmed or job.best is None)
        return self.n_looks < (QUIET_LOOKS if self.is_quiet else LOOKS) and not is_done

    def happens(self):
        """Perhaps something, at a window or at a look of the watch."""
        rng, job = self.rng, self.job
        self.n_looks += 1
        if job.away is not None:
            job.away = None if self.n_looks >= self.back_at else job.away
        elif not self.is_quiet and rng.random() < 0.08:
            self.events[int(rng.integers(len(self.events)))]()

    def has_other_best(self):
        self.has_changed, self.job.best = True, OTHER if self.job.best == GOOD else GOOD

    def is_slow(self):
        if self.job.best is not None:  # else the budget is another one from here on
            self.job.base_ms *= float(self.rng.choice([0.7, 1.5]))

    def is_away(self):
        self.job.away = AWAY[int(self.rng.integers(2))]
        self.back_at = self.n_looks + int(self.rng.integers(1, 9))

    def is_another(self):
        self.guard.is_due = True

    def has_two_ways(self):
        self.job.audit.mismatches = 1

    def is_stopped(self):
        (self.folder.path / STOP).touch()

    def ends(self):
        """The tuner does, by a signal or from one moment to the next."""
        if self.rng.random() < 0.5:
            raise KeyboardInterrupt
        self.keep()
        raise Killed

    def agrees(self):
        """What the log says, what is on disk, and what the ranks run."""
        one, job = self.one, self.job
        summary, table = RunSummary.read(one.out), one.out / TABLE
        assert told(summary) == told(one.outcome)
        assert bool(summary.kept) == bool(job.confirmed) == state(one.out)["kept"]
        assert (summary.in_force != DEFAULT) == bool(job.confirmed)
        rows = {rule.decision for rule in load_table(table).rules} if table.exists() else set()
        assert rows == set(job.confirmed.values()), "what `apply` would run"
        written, search = read_object(one.out / "summary.json"), one.tuner.search
        if written and search is not None and search.is_over:
            assert written["kept"] == bool(job.confirmed)

    # -- a tuner -------------------------------------------------------------------------------------------------------

    def tunes(self, name):
        """A tuner from its begin to its end, whichever that is."""
        had, last, self.n_looks = dict(self.job.confirmed), None, 0
        at_once = not self.is_quiet and self.rng.random() < 0.3
        if self.rng.random() < 0.3:
            self.is_away()
        with (
            tuner_of(self.job, self.tmp_path / name, self.tmp_path / "memory") as self.one,
            pytest.MonkeyPatch.context() as patch,
        ):
            one = self.one
            assert one.tuner.costs.windows == self.n_windows, "what was lost before counts"
            if self.job.best is None:
                one.tuner.config = config_of(replace(one.request, budget=LITTLE))
            one.on_window = lambda line: self.happens()
            patch.setattr(one, "_keep_up", self.watches(one._keep_up))
            patch.setattr(self.folder, "close", lambda remove: None)
            if at_once:
                patch.setattr(daemons, "link", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            with suppress(Killed), ended_politely() as signals:
                last = one.serve(signals)
        for fd in (one._lock, one._out_lock):
            os.close(fd)
        if last is None:
            self.restore()
        else:
            self.ended(last, had if at_once else None)
        self.n_windows = RunSummary.read(one.out).windows or 0

    def watches(self, keep_up):
        def look():
            if self.one.tuner.search is not None and not self.one._closed:
                self.agrees()
            self.happens()
            keep_up()

        return look

    def ended(self, last, had):
        """``had``: the table that was in force as the tuner began, where it ended at once."""
        job, one = self.job, self.one
        assert job.in_force == job.confirmed, "the confirmed table is in force"
        assert had is None or job.confirmed == had
        self.agrees()
        assert last.speedup is None or verdict(last).startswith("KEPT") == bool(last.kept)
        assert not (last.dropped and (one.out / DROPPED).exists() and job.confirmed)
        if last.failure:
            assert not job.confirmed and job.audit.mismatches
            memory, profiles = one.memory, one.tuner.windows.profiles
            found = Memory(memory.url, memory.job, print).recall(memory.facts, profiles)
            assert all(decision.is_auto for decision in found.values()), "no job begins with it"
        if (self.folder.path / STOP).exists() and not job.is_over:
            assert not job.confirmed and last.ended

    def keep(self):
        """What is on disk as the tuner is killed."""
        backup, job = self.tmp_path / "as-it-was", self.job
        shutil.rmtree(backup, ignore_errors=True)
        shutil.copytree(self.one.out, backup / "out", symlinks=True)
        shutil.copytree(self.folder.path, backup / "run", symlinks=True)
        if (memory := self.tmp_path / "memory").exists():
            shutil.copytree(memory, backup / "memory")
        self.saved = dict(job.confirmed), job.generation

    def restore(self):
        """The rest of what it did on its way out did not happen."""
        backup, job, memory = self.tmp_path / "as-it-was", self.job, self.tmp_path / "memory"
        shutil.rmtree(self.one.out)
        shutil.copytree(backup / "out", self.one.out, symlinks=True)
        for path in (backup / "run").iterdir():
            if path.is_file() and not path.is_symlink():
                (self.folder.path / path.name).write_bytes(path.read_bytes())
        shutil.rmtree(memory, ignore_errors=True)
        if (backup / "memory").exists():
            shutil.copytree(backup / "memory", memory)
        job.confirmed, job.generation = self.saved
        job.end_of_trial()


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 30))]
)
def test_whatever_happens_what_is_told_is_what_is_so(folder, tmp_path, monkeypatch, seed):
    rng, guard = np.random.default_rng(seed), AnyGuard()
    monkeypatch.setattr(live_windows, "Guard", lambda *known: guard)
    world = World(folder, tmp_path, rng, guard)
    job = world.job
    for _ in range(int(rng.integers(1, 4))):
        world.tunes(str(rng.choice(["x", "y"])))
        (folder.path / STOP).unlink(missing_ok=True)  # as `tune --again` does
        job.away, job.audit.mismatches, job.audit.is_told, job.is_over = None, 0, False, False
        if job.confirmed and rng.random() < 0.2:
            job.confirm({STRANGE: GOOD, **({GATHER: GOOD} if rng.random() < 0.5 else {})})
    world.is_quiet = True
    world.tunes("x")
    assert job.step_ms(job.confirmed) <= job.base_ms and STRANGE not in job.confirmed
    if job.best is None:
        last = world.one.outcome
        assert last.cost_s <= last.budget_s + A_WINDOW * job.base_ms / 1e3, "one budget for all searches"
    elif not world.has_changed:
        assert set(job.confirmed.values()) == {job.best}
