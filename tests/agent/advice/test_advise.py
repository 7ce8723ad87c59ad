"""Advice: what a recording shows is measured right, what is predicted is as sure as it says."""

import json
import re
from dataclasses import replace

import check_advice
import numpy as np
import pandas as pd
import pytest
import recordings_made
from command import invoke
from dynamiccl.agent.advice.advise import Advice, Gains, exposure, tell
from dynamiccl.agent.advice.settings import FSDP2, SUM, settings
from dynamiccl.envs.nccl.tables import load_table
from dynamiccl.envs.nccl_model.clusters import cluster
from dynamiccl.envs.replay.recordings import named, on_cluster
from dynamiccl.envs.sim.emulated.timeline import CROWD
from dynamiccl.envs.sim.fabric.fabric import Fabric
from dynamiccl.envs.sim.jobs import HELD_OUT, STANDARD, SampledClusters, assemble, draw_jobs
from dynamiccl.envs.sim.step import Law
from dynamiccl.envs.sim.workloads import numbered_for_jobs
from dynamiccl.envs.sim.worlds import Extra, Extras
from dynamiccl.traces.importers.recording import read_recording
from dynamiccl.traces.queries.skew import exposed_ns
from oracle import oracle
from paths import DATA
from synthetic_trace import write_run
from test_traces_importers import profile
from workloads import COMPUTE, Recording, arrays_of


def run(*args):
    return invoke(["advise", *map(str, args)])


def test_exposure_is_the_time_without_a_kernel():
    row = {"rank": 0, "n_ranks": 16, "n_nodes": 2, "func": "all_gather", "n_bytes": 1 << 26, "step": 0}
    events = pd.DataFrame([{**row, "start_ns": 100, "end_ns": 200}, {**row, "start_ns": 300, "end_ns": 400}])
    kernels = [(0, 110, 150), (0, 140, 160), (0, 390, 500), (1, 0, 1000)]
    compute = pd.DataFrame(kernels, columns=["rank", "start_ns", "end_ns"])
    events = events.astype({"start_ns": "Int64", "end_ns": "Int64"})
    assert exposed_ns(events, compute).tolist() == [50.0, 90.0]
    assert exposed_ns(events.assign(rank=3), compute).isna().all()


