"""Suite 4: it comes out as on record, its figures hold on a fresh draw, and another world is not mistaken for it."""

import json

import numpy as np
import pytest
from dynamiccl.envs.bench import job_suites
from dynamiccl.envs.bench.job_suites import JobSuite
from dynamiccl.envs.bench.strata import SUITES
from make_job_suites import draw_suite, figures, save

EACH = {"standard": 125, "held-out": 125, "unseen": 200, "mpi-headroom": 1000}
FILES = {name: job_suites.resources.files(job_suites.__package__).joinpath(f) for name, f in SUITES.items()}
RECORDS = {name: json.loads(file.read_text()) for name, file in FILES.items()}


@pytest.mark.parametrize("name", SUITES)
def test_a_shipped_suite_comes_out_as_on_record(name):
    suite = JobSuite.load(name)
    each, n = RECORDS[name]["each"], len(suite)
    assert each == EACH[name] and len(RECORDS[name]["gain"]) == n == each * len(suite.family.worlds)
    assert len(FILES[name].read_text()) < 250_000
    assert all((suite.strata == world).sum() == each for world in suite.family.worlds)
    assert suite.jobs.usual_us(np.zeros((n, suite.jobs.width), int)) == pytest.approx(suite.jobs.default_us)
    assert (suite.jobs.mask[np.arange(n)[:, None], np.arange(suite.jobs.width), suite.best]).all()
    assert (suite.gain >= -1e-9).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_a_fresh_draw_has_the_figures_on_record(name):
    """Other jobs of the same worlds: their figures lie within the intervals that are printed, widened by their own."""
    told, found = RECORDS[name]["figures"], figures(draw_suite(name, job_suites.FAMILIES[name], 77, 160))
    assert told.keys() == found.keys()
    for world, row in found.items():
        for key in ("oracle_gain", "sweep_gain"):
            low, high = told[world][f"{key}_ci95"]
            own = row[f"{key}_ci95"][1] - row[f"{key}_ci95"][0]
            assert low - own <= row[key] <= high + own, (world, key, row[key], told[world])


def test_a_suite_is_saved_and_read_and_others_are_refused(tmp_path):
    path, suite = tmp_path / "suite.json", draw_suite("small", job_suites.STANDARD, 5, 10)
    save(suite, path)
    again = JobSuite.load(path)
    assert (
        (again.jobs.which == suite.jobs.which).all()
        and (again.jobs.default_us == suite.jobs.default_us).all()
        and (again.best == suite.best).all()
    )
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


def test_the_jobs_of_one_world_meet_the_noise_of_the_whole_suite():
    whole = JobSuite.load("standard")
    some = JobSuite.load("standard:many,plain")
    rows = np.flatnonzero(np.isin(whole.strata, ["many", "plain"]))
    assert some.name == "standard:many,plain" and some.digest != whole.digest
    assert (
        some.strata.tolist() == whole.strata[rows].tolist()
        and some.gain.tolist() == whole.gain[rows].tolist()
    )
    first = whole.open(rows[:2], seed=0)[0].windows.rng
    same = some.open(np.arange(2), seed=0)[0].windows.rng
    assert first.keys == same.keys
    with pytest.raises(ValueError, match=r"no world nowhere in standard: it has plain, "):
        JobSuite.load("standard:nowhere")
