"""The verdict in words: one sentence that says what the summary holds, and nothing else."""

import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
from dynamiccl.agent.daemon.console import show_summary
from dynamiccl.agent.daemon.daemon import Daemon
from dynamiccl.agent.daemon.events import Events
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.texts import consistency_text
from dynamiccl.agent.report.verdict import outcome, rows_text, verdict
from dynamiccl.traces.reasons import RunEnds
from rich.console import Console


def decided_run(**facts):
    told = {"speedup": 1.147, "speedup_ci95": [1.016, 1.295], "aa_speedup_ci95": [0.867, 1.157], "kept": True}
    told |= {
        "compared": "A",
        "in_force": "A",
        "default_step_ms": 325.0,
        "tuned_step_ms": 251.0,
        "cost_s": 30.0,
    }
    return RunSummary.of(told | {"detectable": 0.02, "steps_to_verdict": 126} | facts)


def test_the_verdict_is_one_sentence_with_its_strength_its_cost_and_its_payback():
    text = verdict(decided_run())
    steps = 30_000 / (325 * (1 - 1 / 1.147))
    assert text.startswith(
        "KEPT A: steps 12.8 % shorter (1.6 to 22.8: weak evidence), found at the cost of 30 s"
    )
    assert int(re.search(r"repaid after ([\d,]+) steps", text)[1].replace(",", "")) == int(np.ceil(steps))
    assert decided_run(speedup_ci95=[1.08, 1.2], aa_speedup_ci95=[0.99, 1.01]).strength == "strong evidence"
    assert decided_run(speedup_ci95=[1.05, 1.2], aa_speedup_ci95=[0.99, 1.01]).strength == "fair evidence"
    assert "at no cost" in verdict(decided_run(cost_s=-2.0)) and "repaid" not in verdict(
        decided_run(cost_s=-2.0)
    )
    assert "(emulated times)" in verdict(decided_run(emulated=True))


def test_a_run_that_ends_in_its_search_is_not_told_to_have_a_verdict_after_none_steps():
    """Seen: "verdict after None steps: KEPT A", of a job that ended soon after its first table was confirmed."""
    daemon, said = object.__new__(Daemon), []
    daemon._events, daemon._say = Events(lambda: 0), said.append
    daemon._events.tell("end", ended=RunEnds.JOB_STATUS(status=0))
    daemon._summary = lambda: decided_run(steps_to_verdict=None)
    daemon.tuner = SimpleNamespace(search=None)
    daemon._say_verdict()
    assert said == [RunEnds.JOB_STATUS(status=0)]


def test_a_run_that_is_stopped_in_its_search_is_told_so_once():
    """Seen: "stopped by `dynamiccl stop`" in two lines, one after the other. The watch, which comes next, says it."""
    daemon, said = object.__new__(Daemon), []
    daemon._events, daemon._say = Events(lambda: 0), said.append
    daemon._events.tell("end", ended=RunEnds.STOPPED())
    daemon._summary = lambda: decided_run(steps_to_verdict=None)
    daemon.tuner = SimpleNamespace(search=None)
    daemon._say_verdict()
    assert said == []


def test_the_command_for_again_is_whole():
    console = Console(file=io.StringIO(), width=80)
    s = decided_run(
        emulated=True, cluster="dgx-a100-2x8", bytes_scale=360.0, compute_scale=7.0, table="t.json"
    )
    show_summary(console, s, quiet=True)
    assert "apply t.json --cluster dgx-a100-2x8 --compute-scale 7 -- COMMAND\n" in console.file.getvalue()


@pytest.mark.parametrize(
    ("facts", "says", "never"),
    [
        ({"kept": False}, "NOTHING KEPT: steps under A were 12.8 % shorter", "KEPT A"),
        ({"kept": False}, "its first comparison would have seen a gain of 2.0% or more", "none of"),
        ({"kept": False, "speedup": 0.98, "speedup_ci95": [0.95, 1.01]}, "2.0 % longer", "shorter"),
        ({"kept": False, "speedup": None, "speedup_ci95": None}, "NOTHING FOUND", "%  shorter"),
        (
            {"kept": False, "dropped": RunEnds.SLOWER()},
            "REVERTED: the table is no longer faster than NCCL's default; NCCL's default is used again",
            "KEPT",
        ),
        (
            {"kept": None, "speedup": None, "detectable": None, "ended": RunEnds.JOB_ENDED()},
            "NO VERDICT: the job has ended",
            "NOTHING",
        ),
        ({"failure": RunEnds.STOPPED()}, "FAILED: stopped by", "KEPT"),
    ],
)
def test_the_verdict_is_what_the_run_came_to(facts, says, never):
    text = verdict(decided_run(**facts))
    assert says in text and never not in text


def test_equal_decisions_are_told_together():
    rows = [
        {
            "func": f,
            "min_bytes": (n << 19) + 1,
            "max_bytes": n << 20,
            "algo": "ring",
            "proto": "ll128",
            "n_channels": 8,
        }
        for f in ("all_gather", "reduce_scatter")
        for n in (8, 64, 256)
    ]
    assert rows_text(rows) == "ring/ll128/8: all_gather, reduce_scatter 5-8, 33-64, 129-256 MiB"
    rows[0] |= {"algo": None, "proto": None, "n_channels": None}
    assert (
        rows_text(rows)
        == "ring/ll128/8: all_gather 33-64, 129-256 MiB; reduce_scatter 5-8, 33-64, 129-256 MiB"
    )
    assert rows_text(rows[:1]) == "NCCL's default"


def test_a_host_says_that_other_ranks_are_recorded_elsewhere_and_how_to_compare_them():
    """Before: no collective was recorded by two ranks, and nothing said that all are on another host."""
    alone = consistency_text({"calls_checked": 0, "mismatches": 0, "ranks_elsewhere": 1})
    assert "1 other rank is recorded on other hosts" in alone and "doctor --trace" in alone
    some = consistency_text({"calls_checked": 70, "mismatches": 0, "ranks_elsewhere": 8})
    assert "70 collectives compared across ranks of this host, 0 mismatches; 8 other ranks" in some
    whole = consistency_text({"calls_checked": 70, "mismatches": 0, "ranks_elsewhere": 0})
    assert whole == "consistency: 70 collectives compared across ranks, 0 mismatches"
    held = consistency_text({"calls_checked": 70, "mismatches": 0, "held_ms": 12})
    assert (
        held
        == f"{whole}; while the ranks agreed on tables, calls waited: on the rank with the most 12 ms in all"
    )


def test_a_view_has_no_arithmetic_of_its_own():
    """A stub of a summary with figures that no run has: each view shows them as they are."""
    s = decided_run(trace="t", report="r", consistency={"calls_checked": 0, "mismatches": 0})
    console = Console(file=io.StringIO(), width=80)
    show_summary(console, s)
    said = " ".join(console.file.getvalue().split())
    assert "A 251 ms against NCCL's default 325 ms" in said and "12.8 % shorter" in said


@pytest.mark.parametrize(
    ("row", "says"),
    [
        # Before: "certain after 16 steps", also where the interval has 0, and of steps between that did not count.
        ({"steps": [71, 86], "outcome": "kept"}, "4 alternations"),
        ({"steps": [71, 86], "outcome": "lost"}, "4 alternations"),
    ],
)
def test_a_comparison_says_what_it_has_measured(row, says):
    told = outcome(
        {"table": "A", "against": "default", "pairs": 4, "speedup": 1.2, "speedup_ci95": [1.1, 1.3]} | row
    )
    assert f": {says})" in str(told)
