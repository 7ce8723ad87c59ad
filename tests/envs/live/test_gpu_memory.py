"""A trial must not take the GPU's last memory: the first call of an algorithm on a communicator allocates."""

import numpy as np
import pytest
from dynamiccl.envs.live import gpu_memory
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.nccl_model.gpu_memory import CONNECTION, of_first_use
from dynamiccl.traces.assemble import Offer
from dynamiccl.traces.reasons import names
from dynamiccl.traces.records import ALGOS, PAIRS
from dynamiccl.traces.spaces import N_CHANNELS, N_PAIRS
from fake_job import COST, FakeJob

GIB = 1 << 30
NVLS, PAT = (1 + PAIRS.index((algo, "simple")) for algo in ("nvls", "pat"))


def begun(free, own="ring", communicators=1):
    """(LiveWindows, masks (2, N_PAIRS, N_CHANNELS)) of a job that is offered NVLS and PAT beside the ring."""
    job = FakeJob(lambda decisions: 100.0)
    job.memory_free = free
    cost = COST.copy()
    cost[ALGOS.index("nvls"), 2] = 300
    cost[ALGOS.index("pat"), 2] = 300
    for key in job.assembler.offers:
        job.assembler.offers[key] = Offer(cost, own, "simple", 1)
    told = job.take_events

    def events():
        found = told()
        spread = np.arange(len(found)) % communicators
        return found.assign(comm_id=np.where(spread == 0, 7, 7 + spread).astype("uint64"))

    job.take_events = events
    windows = LiveWindows(job)
    tuned, _ = windows.begin()
    return windows, tuned.mask.reshape(-1, N_PAIRS, N_CHANNELS)


def profile_of(windows):
    return windows.profiles[0].fingerprint


def test_what_is_already_connected_needs_nothing():
    windows, mask = begun(1)
    assert not mask[:, NVLS].any() and not mask[:, PAT].any()
    ring = [i for i, (algo, _) in enumerate(PAIRS, 1) if algo == "ring"]
    assert mask[:, ring].any() and mask[:, 0].any()
    assert len(windows.withheld) == 2, "one text for each algorithm, not for each slot"
    assert {tuple(names(text)) for text in windows.withheld} == {("no-memory",)}


def test_where_the_job_does_not_tell_nothing_is_taken_out():
    windows, mask = begun(0)
    assert mask[:, NVLS].any(axis=1).all() and not windows.withheld


def test_an_algorithm_gets_the_memory_it_may_take_and_no_byte_less():
    windows, _ = begun(0)
    slot = profile_of(windows)
    nvls, pat = of_first_use("nvls", slot), of_first_use("pat", slot)
    kept = gpu_memory.KEPT_FREE
    assert pat > nvls, "else less than both could be enough for the second"
    for free, has_nvls, has_pat in (
        (kept + nvls + pat, True, True),
        (kept + nvls + pat - 1, True, False),
        (kept + nvls - 1, False, False),
    ):
        _, mask = begun(free)
        assert (mask[:, NVLS].any(), mask[:, PAT].any()) == (has_nvls, has_pat), free


def test_each_communicator_of_a_class_takes_it():
    windows, _ = begun(0)
    slot = profile_of(windows)
    for_one = gpu_memory.KEPT_FREE + of_first_use("nvls", slot)
    assert begun(for_one)[1][:, NVLS].any()
    assert not begun(for_one, communicators=2)[1][:, NVLS].any()


def test_under_nvls_the_ring_is_the_one_that_must_be_connected():
    _, mask = begun(1, own="nvls")
    assert mask[:, NVLS].any() or mask[:, 0].any()
    ring = [i for i, (algo, _) in enumerate(PAIRS, 1) if algo == "ring"]
    assert not mask[:, ring].any()


@pytest.mark.parametrize("algo", sorted({algo for algo, _ in PAIRS}))
def test_the_bounds_are_those_of_the_source(algo):
    slot = profile_of(begun(0)[0])  # 16 ranks on 2 nodes, 16 channels
    assert CONNECTION == 524_288 + 4_915_200 + 4_194_304
    ring = 2 * 16 * CONNECTION
    expected = {
        "ring": ring,
        "pat": 8 * ring,
        "nvls": 2 * 32 * 8 * (1 << 20) + ring,
        "collnet_direct": 9 * ring,
    }
    assert of_first_use(algo, slot) == expected[algo]
