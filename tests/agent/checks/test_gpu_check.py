"""``gpu-check`` on the emulated cluster, small; and that what it looks for is found."""

import json
import os
import subprocess
import sys
import time

import pytest
from dynamiccl.agent.checks import gpu_check
from dynamiccl.agent.checks.gpu_check import Check, Machine, placement
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from overhead import main, measure
from paths import ROOT

ENV = {k: v for k, v in os.environ.items() if not k.startswith("DYNAMICCL_")} | {"OMP_NUM_THREADS": "1"}
CLUSTER = "dgx-h100-2x8"
FILED = ROOT / "envs" / "results"
H100 = "2026-11-26_nvidia_h100_80gb_hbm3_under_mps_nccl-"


def dynamiccl(*words):
    command = [sys.executable, "-m", "dynamiccl.agent.cli", *words]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_all_of_it_runs_to_its_end_and_says_that_it_is_emulated(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "SIZES", {"emulated": [2**16]})
    monkeypatch.setattr(gpu_check, "STEPS", 400)
    check = Check(Machine.here(CLUSTER), tmp_path, print)
    result = check.run(600)
    assert result["ok"], result
    assert json.loads((check.folder / "check.json").read_text()) == json.loads(json.dumps(result))
    assert result["emulated"] and "emulated" in result["label"] and "emulated" in check.folder.name
    sweep = result["parts"]["sweep"]
    assert sweep["loaded"] and sweep["kernel_times"] and sweep["configs"] == 2 * 3 * 8
    _, *rows = map(json.loads, (check.folder / "sweep.jsonl").read_text().splitlines())
    assert len(rows) == sweep["configs"] + 2
    assert {row["ran"][1] for row in rows} == {"ll", "ll128", "simple"}
    assert all(row["right"] and row["obeyed"] and row["ranks_agree"] for row in rows)
    summary = result["parts"]["zero3"]["summary"]
    assert (
        summary["speedup"] > 0
        and len(summary["aa_speedup_ci95"]) == 2
        and summary["steps"] <= gpu_check.STEPS
    )


SABOTAGE = """
import os, sys
from dynamiccl.agent.checks import gpu_check
from dynamiccl.traces.records import Decision, Rule, Table
if os.environ["RANK"] == "1":
    if sys.argv[2] == "table":
        encode = gpu_check.encode_table
        other = Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "simple", 1))
        gpu_check.encode_table = lambda table: encode(Table(table.generation, (other,) if table.rules else ()))
    if sys.argv[2] == "bits":
        call = gpu_check.Buffers.call
        def wrong(self):
            call(self)
            self.output[-1] += 1
        gpu_check.Buffers.call = wrong
gpu_check.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "found"), [("table", "obeyed"), ("table", "ranks_agree"), ("bits", "right")]
)
def test_a_rank_that_does_otherwise_is_found_out(tmp_path, what, found):
    machine, run = Machine.here(CLUSTER), RunFolder.create()
    told = json.dumps({"backend": "emulated", "out": str(tmp_path / "rows"), "sizes": [65536]})
    try:
        env = ENV | machine.env() | job_env(run.path) | {"DYNAMICCL_BYTES_SCALE": "1"}
        subprocess.run(
            machine.ranks([sys.executable, "-c", SABOTAGE, told, what]), env=env, check=True, timeout=100
        )
    finally:
        run.close()
    _, *rows = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    forced = [row for row in rows if row["func"] == "all_gather" and row["decision"] != "auto"]
    assert len(forced) == 24
    assert sum(not row[found] for row in forced) >= 16, rows


def test_a_plugin_that_is_not_there_is_found_out(tmp_path):
    """Without a run folder nothing is recorded, as if NCCL had not loaded the plugin."""
    machine = Machine.here(CLUSTER)
    told = json.dumps({"backend": "emulated", "out": str(tmp_path / "rows"), "sizes": [65536]})
    command = machine.ranks([sys.executable, "-m", "dynamiccl.agent.checks.gpu_check", told])
    done = subprocess.run(command, env=ENV | machine.env(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "not loaded on every rank" in done.stderr
    (head,) = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert not head["loaded"] and [rank["ring"] for rank in head["ranks"]] == [False, False]


def test_a_part_that_hangs_or_fails_costs_its_own_result_only(tmp_path, monkeypatch):
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(Machine, "ranks", lambda self, program: hangs)
    monkeypatch.setattr(Check, "_zero3", lambda self, limit_s: {"ok": True})
    began = time.monotonic()
    result = Check(Machine.here(CLUSTER), tmp_path, print).run(2)
    sweep = result["parts"]["sweep"]
    assert time.monotonic() - began < 20 and sweep["ended"] == "cut off after 1 s"
    assert not result["ok"] and not sweep["loaded"] and result["parts"]["zero3"]["ok"]
    monkeypatch.setattr(Machine, "ranks", lambda self, program: ["false"])
    assert "status 1" in Check(Machine.here(CLUSTER), tmp_path, print).run(60)["parts"]["sweep"]["ended"]


def test_steps_too_few_for_a_verdict_are_no_fault(tmp_path, monkeypatch):
    """Before: an H100 whose steps differ by 14 % among themselves, where no comparison ended, was "something wrong"."""
    ran = json.loads((FILED / f"{H100}2.30.7_torch-2.11.0" / "check.json").read_text())["parts"]["zero3"][
        "summary"
    ]
    check = Check(Machine.here(CLUSTER), tmp_path, print)

    def job(self, command, env, limit_s):
        (self.folder / "zero3").mkdir()
        (self.folder / "zero3" / "summary.json").write_text(json.dumps(ran))
        return ""

    monkeypatch.setattr(Check, "_job", job)
    assert check._zero3(1.0)["ok"] and ran["steps_to_verdict"] is None and len(ran["comparisons"]) == 2
    ran["comparisons"] = []
    with pytest.raises(RuntimeError, match="nothing compared"):
        check._zero3(1.0)


def test_every_config_was_obeyed_on_an_h100():
    """By NCCL 2.28.9, whose ranks talk through sockets, and 2.30.7, through the GPU's memory."""
    configs = 0
    for release, tuner, n_configs in (("2.28.9", 5, 128), ("2.30.7", 6, 192)):
        folder = FILED / f"{H100}{release}_torch-2.11.0"
        check = json.loads((folder / "check.json").read_text())
        assert check["label"] == "measured" and check["versions"]["nccl"] == release and check["ok"]
        head, *rows = map(json.loads, (folder / "sweep.jsonl").read_text().splitlines())
        assert (
            head["loaded"]
            and head["kernel_times"]
            and [rank["tuner"] for rank in head["ranks"]] == [tuner, tuner]
        )
        assert all(row["right"] and row["obeyed"] and row["ranks_agree"] for row in rows)
        forced = [row["decision"] for row in rows if row["decision"] != "auto"]
        assert len(forced) == check["parts"]["sweep"]["configs"] == n_configs
        configs += n_configs
    assert f"all {configs} configs" in (FILED.parents[1] / "README.md").read_text()


