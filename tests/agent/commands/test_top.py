"""``top``: what runs leave in their folders, at a glance and for Prometheus."""

import json
import os
import re
import time

import pytest
from command import invoke
from dynamiccl.agent.commands.top import HEADS
from dynamiccl.agent.report import summary as summaries
from dynamiccl.agent.report.runs import EXPORTED_S, find_runs, state
from dynamiccl.agent.report.summary import Follower, RunSummary, read_object
from dynamiccl.envs.live.locks import lock
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.reasons import RunEnds
from left_run import leave
from synthetic_trace import write_run


@pytest.fixture
def runs(tmp_path):
    """One run that is over, and one whose tuner lives."""
    for name, early in (("over", False), ("live", True)):
        summary, _ = write_run(tmp_path / name / "trace", search=4, final=6, stop_early=early)
        if not early:
            summary |= {"kept": True, "records_lost": 3, "agreement": {"state": "OPEN", "why": None}}
            (tmp_path / name / "summary.json").write_text(json.dumps(summary))
    folder = RunFolder.create(f"top-test-{os.getpid()}")
    held = lock(folder.path / "tuner", "")
    path = tmp_path / "live" / "trace" / "header.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run": str(folder.path)}))
    yield tmp_path
    os.close(held)
    folder.close()


def test_the_state_of_runs(runs):
    assert [p.name for p in find_runs([runs])] == ["over", "live"]
    over, live = state(runs / "over"), state(runs / "live")
    assert over["state"] == "ended" and over["kept"] and over["decisions"] == 2 and over["records_lost"] == 3
    low, high = over["gain_ci95"]
    assert low < over["gain"] < high and over["agreement"] == "OPEN"
    assert live["state"] == "tuning" and live["gain"] is None and live["phase"] == "search"


def test_while_the_tuner_lives_its_last_window_tells_the_cost(runs):
    """Before: cost and budget stood still from the verdict on, and an alert on them stayed on."""
    live = runs / "live"
    path = live / "trace" / "windows.jsonl"
    last = [json.loads(line) for line in path.read_text().splitlines() if '"step_ms"' in line][-1]
    leave(
        live,
        RunSummary(cost_s=1.0, budget_s=2.0, steps=1, run=read_object(live / "trace" / "header.json")["run"]),
    )
    with path.open("a") as file:
        file.write(json.dumps(last | {"cost_s": 5.0, "budget_s": 9.0, "last_step": 77}) + "\n")
    found = state(live)
    assert (found["cost_s"], found["budget_s"], found["step"]) == (5.0, 9.0, 77)


def test_who_follows_a_run_reads_the_new_lines_only(runs, monkeypatch):
    """The job's own thread asks as well, every few steps. Before: its last 256 KiB were parsed each time."""
    path, parsed = runs / "live" / "trace" / "windows.jsonl", []
    monkeypatch.setattr(summaries, "parse_json", lambda text: parsed.append(text) or json.loads(text))
    follower = Follower(runs / "live")
    assert follower.fold().summary == RunSummary.read(runs / "live")
    whole = '{"kind": "window", "last_step": 1234, "index": 9}'
    for text, step in (
        (whole[:20], None),
        (whole[20:], 1234),
        ("\n", 1234),
        ('{"kind": "job", "step": 7}\n', 7),
    ):
        with path.open("a") as log:
            log.write(text)
        parsed.clear()
        found = follower.fold().summary.steps
        assert found == step or step is None
        assert len(parsed) <= 1, "what was read before is not read again"
    path.write_text('{"kind": "window", "last_step": 5}\n')  # the writer has thinned it
    assert follower.fold().summary.steps == 5


def test_every_key_of_a_run_is_told(runs):
    told = set(re.findall(r"``(\w+)``", state.__doc__))
    assert set(state(runs / "over")) == told


def test_a_tuner_without_a_window_waits(runs):
    """Before: "tuning" on all nodes of a job, so that nobody saw which of them has rank 0."""
    (runs / "live" / "trace" / "windows.jsonl").write_text('{"kind": "table"}\n')
    assert state(runs / "live")["state"] == "waiting"
    invoke(["top", str(runs), "--once", "--metrics", str(runs / "d.prom")])
    assert f'dynamiccl_tuner_up{{run="{runs / "live"}"}} 1.0' in (runs / "d.prom").read_text()


def test_runs_of_a_job_with_several_tasks_are_found_and_told_apart(tmp_path):
    """Before: metrics of runs/tune had no run that Slurm started with one task per node."""
    for job in ("77.0", "78.0"):
        write_run(tmp_path / job / "task-1" / "trace", search=4, final=6)
    (tmp_path / "latest").symlink_to("78.0/task-1")
    assert len(find_runs([tmp_path])) == 2
    text = invoke(["top", str(tmp_path), "--once"]).stdout
    assert "77.0/task-1" in text and "78.0/task-1" in text


@pytest.mark.parametrize("job_lives", [False, True])
def test_metrics_leave_out_runs_that_ended_an_hour_ago(runs, job_lives):
    """Before: a run stayed until its folder was deleted: 500 of them on 64 exporters are 384,000 series."""
    for path in runs.rglob("*"):
        os.utime(path, (0, time.time() - EXPORTED_S - 60))
    folder = RunFolder.create("top-past")
    held = lock(folder.path / "launcher", "") if job_lives else -1
    (runs / "over" / "run").symlink_to(folder.path)
    try:
        invoke(["top", str(runs), "--once", "--metrics", str(runs / "d.prom")])
        told = set(re.findall(r'tuner_up{run="(.*)"}', (runs / "d.prom").read_text()))
        assert told == {str(runs / "live"), *([str(runs / "over")] if job_lives else [])}
        assert len(json.loads(invoke(["top", str(runs), "--json"]).stdout)) == 2  # people see them all
        os.utime(runs / "over" / "summary.json")  # just now, of a pod whose locks are not seen here
        invoke(["top", str(runs), "--once", "--metrics", str(runs / "d.prom")])
        assert str(runs / "over") in (runs / "d.prom").read_text()
    finally:
        if job_lives:
            os.close(held)
        folder.close()


