"""A tuner that is told to end, or starts again: what it publishes, stores and says in that very moment."""

import os
import signal
from dataclasses import replace

import pytest
from dynamiccl.agent.daemon import daemon as daemons
from dynamiccl.agent.daemon.daemon import config_of
from dynamiccl.agent.daemon.memory import Memory
from dynamiccl.agent.daemon.stopping import ended_politely
from dynamiccl.agent.report.runs import state
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.verdict import verdict
from dynamiccl.envs.live.job_ends import Closed
from dynamiccl.envs.live.locks import Busy
from dynamiccl.envs.nccl.run_folder import STOP
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.nccl.tables import load_table
from dynamiccl.traces.reasons import RunEnds
from dynamiccl.traces.records import AUTO, Decision, Slot
from fake_job import GATHER, SCATTER, STEP_MS
from left_run import leave
from watched_job import GOOD, WatchedJob, tuner_of

BEST = {GATHER: Decision("ring", "ll128", 8), SCATTER: Decision("ring", "simple", 4)}


class OffJob(WatchedJob):
    """``reason`` is raised by each check while ``is_off``."""

    is_off, reason = False, None

    def check(self):
        if self.is_off:
            raise self.reason


class LaterJob(OffJob):
    """Its first table is kept while the search goes on."""

    def _ms(self, decisions):
        total = STEP_MS
        for slot, best in BEST.items():
            row = decisions.get(slot, AUTO)
            if not row.is_auto:
                total -= 5 * (row.algo == best.algo and row.proto == best.proto) + 5 * (row == best)
                total += 3 * (row.n_channels in (1, 2)) + 2 * (row.proto != best.proto)
        return total


@pytest.mark.parametrize(
    "reason", [Closed(RunEnds.TWO_WAYS(example="x")), Closed(RunEnds.STOPPED())], ids=["mismatch", "stop"]
)
def test_what_ends_tuning_before_the_verdict_withdraws_the_table_at_once(
    folder, tmp_path, monkeypatch, reason
):
    """Before: the table was published once more and stored as a success, and withdrawn after that, 15 s later where the
    store was slow."""
    published, stored = [], []
    leave = Memory.leave
    monkeypatch.setattr(
        Memory, "leave", lambda *told: (stored.append(bool(told[1].outcome.failure)), leave(*told))
    )
    job = LaterJob(folder, lambda job: True)
    job.reason, confirm = reason, job.confirm
    monkeypatch.setattr(job, "confirm", lambda rows: (published.append(dict(rows)), confirm(rows))[1])
    looks = iter(range(4))
    job.look = lambda job: next(looks, None) is not None
    with tuner_of(job, tmp_path / "out", tmp_path / "memory") as one:

        def tell(line):
            if job.confirmed and not one.tuner.search.is_over and not job.is_off:
                job.is_off = True
                published.clear()
                job.tables.clear()

        one.on_window = tell
        summary = one.serve()
    later = [table.rules for table in job.tables[1:]]  # the first is the window under way
    assert job.is_off and not any(published) and not any(later) and job.confirmed == {} and not summary.kept
    is_failure = RunEnds.TWO_WAYS in reason.why
    assert bool(summary.failure) == is_failure and set(stored) == {is_failure}, stored


@pytest.fixture
def kept(folder, tmp_path, monkeypatch):
    """The table that a first tuner has left in force, its results in ``out``."""
    with tuner_of(WatchedJob(folder, lambda job: False), tmp_path / "out") as one:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folder, "close", lambda remove: None)
            one.serve()
        for fd in (one._lock, one._out_lock):
            os.close(fd)
        return dict(one.job.confirmed)


