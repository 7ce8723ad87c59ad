"""The chain behind a decision."""

import json

import pytest
from command import invoke
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.why import chains, lines
from synthetic_trace import CALL_US, FINAL, GATHER, HEADER, LAYER_BYTES, OWN, SCATTER, write_run


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
        assert chain["decided"] == str(decision) and chain["tried"][0]["decision"] == str(decision)
        assert chain["sure"] > 0.95 and chain["in_force"] is bool(summary.get("kept"))
        text = "\n".join(lines(chain))
        assert "NCCL    ring/ll/8" in text and f"decided {decision}" in text and "that it is faster" in text
    gather = found[str(GATHER)]
    # Nine calls of a step take 400 us less: what the trace measured is what was put in.
    step = summary["default_step_ms"] * 1e3
    calls = gather["calls"]
    us = {ran: us / HEADER["time_scale"] for ran, us in CALL_US["all_gather", LAYER_BYTES].items()}
    put_in = calls * (us[OWN] - us["ring", "simple", 16]) / step
    best = gather["tried"][0]
    assert abs(best["saved"] - put_in) < max(4 * best["error"], 0.02)
    assert gather["next"]["decision"] == "ring/ll128/16"


@pytest.mark.parametrize(
    ("summary", "says"),
    [
        ({}, "decided nothing: the run goes on, or was cut off"),
        ({"ended": "stopped by `dynamiccl stop`"}, "decided nothing: stopped by `dynamiccl stop`"),
        ({"speedup": 1.1, "decisions": []}, "decided nothing: the run left no word of it"),
    ],
)
def test_a_slot_of_which_nothing_was_decided_says_why(run, summary, says):
    assert says in "\n".join(lines(chains(run[2], RunSummary.of(summary))[0]))


def test_the_command_filters_and_explains(run):
    folder, *_ = run
    text = invoke(["why", str(folder), "reduce_scatter"]).stdout
    assert "reduce_scatter" in text and "all_gather" not in text and str(FINAL[SCATTER]) in text
    told = json.loads(invoke(["why", str(folder), "--json"]).stdout)
    assert len(told) >= 2
    result = invoke(["why", str(folder), "broadcast"])
    assert result.exit_code == 2 and "no slot" in result.stderr
