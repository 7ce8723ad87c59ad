"""``dynamiccl sweep``: what its rows say, and the command on the emulated cluster."""

import json

import numpy as np
import pandas as pd
import pytest
from command import invoke, start
from dynamiccl.agent.checks.sweep.room import AGAIN, UNTOUCHED, judged, read_rows, result_of, table_of
from dynamiccl.envs.nccl.tables import load_table
from dynamiccl.traces.records import Decision

COLUMNS = ["round", "seconds", "func", "n_bytes", "arm", "asked", "ran", "obeyed", "calls", "us", "load"]
MANIFEST = {
    "emulated": None,
    "hardware": "no GPU",
    "nccl": "2.28.9",
    "headroom": None,
    "own": None,
    "communicator": {"n_ranks": 2, "n_nodes": 2},
}


def rows_of(gains, rounds=8, noise=0.02, seed=0, cell=("all_gather", 1 << 20), own="ring/simple/2"):
    """Rows of one cell: ``gains`` is the part that each setting saves."""
    rng = np.random.default_rng(seed)
    arms = {UNTOUCHED: 0.0, AGAIN: 0.0, **gains}
    found = []
    for number in range(rounds):
        luck = rng.normal(0, 0.3)  # of a round's connections: all settings have it
        for arm, gain in arms.items():
            us = 1000 * (1 - gain) * np.exp(luck + rng.normal(0, noise))
            ran = own if arm in (UNTOUCHED, AGAIN) else arm
            asked = "auto" if arm in (UNTOUCHED, AGAIN) else arm
            found.append((number, 0.0, *cell, arm, asked, ran, True, 5, us, 1.0))
    return pd.DataFrame(found, columns=COLUMNS)


def test_a_gain_is_found_and_scored_on_rounds_that_did_not_choose_it():
    (cell,) = judged(rows_of({"ring/simple/4": 0.1, "ring/simple/8": 0.3, "ring/ll/2": -0.5}))
    assert cell.best == "ring/simple/8" and cell.is_sure and cell.has_room
    assert cell.saved.low < 0.3 < cell.saved.high and cell.again.low < 0 < cell.again.high


@pytest.mark.parametrize("n_arms", [1, 12])
def test_without_a_gain_few_cells_are_sure_however_many_settings_are_tried(n_arms):
    """The best of twelve equal settings is above untouched by luck: not on the other half."""
    none = {f"ring/simple/{n}": 0.0 for n in range(3, 3 + n_arms)}
    cells = [judged(rows_of(none, seed=seed))[0] for seed in range(200)]
    assert sum(cell.is_sure for cell in cells) <= 10  # of 200: 2.5 % and its scatter
    assert abs(np.mean([cell.saved.mean for cell in cells])) < 0.003


def test_a_gain_of_five_percent_is_no_room_and_may_be_in_the_table():
    (cell,) = judged(rows_of({"ring/simple/4": 0.04}, noise=0.005))
    assert cell.is_sure and not cell.has_room


def test_what_was_not_obeyed_or_has_few_rounds_is_not_judged():
    rows = rows_of({"ring/simple/8": 0.3})
    rows.loc[rows["arm"] == "ring/simple/8", "obeyed"] = False
    assert judged(rows)[0].best == UNTOUCHED
    with pytest.raises(ValueError, match="from 4 rounds on"):
        judged(rows_of({"ring/simple/8": 0.3}, rounds=3))


def test_the_table_has_the_sure_settings_and_the_size_class_of_each():
    good = rows_of({"ring/simple/8": 0.3})
    bad = rows_of({"ring/simple/8": 0.0}, cell=("reduce_scatter", 1 << 20))
    table = table_of(judged(pd.concat([good, bad])), MANIFEST)
    (rule,) = table.rules
    assert (rule.func, rule.min_bytes, rule.max_bytes) == ("all_gather", (1 << 19) + 1, 1 << 20)
    assert (rule.n_ranks, rule.n_nodes, rule.decision) == (2, 2, Decision("ring", "simple", 8))
    assert table_of(judged(bad), MANIFEST) is None


