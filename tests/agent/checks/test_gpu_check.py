"""``gpu-check`` on the emulated cluster, shortened; its deadlines; what it looks for is found."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dynamiccl.agent.checks.gpu.check import SECONDS, SPARE_S, Check, Plan
from dynamiccl.agent.checks.gpu.machine import Machine
from dynamiccl.agent.checks.gpu.session import PartFailed, Session, session_env
from dynamiccl.agent.checks.results.files import COLUMNS, Results, read_table
from dynamiccl.agent.checks.results.judge import races
from dynamiccl.agent.checks.results.page import page
from dynamiccl.envs.nccl.plugin.build import plugin_path

ENV = {k: v for k, v in os.environ.items() if not k.startswith("DYNAMICCL_")} | {"OMP_NUM_THREADS": "1"}
CLUSTER = "dgx-h100-2x8"
#: The short form: every part that needs no further program than its ranks.
SHORT = {"smoke": 20, "sweep": 20, "contention": 10, "noise": 10, "outside": 20, "truth": 20, "joint": 10}


def short(**changes):
    plan = Plan(SHORT, [2**16, 2**18, 2**21], 2**18, steps=48, aa_steps=40, block_steps=8)
    return dataclasses.replace(plan, **changes)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One run of the short form, in an environment in which a tuner of ours is already named: half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_TUNER_PLUGIN", str(plugin_path()))
        patch.setenv("DYNAMICCL_TABLE", "/nowhere")
        patch.setenv("OMP_NUM_THREADS", "1")
        said = []
        check = Check(Machine.here(CLUSTER), tmp_path_factory.mktemp("results"), said.append, short())
        check.do_all()
    return Results.read(check.folder), said


@pytest.mark.slow
def test_every_part_leaves_its_results_and_says_that_it_is_emulated(done):
    results, said = done
    parts = results.run["parts"]
    assert {name: one["status"] for name, one in parts.items()} == dict.fromkeys(SHORT, "done")
    assert results.run["ok"] and results.run["emulated"] == CLUSTER
    assert all(len(results.tables[name]) for name in COLUMNS)
    text = page(results)
    assert "EMULATED" in text and "CLAIM" not in text and "wrong results 0" in text
    assert "emulated" in results.folder.name and len(said) == 2 * len(SHORT)


@pytest.mark.slow
def test_the_sweep_measures_each_plan_once_and_the_default_again(done):
    sweep = done[0].tables["sweep"]
    assert set(sweep["comm"]) == {"nccl", "raised"} and set(sweep["func"]) == {"all_gather", "reduce_scatter"}
    assert {ran.split("/")[1] for ran in sweep["ran"]} == {"ll", "ll128", "simple"}
    forced = sweep[(sweep["asked"] != "auto") & (sweep["calls"] > 0)]
    assert not forced.duplicated(["comm", "func", "n_bytes", "ran"]).any()
    assert (sweep["asked"] == "auto").sum() > 8  # the first time, and between others
    timed = sweep[sweep["calls"] > 0]
    assert (timed["p10_us"] <= timed["p50_us"]).all() and (timed["p50_us"] <= timed["p90_us"]).all()


@pytest.mark.slow
def test_without_the_tuner_only_the_profilers_variable_is_left_of_ours(done):
    """Arm (b): whatever the environment of the check itself names."""
    ours = done[0].run["parts"]["smoke"]["our_variables"]
    assert ours["profiler"] == ["NCCL_PROFILER_PLUGIN"]
    assert {"DYNAMICCL_RUN", "NCCL_TUNER_PLUGIN"} <= set(ours["tuner"])
    base = {"NCCL_TUNER_PLUGIN": "/x/libnccl-tuner-dynamiccl.so", "DYNAMICCL_RUN": "/y", "NCCL_NET": "z"}
    left = session_env("none", Machine.here(CLUSTER), None, base)
    assert "NCCL_TUNER_PLUGIN" not in left and "DYNAMICCL_RUN" not in left and left["NCCL_NET"] == "z"
    theirs = session_env("none", Machine.here(CLUSTER), None, {"NCCL_TUNER_PLUGIN": "theirs"})
    assert theirs["NCCL_TUNER_PLUGIN"] == "theirs"  # NCCL as this machine has it


@pytest.mark.slow
def test_the_silent_tuner_is_asked_and_answers_nothing(done):
    """Arm (a); under a table it does answer, so the count would show it."""
    parts = done[0].run["parts"]
    told = parts["truth"]["races"]
    for race in told.values():
        asked, answered = race["asked_answered"]["untouched"]
        assert asked > 0 and answered == 0
    asked, answered = told["best table"]["asked_answered"]["table"]
    assert answered == asked > 0
    silent = [one for one in parts["outside"]["answers"] if one["arm"] == "tuner"]
    assert len(silent) == 4
    for one in silent:
        asked, answered = one["asked_answered"]["tuner"]
        assert asked > 0 and answered == 0


@pytest.mark.parametrize("way", ["apart", "hosts", "shared"])
def test_no_placement_sets_a_number_of_channels(way):
    """Before: NCCL_MIN_CTAS=16 slowed the job that a table then made 18 % shorter."""
    names = Machine("a GPU", 2, way, {}).env()
    assert not any("CTAS" in name or "CHANNELS" in name for name in names)


@pytest.mark.slow
def test_no_arm_sets_a_number_of_channels(done):
    baselines = done[0].tables["truth"].drop_duplicates("race")
    assert set(baselines["comm"]) == {"nccl"} and baselines["table"].isna().all()
    assert all(gain.baseline == "" for gain in races(done[0]))


#: A rank without PyTorch: it answers the smoke test, and does with the sweep as it is told.
FAKE = """
import json, os, sys, time
told = json.loads(sys.argv[-1])
for line in sys.stdin:
    part = json.loads(line)["part"]
    if part == "sweep":
        {does}
    if os.environ["LOCAL_RANK"] == "0":
        with open(told["answers"], "a") as file:
            file.write(json.dumps({{"ok": True, "our_variables": []}}) + chr(10))
