"""A recorded job tuned again: its windows are those of the record, and the tuner finds on it what is best in it."""

import numpy as np
import pytest
from dynamiccl.agent.daemon.tuner import Tuner
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.agent.policies.classical import CLASSICAL
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.replay.decisions import load
from dynamiccl.envs.replay.job import RecordedJob
from dynamiccl.envs.search.watch import SearchConfig
from dynamiccl.traces.records import AUTO
from synthetic_trace import FINAL, GATHER, SCATTER, write_run

RULES = SearchConfig(rounds=120, pairs=10, budget=10.0)


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
    default = [job.window({}, 4).step_ms for _ in range(len(job.default_ms))]
    assert sorted(default) == sorted(job.default_ms)  # each recorded default window once a round
    assert default[0] == job.default_ms[job._at]
    tuned = [job.window(FINAL, 4).step_ms for _ in range(len(job.default_ms))]
    np.testing.assert_allclose(tuned, (1 - gain) * np.array(default))
    assert len(job.window({}, 4, give_up_ms=0.1).steps) == 1


def test_the_tuner_finds_the_best_of_the_record(trace, recorded):
    """At the verdict, before what is tried after it; half of it in the mean of four beginnings, for one is luck."""
    best, saved = (
        sum(float(recorded.truth[i].max() * recorded.share[i]) for i in range(len(recorded.slots))),
        [],
    )
    for seed in range(4):
        job = RecordedJob(trace, recorded, seed=seed)
        tuner = Tuner(LiveWindows(job), make_chooser("expected-improvement"), RULES)
        outcome = tuner.run()
        assert {p.slot for p in tuner.windows.profiles} >= {GATHER, SCATTER} and outcome.kept
        saved.append(job.saving(tuner.decisions) / best)
    assert np.mean(saved) >= 0.5 and min(saved) > 0.25


@pytest.mark.parametrize("name", CLASSICAL)
def test_every_baseline_can_tune_a_job(trace, recorded, name):
    job = RecordedJob(trace, recorded, 0)
    tuner = Tuner(LiveWindows(job), make_chooser(name), SearchConfig(rounds=16, pairs=6))
    outcome = tuner.run()
    saving = job.saving(tuner.decisions) if outcome.kept else 0.0
    assert 0 <= saving < 1 and (name != "default" or saving == 0)
