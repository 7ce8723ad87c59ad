"""The golden runs that ``tests/tools/golden_nccl.py`` has filed, and the comparison that it makes.

The runs were on NCCL 2.28.9's library; GPU, driver and kernels replaced by CPU code; two namespaces of one machine.
They need a launcher that this project does not have; these tests read what they left.
"""

import json

import golden_nccl
import numpy as np
import pandas as pd
import pytest
from golden_nccl import AGREE, ALL, CALL, CONTROLS, compare, digest, first_difference, holds, kind_of
from paths import DATA

FILED = DATA / "nccl_on_cpu"


def read(name, folder="golden"):
    return json.loads((FILED / folder / f"{name}.json").read_text())


TABLE = read("table")
JOBS = [row["job"] for row in TABLE["jobs"]]


@pytest.mark.parametrize("folder", ["golden", "golden_turns"])
@pytest.mark.parametrize("name", JOBS)
def test_a_job_whose_tables_change_trains_as_untuned(name, folder):
    """``golden_turns``: after the change by which all tables take turns."""
    job = read(name, folder)
    assert job["untuned_digest"] == read(name)["untuned_digest"]
    assert job["mismatches"] == 0 and job["compared"] >= 300
    assert job["switches"] >= 1 and job["switches"] == sum(job["kinds"].values())
    assert job["losses"] == job["ranks"] * job["steps"] and job["losses_equal"]
    assert job["digest"] == job["untuned_digest"]
    assert holds(job) and job["holds"]


LATER = [path for path in sorted(FILED.glob("golden_*/*-*.json")) if "job" in json.loads(path.read_text())]


@pytest.mark.parametrize("path", LATER, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_filed_job_holds(path):
    job = json.loads(path.read_text())
    assert holds(job) and job["holds"]
    assert job["digest"] == job["untuned_digest"]
    untuned = json.loads((path.parent / f"untuned-{job['workload']}-{job['ranks']}.json").read_text())
    if untuned["steps"] == job["steps"]:
        assert job["digest"] == untuned["digest"]


def test_jobs_of_one_workload_have_the_losses_of_one_untuned_run():
    """However long: the digest of a run of as many steps is the untuned one's own."""
    for name in JOBS:
        job = read(name)
        untuned = read(f"untuned-{job['workload']}-{job['ranks']}")
        if untuned["steps"] == job["steps"]:
            assert job["digest"] == untuned["digest"]


def test_each_way_to_change_a_table_was_run_and_both_numbers_of_ranks():
    hows, _, ranks = zip(*(name.split("-") for name in JOBS), strict=True)
    assert set(hows) == set(golden_nccl.HOWS) and set(ranks) == {"2", "4"} and set(JOBS) <= set(ALL)
    kinds = {kind for name in JOBS for kind in read(name)["kinds"]}
    assert kinds >= {"abba", "baab", "few", "whole", "stay"}


def test_the_table_is_that_of_the_jobs():
    for row in TABLE["jobs"]:
        job = read(row["job"])
        job.pop("summary", None)
        assert row == job


def test_tuned_jobs_keep_their_summary_and_doctor_compares_both_hosts():
    for name in JOBS:
        if name.startswith("tune"):
            job = read(name)
            assert job["summary"]["policy"] == "random" and job["summary"]["job_status"] == 0
            assert job["doctor"].endswith("collectives compared, 0 with different settings")
            assert job["summary"]["consistency"]["ranks_elsewhere"] == job["ranks"] // 2


@pytest.mark.parametrize("fault", CONTROLS)
def test_each_control_was_caught(fault):
    (row,) = [row for row in TABLE["controls"] if row["control"] == fault]
    assert row == read(f"control-{fault}") and row["caught"]


def test_all_reduces_were_tuned_in_each_kind_of_job_that_has_them():
    tuned = [path.stem for path in LATER if path.stem.split("-")[1] in golden_nccl.SUMS]
    assert {name.split("-")[1] for name in tuned} == set(golden_nccl.SUMS)


@pytest.mark.parametrize("fault", CONTROLS)
def test_each_control_was_caught_among_all_reduces_too(fault):
    row = read(f"control-{fault}-ddp", "golden_merged")
    assert row["workload"] == "ddp" and row["caught"]


def test_each_stage_of_zero_was_run():
    assert {name.split("-")[1] for name in JOBS} == {"fsdp2", "zero1", "zero2", "zero3"}


def events(**changed):
    """Ten collectives on two ranks; ``changed``: of rank 1's call 3."""
    rows = [
        dict.fromkeys(AGREE, 1) | dict(zip(CALL, (7, 2, seq), strict=True)) | {"rank": rank}
        for rank in (0, 1)
        for seq in range(10)
    ]
    rows[13] |= changed
    return pd.DataFrame(rows)


def test_the_comparison_counts_what_two_ranks_recorded():
    assert compare(events()) == (10, 0, "")
    assert compare(events().iloc[:15])[:2] == (5, 0)
    assert compare(events().iloc[:10])[:2] == (0, 0)


@pytest.mark.parametrize("name", AGREE)
def test_the_comparison_finds_each_difference(name):
    compared, mismatches, example = compare(events(**{name: 2}))
    assert (compared, mismatches) == (10, 1)
    assert f"{name} 2" in example.partition("rank 1: ")[2]


def test_losses_are_compared_step_by_step_and_bit_by_bit():
    untuned = [[(0.1).hex(), (0.2).hex()], [(0.3).hex(), (0.4).hex()]]
    other = [untuned[0], [(0.3).hex(), float(np.nextafter(0.4, 1)).hex()]]
    assert first_difference(untuned, untuned) is None and first_difference(other, untuned) == 1
    assert digest(other) != digest(untuned)


GOOD = {
    "losses": 20,
    "ranks": 2,
    "steps": 10,
    "switches": 1,
    "compared": 5,
    "losses_equal": True,
    "mismatches": 0,
}


@pytest.mark.parametrize(
    "change", [{"losses": 19}, {"switches": 0}, {"compared": 0}, {"losses_equal": False}, {"mismatches": 1}]
)
def test_a_run_that_shows_nothing_does_not_hold(change):
    assert holds(GOOD) and not holds(GOOD | change)


def test_kinds_of_tables():
    shapes = [(16, 2, 1, 0), (16, 2, 1, 1), (16, 8, 0, 0), (16, 0, 0, 0), (0, 0, 0, 0)]
    names = ("trial_steps", "one_of", "turn_steps", "swap")
    assert [kind_of(dict(zip(names, shape, strict=True))) for shape in shapes] == [
        "abba",
        "baab",
        "few",
        "whole",
        "stay",
    ]


def test_tables_that_ran_are_counted_by_kind(tmp_path):
    (tmp_path / "calls").mkdir()
    tables = [{"generation": g, "kind": k} for g, k in ((1, "abba"), (2, "few"), (3, "few"), (4, "stay"))]
    (tmp_path / "calls" / "published.json").write_text(json.dumps({"tables": tables}))
    ran = pd.DataFrame({"table_generation": [0, 1, 2, 3, 3]})
    assert golden_nccl.switches(tmp_path, ran) == {"abba": 1, "few": 2}