def test_from_file_to_advice(tmp_path):
    path, place = profile(tmp_path), "dgx-h100-2x8"
    result = run(path, "--cluster", place, "--json", "--out", tmp_path / "table.json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["predicted"] and told["source"] == "kineto" and told["slots"] and told["unknown"]
    assert all(0 < s["share"] <= 1 for s in told["slots"])
    advised = sum(s["advice"] != "auto" for s in told["slots"])
    assert (len(load_table(tmp_path / "table.json").rules) if "table" in told else 0) == advised
    if told["gain"]:
        assert 0 <= told["risk"] <= 1 and told["unseen"] == (told["risk"] <= 0.01)
        assert told["gain"]["low"] <= told["gain"]["median"] <= told["gain"]["high"]
    text = run(path, "--cluster", place).stdout
    assert text.startswith(told["verdict"]) and "not known, or assumed:" in text


def test_a_foreign_recording_needs_its_cluster(tmp_path):
    result = run(profile(tmp_path))
    assert result.exit_code == 2 and "--cluster" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(("n_jobs", "fewest"), [(30, 25), pytest.param(60, 50, marks=pytest.mark.slow)])
def test_predicted_gains_are_as_sure_as_they_say_and_following_them_makes_no_job_slower(n_jobs, fewest):
    """So many jobs of each family, of all its worlds, as the intervals' width was chosen on (``NARROWER``);
    ``python tests/tools/check_advice.py`` takes as many as it is told."""
    rows = [
        check_advice.figures(STANDARD, n_jobs, 5),
        check_advice.figures(HELD_OUT, n_jobs, 5, check_advice.SHOWN[1]),
    ]
    columns = np.concatenate(rows).T
    true, _, low, high, advised, followed = columns[:6]
    on = advised > 0
    assert on.sum() >= fewest
    assert 0.7 <= ((low <= true) & (true <= high))[on].mean() <= 0.9
    assert (followed < -0.01).mean() <= 0.02 and followed.mean() > 0.01


def like_the_demo(exposed):
    """A ZeRO-3 step on the demo's cluster and its documented fabric, without weather: every unit is gathered before its
    forward and again before its backward, and its gradients are scattered after."""
    units = [32_000_000, *[160_000_000] * 4, 16_000_000]
    ops = []

    def unit(n_bytes, is_backward):
        ops.append(("all_gather", n_bytes, set()))
        gathered = {len(ops) - 1}
        flops = n_bytes * (2 if is_backward else 1)
        ops.append((COMPUTE, flops, gathered))
        if is_backward:
            computed = {len(ops) - 1}
            ops.append(("reduce_scatter", n_bytes, computed))

    for n_bytes in units:
        unit(n_bytes, is_backward=False)
    for n_bytes in reversed(units):
        unit(n_bytes, is_backward=True)
    scattered = {i for i, op in enumerate(ops) if op[0] == "reduce_scatter"}
    ops.append(("optimizer", 1.0, scattered))
    workload = Recording.of("zero-3", ops).workload()
    works = numbered_for_jobs(arrays_of([(workload, False)]))
    fabric = Fabric.of(cluster("dgx-h100-2x8"), 0)
    rng = np.random.default_rng(0)
    sites = SampledClusters(
        fabric.fleet,
        fabric.truth,
        np.zeros_like(fabric.truth.effect),
        np.zeros(1),
        np.ones(1),
        Law(*np.array([[CROWD], [1.0], [0.0], [0.0]])),
        np.zeros(1, int),
        Extras.draw(Extra(), works.n_slots, rng),
    )
    calm = replace(STANDARD.parts[0], swing=0.0)
    first = np.zeros(1, int)
    rng = np.random.default_rng(0)
    return assemble(works, first, sites, np.array([exposed]), calm, rng)


@pytest.mark.parametrize("exposed", [0.2, 0.3])
def test_on_a_job_like_the_demo_the_advice_is_what_a_sweep_of_the_model_finds(exposed):
    """The demo's cluster, seven times the nominal congestion, and units like the demo's: the recording knows nothing
    of that. Each decision is within 2 % of the best in its place, and the interval holds what the table gains."""
    job = like_the_demo(exposed)
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
    """A job that communicates 1 % of its step: no table, and the most that there could be."""
    monkeypatch.setattr(recordings_made, "STEP_US", 200_000)
    path = recordings_made.kineto(tmp_path / "a", compute=False)
    result = run(path, "--cluster", "dgx-h100-2x8", "--json")
    told = json.loads(result.stdout)
    assert told["communication"] < 0.01 and told["gain"] is None
    assert 0 <= told["possible"]["high"] < 0.01
    assert told["verdict"].startswith("nothing to apply, and not worth a tuning run: at most 0.")
    table = tmp_path / "table.json"
    assert (
        "predicted:" not in run(path, "--cluster", "dgx-h100-2x8", "--out", table).stdout
        and not table.exists()
    )


def test_the_first_line_decides_and_few_steps_give_no_gain(tmp_path, monkeypatch):
    """Before: of six steps "saves 1.5 % [-5.8, 8.8]", which nobody can act on; what to do came last."""
    few = json.loads(
        run(recordings_made.kineto(tmp_path / "few"), "--cluster", "dgx-h100-2x8", "--json").stdout
    )
    assert few["steps"] < 30 and few["gain"] is None and all(s["saves"] is None for s in few["slots"])
    assert any("6 steps are too few to say, 30 are needed" in note for note in few["unknown"])
    monkeypatch.setattr(recordings_made, "N_STEPS", 32)
    path = recordings_made.kineto(tmp_path / "many")
    many = json.loads(run(path, "--cluster", "dgx-h100-2x8", "--json").stdout)
    assert many["steps"] >= 30 and many["possible"]["low"] < many["possible"]["high"]
    first = run(path, "--cluster", "dgx-h100-2x8").stdout.splitlines()[0]
    assert re.fullmatch(
        r"nothing to apply blindly; a tuning run may save \d+% to \d+% of the step \(predicted\)", first
    )


def test_more_ranks_than_the_named_cluster_has_are_said_to_be_assumed(tmp_path):
    """Before: 64 ranks on a preset of 16 were silently 8 nodes, and the header said 2x8."""
    told = json.loads(run(profile(tmp_path), "--cluster", "dgx-h100-1x8", "--json").stdout)
    assert told["unknown"][0].startswith("16 ranks were recorded, dgx-h100-1x8 has 8: as many nodes")


def test_settings_of_the_launch_are_told_with_their_losses_and_how_to_verify_them():
    over, within = (
        settings({"all_gather", "reduce_scatter"}, 2, FSDP2),
        settings({"all_gather", "reduce_scatter"}, 1, FSDP2),
    )
    assert over == [SUM] and "set_force_sum_reduction_for_comms(True)" in SUM
    assert settings({"reduce_scatter"}, 2) == [
        "only for a job that uses FSDP2: " + SUM
    ]  # before: said to any job
    assert settings({"all_reduce"}, 1) == [] and within[0] == SUM and len(within) == 4
    text = " ".join(within)
    for said in (
        "cta_policy 2 (ZERO)",
        "cta_policy 1 is EFFICIENCY",
        "reduce_scatter stays a kernel",
        "-1.8 %",
    ):
        assert said in text
    assert "kernel's name in a profile" in text and "a loss on 128 GPUs (Megatron-LM#5657)" in text
    figures = re.findall(r"[+-]\d+\.\d+", text)
    assert figures and all(
        re.search(re.escape(figure) + r".{,110}?\(\w[\w-]*#\d+\)", text) for figure in figures
    )


def test_times_of_gloo_say_nothing_of_nccl():
    paths = sorted((DATA / "recordings").glob("fsdp2-rank*.json.gz"))
    result = run(*paths, "--cluster", "dgx-h100-1x8")
    assert result.exit_code == 2 and "of gloo" in result.stderr and result.stderr.count("\n") == 1


def test_of_a_finished_run_the_measured_verdict_is_told(tmp_path):
    """Before: a run that had measured 12.8 % was told a prediction of 3.6 %."""
    summary, _ = write_run(tmp_path / "trace", search=4, final=2)
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "table": "t.json"}))
    told = json.loads(run(tmp_path, "--json").stdout)
    assert told["predicted"] is False and told["speedup"] == summary["speedup"]
    assert run(tmp_path).stdout.startswith("measured by this run: KEPT A")


