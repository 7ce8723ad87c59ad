"""`dynamiccl show`: what a person and a program are told of whole, partial and unreadable traces."""

import json
import re

import pytest
from command import invoke
from dynamiccl.agent.report.runs import beside_rank_0
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.verdict import verdict
from dynamiccl.envs.nccl.tables import load_table
from dynamiccl.traces.files import Trace
from dynamiccl.traces.reasons import RowRefused, RunEnds
from dynamiccl.traces.writer import TraceWriter
from rich.console import Console
from synthetic_trace import GATHER, write_run


def run_show(*args):
    return invoke(["show", *args])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    summary, _ = write_run(folder / "trace", search=6, final=6)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_people_are_told_what_happened(run):
    out = run_show(run).stdout
    assert (
        "emulated cluster h100-2x8, bytes x 64, compute x 8: not GPU times; they are counted, not waited"
        in out
    )
    assert "\nsteps 0 to" in out
    (slot,) = [line for line in out.splitlines() if f"│ {GATHER}" in line]
    assert "ring/ll/8" in slot and "ring/simple/16" in slot and "-45 %" in slot
    assert "  search  " not in out
    windows = run_show(run, "--windows").stdout.split("\nconsistency")[0].splitlines()[-13:]
    assert re.match(r"steps \d+ to \d+  profile  ", windows[0])
    assert re.match(r"steps \d+ to \d+  search  ring/ll128/16  ", windows[1])
    assert verdict(RunSummary.read(run)) in out
    assert "NCCL's default takes 1." in out and "against itself: 0.994 to 1.005)" in out
    assert "collectives compared across ranks, 0 mismatches" in out
    assert run_show(run / "trace").stdout == out


def test_programs_are_told_the_same(run):
    story = json.loads(run_show(run, "--json").stdout)
    trace = Trace.read(run)
    assert story["header"]["stage"] == 3 and story["warnings"] == []
    assert story["steps"]["n"] == trace.steps["index"].nunique() and story["steps"]["ranks"] == 2
    assert story["n_events"] == len(trace.events) and story["tables"] == 24
    gather = next(s for s in story["slots"] if s["slot"] == str(GATHER))
    assert (gather["own"], gather["ran"], gather["table"], gather["calls"]) == (
        "ring/ll/8",
        "ring/simple/16",
        "ring/simple/16",
        9,
    )
    assert [gather["default_us"], gather["tuned_us"]] == pytest.approx([112.5, 62.5], rel=0.05)
    assert [w["index"] for w in story["windows"]] == list(range(13))
    assert story["summary"] == vars(RunSummary.read(run))
    assert (
        story["consistency"]["calls_checked"] == len(trace.events) // 2
        and not story["consistency"]["mismatches"]
    )


def test_a_run_that_ended_early_and_a_cut_segment(tmp_path):
    write_run(tmp_path / "trace", search=3, stop_early=True)
    next((tmp_path / "trace").glob("steps-*.parquet")).write_bytes(b"PAR1")
    (tmp_path / "summary.json").write_text("{ half a summ")
    result = run_show(tmp_path)
    assert result.exit_code == 0
    assert "-00000.parquet was cut short" in result.stdout
    assert "no optimizer step was seen" in result.stdout
    assert "no decisions: the run goes on, or was cut off before its verdict" in result.stdout
    assert json.loads(run_show(tmp_path, "--json").stdout)["steps"] == {"n": 0}


def test_a_run_that_decided_nothing_says_who_decides(tmp_path):
    write_run(tmp_path / "trace", search=3, stop_early=True)
    (tmp_path / "summary.json").write_text(
        json.dumps({"ended": RunEnds.JOB_STATUS(status=0).as_json(), "decisions": []})
    )
    result = run_show(tmp_path)
    # Once, as the verdict. Before: "no decisions" with the same words stood below it.
    assert (
        "NO VERDICT: the job ended with status 0\n" in result.stdout and "no decisions" not in result.stdout
    )


