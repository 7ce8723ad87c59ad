"""Measured collectives: returned as measured, predicted from each other where they were not."""

import json

import numpy as np
import pytest
from dynamiccl.agent.commands.calibrate import calibrate
from dynamiccl.envs.sim.measured import Measured, leave_one_out, line, public_points


def test_left_out_public_points_are_predicted_within_8_percent():
    errors = leave_one_out(public_points())
    assert set(errors) == {"one-gpu", "b300", "simai"}
    assert sum(map(len, errors.values())) == 536
    for source, values in errors.items():
        assert np.median(values) <= 0.08, (source, np.median(values))


def test_it_beats_a_plain_latency_bandwidth_fit():
    curves = {}
    for p in public_points():
        curves.setdefault((p.source, p.func, p.curve), []).append(p)
    plain = []
    for points in curves.values():
        sizes, us = (np.array([getattr(p, k) for p in points], float) for k in ("n_bytes", "us"))
        for i in range(len(points)):
            fit = line(np.delete(sizes, i), np.delete(us, i))
            plain.append(abs(np.exp(fit(sizes[i : i + 1], sizes[i : i + 1]))[0] / us[i] - 1))
    ours = [e for values in leave_one_out(public_points()).values() for e in values]
    assert np.median(ours) < 0.4 * np.median(plain)


def test_measured_points_come_back_and_the_rest_lies_between():
    sizes = np.array([2**20, 2**22, 2**26])
    model = Measured(sizes, np.ones(3), np.array([30.0, 50.0, 500.0]))
    assert [model.predict_us(int(b), 1) for b in sizes] == [30.0, 50.0, 500.0]
    assert (2**22, 1) in model.known and (2**22, 2) not in model.known
    assert 30 < model.predict_us(2**21, 1) < 50 < model.predict_us(2**24, 1) < 500
    repeated = Measured(np.array([8, 8, 8]), np.ones(3), np.array([1.0, 2.0, 9.0]))
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
    blind = Measured(b, c, us)
    assert blind.predict_us(2**23, 8) == pytest.approx(float(np.exp(truth(2**23, 8))), rel=0.15)


def test_impossible_measurements_are_refused(tmp_path):
    for us in ([0.0], [np.nan], []):
        with pytest.raises(ValueError, match="finite and above 0"):
            Measured(np.ones(len(us)), np.ones(len(us)), np.array(us))
    for text, message in (
        ("", "no measurements"),
        ("source,func,curve,n_bytes,us\na,b,c,d,1\n", "row 2"),
        ("source,func,curve,n_bytes,us\na,b,c,8,-1\n", "above 0"),
        ("n_bytes,us\n8,1\n", "needs source"),
    ):
        path = tmp_path / "bad.csv"
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            public_points(path)
    with pytest.raises(ValueError, match="cannot read"):
        public_points(tmp_path / "absent.csv")


def test_the_command_prints_the_error_per_source(capsys, tmp_path):
    calibrate(points=None, json_=True)
    rows = {row["source"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {"one-gpu", "b300", "simai", "all"} and rows["all"]["points"] == 536
    calibrate(points=None, json_=False)
    assert "median error" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        calibrate(points=tmp_path / "absent.csv")
    assert caught.value.code == 2
