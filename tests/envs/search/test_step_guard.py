"""What may make a step far too long is tried at few of its calls first."""

import math
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import FEW_CALLS
from dynamiccl.envs.search.interfaces import RUN, SEARCH, TRIAL, WATCH
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.search.step_guard import StepGuard
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.envs.sim.mixes import Few
from dynamiccl.envs.sim.noise import NoiseStream
from dynamiccl.traces.files import Trace
from dynamiccl.traces.queries.consistency import audit
from dynamiccl.traces.records import Decision, Slot
from dynamiccl.traces.writer import TraceWriter
from paths import HELPERS
from test_loop import after
from told_job import Told

CALLS, DARING = 16, 20


class Called(Told):
    """A job of 16 calls a slot and step, whose calls take ``times`` as long with the config that is feared."""

    calls = float(CALLS)

    def __init__(self, times):
        super().__init__(lambda configs: 0.1 * (configs == 18).any())
        self.times = times

    def measure(self, plan):
        seen = super().measure(plan)
        call_us = np.where(plan.configs == DARING, 100.0 * self.times, 100.0)
        return replace(seen, call_us=call_us)


def feared(search, slot=0):
    """The belief holds that calls of the slot may well take three times as long with the config."""
    belief, start = search.state.belief, search.state.belief.parts[slot].start
    at = start + 1 + belief.config[slot][DARING]
    belief.mean[[start, at]] = 1.0, 1.1
    belief.cov[at], belief.cov[:, at] = 0.0, 0.0
    belief.cov[at, at] = 0.5**2
    belief.touched()
    return search


@pytest.fixture
def search():
    def one(times):
        told = Called(times)
        return feared(Search(*told.begin(), Prior.load())), told

    return one


@pytest.mark.parametrize(("times", "is_feared"), [(5.0, True), (0.8, False)])
def test_few_calls_say_whether_all_may_run_so(search, times, is_feared):
    search, told = search(times)
    assert search.state.guard.needs_few_calls(0)[DARING] and not search.state.guard.needs_few_calls(0)[0]
    before = search.state.guard.risk_at_all_calls(0)[DARING]
    assert before > 0.3 and search.state.guard.risk(0)[DARING] < 0.01
    search.decide(DARING, RUN)
    plan = search.plan()
    assert (plan.kind, plan.one_of, plan.n_steps) == (SEARCH, CALLS, FEW_CALLS)
    assert plan.configs[0] == DARING and plan.others.tolist() == [0, 0]
    rounds, turn = search.state.account.rounds, search.turn
    search.record(plan, told.measure(plan))
    assert turn == 2 and search.turn == 0 and search.state.account.rounds == rounds + 1, (
        "the policy decides anew"
    )
    assert not search.state.guard.needs_few_calls(0)[DARING] and search.state.guard.windows[0, DARING] == 0
    assert (search.state.guard.risk(0)[DARING] > 0.5) == is_feared
    assert (search.state.guard.risk(0)[DARING] < 0.01) != is_feared
    search.decide(DARING, RUN)
    assert search.plan().one_of == 0


def test_a_window_without_a_measured_time_is_no_evidence(search):
    """Seen where calls come in groups: no call of the window ran the config, and then all of a step's calls did."""
    search, told = search(math.nan)
    for _ in range(3):
        search.decide(DARING, RUN)
        plan = search.plan()
        assert plan.one_of == CALLS, "never at all calls"
        search.record(plan, told.measure(plan))
        assert search.state.guard.risk(0)[DARING] > 0.3, "nor is it cheap to ask again"
    told.times = 0.8
    search.decide(DARING, RUN)
    search.record(search.plan(), told.measure(search.plan()))
    search.decide(DARING, RUN)
    assert search.plan().one_of == 0


def test_a_slot_of_few_calls_or_without_times_is_tried_whole(search):
    search, _ = search(1.0)
    search.state.job.calls[0] = 7
    assert not search.state.guard.needs_few_calls(0).any() and search.state.guard.risk(0)[DARING] > 0.3
    search.state.job.calls[0] = 8
    assert search.state.guard.needs_few_calls(0)[DARING]
    search.state.guard.has_times[0] = False
    assert not search.state.guard.needs_few_calls(0).any()


