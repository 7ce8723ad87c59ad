"""What a tuner keeps over a search that begins anew: what was lost, what was kept, and when it looks again."""

import os
import shutil
from itertools import pairwise

import pytest
from dynamiccl.agent.daemon.account import Costs
from dynamiccl.agent.daemon.tuner import Tuner
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.envs.live import windows as live_windows
from dynamiccl.envs.live.job_ends import Closed, NothingToTune
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.nccl.run_folder import RUN_ID
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.envs.search.state import Account
from dynamiccl.traces.assemble import Assembler
from dynamiccl.traces.reasons import NotAgreeing, NotTuning, RunEnds
from dynamiccl.traces.segments import LOST, Coverage
from dynamiccl.traces.writer import TraceWriter
from fake_job import STEP_MS, FakeJob
from watched_job import WatchedJob, tuner_of


class Guard:
    """Stands in for the guard of registered buffers: it reports once each time that it is told to."""

    is_due = False

    def look(self, assembler):
        is_due, self.is_due = self.is_due, False
        return ["the job registers buffers now"] if is_due else []

    def close(self, mask):
        """Forbids nothing."""

    def may_run(self, *asked):
        return True


@pytest.fixture
def guard(monkeypatch):
    guard = Guard()
    monkeypatch.setattr(live_windows, "Guard", lambda *known: guard)
    return guard


def test_a_job_that_becomes_another_has_one_budget(guard):
    """Before: each new search had the whole budget once more, and lost all of it."""
    job = FakeJob(
        lambda decisions: STEP_MS * (1 + 0.2 * sum(not d.is_auto for d in decisions.values())), 0.001
    )
    tuner = Tuner(LiveWindows(job), make_chooser("sweep"), SearchConfig(budget=0.0005, rounds=200))
    changes = iter((0.4, 0.6))
    part = next(changes)
    tuner._begin()
    while not tuner.search.is_over:
        tuner.step()
        spent = tuner.search.state.spent
        if spent > part:
            guard.is_due, part = True, next(changes, 1e9)
    assert part == 1e9 and tuner.search.steps > job.last_step / 2
    budget_steps = 2
    one_window = 5
    assert budget_steps < tuner.search.lost < budget_steps + one_window
    costs = tuner.costs
    assert costs.budget_ms == pytest.approx(budget_steps * STEP_MS, rel=0.01)
    assert costs.search_ms == pytest.approx(tuner.search.lost * STEP_MS, rel=0.05)


def test_a_job_whose_tables_cannot_be_compared_runs_the_default_and_is_looked_at_again(monkeypatch):
    job = FakeJob(lambda decisions: STEP_MS, 0.001)
    tuner = Tuner(LiveWindows(job), make_chooser("sweep"), SearchConfig())
    why = NotTuning.UNEVEN(count=6)

    def alternate(*plan):
        raise NothingToTune(why)

    monkeypatch.setattr(job, "alternate", alternate)
    assert tuner.run().ended == why and not job.confirmed
    assert tuner.search is None and not tuner.looks_again()
    job.window({}, 2000)
    assert tuner.looks_again()


def test_a_table_that_the_next_search_adopts_is_kept_also_before_its_verdict(folder, tmp_path, guard):
    """Before: told as not kept, here and on disk; for good if the job ended there."""
    out, looks = tmp_path / "out", []

    def look(job):
        search = one.tuner.search
        if not looks and search.is_over:
            guard.is_due = True
            looks.append(job.last_step)
        has_gain = bool(looks) and not search.is_over and search.confirmed.any()
        if has_gain:
            on_disk = RunSummary.read(out)
            assert on_disk.kept and on_disk.steps_to_verdict is None and (out / "table.json").exists()
        return not has_gain

    job = WatchedJob(folder, look)
    with tuner_of(job, out) as one:
        last = one.serve()
    assert job.confirmed and last.kept and last.in_force != "default" and last.steps_to_first_gain > looks[0]


def test_ranks_that_agree_only_in_a_later_life_are_tuned_then(folder, tmp_path):
    """Before: nothing was tuned any more if the agreement was closed while the job was profiled."""
    looks = []

    def look(job):
        looks.append(job.last_step)
        return len(looks) < 400

    class Restarted(WatchedJob):
        def check(self):
            if len(looks) < 50:
                raise Closed(RunEnds.NEVER_SWITCHED(why=NotAgreeing.NO_PLUGIN(rank=3)))

    job = Restarted(folder, look)
    with tuner_of(job, tmp_path / "out") as one:
        last = one.serve()
    assert last.kept and not last.ended and job.confirmed


