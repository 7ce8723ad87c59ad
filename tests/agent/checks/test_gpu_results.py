"""The analysis of ``gpu-check``: from its files to a page, on results whose truth is known."""

import csv

import numpy as np
import pytest
from dynamiccl.agent.checks.results import judge
from dynamiccl.agent.checks.results.files import Results, append, read_table
from dynamiccl.agent.checks.results.judge import judged, noise_of, power, races, refusal
from dynamiccl.agent.checks.results.page import page
from dynamiccl.envs.search.config import ALPHA
from gpu_results import MEDIAN_LAG1, MEDIAN_SD, folder, most_by_luck, node_noise
from paths import DATA

STEPS = 450


def series(seed, n, **noise):
    rng = np.random.default_rng(seed)
    return [node_noise(rng, STEPS, **noise) for _ in range(n)]


def test_the_noise_of_the_tests_is_that_of_real_nodes():
    """Robust standard deviation and correlation as in the median of public series; some steps are long."""
    found = [noise_of("", 3e4 * np.exp(logs)) for logs in series(0, 40)]
    assert np.median([one.sd for one in found]) == pytest.approx(MEDIAN_SD, rel=0.1)
    assert np.median([one.lags[0] for one in found]) == pytest.approx(MEDIAN_LAG1, abs=0.1)
    assert 0.003 < np.mean([one.long for one in found]) < 0.03
    assert np.isnan(noise_of("", np.full(16, 3.0)).lags[2])  # too short for lag 100


def test_a_gain_of_one_percent_is_found_in_19_of_20_runs(tmp_path):
    """From the files to the gain; the estimate is right as well."""
    found = 0
    for run in range(20):
        path = folder(tmp_path / str(run), np.random.default_rng(run), gain=0.01, steps=STEPS)
        [gain] = races(Results.read(path))
        assert gain.low < 0.01 < gain.high
        found += gain.low > 0 and gain.steps == STEPS // 4 * 4
        assert gain.gain == pytest.approx(0.01, abs=0.004)
    assert found >= 19


def test_no_more_false_gains_than_the_level_allows(capsys):
    """200 A/A runs under noise that lasts: a 95 % bound of the binomial distribution."""
    runs = 200
    false = sum(judged("", 3e4 * np.exp(logs)).low > 0 for logs in series(1, runs))
    with capsys.disabled():
        print(f"\n{false} false gains in {runs} A/A runs, at most {most_by_luck(runs, ALPHA)} by luck")
    assert false <= most_by_luck(runs, ALPHA)


def test_power_by_gpu_type_at_the_90th_percentile_of_its_noise(capsys):
    """Printed, not asserted but for the median: where noise is that large, 450 steps may not do."""
    rows = list(csv.DictReader((DATA / "step_noise.csv").open()))
    with capsys.disabled():
        for row in rows:
            noise = {"sd": float(row["robust_sd"]), "lag1": float(row["lag1"])}
            found, n = power(0.01, series(2, 50, **noise))
            print(f"\n{row['gpu']:>6}, {row['quantile']} of the noise: 1 % in {found} of {n}", end="")
            if row["quantile"] == "0.5" and row["gpu"] != "gb200":
                assert found >= 0.95 * n
        print()
    assert {row["gpu"] for row in rows} == {"a100", "h100", "gb200"}


def claim(tmp_path, name, **options):
    rng = np.random.default_rng(sum(map(ord, name)))
    return Results.read(folder(tmp_path / name, rng, **{"began": f"run {name}"} | options))


def test_a_gain_is_claimed_only_against_untouched_nccl_and_where_a_second_run_agrees(tmp_path):
    first, second = (claim(tmp_path, name, gain=0.02) for name in ("first", "second"))
    [gain] = races(first)
    assert refusal(gain, races(second)) == ""
    assert "CLAIM" in page(first, [second]) and "CLAIM" not in page(first)
    assert refusal(gain, []) == "no second run agrees"
    assert refusal(gain, races(claim(tmp_path, "none"))) == "no second run agrees"
    other = claim(tmp_path, "other table", gain=0.02, table="all_gather:8388608:ring/simple/8")
    assert refusal(gain, races(other)) == "no second run agrees"


OTHER_RUNS = {
    "is the same run": {"began": "run first"},
    "is emulated": {"emulated": "dgx-h100-2x8"},
    "has device NVIDIA A100-SXM4-40GB, not NVIDIA H100 80GB HBM3": {"device": "NVIDIA A100-SXM4-40GB"},
    "has ranks 8, not 2, nodes 4, not 1": {"ranks": 8, "nodes": 4},
    "has placement apart, not hosts": {"placement": "apart"},
    "has network infiniband, not ethernet": {"network": "infiniband"},
    "has environment {}, not {'NCCL_IB_DISABLE': '1'}": {"environment": {}},
    "has nccl 2.30.7, not 2.28.9": {"versions": {"nccl": "2.30.7"}},
}


@pytest.mark.parametrize("why", OTHER_RUNS)
def test_only_another_run_like_it_confirms_a_gain(tmp_path, why):
    """Before: a folder that was given twice, another GPU and an emulated run confirmed it."""
    first = claim(tmp_path, "first", gain=0.02)
    second = claim(tmp_path, "second", gain=0.02, **OTHER_RUNS[why])
    said = page(first, [second])
    assert "CLAIM" not in said and f"no claim: no second run agrees; {second.folder} {why}\n" in said
    assert "CLAIM" in page(first, [second, claim(tmp_path, "third", gain=0.02)])