def test_a_trial_begins_with_few_calls_and_needs_no_window_beside_it():
    told = Called(0.7)
    search = feared(after(told, Prior.load()))
    left = search.trials_left
    search.decide(DARING, RUN)
    plan = search.plan()
    assert (plan.kind, plan.one_of) == (TRIAL, CALLS)
    assert plan.configs.tolist() == [DARING, 18] and plan.others.tolist() == [18, 18]
    search.record(plan, told.measure(plan))
    assert search.trials_left == left - 1 and search.plan() is None, "the policy's turn"
    search.decide(DARING, RUN)
    kinds = []
    while (plan := search.plan()) is not None and len(kinds) < 2:
        kinds.append((plan.kind, plan.one_of))
        search.record(plan, told.measure(plan))
    assert kinds == [(WATCH, 0), (TRIAL, 0)]


def test_a_step_with_few_such_calls_takes_hardly_longer():
    jobs = draw_jobs(STANDARD, np.random.default_rng(0), 20)
    none = np.zeros((20, jobs.width), int)
    slow = np.where(
        np.arange(jobs.width) == 0, np.where(jobs.mask, jobs.tables.us, 0.0)[:, :1].argmax(axis=2), none
    )
    part = Few(np.full(20, 1 / 16), none)
    default, all_, some = (jobs.step_us(*asked)[0] for asked in ((none,), (slow,), (slow, None, part)))
    worse = all_ > 1.2 * default
    assert worse.any()
    assert ((some - default)[worse] / (all_ - default)[worse] < 0.25).all()
    calls = jobs.step_us(slow, None, part)[1], jobs.step_us(slow)[1]
    assert np.array_equal(*calls, equal_nan=True), "each of them takes as long as ever"
    steps = jobs.take(slice(0, 20)).window(slow, 4, NoiseStream(0, np.arange(20), jobs.width), part)[0]
    assert (np.median(steps, axis=1)[worse] < all_[worse]).mean() > 0.8


RANK = HELPERS / "consistency_rank.py"


@pytest.mark.slow
def test_ranks_of_a_job_run_few_calls_alike(tmp_path):
    """The real plugin in an emulated job of two processes: the times of these calls, and no others, are told."""
    run, slot = RunFolder.create(), Slot(2, 1, "all_gather", 22)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, str(RANK), "60000", "60"],
            env={**os.environ, **job_env(run.path)},
            stdout=log,
            stderr=log,
        )
        job = Job(run, process, TraceWriter(tmp_path / "trace", {"emulated": True}))
    try:
        begin = time.monotonic()
        while job.last_step < 8:
            assert time.monotonic() - begin < 60
            job.rest()
        job.take_events()
        window = job.window({slot: Decision("ring", "ll", 2)}, 20, one_of=10)
        events = job.take_events()
    finally:
        process.terminate()  # torchrun ends its ranks, which a kill would leave running
        process.wait()
        run.close()
        job.writer.close()
    events = events[events["step"].isin(window.steps)]
    check = audit(events)
    assert check.calls_checked > 500 and check.mismatches == 0, check.examples
    few = events["table_generation"] == window.generation
    assert 0.05 < few.mean() < 0.15
    assert window.generation not in Trace.read(tmp_path / "trace").tables
    assert math.isfinite(window.step_ms)


class Risks:
    """How likely all configs of each slot are to make a step too slow."""

    def __init__(self, *likely):
        self.likely = likely

    def too_long(self, slot, times):
        return np.full(4, self.likely[slot])


def guard_of(*likely):
    guard = StepGuard(np.ones((len(likely), 4), bool))
    guard.belief = Risks(*likely)
    return guard


def test_a_config_that_aborted_two_windows_is_guilty():
    guard = guard_of(0.1)
    for is_guilty in (False, True):
        guard.abort(np.array([2]))
        assert guard.is_guilty[0, 2] == is_guilty
    guard.ran(np.array([2]))
    guard.abort(np.array([2]))
    assert guard.aborted[0, 2] == 2 and not guard.risk_at_all_calls(0)[2]


def test_the_likelier_of_two_new_configs_is_taken_for_the_cause():
    guard = guard_of(0.3, 0.1)
    for _ in range(2):
        guard.abort(np.array([2, 3]))
    assert guard.aborted.tolist() == [[0, 0, 2, 0], [0, 0, 0, 0]]
    assert [guard.risk_at_all_calls(slot)[slot + 2] for slot in (0, 1)] == [1.0, 0.1]
