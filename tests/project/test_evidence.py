"""The tables of docs/evidence.md are recomputed from the raw rows on file."""

import json
import re

import cables_nccl
import pandas as pd
import pytest
from paths import DATA, ROOT

PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


def test_each_table_of_the_page_is_what_the_raw_rows_give():
    found = dict(re.findall(r"<!-- rows: ([\w-]+) -->\n(.*?)\n<!-- /rows -->", PAGE, re.DOTALL))
    assert found == cables_nccl.page_tables()


@pytest.mark.parametrize("cable", cables_nccl.CABLES)
def test_each_cell_of_the_sweep_has_30_calls_and_two_halves(cable):
    rows = pd.read_csv(cables_nccl.DATA / "sweep" / f"{cable}.csv.gz")
    cells = {name for name, *_ in (*cables_nccl.CELLS, *cables_nccl.PINNED)} | {"untouched communicator"}
    counts = rows.groupby(["func", "bytes", "cell"])["us"].count()
    assert counts.min() >= 30 and len(counts) == 2 * len(cables_nccl.BYTES) * len(cells)
    assert set(rows["launch"] % 2) == {0, 1} and rows["load"].notna().all() and rows["date"].notna().all()


def test_a_forced_cell_ran_its_protocol_and_untouched_is_two_channels():
    """Small calls get fewer channels than a table asks for, so cells are named after the channels that ran."""
    chosen = pd.read_csv(cables_nccl.DATA / "sweep" / "choice.csv")
    forced = chosen[(chosen["communicator"] == "raised") & ~chosen["cell"].str.startswith("untouched")]
    asked = forced["cell"].str.split("-", expand=True)
    assert (asked[0] == forced["proto"]).all() and (forced["channels_as_run"] <= asked[1].astype(int)).all()
    large = forced[forced["bytes"] >= 2**19]
    assert (large["channels_as_run"] == large["cell"].str.split("-").str[1].astype(int)).all()
    untouched = chosen[chosen["cell"] == "untouched"]
    assert set(untouched["channels_as_run"]) == {2} and set(untouched["communicator"]) == {
        "raised",
        "untouched",
    }


def test_a_gain_by_luck_is_not_scored_on_the_launches_that_chose_it():
    """Cell a is faster in the even launches only, b in the odd ones: each half chooses what loses in the other."""
    at = pd.DataFrame({"a": [0.2, -0.2] * 4, "b": [-0.2, 0.2] * 4, "untouched": 0.0}, index=range(8))
    assert (cables_nccl.held_out(at, ["a", "b"]) == -0.2).all()
    assert cables_nccl.chosen_best(at, ["a", "b"]) == "untouched"
    assert (cables_nccl.held_out(at.abs(), ["a", "b"]) == 0.2).all()


def test_what_a_mask_leaves():
    cells = ["LL-1", "LL128-2", "Simple-4"]
    assert cables_nccl.allowed(cells, "Simple", "all") == cells
    assert cables_nccl.allowed(cells, "Simple", "nccl") == ["LL-1", "Simple-4"]
    assert cables_nccl.allowed(cells, "Simple", "ours") == ["Simple-4"]
    assert cables_nccl.allowed(cells, "LL", "ours") == []


def test_five_to_seven_channels_win_where_one_flow_gets_a_quarter_and_no_ll():
    rows, chosen = cables_nccl.filed_sweep()
    rows = rows[(rows["cable"] == "4gbit-flow-1gbit") & (rows["bytes"] >= 2**20)]
    found = set()
    for _, at in cables_nccl.ratios(cables_nccl.as_run(rows, chosen)):
        found.add(cables_nccl.chosen_best(at, [cell for cell in at if not cell.startswith("untouched")]))
    assert found == {"Simple-5", "Simple-6", "Simple-7"}


def test_nearly_a_third_on_the_flow_limited_cable():
    rows = pd.read_csv(cables_nccl.DATA / "gains" / "gains-4gbit-flow-1gbit-fsdp2-512x1.csv.gz")
    gained = cables_nccl.by_turns(rows.query("arm == 'raised'"), cables_nccl.TURNS.index("pinned"))
    for name in ("free", "best", "best of our offer"):
        assert 30 < gained[cables_nccl.TURNS.index(name)][0] < 40


@pytest.mark.parametrize("job", ["fsdp2-512x1", "zero-512x1"])
def test_a_table_beside_the_socket_cure_is_as_the_page_says(job):
    rows = pd.read_csv(cables_nccl.DATA / "gains" / f"gains-4gbit-flow-1gbit-{job}.csv.gz")
    figures = cables_nccl.against(cables_nccl.medians(rows), "best of our offer", "sockets 1 x 4")
    assert cables_nccl.words(figures) in " ".join(PAGE.split())


def test_all_reduces_of_emulated_jobs_were_shortened_as_the_page_says():
    for name, job in {"ddp": "DDP", "stage_1": "stage 1", "hsdp": "HSDP"}.items():
        told = json.loads((DATA / "emulated_all_reduce" / f"{name}.json").read_text())
        mean, low, high = (100 * (1 - 1 / x) for x in (told["speedup"], *told["speedup_ci95"]))
        assert (
            told["kept"] and told["emulated"] and told["all_reduce"] and not told["consistency"]["mismatches"]
        )
        assert any(row["func"] == "all_reduce" for row in told["tables"][told["in_force"]])
        assert f"{job} {mean:.1f} % [{low:.1f}, {high:.1f}]" in PAGE
