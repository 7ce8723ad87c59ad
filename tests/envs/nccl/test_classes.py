"""One decision for all groups of a shape: HSDP and TP x DP gain by it what one group gains; a restart keeps it."""

import json
import os
import subprocess
import sys

import pytest
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.files import Trace
from dynamiccl.traces.records import Decision
from paths import HELPERS

RANK = HELPERS / "classes_rank.py"
LL = Decision("ring", "ll")
LL128 = Decision("ring", "ll128", 24)
BLOCK = 20 * 4 * 49_984  # bytes of a block of the job below, as the emulated backend scales them


def start(run, kind, steps, life=1):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        str(RANK),
    ]
    env = {**os.environ, **job_env(run.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, kind, str(steps), str(life)], env=env, stdout=subprocess.DEVNULL)


def profiles_of(job):
    windows = LiveWindows(job)
    windows.begin()
    return windows.profiles


def held(job, table):
    """Steps under a table that holds."""
    job.confirm(table)
    return job.window(table, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n_slots"), [("one", 1), ("hsdp", 1), ("tp x dp", 2)])
def test_groups_of_a_shape_gain_together_what_one_gains(folder, kind, n_slots):
    """Before: two slots for the same all_gather, each tuned alone while the slower half decided the step.

    Seen at 679c0ae, HSDP 2 x 2: two slots for the same all_gather, each tuned alone.
    """
    process = start(folder, kind, 10_000)
    try:
        job = Job(folder, process)
        profiles = profiles_of(job)
        assert len(profiles) == n_slots and {p.slot.n_ranks for p in profiles} == {4 if kind == "one" else 2}
        table = {p.slot: LL for p in profiles}
        default, tuned, again = (held(job, one) for one in ({}, table, {}))
        assert tuned.disobeyed == ()
        # 4 calls of 24 ms against 4 of 6 ms, beside what the rest of a step takes on a busy machine.
        assert tuned.step_ms < 0.75 * min(default.step_ms, again.step_ms)
        events = job.take_events()
        ours = events[(events["table_generation"] == tuned.generation) & (events["func"] == "all_gather")]
        assert (
            set(ours["proto"]) == {"ll"}
            and ours["comm_id"].nunique() == {"one": 1, "hsdp": 2, "tp x dp": 4}[kind]
        )
        assert job.audit.mismatches == 0
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_a_restart_keeps_its_table(folder):
    """Before: a new life of the job has new communicator ids, which the kept table did not match.

    Seen at 679c0ae, an elastic restart: in the second life ring/simple ran again: the kept table names communicators
    that are no more.
    """
    first = start(folder, "hsdp", 10_000)
    job = Job(folder, first)
    try:
        (profile,) = profiles_of(job)
        generation = job.confirm({profile.slot: LL})
        job.window({profile.slot: LL}, 3)
    finally:
        first.terminate()
        first.wait()
    second = start(folder, "hsdp", 60, life=2)
    back = Job(RunFolder(folder.path), second)
    assert back.confirmed == {profile.slot: LL} and back.generation == generation
    while back.is_alive():
        back.rest()
    back.poll()
    events = back.take_events()
    life = events[(events["comm_id"] > 200) & (events["func"] == "all_gather")]
    assert second.wait() == 0 and life["comm_id"].nunique() == 2
    last = life[life["step"] > 40]
    assert set(last["proto"]) == {"ll"} and (last["table_generation"] == back.generation).all()
    assert back.audit.mismatches == 0


#: Our own job: ranks, the cluster they stand for, how it is cut. A process is four GPUs, so two are a node in each.
JOBS = {"one group": (2, "dgx-h100-1x8", []), "hsdp": (4, "dgx-h100-2x8", ["--hsdp", "2"])}


BYTES_SCALE, COMPUTE_SCALE = "20", "10"


def command(kind, steps):
    """Our ZeRO-3 job on the emulated backend; a block's gather is 4 MB, where NCCL takes LL and LL128 is faster."""
    n_ranks, _, cut = JOBS[kind]
    job = [sys.executable, "-m", "dynamiccl.zero_workload", "--backend", "emulated", "--quiet", *cut]
    shape = [
        "--layers",
        "4",
        "--width",
        "64",
        "--heads",
        "2",
        "--seq",
        "16",
        "--batch",
        "1",
        "--steps",
        str(steps),
    ]
    return [*job, *shape, "--ranks", str(n_ranks)]


def train(run, kind, steps):
    scales = {"DYNAMICCL_BYTES_SCALE": BYTES_SCALE, "DYNAMICCL_COMPUTE_SCALE": COMPUTE_SCALE}
    env = {
        **os.environ,
        **job_env(run.path),
        **scales,
        "DYNAMICCL_CLUSTER": JOBS[kind][1],
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(command(kind, steps), env=env, stdout=subprocess.DEVNULL)


def slots_of(kind):
    """The slots of the job's blocks, and how many communicators ran each collective as a table said."""
    run = RunFolder.create()
    process = train(run, kind, 10_000)
    try:
        job = Job(run, process)
        profiles = profiles_of(job)
        blocks = {p.slot for p in profiles if p.slot.min_bytes <= BLOCK <= p.slot.max_bytes}
        tuned = held(job, dict.fromkeys(blocks, LL128))
        events = job.take_events()
        obeyed = events[
            (events["table_generation"] == tuned.generation) & events["n_bytes"].between(BLOCK, 1.01 * BLOCK)
        ]
        assert tuned.disobeyed == () and set(obeyed["proto"]) == {"ll128"} and job.audit.mismatches == 0
        assert len({(p.slot.func, p.slot.size_class) for p in profiles}) == len(profiles)
        return blocks, {func: some["comm_id"].nunique() for func, some in obeyed.groupby("func")}
    finally:
        process.terminate()
        process.wait()
        run.close()


@pytest.mark.slow
def test_two_shard_groups_of_a_real_job_share_the_slots_of_one():
    """HSDP 2 x 2 of our own job: the slots of a job of one node, one for each collective, in force on both groups."""
    slots, comms = slots_of("one group")
    shared, both = slots_of("hsdp")
    assert len(slots) == 2 and {(s.n_ranks, s.n_nodes) for s in slots} == {(8, 1)} and shared == slots
    assert comms == {"all_gather": 1, "reduce_scatter": 1} and both == {"all_gather": 2, "reduce_scatter": 2}


def tuned(kind, out):
    """Milliseconds a step that a whole ``dynamiccl tune`` of the job saves; how often each communicator ran a block's
    collectives as the search's winner says.
    """
    tune = [sys.executable, "-m", "dynamiccl.agent.cli", "tune", "--cluster", JOBS[kind][1], "--no-memory"]
    scales = ["--bytes-scale", BYTES_SCALE, "--compute-scale", COMPUTE_SCALE, "--window-steps", "4"]
    search = ["--windows", "8", "--out", str(out), "--json", "--"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*tune, *scales, *search, *command(kind, 220)], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout)
    assert summary["kept"] and summary["consistency"]["mismatches"] == 0, summary
    chosen = {
        d["func"]: d["proto"] for d in summary["decisions"] if d["min_bytes"] <= BLOCK <= d["max_bytes"]
    }
    assert set(chosen.values()) <= {"ll128", "simple"}, summary[
        "decisions"
    ]  # either is faster than NCCL's LL
    events = Trace.read(out / "trace").events
    blocks = events[events["n_bytes"].between(BLOCK, 1.01 * BLOCK)]
    won = blocks[blocks["proto"] == blocks["func"].map(chosen)]
    calls = {func: some.groupby("comm_id").size().tolist() for func, some in won.groupby("func")}
    return summary["default_step_ms"] - summary["tuned_step_ms"], calls


@pytest.mark.slow
@pytest.mark.timing
def test_under_a_whole_tune_two_shard_groups_gain_what_one_gains(tmp_path):
    """HSDP 2 x 2 waits for both of its groups in every step: were one of them tuned alone, it would gain nothing."""
    alone, one = tuned("one group", tmp_path / "one")
    assert alone > 0 and {func: len(calls) for func, calls in one.items()} == {
        "all_gather": 1,
        "reduce_scatter": 1,
    }
    for turn in range(3):  # four processes on a busy machine: it looks again
        both, two = tuned("hsdp", tmp_path / f"{turn}")
        assert {func: len(calls) for func, calls in two.items()} == {"all_gather": 2, "reduce_scatter": 2}
        assert all(min(calls) > 0.9 * max(calls) for calls in two.values())
        if both > 0.5 * alone:
            break
    assert both > 0.5 * alone, (alone, both)