ANSWERED = {"truth": {"races": {"best table": {"asked_answered": {"untouched": [900, 3]}}}, "took_s": 1}}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 120}, "120 alternating steps, 200 are needed"),
        ({"gain": 0.0}, "does not exclude"),
        ({"environment": {"NCCL_MIN_CTAS": "16"}}, "not NCCL untouched: NCCL_MIN_CTAS was set"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "not NCCL untouched: NCCL_P2P_DISABLE was set"),
        ({"environment": {"NCCL_IB_DISABLE": "0"}}, "not NCCL untouched: NCCL_IB_DISABLE was set"),
        ({"parts": ANSWERED}, "the tuner answered 3 of 900 questions"),
    ],
)
def test_what_is_no_claim_says_why(tmp_path, options, says):
    """Before: a job that had been slowed by 16 forced channels was printed as 18 % shorter."""
    options = {"gain": 0.02} | options
    gains = [races(claim(tmp_path, name, **options))[0] for name in ("first", "second")]
    assert says in refusal(gains[0], gains[1:])


def test_a_raised_communicator_is_no_untouched_baseline(tmp_path):
    path = folder(tmp_path / "x", np.random.default_rng(0), gain=0.02)
    (path / "truth.csv").unlink()
    for arm in ("raised", "table"):
        append(
            path, "truth", [{"race": "best table", "arm": arm, "comm": "raised", "table": "", "share": 0.4}]
        )
    [gain] = races(Results.read(path))
    assert "more channels than NCCL makes" in refusal(gain, [gain])


def test_the_page_says_what_was_measured(tmp_path):
    path = folder(tmp_path / "x", np.random.default_rng(3), gain=0.02)
    text = page(Results.read(path))
    assert "NVIDIA H100" in text and "EMULATED" not in text
    assert "all_gather        8 MiB  untouched ring/simple/2" in text and "best nccl ring/simple/4" in text
    assert "Noise (bound by compute): 450 default steps" in text
    assert "no claim: no second run agrees" in text
    emulated = page(Results.read(folder(tmp_path / "y", np.random.default_rng(3), gain=0.02, emulated="dgx")))
    assert "EMULATED" in emulated and "no claim: emulated" in emulated


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = folder(tmp_path / "x", np.random.default_rng(0))
    whole = len(read_table(path, "steps"))
    for cut in (1, 5, 12):
        text = (path / "steps.csv").read_text()
        (path / "steps.csv").write_text(text[:-cut])
        assert len(read_table(path, "steps")) == whole - 1
        (path / "steps.csv").write_text(text)
    (path / "sweep.csv").write_text("comm,fu")
    assert read_table(path, "sweep").empty and "Sweep" not in page(Results.read(path))
    (path / "sweep.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"sweep\.csv: its columns are a, b"):
        Results.read(path)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', "{"])
def test_what_is_no_folder_of_results_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json"):
        Results.read(tmp_path)


def test_the_best_table_is_the_fastest_config_of_each_collective(tmp_path):
    results = claim(tmp_path, "x")
    table = judge.best_table(results.tables["sweep"], "nccl", 2**23)
    assert table == "all_gather:8388608:ring/simple/4;reduce_scatter:8388608:ring/simple/4"
    assert judge.best_table(results.tables["sweep"], "raised", 2**23) == ""


@pytest.mark.parametrize("flag", ["right", "obeyed", "agreed"])
def test_a_config_that_went_wrong_is_neither_the_best_nor_claimed(tmp_path, flag):
    """Before: a config was the fastest because its result was wrong, and its gain was a claim."""
    first, second = (claim(tmp_path, name, gain=0.02) for name in ("first", "second"))
    sweep = first.tables["sweep"]
    is_bad = (sweep["func"] == "all_gather") & (sweep["asked"] == "ring/simple/4")
    sweep[flag] = sweep[flag].astype(object).mask(is_bad, "False")
    best = judge.best_table(sweep, "nccl", 2**23)
    assert best == "all_gather:8388608:ring/simple/8;reduce_scatter:8388608:ring/simple/4"
    said = page(first, [second])
    assert "no claim: in the sweep all_gather:8388608:ring/simple/4 was wrong, not obeyed" in said
    fastest = [line for line in said.splitlines() if "all_gather" in line and "untouched ring" in line]
    assert fastest and not any("ring/simple/4" in line for line in fastest)


def test_the_silent_tuner_is_compared_block_by_block(tmp_path):
    """Blocks a b b a of two processes; a slow drift of the machine falls out."""
    path = folder(tmp_path / "x", np.random.default_rng(0))
    rng, rows = np.random.default_rng(1), []
    for block in range(8):
        arm = "tuner" if block % 4 in (0, 3) else "profiler"
        us = 1000 * (1.0 + 0.01 * block + 0.002 * (arm == "tuner")) * np.exp(rng.normal(0, 0.001, 40))
        rows += [
            {"race": "outside", "arm": arm, "at": judge.BLOCK * block + i, "us": value}
            for i, value in enumerate(us)
        ]
    append(path, "steps", rows)
    ratio = judge.outside(Results.read(path))
    assert ratio.pairs == 4 and ratio.ratio == pytest.approx(1.002, abs=0.003)
