"""A recorded job tuned again: the tuner finds on it what is best in it, and rankings are compared as they should be."""

import json

import numpy as np
import pytest
from dynamiccl.agent.choosing import make_chooser
from dynamiccl.agent.classical import CLASSICAL
from dynamiccl.agent.rank import Run, live_run, rank, replayed_run, saved, spearman
from dynamiccl.agent.tuner import Settings, Tuner
from dynamiccl.envs.job_ends import JobEnded
from dynamiccl.envs.live_windows import LiveWindows
from dynamiccl.envs.replay import load
from dynamiccl.envs.replay_job import RecordedJob
from dynamiccl.traces.files import TraceError, TraceWriter
from dynamiccl.traces.records import AUTO
from synthetic_trace import FINAL, GATHER, SCATTER, write_run

SETTINGS = Settings(windows=120, verify=10, budget=10.0)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("rank") / "trace", search=24, final=12)[1]


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
    ending = RecordedJob(trace, recorded, steps=20)
    with pytest.raises(JobEnded, match="are over"):
        for _ in range(6):
            ending.window({}, 4)


@pytest.mark.parametrize("name", ["expected-improvement", "thompson-sampling"])
def test_the_tuner_finds_the_best_of_the_record(trace, recorded, name):
    job = RecordedJob(trace, recorded, seed=1)
    tuner = Tuner(LiveWindows(job, time_scale=8.0), make_chooser(name), SETTINGS)
    outcome = tuner.run()
    assert {p.slot for p in tuner.windows.profiles} >= {GATHER, SCATTER}
    best = sum(float(recorded.truth[i].max() * recorded.share[i]) for i in range(len(recorded.slots)))
    assert outcome.kept and job.saving(outcome.decisions) >= 0.5 * best


@pytest.mark.parametrize("name", [*CLASSICAL, "tpe"])
def test_every_baseline_can_tune_a_job(trace, recorded, name):
    if name == "tpe":
        pytest.importorskip("optuna")
    run = replayed_run(trace, recorded, name, Settings(windows=16, verify=6), 0)
    assert run.speedup >= 1 and np.isfinite(run.saved) and (name != "default" or run.speedup == 1)


def test_saved_counts_the_exploration_and_fills_with_the_result():
    assert saved([-0.5, 0.5], 0.2, 4) == pytest.approx(0.1)
    assert saved([0.1] * 9, 0.5, 3) == pytest.approx(0.1)


def test_spearman():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)  # by hand: 4.5 / sqrt(4.5 * 5)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0


@pytest.mark.slow
def test_rankings_agree_with_themselves_and_not_with_their_opposite(trace, recorded):
    names = ("sweep", "default", "coordinate-descent", "random")
    live = [replayed_run(trace, recorded, name, SETTINGS, seed) for name in names for seed in (100, 101)]
    found = rank(trace, live, SETTINGS, seeds=2)
    assert found["saved"]["spearman"] >= 0.8 and found["saved"]["ci95"][0] <= found["saved"]["ci95"][1]
    assert {row["policy"]: row["live_runs"] for row in found["policies"]} == dict.fromkeys(names, 2)
    other = [Run(run.policy, 2 - run.speedup, -run.saved) for run in live]
    assert rank(trace, other, SETTINGS, seeds=2)["saved"]["spearman"] <= -0.8
    with pytest.raises(ValueError, match="at least three policies"):
        rank(trace, live[:2], SETTINGS)


def test_live_runs_are_read_from_their_folder(tmp_path):
    run = tmp_path / "run"
    with TraceWriter(run / "trace", {}) as writer:
        for phase, saving in (("profile", 0.0), ("search", -0.2), ("search", 0.1), ("confirm", 0.3), ("verify", 0.2)):
            writer.log("window", {"phase": phase, "saving": saving})
    summary = {"policy": "gp", "speedup": 1.25, "kept": True, "speedup_ci95": [1.2, 1.3]}
    (run / "summary.json").write_text(json.dumps({**summary, "aa_speedup_ci95": [0.99, 1.01]}))
    found = live_run(run, 10)
    assert (found.policy, found.speedup) == ("gp", 1.25)
    assert found.saved == pytest.approx((-0.2 + 0.1 + 8 * 0.2) / 10)
    assert found.error[0] == pytest.approx(0.1 / 3.92) and 0 < found.error[1] < 0.01
    (run / "summary.json").write_text(json.dumps({**summary, "kept": False, "aa_speedup_ci95": None}))
    assert live_run(run, 10).speedup == 1 and live_run(run, 3).saved == pytest.approx(-0.1 / 3)
    (run / "summary.json").write_text(json.dumps({**summary, "speedup": None, "aa_speedup_ci95": None}))
    with pytest.raises(ValueError, match="before its closing comparison"):
        live_run(run, 10)
    with pytest.raises(ValueError, match="no run of"):
        live_run(tmp_path, 10)
    with TraceWriter(tmp_path / "empty", {}):
        pass
    from dynamiccl.traces.files import Trace

    runs = [Run(name, 1.0, 0.0) for name in "abc"]
    with pytest.raises(TraceError, match="holds no steps"):
        rank(Trace.read(tmp_path / "empty"), runs, SETTINGS)