@pytest.mark.parametrize("how", ["signal", "full disk"])
def test_a_second_tuner_that_ends_at_once_tells_the_table_that_is_in_force(
    folder, kept, tmp_path, monkeypatch, how
):
    """Before: NOTHING KEPT, while the job ran the table."""
    job = WatchedJob(folder, lambda job: True)
    job.confirm(kept)
    if how == "signal":
        monkeypatch.setattr(daemons, "link", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    else:

        def refuse(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(daemons, "TraceWriter", refuse)
    with tuner_of(job, tmp_path / "out") as two, ended_politely() as signals:
        last = two.serve(signals)
    assert last.kept and last.in_force != "default" and verdict(last).startswith("KEPT"), verdict(last)
    assert state(tmp_path / "out")["kept"] and job.in_force == kept


def test_ranks_that_agree_again_are_watched_again(folder, tmp_path):
    """Before: after an elastic restart nobody looked at the table any more, however slow it had become."""
    looks = []

    def look(job):
        looks.append(1)
        job.is_off = 3 <= len(looks) < 6
        if len(looks) == 6:
            job.best = None  # the table costs an eighth from here on
        return len(looks) < 400 and tuner.outcome.kept is not False

    job = OffJob(folder, look)
    job.reason = Closed(RunEnds.NO_MORE_SWITCHES(why="x"))
    with tuner_of(job, tmp_path / "out") as tuner:
        tuner.serve()
    assert len(looks) < 400 and job.confirmed == {}


OTHER_SHAPE = Slot(8, 1, "all_gather", 27)


def test_a_table_of_calls_that_the_job_does_not_make_gives_way_to_a_search(folder, tmp_path):
    """Before: NOTHING FOUND, the old rows stayed in table.json, and each window of the watch was a trial."""
    looks, said = [], []
    job = WatchedJob(folder, lambda job: looks.append(1) or len(looks) < 30)
    job.confirm({OTHER_SHAPE: GOOD})
    with tuner_of(job, tmp_path / "out") as one:
        one.on_phase = said.append
        summary = one.serve()
    assert any(text.startswith("rows dropped") and str(OTHER_SHAPE) in text for text in said), said
    assert summary.kept and verdict(summary).startswith("KEPT") and OTHER_SHAPE not in job.confirmed
    assert {rule.n_ranks for rule in load_table(tmp_path / "out" / "table.json").rules} == {GATHER.n_ranks}


def test_a_row_that_leaves_the_table_is_named(folder, tmp_path):
    """Before: it left without a word."""
    looks, said = [], []
    job = WatchedJob(folder, lambda job: looks.append(1) or len(looks) < 5)
    job.confirm({OTHER_SHAPE: GOOD, GATHER: GOOD, SCATTER: GOOD})
    with tuner_of(job, tmp_path / "out") as one:
        one.on_phase = said.append
        summary = one.serve()
    assert summary.kept and set(job.confirmed) == {GATHER, SCATTER}
    assert any(text.startswith("rows dropped") for text in said), said


def test_a_run_that_compared_nothing_hides_no_table_that_is_stored(tmp_path):
    """Before: after a run with --budget 0 the next one began from nothing, and said that it did not."""
    told = []

    def run(name, budget):
        run = RunFolder.create()
        looks = iter(range(2))
        job = WatchedJob(run, lambda job: next(looks, None) is not None)
        with tuner_of(job, tmp_path / name, tmp_path / "memory") as one:
            one.request = replace(one.request, budget=budget)
            one.tuner.config = config_of(one.request)
            one.on_phase = told.append
            summary = one.serve()
        run.close()
        return summary

    assert run("first", 0.05).kept
    told.clear()
    assert not run("watched", 0.0).kept
    assert not any("begin with" in text for text in told), told
    run("next", 0.05)
    assert any("2 of 2 slots begin with" in text for text in told), told


def test_a_tuner_that_is_refused_has_not_undone_a_stop(folder, tmp_path, monkeypatch):
    (folder.path / STOP).touch()

    def refuse(self):
        raise Busy("it belongs to a run that is not over")

    monkeypatch.setattr(daemons.Daemon, "_claim", refuse)
    asked = daemons.Request(out=tmp_path / "out", policy="expected-improvement", memory=None)
    with pytest.raises(Busy):
        daemons.Daemon(asked, folder, again=True)
    assert (folder.path / STOP).exists()


def test_a_row_of_a_small_slot_stays_when_another_tuner_joins(folder, tmp_path):
    """Before: "the job makes no such calls now", and the row was gone for good."""
    looks = []
    job = WatchedJob(folder, lambda job: looks.append(1) or len(looks) < 5)
    job.confirm({GATHER: GOOD, SCATTER: GOOD})
    with tuner_of(job, tmp_path / "out") as one:
        one.tuner.windows.min_share = 0.4  # of the gathers' share 0.4 is too much to ask
        one.serve()
    assert set(job.confirmed) == {GATHER, SCATTER}


def test_a_search_in_place_of_a_lost_table_has_its_own_figures(folder, kept, tmp_path):
    """Before: its verdict was the earlier tuner's, with that one's cost."""
    looks, said = [], []
    job = WatchedJob(folder, lambda job: looks.append(1) or len(looks) < 5)
    before = RunSummary.read(tmp_path / "out")
    leave(tmp_path / "out", replace(before, speedup=3.0, speedup_ci95=[2.9, 3.1]))
    job.confirm({OTHER_SHAPE: GOOD})
    with tuner_of(job, tmp_path / "out") as two:
        two.on_phase = said.append
        last = two.serve()
    assert last.kept and last.speedup < 2 and job.confirmed and OTHER_SHAPE not in job.confirmed
    assert any(text.startswith("verdict after") and "25." in text for text in said), said
