"""Measured collectives: returned as measured, predicted from each other where they were not."""

import csv
from collections import defaultdict

import numpy as np
import pytest
from dynamiccl.envs.replay.measured import MOST_POINTS, Measured
from paths import DATA

PUBLIC = DATA / "measured.csv"


def line(n_bytes, us):
    """Latency + bytes / bandwidth through points, by least squares of relative errors; both terms at least 0."""
    columns = np.stack([1.0 / us, n_bytes / us], axis=1)
    best = (np.inf, np.array([float(np.median(us)), 0.0]))
    for used in ([0, 1], [0], [1]):
        found = np.linalg.lstsq(columns[:, used], np.ones(len(us)), rcond=None)[0]
        if (found < 0).any():
            continue
        both = np.zeros(2)
        both[used] = found
        error = float(((columns @ both - 1.0) ** 2).sum())
        if error < best[0]:
            best = error, both
    latency, per_byte = best[1]
    return lambda b, _: np.log(np.maximum(latency + per_byte * b, 1e-9))


def fitted(n_bytes, n_channels, us):
    """With a formula fitted to the points themselves."""
    usable = len(us) and np.isfinite(us).all() and (np.asarray(us) > 0).all()
    return Measured(n_bytes, n_channels, us, line(n_bytes, us) if usable else None)


def curves():
    """{(source, func, curve): (n, 3) bytes, channels (1 where the source does not vary them), us}."""
    found = defaultdict(list)
    lines = [row for row in PUBLIC.read_text().splitlines() if not row.startswith("#")]
    for row in csv.DictReader(lines):
        curve, n_channels = row["curve"], int(row.get("n_channels") or 1)
        if curve.startswith("channel_sweep") and curve[-1].isdigit():  # the sweep's count is in its label
            curve, _, text = curve.rpartition("/")
            n_channels = int(text)
        found[row["source"], row["func"], curve].append((int(row["n_bytes"]), n_channels, float(row["us"])))
    return {key: np.array(points, float) for key, points in found.items()}


def left_out():
    """{source: |predicted / measured - 1| of each point, from the others of its curve}; curves of two say nothing."""
    errors = defaultdict(list)
    for (source, _, _), table in curves().items():
        for i, (n_bytes, n_channels, us) in enumerate(table if len(table) > 2 else ()):
            model = fitted(*np.delete(table, i, axis=0).T)
            errors[source].append(abs(model.predict_us(int(n_bytes), int(n_channels)) / us - 1.0))
    return errors


def test_left_out_public_points_are_predicted_within_8_percent():
    errors = left_out()
    assert set(errors) == {"one-gpu", "b300", "simai"}
    assert sum(map(len, errors.values())) == 536
    for source, values in errors.items():
        assert np.median(values) <= 0.08, (source, np.median(values))


def test_it_beats_a_plain_latency_bandwidth_fit():
    plain = []
    for sizes, _, us in (table.T for table in curves().values()):
        for i in range(len(sizes)):
            fit = line(np.delete(sizes, i), np.delete(us, i))
            plain.append(abs(np.exp(fit(sizes[i : i + 1], sizes[i : i + 1]))[0] / us[i] - 1))
    ours = [e for values in left_out().values() for e in values]
    assert np.median(ours) < 0.4 * np.median(plain)


def test_measured_points_come_back_and_the_rest_lies_between():
    sizes = np.array([2**20, 2**22, 2**26])
    model = fitted(sizes, np.ones(3), np.array([30.0, 50.0, 500.0]))
    assert [model.predict_us(int(b), 1) for b in sizes] == [30.0, 50.0, 500.0]
    assert (2**22, 1) in model.known and (2**22, 2) not in model.known
    assert 30 < model.predict_us(2**21, 1) < 50 < model.predict_us(2**24, 1) < 500
    repeated = fitted(np.array([8, 8, 8]), np.ones(3), np.array([1.0, 2.0, 9.0]))
    assert repeated.predict_us(8, 1) == 2.0


def test_the_formula_extrapolates_and_channels_borrow_from_each_other():
    def truth(b, c):
        return np.log(20 + b / (20e3 * np.minimum(c, 12)))

    grid = [(2**k, c) for k in (22, 24) for c in (1, 2, 4, 8, 16)] + [(2**20, 1), (2**28, 1)]
    b, c = (np.array(x) for x in zip(*grid, strict=True))
    us = np.exp(truth(b, c))
    known = Measured(b, c, 1.3 * us, formula=truth)  # the whole machine is 30 % slower than the formula
    for size, count in ((2**30, 1), (2**26, 8), (2**20, 16)):
        right = 1.3 * np.exp(truth(size, count))
        assert known.predict_us(size, count) == pytest.approx(right, rel=0.05)
    blind = fitted(b, c, us)
    assert blind.predict_us(2**23, 8) == pytest.approx(float(np.exp(truth(2**23, 8))), rel=0.15)


def test_impossible_measurements_are_refused():
    for us in ([0.0], [np.nan], []):
        with pytest.raises(ValueError, match="finite and above 0"):
            fitted(np.ones(len(us)), np.ones(len(us)), np.array(us))


def test_a_job_with_thousands_of_sizes_needs_no_more_memory_than_one_with_few():
    """Sizes that follow the lengths of texts. Before: matrices of all sizes by all, 100 GB beside a running job."""

    def truth(b, c):
        return np.log(20 + b / (20e3 * np.minimum(c, 12)))

    sizes = 2**20 + 1024 * np.arange(6000)
    counts = np.where(sizes % 4096, 8, 16)
    model = Measured(sizes, counts, 1.3 * np.exp(truth(sizes, counts)), formula=truth)
    assert len(model.known) < MOST_POINTS / 4
    for size, count in ((sizes[3], 8), (sizes[3000], 16), (2**24, 16)):
        assert model.predict_us(size, count) == pytest.approx(1.3 * np.exp(truth(size, count)), rel=0.05)
    few = Measured(sizes[:MOST_POINTS], counts[:MOST_POINTS], np.arange(1.0, MOST_POINTS + 1), formula=truth)
    assert [few.predict_us(b, c) for b, c in zip(sizes[:3], counts[:3], strict=True)] == [1.0, 2.0, 3.0]
