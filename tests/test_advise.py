"""Advice: what a recording shows is measured right, what is predicted is as sure as it says."""

import json

import check_advice
import numpy as np
import pandas as pd
import pytest
import recordings_made
from dynamiccl.agent.advise import Advice
from dynamiccl.agent.cli import app
from dynamiccl.agent.gain import Gains
from dynamiccl.agent.knobs import knobs
from dynamiccl.agent.recordings import read
from dynamiccl.envs.nccl.tables import load_table
from dynamiccl.envs.sim.clusters import cluster
from dynamiccl.envs.sim.documented import one_job
from dynamiccl.envs.sim.jobs import HELD_OUT, STANDARD, oracle
from dynamiccl.envs.sim.workloads import zero_step
from dynamiccl.traces.importers import FORMATS
from dynamiccl.traces.overlap import exposed_ns, slowdowns
from test_traces_importers import sources
from typer.testing import CliRunner


def run(*args):
    return CliRunner().invoke(app, ["advise", *map(str, args)])


def side_by_side(slow=0.25, seed=0, steps=8, noise=0.05):
    """Events and kernels of a rank: every other kernel lies within a collective and takes 1 + slow times as long."""
    rng, now, kernels, events = np.random.default_rng(seed), 0, [], []
    for step in range(steps):
        for n in range(20):
            for kind, us in (("gemm", 200.0), ("norm", 20.0)):
                for beside in (False, True):
                    lasts = round(1000 * us * (1 + slow * beside) * np.exp(rng.normal(0, noise)))
                    if beside:
                        row = {"rank": 0, "n_ranks": 16, "n_nodes": 2, "func": "all_gather", "n_bytes": 1 << 26}
                        row |= {"algo": "ring", "proto": "simple", "n_channels": 16, "step": step}
                        events.append({**row, "start_ns": now - 1000, "end_ns": now + lasts + 1000})
                    kernels.append({"rank": 0, "start_ns": now, "end_ns": now + lasts, "name": kind, "blocks": 132})
                    now += lasts + 5000
                if n % 5 == 0:  # partly beside one: says nothing
                    kernels.append({"rank": 0, "start_ns": now, "end_ns": now + 400_000, "name": kind, "blocks": 132})
                    part = {**row, "start_ns": now + 200_000, "end_ns": now + 420_000}
                    events.append(part)
                    now += 430_000
    frame = pd.DataFrame(events).astype({"start_ns": "Int64", "end_ns": "Int64"})
    return frame, pd.DataFrame(kernels).assign(stream=7).astype({"name": "category"}), now / 1e3 / steps


@pytest.mark.parametrize("slow", [0.0, 0.1, 0.4])
def test_the_cost_of_overlap_is_found_within_its_interval(slow):
    held = []
    for seed in range(10):
        events, compute, step_us = side_by_side(slow, seed)
        (found,) = slowdowns(events, compute, step_us)
        held.append(found.low <= slow <= found.high)
        assert found.slowdown == pytest.approx(slow, abs=0.03) and found.kinds == 2
        assert found.key == (16, 2, "all_gather", 26, "ring", "simple", 16)
        beside = 160 * 1e3 * 220 * (1 + slow)
        assert found.lost == pytest.approx(beside * slow / (1 + slow) / (step_us * 1e3 * 8), abs=0.01)
    assert sum(held) >= 8


def test_exposure_is_the_time_without_a_kernel():
    row = {"rank": 0, "n_ranks": 16, "n_nodes": 2, "func": "all_gather", "n_bytes": 1 << 26, "step": 0}
    events = pd.DataFrame([{**row, "start_ns": 100, "end_ns": 200}, {**row, "start_ns": 300, "end_ns": 400}])
    kernels = [(0, 110, 150), (0, 140, 160), (0, 390, 500), (1, 0, 1000)]
    compute = pd.DataFrame(kernels, columns=["rank", "start_ns", "end_ns"])
    events = events.astype({"start_ns": "Int64", "end_ns": "Int64"})
    assert exposed_ns(events, compute).tolist() == [50.0, 90.0]
    assert exposed_ns(events.assign(rank=3), compute).isna().all()


