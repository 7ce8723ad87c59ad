"""One config an arm: against what the cost model really plans, over thousands of slots."""

from types import SimpleNamespace

import numpy as np
from dynamiccl.envs.nccl_model import arms, channels
from dynamiccl.envs.sim.jobs import HELD_OUT, draw_jobs
from dynamiccl.traces import spaces
from dynamiccl.traces.records import CHANNELS, PAIRS


def what_runs(tasks, fleet):
    """(pair, channels) of every config by the cost model, as two arrays (n, N_CONFIGS)."""
    n, own = len(fleet), tasks.fingerprint.own_pair
    columns = fleet.take((slice(None), None))
    pair = np.repeat(
        np.concatenate([own[:, None], np.tile(np.arange(len(PAIRS)), (n, 1))], 1), len(CHANNELS), 1
    )
    asked = np.tile(np.array(CHANNELS), spaces.N_PAIRS)[None]
    n_bytes = np.asarray(tasks.fingerprint.n_bytes)[:, None]
    limit, _ = channels.heuristic_channels(columns, n_bytes, pair)
    wanted = np.where(columns.release >= 23100, np.minimum(asked, limit), asked)
    return pair, channels.planned_channels(columns, n_bytes, pair, np.where(asked == 0, limit, wanted))


def drawn(n=300):
    jobs = draw_jobs(HELD_OUT, np.random.default_rng(5), n)
    tasks = SimpleNamespace(fingerprint=jobs.fingerprint, mask=spaces.action_mask(jobs.fingerprint))
    return tasks, jobs.sites.fleet.take(np.repeat(np.arange(n), jobs.width))


def test_every_arm_is_left_one_config_and_none_is_lost():
    tasks, fleet = drawn()
    pair, ran = what_runs(tasks, fleet)
    keep, allowed = arms.distinct(tasks.fingerprint, fleet.release), spaces.config_mask(tasks.mask)
    assert keep[:, 0].all() and not (keep & ~allowed).any()
    twice = 0
    for i in range(len(keep)):
        offered = {(p, c) for p, c, ok in zip(pair[i], ran[i], allowed[i], strict=True) if ok}
        left = [(p, c) for p, c, ok in zip(pair[i], ran[i], keep[i], strict=True) if ok]
        assert set(left) == offered, "an arm has no config left"
        twice += len(left) - len(set(left))
    # What stays double is what no fingerprint tells: a small message's own count, a switch's channels.
    assert twice < 0.05 * keep.sum(), twice / keep.sum()
    assert keep.sum() < 0.65 * allowed.sum(), "about half of the configs are names of others"


def test_auto_with_a_count_goes_by_the_name_of_its_pair():
    tasks, fleet = drawn(200)
    keep = arms.distinct(tasks.fingerprint, fleet.release)
    assert not keep[:, 1 : spaces.N_CHANNELS].any()
    own = tasks.fingerprint.own_pair
    assert not keep[np.arange(len(own)), (1 + own) * spaces.N_CHANNELS].any(), (
        "the own pair with NCCL's count is AUTO"
    )
