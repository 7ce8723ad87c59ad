"""The chain behind a decision."""

import json
from dataclasses import replace

import pytest
from command import invoke
from dynamiccl.agent.commands.show import _steps
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.why import chains, lines
from dynamiccl.traces.reasons import RunEnds
from dynamiccl.traces.records import decided
from synthetic_trace import FINAL, GATHER, OWN, SCATTER, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("why")
    summary, trace = write_run(folder / "trace", search=24, final=12)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder, summary, trace


def test_the_chain_names_prices_trials_and_the_next_best(run):
    _, summary, trace = run
    found = {c["slot"]: c for c in chains(trace, RunSummary.of(summary))}
    for slot, decision in FINAL.items():
        chain = found[str(slot)]
        assert chain["own"] == "/".join(map(str, OWN)) and chain["prices"]
        assert chain["decided"] == str(decision) and chain["tried"][str(decision)] > 0
        assert chain["in_force"] and chain["table"] == "A" and chain["alone"] == []
        text = "\n".join(lines(chain, RunSummary.of(summary)))
        assert "NCCL    ring/ll/8" in text and f"decided {decision}, used as a row of A" in text
        assert "these 2 rows together: steps" in text and "not separable" in text
    tried = found[str(GATHER)]["tried"]
    assert tried.keys() == {"ring/ll128/16", "ring/simple/16"}


def test_windows_of_the_log_are_counted(run):
    """Before: stretches of steps. A trial in turns was many, a table in force between looks one, one at calls none."""
    _, told, trace = run
    rows = [
        {**row, "decision": str(decided(row))} for row in told["decisions"] if row["func"] == "all_gather"
    ]
    log = []
    for generation, n_windows in ((0, 1), (1, 1), (2, 3), (4, 0), (6, 1)):
        table = {"generation": generation, "rules": rows if generation else []}
        table |= {"one_of": 4} if generation == 6 else {}
        log.append({"kind": "table", "table": table})
        log += [{"kind": "window", "generation": generation}] * n_windows
    found = {c["slot"]: c for c in chains(replace(trace, log=log), RunSummary.of(told))}
    assert found[str(GATHER)]["tried"] == {str(FINAL[GATHER]): 5}
    assert found[str(SCATTER)]["tried"] == {}


def test_a_row_that_was_changed_alone_has_a_figure_of_its_own(run):
    _, told, trace = run
    summary = RunSummary.of(told)
    gather = next(row for row in told["decisions"] if row["func"] == "all_gather")
    other = {**gather, "algo": "ring", "proto": "ll128"}
    summary.tables = summary.tables | {"B": [other if row is gather else row for row in told["decisions"]]}
    summary.comparisons = [
        {
            "table": "B",
            "against": "A",
            "trial": True,
            "outcome": "lost",
            "pairs": 3,
            "speedup": 0.98,
            "speedup_ci95": [0.96, 1.0],
            "table_ms": 2.0,
            "against_ms": 1.9,
            "steps": [1, 9],
        }
    ]
    found = {c["slot"]: "\n".join(lines(c, summary)) for c in chains(trace, summary)}
    assert (
        "alone   ring/ll128/16: B lost: 2.0 % longer than A (0.0 to 4.2: 3 alternations)"
        in found[str(GATHER)]
    )
    assert "alone" not in found[str(SCATTER)] and "not separable" in found[str(SCATTER)]


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        ({}, "decided nothing: the run goes on, or was cut off before its verdict"),
        ({"ended": RunEnds.STOPPED()}, "decided nothing: stopped by `dynamiccl stop`"),
        ({"speedup": 1.1, "decisions": []}, "decided nothing: NCCL's default stays"),
    ],
)
def test_a_slot_of_which_nothing_was_decided_says_why(run, summary, says):
    told = RunSummary.of(summary)
    assert says in "\n".join(lines(chains(run[2], told)[0], told))


def test_show_tells_the_chain_of_every_slot(run):
    folder, told, trace = run
    said = invoke(["show", str(folder)]).stdout
    found = json.loads(invoke(["show", str(folder), "--json"]).stdout)["why"]
    assert [chain["slot"] for chain in found] == [c["slot"] for c in chains(trace, RunSummary.of(told))]
    for chain in found:
        assert "\n".join(lines(chain, RunSummary.of(told))) in said


def test_show_tells_how_full_the_fullest_gpu_was(run):
    folder, _, trace = run
    steps = trace.steps.copy()
    # Of two ranks the fuller one counts: 11 of 80 GiB until the second one holds 40 in one step, and 8 in another.
    second = steps.index[steps["rank"] == 1]
    steps.loc[second[5], "memory_used"] = 40 << 30
    steps.loc[second[6], "memory_used"] = 8 << 30
    assert _steps(steps)["memory_pressure"] == pytest.approx({"least": 11 / 80, "most": 0.5})
    assert _steps(steps.assign(memory_total=0))["memory_pressure"] is None
    assert (
        "memory pressure: 14% to 14% of the fullest GPU's memory is used"
        in invoke(["show", str(folder)]).stdout
    )


def test_a_chain_tells_the_exposed_part_as_the_run_did(run):
    _, told, trace = run
    unknown = RunSummary.of(told)
    assert all(
        chain["exposed"] is None for chain in chains(trace, unknown)
    )  # a trace without waits or compute
    known = RunSummary.of(
        told
        | {
            "exposed": [
                {
                    "slot": str(GATHER),
                    "n_ranks": GATHER.n_ranks,
                    "n_nodes": GATHER.n_nodes,
                    "share": 0.3,
                    "exposed": 0.62,
                }
            ]
        }
    )
    first_lines = [lines(chain, known)[0] for chain in chains(trace, known)]
    assert [str(GATHER) in line for line in first_lines] == [
        "exposed: 62 % of its time" in line for line in first_lines
    ]
