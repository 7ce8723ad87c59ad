"""The results that the README speaks of are filed beside the traces' code, and say what it says of them."""

import json
from pathlib import Path

import pytest
from dynamiccl.agent.choosing import DEFAULT
from dynamiccl.envs.sim.emulated import Emulated

TRACES = Path(__file__).resolve().parents[1] / "traces"
ORACLE = json.loads((TRACES / "oracle_demo.json").read_text())
DEMO = json.loads((TRACES / "demo.json").read_text())


def saved(summary):
    """Share of the default's step that the table saves."""
    return 1 - 1 / summary["speedup"]


@pytest.mark.parametrize("summary", [ORACLE, DEMO])
def test_both_ran_on_what_the_demo_runs_on(summary):
    assert summary["emulated"] is True and summary["date"] and summary["made_by"].startswith(("dynamiccl", "make"))
    usual = Emulated()
    scales = (summary["bytes_scale"], summary["time_scale"])
    assert (summary["cluster"], *scales) == (usual.cluster, usual.bytes_scale, usual.time_scale)
    assert summary["consistency"]["mismatches"] == 0


def test_the_oracle_leaves_room_and_the_demo_takes_most_of_it():
    assert ORACLE["policy"] == "exhaustive" and saved(ORACLE) >= 0.15
    assert DEMO["policy"] == DEFAULT and saved(DEMO) >= 0.6 * saved(ORACLE)
    assert DEMO["speedup_ci95"][0] > 1 and DEMO["aa_speedup_ci95"][0] <= 1 <= DEMO["aa_speedup_ci95"][1]
    assert DEMO["loss_last"] < DEMO["loss_first"]


def test_the_oracle_tried_every_config_of_the_large_slots():
    for slot in ("all_gather <=256 MiB", "reduce_scatter <=256 MiB"):
        tried = ORACLE["tried"][slot]
        assert len(tried) >= 17 and all(t["step_ms"] > 0 for t in tried)
