"""What docs/evidence.md says of ``dynamiccl sweep`` on a cable, recomputed from the rows on file."""

import json

import numpy as np
import pandas as pd
import pytest
from dynamiccl.agent.checks.sweep.room import Saved, _held_out, judged, read_rows, table_of
from dynamiccl.envs.nccl.tables import load_table
from sweep_nccl import AGAIN, APPLIED, DATA, UNTOUCHED, gained


def sweep(name):
    return read_rows(DATA / name), json.loads((DATA / name / "manifest.json").read_text())


@pytest.mark.parametrize("name", ["range", "one_message"])
def test_each_row_says_what_ran_and_the_manifest_on_what(name):
    rows, manifest = sweep(name)
    assert manifest["nccl"] == "2.28.9" and manifest["hardware"] == "no GPU" and manifest["headroom"] == 8
    assert manifest["communicator"] == {"n_ranks": 2, "n_nodes": 2} and manifest["emulated"] is None
    assert rows["obeyed"].astype(str).eq("True").all() and rows["load"].notna().all()
    assert set(rows["round"]) == set(range(manifest["rounds"]))
    forced = rows[~rows["arm"].str.startswith("untouched")]
    assert (forced["ran"] == forced["arm"]).all() and set(rows["ran"].str[:12]) == {"ring/simple/"}


def test_the_room_of_the_range_is_what_the_filed_table_says():
    rows, manifest = sweep("range")
    cells = judged(rows)
    assert (sum(cell.has_room for cell in cells), len(cells)) == (6, 10)
    best = {int(cell.best.rpartition("/")[2]) for cell in cells if cell.has_room}
    assert best == {5, 6, 7}
    assert table_of(cells, manifest).rules == load_table(DATA / "range").rules


def test_the_gain_over_all_messages_of_the_range():
    """As in the table of single calls: the mean over messages of each round, chosen on the other half."""
    rows, _ = sweep("range")
    scores, again = [], []
    for _, of_cell in rows.groupby(["func", "n_bytes"]):
        logs = np.log(of_cell.pivot_table(index="round", columns="arm", values="us"))
        ratios = logs.rsub(logs[UNTOUCHED], axis=0)
        arms = [arm for arm in ratios if not arm.startswith("untouched")]
        scores.append(_held_out(ratios, arms))
        again.append(ratios[AGAIN].to_numpy())
    saved, aa = (Saved.of(np.mean(part, axis=0)) for part in (scores, again))
    assert str(saved) == "28.7 % [7.6, 45.0]"
    assert str(aa) == "1.8 % [-2.5, 6.0]"


def test_of_one_message_sixteen_rounds_are_not_sure():
    cells = judged(sweep("one_message")[0])
    assert not any(cell.is_sure for cell in cells)
    assert [str(cell.saved) for cell in cells] == ["11.7 % [-10.6, 29.5]", "5.3 % [-15.5, 22.4]"]


def test_the_table_gains_in_a_job():
    steps = pd.read_csv(DATA / "steps.csv.gz")
    found, ms = gained(steps)
    assert steps.groupby("arm")["run"].nunique().to_dict() == {UNTOUCHED: 6, AGAIN: 6, APPLIED: 6}
    assert steps["digest"].nunique() == 1  # losses are equal to the bit
    assert steps[steps["arm"] == APPLIED].groupby("run")["used"].first().gt(0).all()
    assert found == {AGAIN: [-3.8, -27.7, 15.9], APPLIED: [19.2, 6.2, 31.4]}
    assert ms.round(0).loc[APPLIED].tolist() == [56, 66, 67, 65, 78, 98]