@pytest.mark.parametrize("source", FORMATS)
def test_from_file_to_advice(tmp_path, source):
    path = sources(tmp_path)[source]
    place = "dgx-h100-1x8" if source == "inspector" else "dgx-h100-2x8"
    result = run(path, "--cluster", place, "--json", "--out", tmp_path / "table.json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["predicted"] and told["source"] == source and told["slots"] and told["unknown"]
    assert all(0 < s["share"] <= 1 and s["offered"] for s in told["slots"])
    assert len(load_table(tmp_path / "table.json").rules) == sum(s["saves"] is not None for s in told["slots"])
    if told["gain"]:
        assert 0 <= told["risk"] <= 1 and told["unseen"] == (told["risk"] <= 0.01)
        assert told["gain"]["low"] <= told["gain"]["median"] <= told["gain"]["high"]
    text = run(path, "--cluster", place).stdout
    assert "predicted" in text and "not known:" in text and "bottleneck" not in text


def test_a_foreign_recording_needs_its_cluster(tmp_path):
    result = run(sources(tmp_path)["kineto"])
    assert result.exit_code == 2 and "--cluster" in result.stderr and result.stderr.count("\n") == 1


def test_predicted_gains_are_as_sure_as_they_say_and_following_them_makes_no_job_slower():
    """Sixty jobs of each family; ``python tests/check_advice.py`` takes as many as it is told."""
    rows = [check_advice.figures(STANDARD, 60, 5), check_advice.figures(HELD_OUT, 60, 5, check_advice.SHOWN[1])]
    true, _, low, high, advised, followed, *_ = np.concatenate(rows).T
    on = advised > 0
    assert on.sum() >= 50
    assert 0.7 <= ((low <= true) & (true <= high))[on].mean() <= 0.9
    assert (followed < -0.01).mean() <= 0.02 and followed.mean() > 0.01


@pytest.mark.parametrize("exposed", [0.2, 0.3])
def test_on_a_job_like_the_demo_the_advice_is_what_a_sweep_of_the_model_finds(exposed):
    """The demo's cluster, seven times the nominal congestion, and units like the demo's: the recording knows nothing
    of that. Each decision is within 2 % of the best in its place, and the interval holds what the table gains."""
    units = [32_000_000, *[160_000_000] * 4, 16_000_000]
    job = one_job(zero_step(3, units, 16), cluster("dgx-h100-2x8"), exposed=exposed)
    gains = Gains(check_advice.belief_of(job, 0, "no compute"))
    table, (best, best_us) = gains.best(), oracle(job)
    assert best_us[0] < 0.9 * job.default_us[0]
    for i, config in enumerate(table):
        placed = best.copy()
        placed[0, i] = config
        assert job.step_us(placed)[0][0] <= 1.02 * best_us[0]
    chosen = np.zeros_like(best)
    chosen[0, : len(table)] = table
    _, low, high = gains.interval(table)
    gained = 1 - job.step_us(chosen)[0][0] / job.default_us[0]
    assert low <= gained <= high and gained > 0.08


def test_where_nothing_is_to_be_gained_it_says_so(tmp_path, monkeypatch):
    """A job that communicates 1 % of its step: no table, no knob, and the most that there could be."""
    monkeypatch.setattr(recordings_made, "STEP_US", 200_000)
    path = recordings_made.nsys(tmp_path / "a.sqlite", compute=False)
    result = run(path, "--cluster", "dgx-h100-2x8", "--json")
    told = json.loads(result.stdout)
    assert told["communication"] < 0.01 and told["gain"] is None and told["knobs"] == []
    assert 0 <= told["possible"]["high"] < 0.01
    assert "none is advised" in run(path, "--cluster", "dgx-h100-2x8").stdout


def test_knobs_are_named_only_where_the_recording_speaks_for_them(tmp_path):
    trace = read([recordings_made.nsys(tmp_path / "a.sqlite")], "dgx-h100-2x8")
    advice = Advice(trace)
    assert not [k for k in knobs(advice) if "CTA" in k["knob"]]
    events, compute, step_us = side_by_side(0.3)
    advice.overlaps = slowdowns(events, compute, step_us)
    (policy,) = [k for k in knobs(advice) if "CTA" in k["knob"]]
    assert (
        "openxla/xla#33613" in policy["evidence"] and "measured" in policy["because"] and "cta_policy" in policy["set"]
    )
