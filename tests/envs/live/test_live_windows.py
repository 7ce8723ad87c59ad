"""The windows of a running job, and Live-v0 on them: slots from default steps, decisions out, durations back."""

from itertools import count

import dynamiccl  # noqa: F401
import gymnasium as gym
import numpy as np
import pytest
from dynamiccl.agent.policies.rule import ExpectedImprovement
from dynamiccl.envs.live.job import Window
from dynamiccl.envs.live.job_ends import Closed, JobEnded, NothingToTune
from dynamiccl.envs.live.turns import CURRENT, Turns
from dynamiccl.envs.live.turns import TRIAL as TRIAL_ARM
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.live_env import LiveEnv
from dynamiccl.envs.search.belief.prior import Prior
from dynamiccl.envs.search.config import HORIZON
from dynamiccl.envs.search.interfaces import LEAVE, RUN, SEARCH, TABLE, TRIAL, WATCH, Plan, actions_of
from dynamiccl.envs.search.search import Search
from dynamiccl.envs.sim.jobs import STANDARD, draw_jobs
from dynamiccl.envs.sim.windows import OneJob, SimWindows
from dynamiccl.traces.reasons import NotTuning, RunEnds
from dynamiccl.traces.records import Decision
from dynamiccl.traces.spaces import config_of
from fake_job import GATHER, SCATTER, STEP_MS, FakeJob
from gymnasium.utils.env_checker import check_env

LL128 = Decision("ring", "ll128", 8)


def truth(decisions):
    return STEP_MS - 10 * (decisions.get(GATHER) == LL128)


def test_gymnasium_and_stable_baselines3_accept_it():
    env = gym.make("dynamiccl/Live-v0", job=FakeJob(truth, noise=0.01))
    check_env(env.unwrapped, skip_render_check=True)
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    checker.check_env(env.unwrapped, skip_render_check=True)


def play(env, after=None):
    """An episode under the rule, after the verdict under ``after(search)``: what it earned, and what was told last."""
    observation, info = env.reset(seed=0)
    earned, over = 0.0, False
    while not over:
        search = env.search
        action, _ = ExpectedImprovement().predict(observation)
        if after and search.is_over:
            action = actions_of(after(search), RUN)
        observation, reward, terminated, truncated, info = env.step(action)
        earned, over = earned + reward, terminated or truncated
    return earned, info


def test_what_an_episode_confirmed_is_in_force_when_it_is_over():
    """Before: all its tables were trials, which lapsed, also while they were measured."""
    job = FakeJob(truth, noise=0.002)
    env = LiveEnv(job)
    _, info = play(env)
    env.close()
    job.end_of_trial()
    table = env.windows.decisions(info["table"][:2])
    assert table[GATHER] == LL128 and job.in_force == job.confirmed == table


def test_a_new_episode_begins_from_the_default():
    job = FakeJob(truth, noise=0.002)
    env = LiveEnv(job)
    play(env)
    assert job.confirmed
    env.reset()
    assert job.confirmed == {}


@pytest.mark.parametrize(
    ("why", "stays"),
    [(JobEnded(RunEnds.JOB_STATUS(status=0)), True), (Closed(RunEnds.TWO_WAYS(example="x")), False)],
)
def test_the_end_of_the_job_ends_the_episode(why, stays):
    """Before: an exception. What made the ranks disagree is not left in force."""
    job = FakeJob(truth, noise=0.002)
    env = LiveEnv(job)
    window = job.window

    def ends(*args):
        if job.confirmed:
            raise why
        return window(*args)

    job.window = ends
    earned, info = play(env)
    assert info["ended"] == str(why) and bool(job.confirmed) == bool(job.in_force) == stays and earned < 1
    with pytest.raises(ValueError, match=r"call reset\(\)"):
        env.step(0)


def test_who_is_done_with_a_table_earns_more_than_who_goes_on_trying_for_nothing():
    """Before: the gain of the table was paid for as long as something was tried beside it, and not after."""

    turn = count()

    def other(search):
        open_ = np.flatnonzero(search.open[search.turn])
        return int(open_[next(turn) % len(open_)])

    stops, stopped = play(LiveEnv(FakeJob(truth, noise=0.002)), lambda search: search.confirmed[search.turn])
    tries, tried = play(LiveEnv(FakeJob(truth, noise=0.002)), other)
    assert tried["steps"] > stopped["steps"] + 100 and tried["table"][0] == stopped["table"][0]
    assert stops > tries
    assert stops == pytest.approx(0.1 * HORIZON / 100, rel=0.1)  # what the table saves until then


