"""A recorded job tuned again: its windows are those of the record, and the tuner finds on it what is best in it."""

import numpy as np
import pytest
from dynamiccl.agent.daemon.tuner import Tuner
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.agent.policies.classical import CLASSICAL
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.replay.decisions import default_steps, load
from dynamiccl.envs.replay.job import RecordedJob, _steps_of
from dynamiccl.envs.search.config import SearchConfig
from dynamiccl.traces.queries.lives import lives
from dynamiccl.traces.records import AUTO
from restarted import LIVES, restarted
from synthetic_trace import FINAL, GATHER, SCATTER, write_run

RULES = SearchConfig(rounds=120, budget=10.0)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("recorded") / "trace", search=24, final=12)[1]


@pytest.fixture(scope="module")
def recorded(trace):
    return load(trace)


def test_windows_take_what_the_record_says(trace, recorded):
    job = RecordedJob(trace, recorded, seed=3)
    share = {slot: recorded.share[recorded.slots.index(slot)] for slot in (GATHER, SCATTER)}
    gain = job.saving(FINAL)
    assert gain == pytest.approx(sum(job.saving({slot: d}) for slot, d in FINAL.items()))
    assert job.saving({}) == job.saving({GATHER: AUTO}) == 0 and 0 < gain < sum(share.values())
    default = [job.window({}, 1).step_ms for _ in range(len(job.default_ms))]
    assert sorted(default) == sorted(job.default_ms)  # each recorded default step once a round
    assert default[0] == job.default_ms[job._at]
    tuned = [job.window(FINAL, 1).step_ms for _ in range(len(job.default_ms))]
    np.testing.assert_allclose(tuned, (1 - gain) * np.array(default))
    assert job.window({}, 4).step_ms == np.median(default[:4])
    assert job.window({}, 4).step_ms == np.median(default[4:8])
    assert len(job.window({}, 4, give_up_ms=0.1).steps) == 1


def test_every_default_step_counts_alike(trace, recorded):
    """Before: every stretch of default steps did. In turns there are many of one step, beside one of 45."""
    steps = default_steps(trace)
    assert len(steps) == recorded.n_steps and recorded.default_ms == np.median(steps)
    assert RecordedJob(trace, recorded).default_ms.tolist() == steps.tolist()


def test_each_step_of_each_life_is_a_step():
    """Before: steps of one number in two lives counted as one, with twice the calls; only the first first step went."""
    trace = restarted()
    quiet = trace.events[trace.events["table_generation"] == 0]
    steps = _steps_of(quiet, lives(trace))
    assert [len(step) for step in steps] == [2] * len(steps), "one call of each of two ranks"
    assert len(steps) == LIVES[0][2] - 1 + LIVES[1][2] - 1
    assert len(_steps_of(quiet[quiet["step"] == 0], lives(trace))) == 2, "nothing else is recorded"


def test_the_tuner_finds_the_best_of_the_record(trace, recorded):
    """A part of it at the verdict, most of it with the trials after it; in four beginnings, for one is luck.

    At the verdict the mean was 0.55 of eight beginnings, and is 0.46 since the belief has no second model of what slots
    do to each other. In this record slots add up, and the trials find later what the search left: the bound that was
    0.5 at the verdict holds at their end, for each beginning.
    """
    slots = range(len(recorded.slots))
    best = sum(float(recorded.truth[i].max() * recorded.share[i]) for i in slots)
    at_verdict, at_end = [], []
    for seed in range(4):
        job = RecordedJob(trace, recorded, seed=seed)
        tuner = Tuner(LiveWindows(job), make_chooser("expected-improvement"), RULES)
        outcome = tuner.run()
        assert {p.slot for p in tuner.windows.profiles} >= {GATHER, SCATTER} and outcome.kept
        at_verdict.append(job.saving(tuner.decisions) / best)
        while not tuner.search.is_done:
            tuner.step()
        at_end.append(job.saving(tuner.decisions) / best)
    assert min(at_verdict) > 0.2 and min(at_end) > 0.5 and np.mean(at_end) > 0.6, (at_verdict, at_end)


@pytest.mark.parametrize("name", CLASSICAL)
def test_every_baseline_can_tune_a_job(trace, recorded, name):
    job = RecordedJob(trace, recorded, 0)
    tuner = Tuner(LiveWindows(job), make_chooser(name), SearchConfig(rounds=16))
    outcome = tuner.run()
    saving = job.saving(tuner.decisions) if outcome.kept else 0.0
    assert 0 <= saving < 1 and (name != "default" or saving == 0)
