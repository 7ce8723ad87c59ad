"""The worlds that nothing is trained on: each does what it says, and what it does is in the time that is billed."""

from dataclasses import replace

import numpy as np
import pytest
from dynamiccl.envs.sim.family import WORLDS
from dynamiccl.envs.sim.jobs import HELD_OUT, SLOTS, STANDARD, draw_jobs
from dynamiccl.envs.sim.step import Law
from dynamiccl.envs.sim.unseen import UNSEEN, _what_runs
from dynamiccl.traces.records import PAIRS
from oracle import oracle
from workloads import COMPUTE, Op, flattened

SIMPLE, NVLS = PAIRS.index(("ring", "simple")), PAIRS.index(("nvls", "simple"))


def with_and_without(world, n=60):
    """The same jobs with the world's mechanism and without, in calm weather."""
    calm = replace(UNSEEN, parts=UNSEEN.only(world).parts[:1])
    without = replace(calm, parts=(replace(calm.parts[0], hook=None),))
    return (draw_jobs(f, np.random.default_rng(4), n) for f in (calm, without))


def masked(jobs):
    """Configs that may be chosen of slots that there are, (n, SLOTS, N_CONFIGS)."""
    return jobs.mask & (np.arange(SLOTS)[:, None] < jobs.n_slots[:, None, None])


def test_its_worlds_are_no_others_and_half_of_its_jobs_have_a_neighbour():
    assert UNSEEN.worlds == WORLDS[8:13] and not {*UNSEEN.worlds} & {*STANDARD.worlds, *HELD_OUT.worlds}
    jobs = draw_jobs(UNSEEN, np.random.default_rng(0), 400)
    held = jobs.noise.memory >= 0.9  # 0.9 is the most of a calm job
    assert 0.4 < held.mean() < 0.6
    assert (jobs.noise.pace[held] > 0.05).mean() > 0.7 > 0.3 > (jobs.noise.pace[~held] > 0).mean()
    assert jobs.noise.hold[held].min() >= 200


@pytest.mark.parametrize("channels", [4, 8, 16])
def test_compute_pays_for_channels_beyond_the_knee_and_only_for_these(channels):
    """Two calls beside one computation: their channels count together."""
    ops = (Op(COMPUTE, 100.0), Op("gather", 1.0, slot=0), Op("scatter", 1.0, slot=0))
    row = np.array([[1e4, 0.1, 0.0, 0.0, 0.0, channels, 0.0]])
    us = {}
    for steep in (0.0, 0.05):
        times = np.zeros((3, 3))
        law = Law(power=1.0, knee=np.array([16.0]), steep=np.array([steep]))
        flattened([ops]).run(np.zeros(1, int), row[None], 1.0, law, times)
        us[steep] = times[1, 0]
    assert us[0.0] == pytest.approx(120) and us[0.05] == pytest.approx(
        120 + 100 * 0.05 * max(2 * channels - 16, 0)
    )


def test_in_sms_the_compute_of_the_default_is_slower():
    jobs, plain = with_and_without("sms")
    none = np.zeros((60, SLOTS), int)
    plain.scale = jobs.scale
    longer = jobs.usual_us(none) / plain.usual_us(none)
    assert (longer > 1 - 1e-9).all() and (longer > 1.01).mean() > 0.4 and longer.mean() > 1.03
    assert (jobs.tables.us == plain.tables.us).all()


def test_where_rings_meet_only_channels_beyond_the_ports_disturb():
    jobs, _ = with_and_without("meeting")
    pair, ports = _what_runs(jobs)
    crowd, beyond = jobs.tables.crowd, jobs.tables.channels - ports
    assert (crowd[(pair > SIMPLE) | (beyond <= 0)] == 0).all() and (crowd > 0).mean() > 0.1
    ring = (pair <= SIMPLE) & (beyond > 0)
    assert crowd[ring] == pytest.approx(beyond[ring] / 16) and jobs.sites.law.crowd.min() >= 0.5


def test_the_dip_is_simples_alone_and_smooth_in_size():
    jobs, plain = with_and_without("dip")
    longer = jobs.tables.us / plain.tables.us
    pair, _ = _what_runs(jobs)
    assert longer[pair != SIMPLE] == pytest.approx(1) and longer.min() > 1 - 1e-6
    deepest = np.where(pair == SIMPLE, longer, 1).max(axis=(1, 2))
    assert deepest.max() < np.exp(0.9) * 1.001 and (deepest > 1.3).mean() > 0.3
    shard = np.log2(jobs.fingerprint.n_bytes / jobs.fingerprint.n_ranks).reshape(-1, SLOTS)
    log = np.log(np.where(pair == SIMPLE, longer, 1).max(axis=2))
    near = np.abs(shard[:, :, None] - shard[:, None]) < 0.25
    assert np.abs(log[:, :, None] - log[:, None])[near].max() < 0.25, "the slope is below 0.9 an octave"


def test_a_slow_port_is_missed_by_few_channels_or_by_none():
    jobs, plain = with_and_without("rail")
    slow, (pair, ports) = jobs.tables.us / plain.tables.us > 1.1, _what_runs(jobs)
    channels = np.where(pair == NVLS, 0, jobs.tables.channels)
    assert not slow[pair == NVLS].any()
    most, least = (np.where(where, channels, other) for where, other in ((~slow, 0), (slow, 99)))
    assert (most.max(axis=(1, 2)) < least.min(axis=(1, 2))).all(), "the same number of channels in all slots"
    assert (most.max(axis=(1, 2)) < ports[:, 0, 0]).all() and (most.max(axis=(1, 2)) > 0).mean() > 0.3


def test_there_is_nothing_to_gain_in_nothing():
    jobs, _ = with_and_without("nothing")
    longer = (jobs.tables.us / jobs.tables.us[:, :, :1])[:, :, 1:]
    assert longer[masked(jobs)[:, :, 1:]].min() > 1.019
    _, best_us = oracle(jobs)
    gain = 1 - best_us / jobs.default_us
    assert (gain < 1e-3).mean() > 0.95 and gain.max() < 0.01, (
        "what little there is comes of calls that miss each other"
    )
    place, slot, config = np.nonzero(masked(jobs))
    single = np.zeros((len(place), SLOTS), int)
    single[np.arange(len(place)), slot] = config
    worse = jobs.usual_us(single, place) / jobs.default_us[place] - 1
    assert 0.3 < (worse[config > 0] > 0.01).mean() < 0.7
