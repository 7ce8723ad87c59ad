"""Options and paths of ``dynamiccl advise``: none is dropped without a word."""

import json
import shutil
from pathlib import Path

import pytest
import recordings_made as made
from command import invoke
from dynamiccl.envs.nccl.tables import load_table
from synthetic_trace import write_run

PLACE = ("--cluster", "dgx-h100-2x8")


def run(*words):
    return invoke(["advise", *map(str, words)])


@pytest.fixture
def many(tmp_path, monkeypatch):
    """A recording that is long enough for advice, as docs/start.md shows it."""
    calls = [("all_gather", 100), ("all_gather", 1200), ("reduce_scatter", 2400)]
    monkeypatch.setattr(made, "STEP", [(func, 32 << 20, at, 1000) for func, at in calls])
    monkeypatch.setattr(made, "STEP_US", 4000)
    monkeypatch.setattr(made, "N_STEPS", 40)
    return made.kineto(tmp_path / "many")


def nothing_to_try(tmp_path, monkeypatch):
    monkeypatch.setattr(made, "STEP_US", 200_000)
    return made.kineto(tmp_path / "calm", compute=False)


def test_a_table_is_written_where_there_is_advice(many, tmp_path):
    result = run(many, *PLACE, "--out", tmp_path / "table.json")
    assert result.exit_code == 0 and "no table written" not in result.stderr
    assert load_table(tmp_path / "table.json").rules


def test_without_advice_it_says_that_no_table_was_written(tmp_path, monkeypatch):
    """Before: not a word and status 0, and a former table in its place was taken for this job's."""
    monkeypatch.setattr(made, "N_STEPS", 32)
    calm = nothing_to_try(tmp_path, monkeypatch)
    table = tmp_path / "table.json"
    result = run(calm, *PLACE, "--out", table)
    assert result.exit_code == 0 and not table.exists()
    assert result.stderr == f"no table written to {table}: nothing to try\n"
    table.write_text("{}")
    result = run(calm, *PLACE, "--out", table)
    assert (
        result.exit_code == 1 and table.read_text() == "{}" and result.stdout.startswith("nothing to apply")
    )
    assert "no table written" in result.stderr and "not of this recording" in result.stderr


def test_few_steps_an_inventory_a_comparison_and_a_measured_run_write_no_table(tmp_path):
    """Before: of six steps one was written, "no gain is predicted" beside it; of the others it was not said."""
    table = tmp_path / "table.json"
    few, other = made.kineto(tmp_path / "few"), made.kineto(tmp_path / "other", compute=False)
    summary, _ = write_run(tmp_path / "run" / "trace", search=4, final=2)
    (tmp_path / "run" / "summary.json").write_text(json.dumps({**summary, "table": "t.json"}))
    cases = {
        "6 steps are too few to say what to try": (few, *PLACE),
        "the recording has no steps": (made.inspector(tmp_path / "logs"),),
        "two recordings are compared": (few, other),
        "the run has measured tables itself": (tmp_path / "run",),
    }
    for why, words in cases.items():
        result = run(*words, "--out", table)
        assert result.exit_code == 0 and not table.exists()
        assert f"no table written to {table}: {why}" in result.stderr
    told = json.loads(run(few, *PLACE, "--json").stdout)
    assert all(slot["advice"] == "auto" for slot in told["slots"])
    assert "as it is" not in run(few, *PLACE).stdout


def test_a_folder_that_holds_only_a_trace_is_read(tmp_path):
    """Before: "no file in it: folders within are not looked into", though ``show`` reads it."""
    write_run(tmp_path / "run" / "trace", search=4, final=2)
    assert run(tmp_path / "run", "--json").exit_code == 0


def test_a_run_beside_other_files_is_refused(tmp_path):
    """Before: the run alone was read, the files were not spoken of."""
    write_run(tmp_path / "run" / "trace", search=4, final=2)
    profiles = made.kineto(tmp_path / "profiles")
    shutil.copy(tmp_path / "run" / "trace" / "header.json", tmp_path / "run" / "other.json")
    for others in ([profiles / "rank0.trace.json"], [profiles, tmp_path / "run"]):
        result = run(tmp_path / "run", *others)
        assert result.exit_code == 2 and "is the folder of a run: give it alone" in result.stderr


def test_advice_is_told_though_the_table_cannot_be_written(many, tmp_path):
    """Before: a traceback, and not a word of the advice."""
    result = run(many, *PLACE, "--out", tmp_path / "none" / "table.json")
    assert result.exit_code == 2 and "of the step" in result.stdout
    assert result.stderr.startswith("error: ") and "No such file or directory" in result.stderr


def test_a_comparison_refuses_a_cluster_that_it_would_not_use(tmp_path):
    folders = [made.kineto(tmp_path / name, compute=name == "a") for name in "ab"]
    result = run(*folders, *PLACE)
    assert result.exit_code == 2 and "--cluster and --nccl are for one recording" in result.stderr


def test_a_release_without_a_cluster_is_refused(many):
    """Before: it was dropped, and the table was that of the recorded release."""
    told = run(many, "--nccl", "2.31.2")
    assert told.exit_code == 2 and "--nccl is the release of a --cluster" in told.stderr


def test_relative_and_absolute_paths_may_be_mixed(many, tmp_path, monkeypatch):
    """Before: "Can't mix absolute and relative paths"."""
    monkeypatch.chdir(tmp_path)
    first, second = sorted(path.name for path in many.iterdir())[:2]
    assert run(many / first, f"many/{second}", *PLACE).exit_code == 0


def test_a_folder_that_may_not_be_entered_is_an_error_of_one_line(monkeypatch, tmp_path):
    locked, real = tmp_path / "locked", Path.exists

    def refused(path, **more):
        if path.is_relative_to(locked):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **more)

    monkeypatch.setattr(Path, "exists", refused)
    for words in (["advise", locked], ["show", locked], ["doctor", "--trace", locked]):
        result = invoke(words)
        assert result.exit_code == 2 and "Permission denied" in result.stderr


def test_another_runs_verdict_is_not_told_of_a_recording(many, tmp_path):
    """Before: the first summary.json beside a profile answered for it."""
    for folder in (tmp_path, many):
        (folder / "summary.json").write_text(json.dumps({"speedup": 1.3}))
    result = run(*sorted(many.glob("*rank*")), *PLACE)
    assert result.exit_code == 0 and "measured by this run" not in result.stdout
    shown = invoke(["show", str(sorted(many.iterdir())[0])])
    assert "1.3" not in shown.stdout and "no decisions" in shown.stdout


def test_steps_without_calls_count(many):
    """Accumulated gradients: collectives in each tenth step. Before: ten times their share of the step."""
    for path in many.iterdir():
        document = json.loads(path.read_text())
        events = document["traceEvents"]
        document["traceEvents"] = [
            e for e in events if "Collective name" not in e["args"] or int(e["ts"] // made.STEP_US) % 10 == 0
        ]
        path.write_text(json.dumps(document))
    told = json.loads(run(many, *PLACE, "--json").stdout)
    gather = next(slot for slot in told["slots"] if slot["func"] == "all_gather")
    assert gather["calls"] == pytest.approx(0.2) and told["communication"] < 0.1
    assert gather["exposed_share"] is None or gather["exposed_share"] < 0.1
    shown = json.loads(invoke(["show", str(many), "--json"]).stdout)
    assert {slot["func"]: slot["calls"] for slot in shown["slots"]}["all_gather"] == pytest.approx(0.2)
    settings = invoke(["doctor", "--json", "--trace", str(many)]).stdout
    assert json.loads(settings)["checked"]["settings"].startswith("not compared: another tool's")
