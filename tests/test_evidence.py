"""What a profile shows of compute makes the belief better, and reaches the search of a running job."""

import check_advice
import numpy as np
import pytest
import recordings_made
from dynamiccl.agent.recordings import evidence
from dynamiccl.agent.rules import ExpectedImprovement
from dynamiccl.agent.tuner import Settings, Tuner
from dynamiccl.envs.belief import Belief
from dynamiccl.envs.evidence import SlotOverlap, given_back, of_slot, seen_in, tell
from dynamiccl.envs.live_windows import LiveWindows
from dynamiccl.envs.sim.jobs import HELD_OUT, SLOTS, STANDARD, draw_jobs
from dynamiccl.traces.files import TraceError
from dynamiccl.traces.importers import read_recording
from dynamiccl.traces.records import Slot
from dynamiccl.traces.spaces import N_CONFIGS
from fake_job import GATHER, STEP_MS, FakeJob


@pytest.mark.parametrize("kind", [STANDARD, HELD_OUT])
def test_what_is_shown_makes_the_belief_surer_and_no_less_right(kind):
    """Of jobs whose exposure is known, what every config saves is predicted more surely and no less rightly (the
    logarithm of the probability that is given to the truth, far ones cut off)."""
    n = 40
    jobs = draw_jobs(kind, np.random.default_rng(3), n)
    default, _ = jobs.step_us(np.zeros((n, SLOTS), int))
    scores = {shown: [] for shown in check_advice.SHOWN}
    for j in range(n):
        k = int(jobs.n_slots[j])
        pairs = [(i, c) for i in range(k) for c in np.flatnonzero(jobs.mask[j, i]) if c]
        tables = np.zeros((len(pairs), SLOTS), int)
        for row, (i, c) in zip(tables, pairs, strict=True):
            row[i] = c
        true = 1 - jobs.step_us(tables, np.full(len(pairs), j))[0] / default[j]
        beliefs = {shown: check_advice.belief_of(jobs, j, shown) for shown in check_advice.SHOWN}
        told = {shown: np.array([b.saving(t[:k]) for t in tables]).T for shown, b in beliefs.items()}
        near = told[check_advice.SHOWN[0]][0] > -0.05  # those that come into question
        for shown, found in scores.items():
            mean, deviation = told[shown][:, near]
            found.extend(-np.log(deviation) - np.minimum(((true[near] - mean) / deviation) ** 2, 16) / 2)
    mean = {shown: float(np.mean(s)) for shown, s in scores.items()}
    nothing, exposure = (mean[shown] for shown in check_advice.SHOWN)
    assert exposure > nothing


def test_without_anything_shown_nothing_changes():
    jobs = draw_jobs(STANDARD, np.random.default_rng(0), 1)
    belief = check_advice.belief_of(jobs, 0, "no compute")
    before = belief.mean.copy(), belief.cov.copy()
    tell(belief, [SlotOverlap()] * len(belief.arms))
    assert np.array_equal(belief.mean, before[0]) and np.array_equal(belief.cov, before[1])


def test_fewer_channels_give_compute_back_and_longer_calls_take_it():
    back = given_back(0.2, 0.3, 16, np.ones(N_CONFIGS))
    assert back[0] == 0 and back.max() > 0.05 > 0 > back.min()
    assert given_back(0.2, 0.3, 16, np.full(N_CONFIGS, 2.0))[0] < 0 and not given_back(1.0, 0.3, 16, np.ones(1)).any()


def test_slots_are_matched_by_their_ranks_where_nodes_are_not_told():
    seen = [(Slot(16, 0, "all_gather", 26), SlotOverlap(0.5))]
    assert of_slot(seen, Slot(16, 2, "all_gather", 26)).exposed == 0.5
    assert np.isnan(of_slot(seen, Slot(8, 1, "all_gather", 26)).exposed)
    assert np.isnan(of_slot(seen, Slot(16, 2, "reduce_scatter", 26)).exposed)


def test_a_profile_is_evidence_and_one_without_compute_says_so(tmp_path):
    path = recordings_made.nsys(tmp_path / "a.sqlite")
    trace = read_recording([path])
    found, overlaps = seen_in(trace, 1e4)
    assert found and overlaps and all(0 <= one.exposed <= 1 for one in found.values())
    rows = evidence([path])
    assert {Slot(*slot) for slot, _ in rows} == set(found)
    with pytest.raises(TraceError, match="shows no compute"):
        evidence([recordings_made.nsys(tmp_path / "b.sqlite", compute=False)])


def test_the_search_of_a_running_job_begins_with_it():
    def first(seen):
        tuner = Tuner(LiveWindows(FakeJob(lambda d: STEP_MS)), ExpectedImprovement(), Settings(), evidence=seen)
        tuner._begin()
        belief: Belief = tuner.search.belief
        return belief.exposure[0][0], belief.exposure[1][0]

    alone, told = first([]), first([(GATHER, SlotOverlap(0.02))])
    assert told[0] < alone[0] and told[1] < alone[1]