def test_slots_come_from_default_steps_largest_share_first():
    windows = LiveWindows(FakeJob(truth))
    job, default = windows.begin()
    assert [p.slot for p in windows.profiles] == [GATHER, SCATTER]
    assert windows.profiles[0].calls == 8 and job.call_us.tolist() == [4000, 4000]
    assert job.share == pytest.approx(8 * 4 / STEP_MS)
    assert default.billed == 11 and len(default.step_ms) == 8
    assert job.mask[:, 0].all() and not job.mask[0, config_of(Decision("nvls", "simple", 0))]
    # AUTO with a count is the own pair with that count: one of the two is folded.
    assert (
        not job.mask[0, config_of(Decision(None, None, 8))]
        and job.mask[0, config_of(Decision("ring", "simple", 8))]
    )


def test_a_window_runs_under_the_decisions_and_says_what_it_cost():
    job = FakeJob(truth)
    windows = LiveWindows(job)
    windows.begin()
    seen = windows.measure(Plan(SEARCH, np.array([config_of(LL128), 0]), 5, 3, 150.0))
    assert len(seen.step_ms) == 5 and seen.step_ms[0] == pytest.approx(STEP_MS - 10)
    assert seen.billed == 8 and seen.billed_ms == pytest.approx(8 * (STEP_MS - 10)) and seen.obeyed.all()
    assert {rule.decision for rule in job.tables[-1].rules} == {LL128}
    quiet = windows.measure(Plan(SEARCH, np.zeros(2, np.int64), 5))
    assert quiet.call_us == pytest.approx([4000, 4000]) and np.isnan(seen.call_us).all()


def test_in_turns_calls_of_the_current_table_tell_nothing_of_the_times_under_the_other():
    job = FakeJob(truth)
    windows = LiveWindows(job)
    windows.begin()
    alternate = job.alternate

    def sampled(*args):
        """Each kernel of both tables is timed: those of the trial's take 2 ms, the others 4 ms."""
        turns = alternate(*args)
        job._note(turns.steps.tolist())
        of_calls = np.repeat(turns.arms == TRIAL_ARM, 16)
        generations = np.where(of_calls, turns.generation, 0)
        (events,) = job._events
        job._events = [events.assign(table_generation=generations, end_ns=np.where(of_calls, 2e6, 4e6))]
        return turns

    job.alternate = sampled
    seen = windows.measure(Plan(SEARCH, np.array([config_of(LL128), 0]), 8, turns=1))
    assert seen.call_us == pytest.approx([2000, 2000])


def test_a_step_above_the_limit_ends_the_window():
    windows = LiveWindows(FakeJob(lambda d: STEP_MS * (2 if d else 1)))
    windows.begin()
    seen = windows.measure(Plan(SEARCH, np.array([config_of(LL128), 0]), 5, 1, 150.0))
    assert len(seen.step_ms) == 1 and seen.step_ms[-1] > 150


@pytest.mark.parametrize("kind", [SEARCH, TRIAL])
def test_steps_that_go_by_while_a_policy_makes_up_its_mind_are_counted(kind):
    """Before: an episode beside a slow policy had fewer steps than the job took."""
    job = FakeJob(truth)
    windows = LiveWindows(job)
    search = Search(*windows.begin(), Prior.load())
    if kind == TRIAL:
        search.decide(0, LEAVE)
    kinds = set()
    for other in np.flatnonzero(search.open[1])[1:5]:  # of the slot whose setting makes no difference
        while (plan := search.plan()) is None:
            search.decide(int(other) if search.turn else 0)
        job.last_step += 30
        steps, lost = search.steps, search.lost
        seen = windows.measure(plan)
        search.record(plan, seen)
        assert seen.between == 30 and search.steps == steps + 30 + seen.billed == job.last_step
        assert search.lost == pytest.approx(lost)  # all ran as fast as the default
        kinds.add(plan.kind)
    assert kind in kinds


def test_only_the_functions_that_may_be_tuned():
    windows = LiveWindows(FakeJob(truth), funcs=("all_gather",))
    windows.begin()
    assert [p.slot for p in windows.profiles] == [GATHER]


def test_slots_too_small_to_tune_are_not_said_to_be_none():
    """Before: "the job runs no all_gather or reduce_scatter that a tuner can reach"."""
    with pytest.raises(NothingToTune, match=r"take 0.6% of a step: too small a share"):
        LiveWindows(FakeJob(lambda _: 10_000.0)).begin()
    with pytest.raises(NothingToTune, match=r" 0.3% of a step"):  # of what may be tuned
        LiveWindows(FakeJob(lambda _: 10_000.0), funcs=("all_gather",)).begin()