"""


def fake(does):
    return (sys.executable, "-c", FAKE.format(does=does))


@pytest.mark.parametrize(
    ("does", "status", "why"),
    [("time.sleep(60)", "stopped", "by its deadline"), ("sys.exit(3)", "failed", "status 3: log.txt says")],
)
def test_a_part_that_hangs_or_fails_costs_its_own_results_only(tmp_path, does, status, why):
    seconds = {"smoke": 10, "sweep": 1, "contention": 5}
    check = Check(
        Machine.here(CLUSTER), tmp_path, print, short(seconds=seconds, grace_s=0.5, program=fake(does))
    )
    began = time.monotonic()
    result = check.do_all()
    assert time.monotonic() - began < 20
    parts = result["parts"]
    assert parts["sweep"]["status"] == status and why in parts["sweep"]["why"]
    assert parts["smoke"]["status"] == parts["contention"]["status"] == "done"  # with new ranks
    assert not result["ok"] and "sweep" in page(Results.read(check.folder))


@pytest.mark.slow
def test_what_comes_late_falls_away_from_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("dynamiccl.agent.checks.gpu.check.SPARE_S", 0.0)
    seconds = {"smoke": 3, "sweep": 3, "contention": 3}
    slow = fake("time.sleep(9.5)")  # longer than the plan, however quick the machine is
    check = Check(Machine.here(CLUSTER), tmp_path, print, short(seconds=seconds, grace_s=12, program=slow))
    parts = check.do_all()["parts"]
    assert parts["sweep"]["status"] == "done"
    assert parts["contention"]["status"] == "left out" and "no time" in parts["contention"]["why"]


def test_nothing_is_measured_where_the_plugin_is_not_loaded(tmp_path):
    program = [sys.executable, "-c", FAKE.format(does="pass").replace("True", "False")]
    check = Check(Machine.here(CLUSTER), tmp_path, print, short(program=program))
    parts = check.do_all()["parts"]
    assert "not loaded" in parts["smoke"]["why"]
    assert {part["status"] for name, part in parts.items() if name != "smoke"} == {"left out"}


RUN = """
import sys
import tarfile
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from dynamiccl.agent.checks.gpu.check import Check, Machine
from test_gpu_check import CLUSTER, short
Check(Machine.here(CLUSTER), Path(sys.argv[1]), lambda text: None, short()).do_all()
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_results_that_can_be_read_and_no_rank(tmp_path):
    """A copy of the folder is what a kill at that moment would leave; then a real kill."""
    command = [sys.executable, "-c", RUN, str(tmp_path / "out"), str(Path(__file__).parent)]
    check = subprocess.Popen(command, env=ENV, start_new_session=True)
    copies, rows = 0, 0
    while rows < 40:
        assert check.poll() is None
        time.sleep(0.05)
        for folder in (tmp_path / "out").glob("*"):
            copy = tmp_path / f"copy {copies}"
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".*"))
            if (copy / "run.json").exists():
                page(Results.read(copy))
                rows = len(read_table(copy, "steps"))
                copies += 1
            else:
                shutil.rmtree(copy)
    ranks = children(check.pid)
    assert len(ranks) == 4 and copies > 10
    check.kill()
    check.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{rank}/fd/0").exists() for rank in ranks):
        assert time.monotonic() < deadline, "ranks go on without the check"
        time.sleep(0.05)
    [folder] = (tmp_path / "out").glob("*")
    assert "Noise" in page(Results.read(folder))


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