@pytest.mark.parametrize("place", [(), ("--cluster", "dgx-h100-2x8")])
@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_job_of_all_reduces_is_told_that_there_is_nothing_to_tune(tmp_path, is_foreign, place):
    """Before: "the recording does not say what NCCL offers", and with a cluster a traceback."""
    if is_foreign:
        path = recordings_made.kineto(tmp_path / "profiles")
        for file in path.iterdir():
            names = "all_gather|reduce_scatter|_allgather_base|_reduce_scatter_base"
            file.write_text(re.sub(f'"({names})"', '"allreduce"', file.read_text()))
    else:
        path = tmp_path / "trace"
        write_run(path, search=4, final=2)
        next(path.glob("offers-*")).unlink()  # the plugin tells none of all-reduces
        for file in path.glob("events-*"):
            pd.read_parquet(file).assign(func="all_reduce").to_parquet(file)
    result = run(path, *place)
    assert result.exit_code == 2 and "holds no all_gather or reduce_scatter" in result.stderr


def test_the_cluster_is_that_of_the_recorded_ranks(tmp_path):
    """Before: the header said 2x8 for more ranks."""
    trace = on_cluster(read_recording([profile(tmp_path)]), named("dgx-h100-4x8"))
    assert Advice(trace, named("dgx-h100-4x8")).cluster.n_ranks == max(trace.events["n_ranks"])


def test_what_is_exposed_is_told_to_the_belief_and_makes_it_surer(tmp_path):
    trace = on_cluster(read_recording([recordings_made.kineto(tmp_path / "a")]), named("dgx-h100-2x8"))
    seen = exposure(trace)
    assert seen and all(0 <= part <= 1 for part in seen.values())
    assert not exposure(
        on_cluster(
            read_recording([recordings_made.kineto(tmp_path / "b", compute=False)]), named("dgx-h100-2x8")
        )
    )
    rng = np.random.default_rng(0)
    jobs = draw_jobs(STANDARD, rng, 1)
    belief = check_advice.belief_of(jobs, 0, "no compute")
    before = belief.mean.copy(), belief.cov.copy()
    unseen = np.full(len(belief.arms), np.nan)
    tell(belief, unseen)
    assert np.array_equal(belief.mean, before[0])
    assert np.array_equal(belief.cov, before[1])
    exposed, unsure = belief.exposure
    unseen[0] = 0.02
    tell(belief, unseen)
    assert belief.exposure[0][0] < exposed[0] and belief.exposure[1][0] < unsure[0]