def test_overhead_is_the_ratio_of_the_jobs_own_clocks():
    """A job that takes 10 ms a step, and 11 with the plugin's environment."""
    program = (
        "import json, os, sys; ms = 11 if 'DYNAMICCL_RUN' in os.environ else 10;"
        "open(sys.argv[1], 'w').writelines(json.dumps({'step_ms': ms}) + chr(10) for _ in range(8))"
    )
    said = []
    result = measure(3, lambda log: [sys.executable, "-c", program, str(log)], {}, said.append)
    assert abs(result[0] - 1.1) < 1e-9 and len(said) == 3
    for words in ("no luck", "error: no luck\\n===="):
        with pytest.raises(RuntimeError, match="no luck"):
            measure(3, lambda log, words=words: [sys.executable, "-c", f"raise SystemExit('{words}')"], {})


def test_overhead_without_a_figure_is_not_all_well():
    """Before: it printed NaN and "all well".

    Seen at 679c0ae, ``gpu-check`` calls an overhead of NaN well: "overhead +nan % [+nan, +nan]", and ``ok``.
    """
    program = "import sys; open(sys.argv[1], 'w').write('{\"step_ms\": 1}\\n' * 5)"
    with pytest.raises(RuntimeError, match="no step time"):
        measure(3, lambda log: [sys.executable, "-c", program, str(log)], {})


@pytest.mark.slow
def test_overhead_of_our_own_job(capsys):
    main(["--pairs", "3", "--steps", "10", "--cluster", CLUSTER])
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("overhead ") and said[-1].endswith(" of a step, 3 pairs")


def test_ranks_that_share_a_gpu_are_told_how():
    assert placement(8, (2, 29, 7)) == "apart"
    assert placement(1, (2, 29, 7)) == "hosts" and placement(1, (2, 30, 3)) == "shared"
    machines = {way: Machine("a GPU", 2, way, {}) for way in ("apart", "hosts", "shared")}
    assert machines["hosts"].env()["NCCL_SOCKET_IFNAME"] == "lo"
    assert machines["shared"].env()["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert not any(name.startswith("NCCL_") for name in machines["apart"].env())
    says = (
        'import os; os.write(1, f\'{os.environ.get("NCCL_HOSTID")} {os.environ["LOCAL_RANK"]}\\n\'.encode())'
    )
    program = [sys.executable, "-c", says]  # in one piece: the ranks share the output
    for way, said in (("hosts", ["rank-0 0", "rank-1 1"]), ("shared", ["None 0", "None 1"])):
        done = subprocess.run(
            machines[way].ranks(program), env=ENV, capture_output=True, text=True, timeout=100
        )
        assert sorted(done.stdout.splitlines()) == said, done.stderr


def test_a_machine_of_one_gpu_says_where_mps_runs_and_which_nccl_is_installed(tmp_path, monkeypatch):
    known = {"gpus": lambda: ["a GPU"], "driver": lambda: "580", "nccl_release": lambda: (2, 28, 9)}
    for name, value in known.items():
        monkeypatch.setattr(gpu_check, name, value)
    monkeypatch.setattr(gpu_check.torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert Machine.here().device == "a GPU"
    (tmp_path / "control").touch()  # the control program's pipe
    machine = Machine.here()
    assert (machine.device, machine.n_ranks, machine.placement) == ("a GPU under MPS", 2, "hosts")
    assert machine.versions["nccl"] == "2.28.9" and machine.backend == "nccl"


def test_bad_input():
    done = dynamiccl("lab", "gpu-check", "--cluster", "no-such")
    assert done.returncode == 2 and "no-such" in done.stderr and "Traceback" not in done.stderr
