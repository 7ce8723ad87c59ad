"""``lab gpu-check``: its parts by their deadlines, what its folders say, and the whole on the emulated cluster."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from command import invoke, start
from dynamiccl.agent.checks.gpu import figures
from dynamiccl.agent.checks.gpu.beside import CONTENTION, KERNELS
from dynamiccl.agent.checks.gpu.check import CAP, ON_GPUS, Check, Part, parts_of
from dynamiccl.agent.checks.gpu.figures import Folder, claims, noise, obedience, page, sentence, staircase
from dynamiccl.agent.checks.gpu.machine import Machine
from dynamiccl.agent.checks.gpu.race import Fixed
from dynamiccl.traces.records import CHANNELS, PAIRS
from dynamiccl.traces.spaces import N_CHANNELS, N_CONFIGS, decision_of

CLUSTER = "dgx-h100-2x8"


@pytest.fixture
def check(tmp_path):
    return Check(Machine.here(CLUSTER), tmp_path, lambda _: None)


def is_gone(pid):
    """Whether a process has ended, or soon does; who has to reap it may not."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def python(text, name, seconds=20):
    return Part(name, seconds, [sys.executable, "-c", text])


def test_a_part_that_fails_or_hangs_skips_no_other_and_keeps_its_rows(check):
    """Before: one weak flag of the first part left out all others."""
    hangs = f"import subprocess, sys, time; open({str(check.folder / 'rows')!r}, 'w').write('1'); "
    hangs += "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']); print(p.pid, flush=True); "
    hangs += "time.sleep(99)"
    parts = [python("raise SystemExit(3)", "fails"), python(hangs, "hangs", 2), python("print('x')", "works")]
    began = time.monotonic()
    result = check.do_all(parts, 100)
    assert {name: one["status"] for name, one in result["parts"].items()} == {
        "fails": "status 3",
        "hangs": "stopped by its deadline",
        "works": "done",
    }
    assert time.monotonic() - began < 20 and (check.folder / "rows").read_text() == "1"
    child = int((check.folder / "hangs.log").read_text())
    assert is_gone(child)
    assert json.loads((check.folder / "run.json").read_text())["parts"] == result["parts"]


def test_what_no_time_is_left_for_is_left_out(check):
    result = check.do_all([python("import time; time.sleep(1)", "one"), python("", "two", 100)], 20)
    assert [one["status"] for one in result["parts"].values()] == ["done", "left out"]


def test_the_races_are_8_16_and_32_channels_and_again_with_both_arms_held_to_24(tmp_path):
    machine = Machine("an H200", 2, "shared", "2.30.7")
    parts = {part.name: part for part in parts_of(machine, tmp_path)}
    assert list(parts)[:5] == ["kernels", "sweep", "race-8-64mib", "race-16-64mib", "race-32-64mib"]
    assert parts["race-8-64mib-cap24"].env == {"NCCL_MAX_CTAS": str(CAP)} and not parts["race-8-64mib"].env
    assert {race.layer_mib for race in ON_GPUS} == {64, 256}
    again = parts_of(machine, tmp_path, only_races=True)
    assert [part.name for part in again] == [name for name in parts if name.startswith("race-")]
    assert sum(part.seconds for part in again[:5]) < 5 * 60


def test_a_race_takes_nccls_own_pair_with_fewer_channels():
    own = PAIRS.index(("ring", "simple"))
    row = N_CHANNELS * (1 + own)
    every = SimpleNamespace(own=own, own_channels=64, open=np.arange(N_CONFIGS))
    assert str(decision_of(Fixed(16).choose(every))) == "ring/simple/16"
    few = SimpleNamespace(own=own, own_channels=64, open=np.array([0, row + CHANNELS.index(4)]))
    assert str(decision_of(Fixed(16).choose(few))) == "ring/simple/4"
    assert Fixed(16).choose(SimpleNamespace(own=own, own_channels=8, open=np.arange(N_CONFIGS))) == 0


def folder(path, low=1.02, began="2026-11-30T10:00:00Z", **changes):
    """A folder with one race."""
    (path / "race-8-64mib").mkdir(parents=True)
    run = {
        "schema": 2,
        "began": began,
        "device": "NVIDIA H200",
        "ranks": 2,
        "placement": "shared",
        "network": "ethernet",
        "nccl": "2.30.7",
        "environment": {},
        "emulated": None,
        "parts": {"race-8-64mib": {"status": "done", "took_s": 40.0}},
        **changes,
    }
    (path / "run.json").write_text(json.dumps(run))
    row = {"algo": "ring", "proto": "simple", "n_channels": 8}
    told = {"compared": "A", "tables": {"A": [row, row]}, "speedup": 1.06, "speedup_ci95": [low, 1.1]}
    (path / "race-8-64mib" / "summary.json").write_text(json.dumps(told))
    return Folder.read(path)


def test_a_gain_is_claimed_if_a_second_call_agrees(tmp_path):
    one = folder(tmp_path / "one")
    assert claims([one])[0][2] == "no second call on such a machine agrees"
    two = folder(tmp_path / "two", began="2026-11-30T10:09:00Z")
    assert [why for *_, why in claims([one, two])] == ["", ""]
    assert "two ranks share one GPU" in sentence([one, two]) and "CLAIM" in page([one, two])
    for name, changes in (
        ("a", {"nccl": "2.28.9"}),
        ("b", {"low": 0.99}),
        ("c", {"environment": {"NCCL_ALGO": "ring"}}),
    ):
        other = folder(tmp_path / name, began="2026-11-30T10:09:00Z", **changes)
        assert claims([one, other])[0][2] == "no second call on such a machine agrees"
        assert "none may be claimed" in sentence([one, other])