def test_with_headroom_all_other_calls_keep_nccls_own_channels():
    own = [[["all_gather", n], f"ring/simple/{min(2, n >> 15)}"] for n in (1 << 15, 1 << 20, 1 << 25)]
    table = table_of(judged(rows_of({"ring/simple/8": 0.3})), {**MANIFEST, "headroom": 8, "own": own})
    assert len(table.deciding) == 1
    ceilings = [rule for rule in table.rules if rule.threads]
    assert {rule.decision.n_channels for rule in ceilings} == {2} and len(ceilings) == 6
    odd = [[["all_gather", 1 << 20], "ring/simple/1"], [["all_gather", 1 << 25], "ring/simple/2"]]
    other = {**MANIFEST, "headroom": 8, "own": odd}
    with pytest.raises(ValueError, match="cannot hold NCCL untouched"):
        table_of(judged(rows_of({"ring/simple/8": 0.3})), other)


def test_a_folder_that_was_cut_off_is_judged_as_far_as_it_goes(tmp_path):
    rows_of({"ring/simple/8": 0.3}).to_csv(tmp_path / "rows.csv", index=False)
    text = (tmp_path / "rows.csv").read_text()
    (tmp_path / "rows.csv").write_text(text[:-9])
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    assert len(read_rows(tmp_path)) == 8 * 3 - 1
    found = result_of(tmp_path)
    assert found.line.startswith("room: 1 of 1 cells above 5 %")
    assert load_table(tmp_path).rules[0].decision == Decision("ring", "simple", 8)
    told = invoke(["sweep", "--judge", tmp_path, "--json"])
    assert json.loads(told.stdout)["cells"][0]["best"] == "ring/simple/8"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--judge", "nowhere"], "nowhere/manifest.json: no sweep"),
        (["--cluster", "dgx-h100-2x8", "--bytes", "64K"], "'64K' is no size: write it like"),
        (["--cluster", "dgx-h100-2x8", "--bytes", "5:7"], "holds no power of two"),
        (["--cluster", "dgx-h100-2x8", "--trace", "nowhere"], "nowhere"),
        (["--cluster", "dgx-h100-2x8", "--trace", "a", "--bytes", "4MiB"], "give one of them"),
        (["--cluster", "nowhere"], "nowhere"),
        (["--cluster", "dgx-h100-2x8", "--ranks", "1"], "one rank has nobody to talk to"),
        ([], "no GPU is visible here: --cluster NAME"),
        (["--backend-module", "x"], "give its name with --backend"),
    ],
)
def test_a_mistake_is_one_line_before_a_rank_starts(words, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dynamiccl.envs.nccl.steps.nvml.visible_gpus", list)
    told = invoke(["sweep", *words])
    assert told.exit_code == 2 and told.stderr.count("\n") == 1 and says in told.stderr, told.stderr


@pytest.mark.slow
def test_the_command_measures_an_emulated_cluster_and_its_table_is_obeyed(tmp_path):
    """Its choice is known: NCCL gives small messages over nodes too few channels there."""
    out = tmp_path / "out"
    words = ["--cluster", "dgx-h100-2x8", "--bytes", "64KiB:64KiB", "--rounds", "4", "--out", out]
    done = start("sweep", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "emulated times" in done.stdout and "room: 2 of 2 cells above 5 % (emulated times" in done.stdout
    assert "round 4 of 4" in done.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["emulated"] == "dgx-h100-2x8" and manifest["communicator"] == {
        "n_ranks": 16,
        "n_nodes": 2,
    }
    rows = read_rows(out)
    assert rows["obeyed"].astype(str).eq("True").all()
    for _, visits in rows.groupby(
        ["round", "func"]
    ):  # each setting once in each round, none in a fixed place
        assert sorted(visits["arm"]) == sorted(set(rows["arm"]))
    orders = {tuple(visits["arm"]) for _, visits in rows.groupby(["round", "func"])}
    assert len(orders) > 1
    again = start("sweep", *words)
    assert again.returncode != 0 and "is not empty" in again.stderr