def test_metrics_before_the_first_run_are_a_file_without_runs(tmp_path):
    """Before: an error, so that the unit failed on every new node."""
    done = invoke(["top", str(tmp_path), "--once", "--metrics", str(tmp_path / "d.prom")])
    assert done.exit_code == 0 and "dynamiccl_tuner_up{" not in (tmp_path / "d.prom").read_text()
    assert invoke(["top", str(tmp_path), "--once"]).exit_code == 2


@pytest.mark.parametrize(
    ("held", "ended", "died"),
    [
        ("launcher", None, True),
        ("ring-1", None, True),
        ("launcher", RunEnds.STOPPED().as_json(), False),
        ("tuner", None, False),
        (None, None, False),
    ],
)
def test_a_tuner_that_died_is_known_from_one_that_ended(tmp_path, held, ended, died):
    """A job lives while its launcher or a rank holds a lock. A tuner that ends leaves its reason."""
    folder = RunFolder.create("top-died")
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "header.json").write_text(json.dumps({"run": str(folder.path)}))
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 9, "ended": ended}))
    fd = lock(folder.path / held, "") if held else -1
    try:
        assert state(tmp_path)["tuner_died"] is died
    finally:
        if held:
            os.close(fd)
        folder.close()


def test_what_a_search_costs_is_told_as_the_budget_counts_it(tmp_path):
    """Seen: "search cost 9.6%" beside a budget of 5 %, of another denominator."""
    told = {
        "kind": "window",
        "phase": "search",
        "step_ms": 110.0,
        "cost_s": 12.0,
        "budget_s": 96.0,
        "in_force": "A",
    }
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "header.json").write_text("{}")
    (tmp_path / "trace" / "windows.jsonl").write_text(json.dumps(told))
    assert (state(tmp_path)["cost_s"], state(tmp_path)["budget_s"]) == (12.0, 96.0)
    assert "12 s of 96 s" in invoke(["top", str(tmp_path)]).stdout
    (tmp_path / "summary.json").write_text(json.dumps({"cost_s": 30.0, "budget_s": 100.0, "steps": 9}))
    assert state(tmp_path)["cost_s"] == 30.0


def test_a_damaged_run_is_shown_with_what_is_left(runs):
    (runs / "over" / "summary.json").write_text('{"kept": tr')
    (runs / "over" / "trace" / "windows.jsonl").write_bytes(b'\xff\xfe{"kind": "win')
    assert state(runs / "over")["state"] == "no tuner" and state(runs / "over")["phase"] is None


def test_the_command(runs):
    text = invoke(["top", str(runs)]).stdout
    assert "over" in text and "live" in text and "tuning" in text and "A, 2 rows" in text
    assert len(json.loads(invoke(["top", str(runs), "--json"]).stdout)) == 2
    result = invoke(["top", str(runs / "nothing")])
    assert result.exit_code == 2 and "dynamiccl tune" in result.stderr


@pytest.mark.parametrize("width", [80, 120, 160, 200])
def test_no_word_is_cut_whatever_the_width(runs, monkeypatch, width):
    """Before: "sta", "ste" and "step ti" in 80 columns, and again in 160 where all columns were tried."""
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("over", "live"):  # names as long as `tune` gives them
        (runs / name).rename(runs / f"20261127-02360{len(name)}-{name}")
    head, _, *lines = [line for line in invoke(["top", str(runs)]).stdout.splitlines() if line.strip()]
    shown = re.split(r"\s{2,}", head.strip())
    assert set(shown) <= set(HEADS) and {"run", "step", "step time", "current table"} <= set(shown)
    assert len(shown) == len(HEADS) or width < 200
    assert any("-live (emulated) " in line for line in lines)


def test_a_run_that_kept_no_table_shows_no_gain(runs):
    path = runs / "over" / "summary.json"
    gain = f"{100 * state(runs / 'over')['gain']:.1f} %"
    assert gain in invoke(["top", str(runs)]).stdout
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kept": False, "in_force": "default"}))
    text = invoke(["top", str(runs)]).stdout
    assert "NCCL's default" in text and gain not in text and state(runs / "over")["gain"] is None


def test_metrics_are_what_prometheus_reads(runs):
    parser = pytest.importorskip("prometheus_client.parser")
    from dynamiccl.agent.report.runs import METRICS

    result = invoke(["top", str(runs), "--once", "--metrics", str(runs / "d.prom")])
    assert result.exit_code == 0, result.stderr
    families = {f.name: f for f in parser.text_string_to_metric_families((runs / "d.prom").read_text())}
    assert set(families) == {name.removesuffix("_total") for name, *_ in METRICS}
    up = {s.labels["run"]: s.value for s in families["dynamiccl_tuner_up"].samples}
    assert up == {str(runs / "over"): 0.0, str(runs / "live"): 1.0}
    (gain,) = families["dynamiccl_gain_ratio"].samples
    assert gain.value == pytest.approx(state(runs / "over")["gain"])
    # Base units, a prefix, no unit twice: Prometheus' conventions.
    assert all(name.startswith("dynamiccl_") and not name.endswith(("_ms", "_percent")) for name in families)