def test_nothing_to_tune_is_said():
    job = FakeJob(truth)
    job.assembler.offers = {}
    with pytest.raises(NothingToTune, match=r"never asks the tuner|nothing to tune"):
        LiveWindows(job).begin()


def test_a_slot_that_runs_outside_the_offer_is_left_alone_and_named():
    job = FakeJob(truth)
    told = job.take_events

    def symmetric():
        events = told()
        algo = events["algo"].astype("str")
        return events.assign(algo=algo.where(events["func"] != "all_gather", "auto"))

    job.take_events = symmetric
    windows = LiveWindows(job)
    windows.begin()
    assert {p.slot.func for p in windows.profiles} == {"reduce_scatter"}
    (why,) = windows.left_alone
    assert why == NotTuning.OUTSIDE(slot=GATHER, ran="a kernel of another kind")
    with pytest.raises(NothingToTune, match="is left alone"):
        LiveWindows(job, funcs=("all_gather",)).begin()


def test_a_job_of_whose_collectives_nobody_tells_is_not_said_to_have_none():
    """Before: on NCCL 2.27 every job was said to run no all_gather or reduce_scatter."""
    job = FakeJob(truth)
    told = job.take_events
    job.take_events = lambda: told().iloc[:0]
    job.assembler.comms = {7: "the world"}
    with pytest.raises(NothingToTune, match="tells the profiler of no collective"):
        LiveWindows(job).begin()


@pytest.mark.parametrize("kind", [SEARCH, TABLE, TRIAL, WATCH])
def test_windows_after_the_verdict_tell_no_times_of_calls_wherever_they_come_from(kind):
    """Before: trials after the verdict had them in simulated jobs, and none in a running one."""
    jobs = draw_jobs(STANDARD.only("plain"), np.random.default_rng(3), 1)
    simulated, job = OneJob(SimWindows(jobs, np.random.default_rng(0)), 8), FakeJob(truth)
    for windows in (simulated, LiveWindows(job)):
        told, _ = windows.begin()
        plan = Plan(kind, np.zeros(len(told.share), np.int64), 8, 1)
        assert np.isfinite(windows.measure(plan).call_us).any() == (kind in (SEARCH, TABLE))


def test_calls_in_a_group_take_the_time_of_the_group_in_windows_as_in_the_profile():
    """Before: a window told the time of one call, so that after the profile each setting seemed so many times as fast,
    and a risky one looked harmless."""
    job = FakeJob(truth)
    reader = LiveWindows(job)
    reader.begin()
    job.window({}, 4)
    events = job.take_events()
    alone = reader._calls(events)
    in_groups = events.assign(n_bytes=events["n_bytes"] // 4, asked_bytes=events["n_bytes"])
    np.testing.assert_allclose(reader._calls(in_groups), 4 * alone)
    assert np.isnan(reader._calls(in_groups.assign(asked_bytes=0).assign(n_bytes=1))).all()


def test_steps_that_wait_after_turns_are_billed_as_steps_of_the_current_table():
    """Before: by the trial's time, although the current table runs then."""
    job = FakeJob(truth)
    reader = LiveWindows(job)
    told, _ = reader.begin()
    none = np.zeros(len(told.share), np.int64)
    times = np.array([100.0, 300.0, 300.0, 100.0])
    turns = Turns((2,), np.arange(4), times, np.array([CURRENT, TRIAL_ARM, TRIAL_ARM, CURRENT]))
    job.alternate = lambda *_: turns
    reader.measure(Plan(TRIAL, none + 16, 4, turns=1, others=none))
    before = job.last_step

    def late(*words):
        job.last_step = before + 11
        return Window(3, np.arange(8), np.full(8, 100.0))

    job.window = late
    seen = reader.measure(Plan(WATCH, none, 8))
    assert seen.billed == 11 and seen.billed_ms == pytest.approx(1100.0)


def test_where_a_table_holds_its_turns_with_the_default_show_the_default(monkeypatch):
    """A tuner that comes back. Before: a window of the default."""
    job = FakeJob(truth)
    job.confirm({GATHER: Decision("ring", "ll", 4)})
    asked = []

    def turns(decisions, n_steps, turn_steps, discard):
        asked.append((decisions, n_steps, turn_steps, discard))
        job.confirmed, held = {}, job.confirmed
        window = job.window({}, n_steps)
        job.confirmed = held
        return Turns((window.generation,), window.steps, window.durations_ms, np.arange(n_steps) % 2)

    job.alternate = turns
    reader = LiveWindows(job)
    _, default = reader.begin()
    assert asked == [({}, 16, 1, 4)] and len(default.step_ms) == 8 and not len(default.arms)
    assert {profile.slot for profile in reader.profiles} == {GATHER, SCATTER}
