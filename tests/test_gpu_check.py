"""``gpu-check`` in its dry mode, small; and that what it looks for is found."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from dynamiccl.agent import gpu_check as gpu_check_module
from dynamiccl.agent.compare import Comparison
from dynamiccl.agent.gpu_check import CSV_COLUMNS, SMALL, Check, Machine
from dynamiccl.agent.overhead import measure
from dynamiccl.envs.nccl.ranks import placements, rank_env
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.nccl.sweep import rows_of
from dynamiccl.envs.sim.emulated import Emulated

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def gpu_check(*arguments):
    command = [sys.executable, "-m", "dynamiccl.agent.cli", "lab", "gpu-check", *arguments]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_the_dry_mode_runs_to_its_end_and_says_that_it_is_emulated(tmp_path):
    parts = ["--only", "sweep", "--only", "zero3"]
    done = gpu_check("--dry", "--small", "--json", "--budget", "1500", "--out", str(tmp_path), *parts)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(done.stdout)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "check.json").read_text()) == result
    assert result["emulated"] and "emulated" in result["label"] and "emulated" in folder.name
    sweep = result["parts"]["sweep"]["placements"]["apart"]
    assert sweep["loaded"] and sweep["configs"] == sweep["configs_offered"] == 12 and sweep["cells"] == 2
    assert (sweep["not_obeyed"], sweep["ranks_differ"], sweep["bits_differ"]) == (0, 0, 0)
    with open(folder / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16 and set(rows[0]) == set(CSV_COLUMNS)
    assert {row["ran_proto"] for row in rows} == {"ll", "ll128", "simple"}
    assert all(float(row["kernel_us"]) > 0 for row in rows)
    zero3 = result["parts"]["zero3"]
    assert zero3["speedup"] > 0 and len(zero3["aa_speedup_ci95"]) == 2 and zero3["consistency"]["mismatches"] == 0


SABOTAGE = """
import sys
from dynamiccl.envs.nccl import sweep
from dynamiccl.traces.records import Decision, Rule, Table
if __import__("os").environ["RANK"] == "1":
    if sys.argv[1] == "table":
        encode = sweep.encode_table
        other = Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "simple", 1))
        sweep.encode_table = lambda table: encode(Table(table.generation, (other,) if table.rules else ()))
    if sys.argv[1] == "bits":
        call = sweep.Buffers.call
        def wrong(self):
            call(self)
            self.output[-1] += len(self.reference) > 0
        sweep.Buffers.call = wrong
sys.argv[1:2] = []
sweep.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "found"), [("table", "obeyed"), ("table", "ranks_agree"), ("bits", "same_bits")])
def test_a_rank_that_does_otherwise_is_found_out(tmp_path, what, found):
    run, lines = RunFolder.create(), tmp_path / "rows"
    words = ["--backend", "emulated", "--out", str(lines), "--sizes", "65536", "--channels", "4", "--reps", "1"]
    command = [sys.executable, "-m", "dynamiccl.envs.nccl.ranks", "--", sys.executable, "-c", SABOTAGE, what, *words]
    try:
        env = ENV | run.env() | Emulated("dgx-h100-2x8", 1.0, 1.0).env()
        subprocess.run(command, env=env, check=True, timeout=100)
    finally:
        run.close()
    _, *rows = rows_of(lines)
    forced = [row for row in rows if row["func"] == "all_gather" and row["decision"] != "auto"]
    assert len(forced) == 3
    assert sum(not row[found] for row in forced) >= 2, rows


def test_a_plugin_that_is_not_there_is_found_out(tmp_path):
    """Without a run folder nothing is recorded, as if NCCL had not loaded the plugin."""
    words = ["--backend", "emulated", "--out", str(tmp_path / "rows"), "--sizes", "65536", "--channels", "0"]
    ranks = [sys.executable, "-m", "dynamiccl.envs.nccl.ranks", "--", sys.executable, "-m", "dynamiccl.envs.nccl.sweep"]
    env = {k: v for k, v in ENV.items() if not k.startswith("DYNAMICCL_")} | Emulated("dgx-h100-2x8", 1.0, 1.0).env()
    done = subprocess.run([*ranks, *words], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "not loaded on every rank" in done.stderr
    (head,) = rows_of(tmp_path / "rows")
    assert head["loaded"] == [{"tuner": False, "profiler": False, "communicator": False}] * 2


def test_overhead_is_the_ratio_of_the_jobs_own_clocks():
    """A job that takes 10 ms a step, and 11 with the plugin's environment."""
    program = (
        "import json, os, sys; ms = 11 if 'DYNAMICCL_RUN' in os.environ else 10;"
        "open(sys.argv[1], 'w').writelines(json.dumps({'step_ms': ms}) + chr(10) for _ in range(8))"
    )
    said = []
    result = measure(9, lambda log: [sys.executable, "-c", program, str(log)], {}, said.append, budget_s=0)
    assert abs(result.speedup - 1.1) < 1e-9 and result.n_pairs == len(said) == 3  # the budget ends it at the least
    with pytest.raises(RuntimeError, match="no luck"):
        measure(3, lambda log: [sys.executable, "-c", "raise SystemExit('no luck')"], {})


def test_overhead_without_a_figure_is_not_all_well(tmp_path, monkeypatch):
    """Before: it printed NaN and "all well".

    Seen at 679c0ae, ``gpu-check`` calls an overhead of NaN well: "overhead +nan % [+nan, +nan]", and ``ok``.
    """
    program = "import sys; open(sys.argv[1], 'w').write('{\"step_ms\": 1}\\n' * 5)"
    with pytest.raises(RuntimeError, match="no step time"):
        measure(3, lambda log: [sys.executable, "-c", program, str(log)], {})
    nan = Comparison(float("nan"), float("nan"), float("nan"), 3)
    monkeypatch.setattr(gpu_check_module, "measure", lambda *_args, **_more: nan)
    check = Check(Machine.here(dry=True), SMALL, tmp_path, 60, lambda text: None)
    result = check.run(["overhead"])
    assert not result["ok"] and "no figure" in result["parts"]["overhead"]["error"]


def test_ranks_that_share_a_gpu_are_told_how():
    assert placements(8, (2, 29, 7)) == ("apart",) and placements(1, (2, 29, 7)) == ("hosts",)
    assert placements(1, (2, 30, 3)) == ("shared", "hosts")
    hosts = [rank_env(rank, 3, 1234, "hosts") for rank in range(3)]
    assert len({env["NCCL_HOSTID"] for env in hosts}) == 3 and hosts[0]["NCCL_SOCKET_IFNAME"] == "lo"
    shared = rank_env(1, 2, 1234, "shared")
    assert shared["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and "NCCL_HOSTID" not in shared
    assert not any(name.startswith("NCCL_") for name in rank_env(0, 2, 1234, "apart"))


def test_a_failed_rank_ends_the_others(tmp_path):
    program = "import os, time; os.environ['RANK'] == '1' and os._exit(7); time.sleep(60)"
    command = [sys.executable, "-m", "dynamiccl.envs.nccl.ranks", "--ranks", "3", "--", sys.executable, "-c", program]
    assert subprocess.run(command, timeout=30).returncode == 7


def test_bad_input():
    done = gpu_check("--only", "everything")
    assert done.returncode == 2 and "sweep, overhead, zero3" in done.stderr and "Traceback" not in done.stderr


def test_without_a_gpu_the_dry_mode_is_taken():
    machine = Machine.here(dry=True)
    assert machine.backend == "emulated" and machine.emulated and machine.placements == ("apart",)
    assert Path(machine.emulated.cluster).name in machine.device