SABOTAGE = """
import os, sys
from dynamiccl.agent.checks.gpu.parts import rank, serve
from dynamiccl.traces.records import Decision, Rule
what = sys.argv[1]
set_table, call = rank.Rank.set_table, rank.Buffers.call
def other_table(self, rules):
    set_table(self, (Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "simple", 1)),) if rules else ())
def other_bits(self, group, later=False):
    work = call(self, group, later)
    self.output[-1] += 1
    return work
if os.environ["RANK"] == "1" and what == "table":
    rank.Rank.set_table = other_table
if os.environ["RANK"] == "1" and what == "bits":
    rank.Buffers.call = other_bits
sys.argv[1:] = sys.argv[2:]
serve.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "found"), [("table", "not obeyed"), ("table", "ranks differ"), ("bits", "wrong results")]
)
def test_a_rank_that_does_otherwise_is_found_out(tmp_path, what, found):
    session = Session(
        "tuner", Machine.here(CLUSTER), tmp_path, program=[sys.executable, "-c", SABOTAGE, what]
    )
    try:
        session.do("smoke", time.monotonic() + 60, 1)
        told = session.do("sweep", time.monotonic() + 60, 30, sizes=[2**16], first=[])
    finally:
        session.close()
    assert told[found] >= 8 and not told["ok"], told


@pytest.mark.slow
def test_the_whole_script_ends_by_its_plan(tmp_path):
    """Of less than three minutes, tuning and the killed tuner included; on a busy machine late parts fall away."""
    command = [sys.executable, "-m", "dynamiccl.agent.cli", "lab", "gpu-check", "--cluster", CLUSTER]
    began = time.monotonic()
    result = subprocess.run(
        [*command, "--out", str(tmp_path), "--json"], env=ENV, capture_output=True, text=True, timeout=400
    )
    told = json.loads(result.stdout)
    assert time.monotonic() - began < sum(SECONDS["emulated"].values()) + SPARE_S + 60
    assert list(told["parts"]) == list(SECONDS["emulated"])
    assert "killed" in told["parts"]["tune"]["killed"]
    assert set(os.listdir(told["folder"])) == {
        *("run.json", "tune.tar.gz", "log.txt"),
        *(f"{name}.csv" for name in COLUMNS),
    }


@pytest.mark.slow
def test_several_nodes_run_it_together(tmp_path):
    """Two starts by torchrun, one rank each: node 0 has the results, both the same parts."""
    nodes = []
    for number in range(2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", "23517"]
        command = [sys.executable, "-c", RUN, str(tmp_path / str(number)), str(Path(__file__).parent)]
        nodes.append(subprocess.Popen([*torchrun, "--no-python", *command], env=ENV))
    assert [node.wait(300) for node in nodes] == [0, 0]
    first, second = (Results.read(next((tmp_path / str(number)).glob("*"))) for number in range(2))
    assert first.run["ok"] and first.run["nodes"] == 2 and len(first.tables["steps"]) > 100
    assert second.tables["steps"].empty and list(second.run["parts"]) == list(first.run["parts"])


def test_the_plan_is_eight_and_a_half_minutes_and_minutes_mean_the_sweep():
    assert sum(SECONDS["nccl"].values()) == 510 and sum(SECONDS["emulated"].values()) < 180 - 5
    alone = Plan.of("nccl", 5).seconds
    assert set(alone) == {"smoke", "sweep"} and sum(alone.values()) == 300


def test_a_session_whose_rank_dies_is_over_at_once(tmp_path):
    session = Session("none", Machine.here(CLUSTER), tmp_path, program=fake("time.sleep(60)"))
    os.kill(session._ranks[1].pid, signal.SIGKILL)
    with pytest.raises(PartFailed, match="status -9"):
        session.do("sweep", time.monotonic() + 30, 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--cluster", "no-such"], "no-such"),
        (["--minutes", "0"], "--minutes"),
        (["/no/folder"], "no results of gpu-check"),
    ],
)
def test_bad_input(words, says):
    command = [sys.executable, "-m", "dynamiccl.agent.cli", "lab", "gpu-check", *words]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