def test_what_an_interrupted_tuner_has_lost_counts_for_the_next_one_of_the_run(folder, tmp_path):
    """Before: forgotten where nothing had been confirmed, and the next one might lose the whole budget again."""
    out = tmp_path / "out"

    class Slower(WatchedJob):
        def _ms(self, decisions):
            return self.base_ms * (1 + 0.06 * sum(not d.is_auto for d in decisions.values()))

    def interrupt(line):
        if line.index == 8:
            raise KeyboardInterrupt

    with tuner_of(Slower(folder, lambda job: True), out) as one, pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "close", lambda remove: None)
        one.on_window = interrupt
        first = one.serve()
    assert not first.kept and first.cost_s > 0
    for fd in (one._lock, one._out_lock):
        os.close(fd)
    with tuner_of(Slower(folder, lambda job: False), out) as two:
        last = two.serve()
    lost_ms = two.tuner.search.lost * STEP_MS
    assert last.windows > first.windows and last.cost_s > first.cost_s
    assert lost_ms == pytest.approx(1e3 * (last.cost_s + last.trials_cost_s), rel=0.1)
    assert last.budget_s == pytest.approx(first.budget_s, rel=0.02)


def test_what_was_lost_before_comes_with_the_steps_that_allow_it():
    """Before: with 200 steps' budget alone, a tuner that joined late could try nothing any more."""
    account = Account()
    costs = Costs.after(RunSummary(cost_s=300.0, trials_cost_s=0.0, budget_s=2000.0), has_table=False)
    costs.hand_over(account, 500.0, 400_000)
    assert account.lost == 600 and account.spent(0.01) == pytest.approx(0.15)
    costs.hand_over(account, 500.0, 500_000)
    assert account.steps == 400_000, "once"


def test_a_run_folder_of_the_same_name_is_another_run(tmp_path):
    """Before: a tuner took over the costs of the job before, where one of this job was killed before it told any."""
    seen = []
    for _ in range(2):
        run = RunFolder.create(f"named-{os.getpid()}")
        if not seen:
            RunSummary(cost_s=7.0, windows=3).write(run.path)
        with tuner_of(WatchedJob(run, lambda job: False), tmp_path / "out") as one:
            seen.append(one.tuner.costs.windows)
        for fd in (one._lock, one._out_lock):
            os.close(fd)
        assert RunFolder(run.path).id == run.id
        shutil.rmtree(run.path)
    assert seen == [3, 0]


def test_what_a_tuner_has_lost_counts_for_the_next_one_in_whichever_folder(folder, tmp_path):
    """Before: a tuner knew of what was lost under its own --out only, and the job lost that of the others beside."""
    told = []
    for name in ("x", "y", "x"):
        job = WatchedJob(folder, lambda job: False)
        with tuner_of(job, tmp_path / name) as one, pytest.MonkeyPatch.context() as patch:
            patch.setattr(folder, "close", lambda remove: None)
            before = one.tuner.costs.windows
            told.append((before, one.serve().windows))
        for fd in (one._lock, one._out_lock):
            os.close(fd)
        (folder.path / "confirmed").unlink(missing_ok=True)
    for (_, after), (before, _) in pairwise(told):
        assert before == after > 0


def test_a_damaged_account_of_a_run_counts_as_none(folder):
    for word in ("x", "7", "[7]"):
        (folder.path / "summary.json").write_text(word)
        assert not RunSummary.read(folder.path)


def test_what_earlier_tuners_of_a_trace_have_lost_stands_in_the_summary_too(folder, tmp_path):
    """Before: the summary and the report told of a whole recording, and the trace of 500 lost records."""
    out = tmp_path / "out"
    with TraceWriter(out / "trace", {"run_id": folder.id}) as writer:
        coverage = Coverage({}, {LOST: {"a life/ring-0-1": [(20, 520)]}})
        writer.drain(Assembler(), coverage=lambda: coverage)
    job = WatchedJob(folder, lambda job: False)
    job.lost["a ring"] = 7
    with tuner_of(job, out) as one:
        assert one.serve().records_lost == 507


def test_a_run_folder_without_a_word_of_its_own_is_like_no_other(folder):
    (folder.path / RUN_ID).unlink()
    assert RunFolder(folder.path).id != RunFolder(folder.path).id
