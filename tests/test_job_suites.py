"""Suite 3: it comes out as on record, its figures hold on a fresh draw, and another world is not mistaken for it."""

import json

import numpy as np
import pytest
from dynamiccl.envs.bench import job_suites
from dynamiccl.envs.bench.job_suites import JobSuite, draw_suite, figures, quiet_step_us
from dynamiccl.envs.bench.scores import STRATA, stratum
from dynamiccl.envs.bench.strata import SUITES, percentile_of_gain
from dynamiccl.envs.sim.jobs import SLOTS

JOBS = 400
RECORDS = {
    name: json.loads(job_suites.resources.files(job_suites.__package__).joinpath(f).read_text())
    for name, f in SUITES.items()
}


@pytest.mark.parametrize("name", SUITES)
def test_a_shipped_suite_comes_out_as_on_record(name):
    suite = JobSuite.load(name, 40)
    assert len(RECORDS[name]["picked"]) >= JOBS and len(suite) == 40
    assert (np.bincount(stratum(suite.gain), minlength=len(STRATA)) == 10).all()
    assert quiet_step_us(suite.jobs, np.zeros((40, SLOTS), int)) == pytest.approx(suite.jobs.default_us)
    assert (suite.jobs.mask[np.arange(40)[:, None], np.arange(SLOTS), suite.best]).all()


@pytest.mark.parametrize("name", SUITES)
def test_a_fresh_draw_has_the_figures_on_record(name):
    """Other jobs of the same strata: their figures lie within the intervals that are printed, widened by their own."""
    fresh = draw_suite(name, job_suites.FAMILIES[RECORDS[name]["family"]], 77, 60)
    told, found = RECORDS[name]["figures"], figures(fresh)
    for key in ("oracle_gain", "sweep_gain"):
        low, high = told[f"{key}_ci95"]
        own = (found[f"{key}_ci95"][1] - found[f"{key}_ci95"][0]) / 2
        assert low - own <= found[key] <= high + own, (key, found[key], told[f"{key}_ci95"])
    weights = np.array(list(RECORDS[name]["weights"].values()))
    assert fresh.weights == pytest.approx(weights, abs=0.12)


def test_a_suite_is_saved_and_read_and_others_are_refused(tmp_path):
    path, suite = tmp_path / "suite.json", draw_suite("small", job_suites.STANDARD, 5, 8)
    suite.save(path)
    again = JobSuite.load(path)
    assert (again.jobs.label == suite.jobs.label).all() and (again.best == suite.best).all()
    assert again.gain == pytest.approx(suite.gain, abs=1e-6) and again.best_us == pytest.approx(suite.best_us)
    told = json.loads(path.read_text())
    for change, word in (
        ({"version": 99}, "version 99"),
        ({"seed": told["seed"] + 1}, "otherwise than on record"),
        ({"family": "nope"}, "not a suite"),
        ({"gain": [g + 0.01 for g in told["gain"]]}, "otherwise than on record"),
    ):
        path.write_text(json.dumps(told | change))
        with pytest.raises(ValueError, match=word):
            JobSuite.load(path)
    with pytest.raises(ValueError, match="there is no suite"):
        JobSuite.load(tmp_path / "absent.json")


def test_where_a_job_stands_in_its_family():
    """Half of random jobs have less than the median; a suite holds more of the rare ones, which count for less."""
    told = [percentile_of_gain(saved) for saved in (-0.1, 0.0001, percentile_of_gain(0)["median"], 0.23, 0.9)]
    less = [t["less"] for t in told]
    assert less[0] == 0 and less == sorted(less) and less[-1] == 1
    assert less[2] == pytest.approx(0.5, abs=0.01) and 0.9 < less[3] < 0.99
    assert told[0]["median"] == pytest.approx(0.0236, abs=0.0005)
