"""Upgrades: every changed cell of two releases' plans is found and no other."""

import csv
import json
from pathlib import Path

import pytest
from command import invoke

DATA = Path(__file__).parent / "data"
FUNCS = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}


def run(*words):
    return invoke(["model", *words])


def changed(cluster, before, after):
    """func -> what `dynamiccl model` says that the upgrade changes."""
    done = run(cluster, "--release", before, "--release", after, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def plans(release):
    """What the real library planned: (func, bytes) -> (algo/proto/channels, offered pairs, price of the choice)."""
    found = {}
    for row in csv.DictReader((DATA / f"nccl_decisions_h100_1x8_{release}.csv").open()):
        ran = f"{row['algo']}/{row['proto']}/{row['nChannels']}".lower()
        offered = {k[3:].lower() for k, v in row.items() if k.startswith("us_") and v}
        price = float(row[f"us_{row['algo']}_{row['proto']}"])
        found[FUNCS[row["coll"]], int(row["nBytes"])] = ran, offered, price
    return found


def test_every_changed_cell_of_two_real_releases_is_found_and_no_other():
    old, new = plans("2.28.9"), plans("2.30.7")
    told, found = changed("dgx-h100-1x8", "2.28.9", "2.30.7"), {}
    for func in FUNCS.values():
        for row in told[func]:
            sizes = [n for name, n in old if name == func and row["min_bytes"] <= n <= row["max_bytes"]]
            ratios = [new[func, n][2] / old[func, n][2] for n in sizes]
            assert row["price"] == pytest.approx([min(ratios), max(ratios)], rel=1e-4)
            found |= {(func, n): (row["before"], row["after"]) for n in sizes}
    really = {k: (old[k][0], new[k][0]) for k in old if old[k][:2] != new[k][:2]}
    assert found == really and really


def test_a_new_algorithm_is_seen_and_one_that_goes():
    """PAT came with 2.23, for one GPU a node."""
    for rows in (changed("one-gpu-per-node-8x1", "2.22.3", "2.23.4")[func] for func in FUNCS.values()):
        assert all(row["new"] == ["pat/simple"] and not row["gone"] for row in rows)
        assert (rows[0]["min_bytes"], rows[-1]["max_bytes"]) == (1 << 10, 1 << 32)
    back = changed("one-gpu-per-node-8x1", "2.23.4", "2.22.3")["all_gather"]
    assert all(row["gone"] == ["pat/simple"] and not row["after"].startswith("pat") for row in back)


def test_the_same_release_changes_nothing_and_that_is_said():
    assert not any(changed("dgx-h100-2x8", "2.30.7", "2.30.7").values())
    assert "all_gather: nothing that runs" in run("dgx-h100-2x8", "--release", "2.30.7", "--release", "2.30.7").stdout


def test_an_upgrade_is_told_in_a_few_lines():
    said = run("one-gpu-per-node-8x1", "--release", "2.22.3", "--release", "2.23.4").stdout
    assert "NCCL 2.22.3 -> 2.23.4 on one-gpu-per-node-8x1" in said and "new pat/simple" in said
    assert "1 KiB to" in said and sum("all_gather" in line for line in said.splitlines()) < 11


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--release", "2.28.9", "--release", "2.29.1", "--release", "2.30.7"), "one --release, or two"),
        (("--release", "new"), "'new' is no release of NCCL"),
        (("no-such-cluster",), "presets are"),
        (("--nodes", "0"), "at least 1"),
    ],
)
def test_bad_arguments_are_one_line(words, says):
    done = run(*words)
    assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ['{"dynamiccl_table": ' + "[" * 200_000, "{" + " " * (5 << 20)])
def test_a_hostile_table_is_one_line(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    result = invoke(["apply", str(tmp_path / "t.json"), "--", "true"])
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