def test_an_empty_trace(tmp_path):
    TraceWriter(tmp_path, {}).close()
    result = run_show(tmp_path)
    assert result.exit_code == 0 and "no optimizer step was seen; 0 collectives" in result.stdout
    assert json.loads(run_show(tmp_path, "--json").stdout)["why"] == []


def test_disagreeing_ranks_are_told_as_the_tuner_found_them(tmp_path):
    write_run(tmp_path / "trace", search=1, final=1)
    (tmp_path / "summary.json").write_text(
        json.dumps({"consistency": {"calls_checked": 700, "mismatches": 1}})
    )
    assert "700 collectives compared across ranks, 1 mismatches" in run_show(tmp_path).stdout


def test_a_decision_left_to_nccl(tmp_path):
    summary, _ = write_run(tmp_path / "trace", search=4, final=2)
    auto = {
        **summary["decisions"][0],
        "algo": None,
        "proto": None,
        "n_channels": None,
        "why": RowRefused.NOT_BETTER(own="ring/ll/4", tried=3).as_json(),
    }
    summary |= {"decisions": [auto], "kept": False, "speedup": 1.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    out = run_show(tmp_path).stdout
    assert "NOTHING KEPT" in out and "which stays" in out
    assert "(NCCL decides): NCCL's default, ring/ll/4, stays: 3 other settings tried" in out
    assert all(s["table"] is None for s in json.loads(run_show(tmp_path, "--json").stdout)["slots"])


@pytest.mark.parametrize(
    ("make", "args", "says"),
    [
        (lambda p: None, (), "give the folder that holds header.json"),
        (lambda p: (p / "header.json").write_text('{"format": 99}'), (), "upgrade dynamiccl"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, make, args, says):
    make(tmp_path)
    result = run_show(tmp_path, *args)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and says in result.stderr


def test_a_long_trace_is_not_read_as_a_whole(run, tmp_path, monkeypatch):
    """Before: all of it, at each call."""
    events = Trace.read(run / "trace").events
    part = len(events) // 10
    with TraceWriter(tmp_path / "t", {}, part_rows=part) as writer:
        for first in range(0, 10 * part, part):
            writer.write(events.iloc[first : first + part])
    monkeypatch.setattr("dynamiccl.agent.commands.show.MOST_EVENTS", 3 * part)
    told = json.loads(run_show(tmp_path / "t", "--json").stdout)
    assert part <= told["n_events"] <= 4 * part and told["warnings"]
    told = json.loads(run_show(tmp_path / "t", "--json", "--whole").stdout)
    assert told["n_events"] == 10 * part and not told["warnings"]


def test_a_terminal_of_80_columns_is_enough(tmp_path, monkeypatch):
    """Before: the table of collectives needed 160 columns, and lines broke within words."""
    write_run(tmp_path / "trace")
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: True))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    text = re.sub(r"\x1b\[[0-9;]*m", "", invoke(["show", str(tmp_path)]).stdout)
    lines = [line for line in text.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80 and "all_gather 5-8 MiB" in text and re.search(r"-\d+ %", text)


def test_results_of_a_node_without_rank_0_lead_to_those_of_rank_0(tmp_path):
    """Slurm's tasks leave their results in one folder; only the tuner beside rank 0 measures and keeps a table."""
    other, mine = tmp_path / "12.0" / "task-0", tmp_path / "12.0" / "task-1"
    other.mkdir(parents=True)
    write_run(mine / "trace", search=4, final=2)
    assert beside_rank_0(other) == mine and beside_rank_0(mine) is None
    with pytest.raises(ValueError, match="give the results of rank 0's node"):
        load_table(other)
    (mine / "table.json").write_text('{"dynamiccl_table": 1, "rules": []}')
    with pytest.raises(ValueError, match=r"was on another node: give .*task-1/table\.json"):
        load_table(other)
