"""The results that the README speaks of are filed in envs/results/, and say what it says of them."""

import json

import pytest
from dynamiccl.agent.advice.advise import Advice
from dynamiccl.agent.policies.choosing import DEFAULT
from dynamiccl.envs.sim.emulated.settings import Emulated
from dynamiccl.traces.files import Trace
from make_demo import PAGE, written
from paths import DATA, ROOT

RESULTS = ROOT / "envs" / "results"
ORACLE = json.loads((RESULTS / "oracle_demo.json").read_text())
RECORDING = DATA / "recordings" / "demo"
DEMO = json.loads((RESULTS / "demo.json").read_text())
#: Size classes as the filed sweep names them -> as they are named today.
NAMED = {"<=256 MiB": "129-256 MiB", "<=64 MiB": "33-64 MiB"}


def tried():
    """What the filed sweep tried, by the name that a slot has today."""
    found = {}
    for slot, rows in ORACLE["tried"].items():
        func, size = slot.split(" ", 1)
        found[f"{func} {NAMED[size]}"] = rows
    return found


def saved_by(speedup):
    """Share of the default's step."""
    return 1 - 1 / speedup


def saved(summary):
    """Share of the default's step that the table saves."""
    return saved_by(summary["speedup"])


@pytest.mark.parametrize("summary", [ORACLE, DEMO])
def test_both_ran_on_what_the_demo_runs_on(summary):
    assert (
        summary["emulated"] is True
        and summary["date"]
        and summary["made_by"].startswith(("dynamiccl", "make", "python"))
    )
    usual = Emulated()
    scales = (summary["bytes_scale"], summary["compute_scale"])
    assert (summary["cluster"], *scales) == (usual.cluster, usual.bytes_scale, usual.compute_scale)
    assert summary["consistency"]["mismatches"] == 0


def test_the_page_says_what_is_on_record():
    page = PAGE.read_text()
    assert written(page) == page, "python tests/tools/make_demo.py"


def test_the_oracle_leaves_room_and_the_demo_takes_most_of_it():
    assert ORACLE["policy"] == "exhaustive" and saved(ORACLE) >= 0.15
    assert DEMO["policy"] == DEFAULT and saved(DEMO) >= 0.6 * saved(ORACLE)
    assert DEMO["speedup_ci95"][0] > 1 and DEMO["aa_speedup_ci95"][0] <= 1 <= DEMO["aa_speedup_ci95"][1]
    assert DEMO["loss_last"] < DEMO["loss_first"]


def test_the_oracle_tried_every_config_of_the_large_slots():
    """Both pairs that the cluster's model offers there, with each count of channels; the default is ring/simple."""
    every = {f"ring/{proto}/{n}" for proto in ("ll128", "simple") for n in (1, 2, 4, 8)} | {"ring/ll128"}
    for slot in ("all_gather 129-256 MiB", "reduce_scatter 129-256 MiB"):
        assert {t["config"] for t in tried()[slot]} == every
        assert all(t["pairs"] > 0 for t in tried()[slot])


@pytest.mark.skipif(
    "advised" not in ORACLE, reason="the sweep is of the earlier world: python tests/tools/make_oracle.py"
)
def test_advice_on_the_demos_default_windows_is_what_the_sweep_found():
    """Each advised decision is within 2 % of the step of the best tried; no more is promised than is gained."""
    advice = Advice(Trace.read(RECORDING))
    table = {str(slot): str(decision) for slot, decision in advice.decisions.items()}
    for slot, rows in tried().items():
        saved = {row["config"]: row["saved"] for row in rows}
        assert saved.get(table.get(slot, "auto"), 0.0) >= max(saved.values()) - 0.02
    _, low, _ = advice.gains.interval(advice.configs)
    assert low <= saved_by(ORACLE["advised"]["speedup"])
