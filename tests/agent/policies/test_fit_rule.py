"""The tool that fits the rule's constants: it finds a better point, goes on where it stopped, and leaves the rule as it
is. Jobs are replaced by a bowl; that it plays real jobs is checked in `test-slow`."""

import json

import fit_rule
import numpy as np
import pytest
from dynamiccl.agent.policies import rule

BEST = 0.3


def bowl(points, family, seed, n, parallel):
    """Lost steps around a best point; all points of a generation meet the same jobs."""
    jobs = np.random.default_rng(seed[1]).normal(0, 50, n)
    return [(jobs + 100 * float(np.square(np.asarray(x) - BEST).sum()),) for x in points]


def factors_after(path, generations, monkeypatch):
    monkeypatch.setattr(fit_rule, "all_played", bowl)
    fit_rule.search(path, generations, 24, None)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return rows, np.log(list(rows[-1]["factors"].values()))


def test_it_finds_a_better_point_and_resumes_to_the_same(tmp_path, monkeypatch, capsys):
    rows, at_once = factors_after(tmp_path / "once.json", 40, monkeypatch)
    assert len(rows) == 40 and np.abs(at_once - BEST).max() < 0.15
    factors_after(tmp_path / "twice.json", 7, monkeypatch)
    rows, resumed = factors_after(tmp_path / "twice.json", 40, monkeypatch)
    assert [row["generation"] for row in rows] == list(range(1, 41))
    np.testing.assert_array_equal(resumed, at_once)
    assert "generation 40: mean -" in capsys.readouterr().out


@pytest.mark.slow
def test_a_candidate_plays_by_its_own_constants_and_the_rule_stays():
    seed = (fit_rule.SEARCHED, 0, 0)
    shipped = fit_rule.played(fit_rule.SHIPPED, "standard", seed, 3)
    again = fit_rule.played(fit_rule.constants(np.zeros(13)), "standard", seed, 3)
    np.testing.assert_array_equal(shipped[0], again[0])
    other = fit_rule.played(fit_rule.constants(np.full(13, 1.0)), "standard", seed, 3)
    assert (other[3] != shipped[3]).any()
    assert {name: float(getattr(rule, name)) for name in fit_rule.NAMES} == fit_rule.SHIPPED