def test_an_emulated_gain_is_never_claimed(tmp_path):
    emulated = [folder(tmp_path / name, began=name, emulated=CLUSTER) for name in ("one", "two")]
    assert {why for *_, why in claims(emulated)} == {"emulated"}
    assert "has not run on a GPU yet" in sentence(emulated) and "emulated times" in sentence(emulated)
    assert figures.measured(emulated) == {}


def contention_rows(seen, sms=132):
    """A product of 128 tiles beside a collective, of whose staircase the part ``seen`` shows."""
    import pandas as pd

    rows = []
    for channels, expected in ((1, 1.0), (8, 2.0), (24, 2.0)):
        beside = 100 * (1 + seen * (expected - 1))
        rows.append((2048, sms, "all_gather", 1, "auto", f"ring/simple/{channels}", 6, 100.0, beside, beside))
    return pd.DataFrame(rows, columns=CONTENTION)


@pytest.mark.parametrize("seen", [0.0, 0.7, 1.0])
def test_the_staircase_is_read_from_rows_whose_truth_is_known(seen):
    assert staircase(contention_rows(seen)) == pytest.approx(seen)
    assert np.isnan(staircase(contention_rows(seen, sms=0)))


def test_noise_is_read_from_steps_whose_truth_is_known():
    rng = np.random.default_rng(0)
    logs = [0.0]
    for _ in range(4000):
        logs.append(0.7 * logs[-1] + rng.normal(0, 0.05))
    found = noise([np.array(logs)])
    assert found["sigma"][0] == pytest.approx(0.07, rel=0.1) and found["memory"][0] == pytest.approx(
        0.7, abs=0.05
    )


def test_obedience_is_by_the_name_and_the_grid_of_a_kernel():
    import pandas as pd

    good = ("all_gather", 1, "ring/ll/8", "ring/ll/8", "ncclDevKernel_AllGather_RING_LL", "8x1x1", 4)
    rows = pd.DataFrame([good, (*good[:2], "ring/ll128/8", "ring/ll128/8", *good[4:])], columns=KERNELS)
    assert obedience(rows) == (1, 2)
    assert obedience(pd.DataFrame([(*good[:5], "4x1x1", 4)], columns=KERNELS)) == (0, 1)


def test_one_command_puts_figures_where_they_belong(tmp_path):
    one = folder(tmp_path / "one")
    folder(tmp_path / "two", began="later")
    contention_rows(0.6).to_csv(one.path / "contention.csv", index=False)
    readme, records = tmp_path / "README.md", tmp_path / "measured.json"
    readme.write_text(f"before {figures.BEGIN}old{figures.END} after\n")
    records.write_text(json.dumps({"staircase_seen": {"value": 0.7}, "other": {"value": 1}}))
    command = [sys.executable, "-m", "dynamiccl.agent.checks.gpu.figures", tmp_path / "one", tmp_path / "two"]
    options = ["--write", "--readme", readme, "--measured", records]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert readme.read_text().startswith(
        f"before {figures.BEGIN}NVIDIA H200, two ranks share one GPU: race-8-64mib: 5.7 %"
    )
    told = json.loads(records.read_text())
    assert told["staircase_seen"]["value"] == 0.6 and "2.30.7" in told["staircase_seen"]["source"]
    assert told["other"] == {"value": 1}


def test_the_readme_says_what_is_on_file():
    """Without a folder on file: that it has not run on a GPU."""
    from paths import ROOT

    folders = [Folder.read(path.parent) for path in sorted((ROOT / "envs" / "results").glob("*/run.json"))]
    text = figures.README.read_text("utf-8").partition(figures.BEGIN)[2].partition(figures.END)[0]
    assert text == sentence(folders)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1}'])
def test_a_folder_of_another_kind_is_one_line(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    told = invoke(["lab", "gpu-check", tmp_path])
    assert told.exit_code == 2 and told.stderr.count("\n") == 1 and "run.json" in told.stderr


@pytest.mark.slow
def test_the_whole_runs_emulated_and_ends_as_a_figure(tmp_path):
    began = time.monotonic()
    done = start("lab", "gpu-check", "--cluster", CLUSTER, "--out", tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < 180
    (path,) = tmp_path.iterdir()
    found = Folder.read(path)
    assert {one["status"] for one in found.run["parts"].values()} == {"done"}
    assert len(found.rows("contention", CONTENTION)) > 4 and len(found.rows("kernels", KERNELS)) > 4
    assert found.sweep().line.startswith("room: ")
    assert [race.name for race in found.races()] == ["race-4-0.25mib", f"race-4-0.25mib-cap{CAP}"]
    assert all(np.isfinite(race.speedup) for race in found.races()), found.races()
    assert "EMULATED" in done.stdout and "CLAIM" not in done.stdout
    assert "has not run on a GPU yet. On the emulated cluster, emulated times, race-4" in sentence([found])