def single_tables(jobs, j):
    """Every table of job ``j`` that sets one slot, (t, width) configs."""
    tables = []
    for slot in range(int(jobs.n_slots[j])):
        for config in np.flatnonzero(jobs.mask[j, slot]):
            if config:
                table = np.zeros(jobs.width, int)
                table[slot] = config
                tables.append(table)
    return np.array(tables)


def predicted(jobs, j, shown, tables):
    """Mean and deviation of what each table saves, (2, t), as it is believed."""
    belief = check_advice.belief_of(jobs, j, shown)
    n_slots = int(jobs.n_slots[j])
    savings = [belief.saving(table[:n_slots]) for table in tables]
    return np.array(savings).T


KINDS = [STANDARD.only("plain"), HELD_OUT.only("plain")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_is_shown_makes_the_belief_surer_and_no_less_right(kind):
    """Of jobs whose exposure is known, what every config saves is predicted more surely and no less rightly (the
    logarithm of the probability that is given to the truth, far ones cut off)."""
    n = 40
    rng = np.random.default_rng(3)
    jobs = draw_jobs(kind, rng, n)
    default, _ = jobs.step_us(np.zeros((n, jobs.width), int))
    scores = {shown: [] for shown in check_advice.SHOWN}
    for j in range(n):
        tables = single_tables(jobs, j)
        which = np.full(len(tables), j)
        tuned, _ = jobs.step_us(tables, which)
        true = 1 - tuned / default[j]
        told = {shown: predicted(jobs, j, shown, tables) for shown in check_advice.SHOWN}
        nothing_shown = told[check_advice.SHOWN[0]]
        near = nothing_shown[0] > -0.05  # those that come into question
        for shown, found in scores.items():
            mean, deviation = told[shown][:, near]
            distance = (true[near] - mean) / deviation
            misses = np.minimum(distance**2, 16) / 2
            found.extend(-np.log(deviation) - misses)
    mean = {shown: float(np.mean(those)) for shown, those in scores.items()}
    nothing, exposure = (mean[shown] for shown in check_advice.SHOWN)
    assert exposure > nothing


def waits_for(folder, late):
    """Two ranks of a group of two: rank ``late`` computes for 2 ms in which the other waits in its all-gather."""
    folder.mkdir()
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2}
    call = {**group, "Collective name": "all_gather", "dtype": "BFloat16", "In msg nelems": 16 << 20}
    for rank in (0, 1):
        begin, lasts = (2500, 1000) if rank == late else (500, 3000)
        events = []
        for step in range(40):
            now = 4000 * step
            asked = {**call, "Out msg nelems": 32 << 20, "External id": step, "Seq": step}
            rows = [("user_annotation", f"ProfilerStep#{step}", 0, 3999.999, {})]
            rows += [("cpu_op", "record_param_comms", begin - 50, 1, asked)]
            rows += [("kernel", "ncclDevKernel", begin, lasts, {**asked, "grid": [16, 1, 1]})]
            rows += [("kernel", "gemm", 3500, 400, {})]
            rows += [("kernel", "gemm", 500, 1999, {})] if rank == late else []
            names = ("cat", "name", "ts", "dur", "args")
            events += [
                {"ph": "X", **dict(zip(names, (*row[:2], now + row[2], *row[3:]), strict=True))}
                for row in rows
            ]
        info = {"backend": "nccl", "rank": rank, "nccl_version": "2.28.9"}
        document = {
            "baseTimeNanoseconds": recordings_made.BASE,
            "distributedInfo": info,
            "traceEvents": events,
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize("late", [0, 1])
def test_exposed_contains_the_wait_for_a_late_rank_however_many_files_are_given(tmp_path, late):
    """Before: with both files the wait was taken out of it, 75 % became 25 %: more files hid a slow rank."""
    folder = waits_for(tmp_path / "a", late)
    both = json.loads(run(folder, "--cluster", "dgx-h100-1x8", "--json").stdout)["slots"][0]
    waiting = folder / f"rank{1 - late}.json"
    alone = json.loads(run(waiting, "--cluster", "dgx-h100-1x8", "--json").stdout)["slots"][0]
    assert both["share"] == pytest.approx(0.25, abs=0.01) and both["timed_by"] == "all ranks"
    assert both["exposed_share"] == pytest.approx(0.75, abs=0.01) == alone["exposed_share"]
