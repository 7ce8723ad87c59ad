"""A trial must not take the GPU's last memory: the first call of an algorithm on a communicator allocates."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from dynamiccl.envs.live import gpu_memory
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.nccl_model import gpu_memory as bounds
from dynamiccl.envs.nccl_model.gpu_memory import connection
from dynamiccl.traces.assemble import Offer
from dynamiccl.traces.reasons import RowRefused
from dynamiccl.traces.records import ALGOS, PAIRS
from dynamiccl.traces.spaces import N_CHANNELS, N_PAIRS
from fake_job import COST, GATHER, FakeJob

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
        found = told().assign(algo=own)
        spread = np.arange(len(found)) % communicators
        return found.assign(comm_id=np.where(spread == 0, 7, 7 + spread).astype("uint64"))

    job.take_events = events
    windows = LiveWindows(job)
    tuned, _ = windows.begin()
    return windows, tuned.mask.reshape(-1, N_PAIRS, N_CHANNELS)


def profile_of(windows):
    return windows.profiles[0].fingerprint


def of_first_use(algo, slot, **environment):
    return bounds.of_first_use(algo, slot, environment)


def test_what_is_already_connected_needs_nothing():
    windows, mask = begun(1)
    assert not mask[:, NVLS].any() and not mask[:, PAT].any()
    ring = [i for i, (algo, _) in enumerate(PAIRS, 1) if algo == "ring"]
    assert mask[:, ring].any() and mask[:, 0].any()
    assert len(windows.withheld) == 2, "one text for each algorithm, not for each slot"
    assert {why.reason for why in windows.withheld} == {RowRefused.NO_MEMORY}


def test_where_the_job_does_not_tell_nothing_is_taken_out():
    windows, mask = begun(0)
    assert mask[:, NVLS].any(axis=1).all() and not windows.withheld


def enough(needs):
    """The least free bytes of which half, and KEPT_FREE, stay the job's."""
    return max(2 * needs, gpu_memory.KEPT_FREE + needs)


def test_an_algorithm_gets_the_memory_it_may_take_and_no_byte_less():
    """Before: all but one GiB of what was free."""
    windows, _ = begun(0)
    slot = profile_of(windows)
    nvls, pat = of_first_use("nvls", slot), of_first_use("pat", slot)
    assert pat > nvls, "else less than both could be enough for the second"
    for free, has_nvls, has_pat in (
        (enough(nvls + pat), True, True),
        (enough(nvls + pat) - 1, True, False),
        (enough(nvls) - 1, False, False),
    ):
        _, mask = begun(free)
        assert (mask[:, NVLS].any(), mask[:, PAT].any()) == (has_nvls, has_pat), free


def test_the_size_of_buffers_is_read_where_nccl_reads_it(tmp_path, monkeypatch):
    """Before: only in the environment, so that an algorithm was tried that the GPU had no room for."""
    windows, _ = begun(0)
    free = enough(of_first_use("nvls", profile_of(windows)))
    assert begun(free)[1][:, NVLS].any()
    file = tmp_path / "nccl.conf"
    monkeypatch.setenv("NCCL_CONF_FILE", str(file))
    for text in ("67108864", "64M"):
        file.write_text(f"NCCL_BUFFSIZE={text}")
        assert not begun(free)[1][:, NVLS].any()
        ring = [i for i, (algo, _) in enumerate(PAIRS, 1) if algo == "ring"]
        assert begun(free)[1][:, ring].any(), "it is connected"


def test_the_size_of_buffers_is_read_as_nccl_reads_it():
    """By strtoll. Before: all but decimal digits counted as not set."""
    large = connection({"NCCL_BUFFSIZE": "67108864"})
    assert large == 70 << 20
    for text in ("0x4000000", "0X4000000", " 67108864", "+67108864", "0400000000"):
        assert connection({"NCCL_BUFFSIZE": text}) == large, text
    for text in ("64M", "-1", "0x", "09", "1_0", "0o7", "four"):
        assert connection({"NCCL_BUFFSIZE": text}) == math.inf, text
    assert connection({"NCCL_BUFFSIZE": ""}) == connection({})


def test_each_communicator_of_a_class_takes_it():
    windows, _ = begun(0)
    slot = profile_of(windows)
    for_one = enough(of_first_use("nvls", slot))
    assert begun(for_one)[1][:, NVLS].any()
    assert not begun(for_one, communicators=2)[1][:, NVLS].any()


def test_under_nvls_the_ring_is_the_one_that_must_be_connected():
    _, mask = begun(1, own="nvls")
    ring = [i for i, (algo, _) in enumerate(PAIRS, 1) if algo == "ring"]
    assert not mask[:, ring].any() and not mask[:, PAT].any()
    has_room = enough(of_first_use("ring", profile_of(begun(0)[0])))
    assert begun(has_room, own="nvls")[1][:, ring].any()


def test_a_ring_that_runs_for_another_function_is_connected():
    """An all-reduce of the same communicator has connected it."""
    events = pd.DataFrame(
        {"n_ranks": 16, "n_nodes": 2, "pid": 1, "comm_id": [7, 7], "algo": ["nvls", "ring"]}
    )
    assert gpu_memory._not_connected(events, GATHER, "ring") == 0
    assert gpu_memory._not_connected(events, GATHER, "pat") == 1


def test_the_fullest_gpu_counts_whichever_batch_of_records_told_of_it(folder):
    """Before: each batch overwrote what the last had told, and the last may be of one rank alone."""
    job = Job(folder)
    columns = {"pid": [1, 2], "rank": [0, 1], "memory_total": [80 * GIB] * 2}
    job._note_memory(pd.DataFrame(columns | {"memory_used": [60 * GIB, 79 * GIB]}))
    job._note_memory(pd.DataFrame(columns | {"memory_used": [60 * GIB, 0], "memory_total": [80 * GIB, 0]}))
    assert job.memory_free == GIB and job.memory_pressure == pytest.approx(79 / 80)
    job._note_memory(pd.DataFrame(columns | {"memory_used": [60 * GIB, 70 * GIB]}))
    assert job.memory_free == 10 * GIB


def test_a_process_that_has_ended_holds_no_memory(folder, monkeypatch):
    """Before: what the processes before an elastic restart had used counted for ever."""
    job = Job(folder)
    told = {"rank": [0], "memory_total": [80 * GIB]}
    job._note_memory(pd.DataFrame(told | {"pid": [1], "memory_used": [79 * GIB]}))
    rings = [
        SimpleNamespace(process=1, is_alive=lambda: False),
        SimpleNamespace(process=2, is_alive=lambda: True),
    ]
    monkeypatch.setattr(folder, "rings", lambda: rings)
    job._note_memory(pd.DataFrame(told | {"pid": [2], "memory_used": [60 * GIB]}))
    assert job.memory_free == 20 * GIB and job.memory_pressure == pytest.approx(60 / 80)


@pytest.mark.parametrize("algo", sorted({algo for algo, _ in PAIRS}))
def test_the_bounds_are_those_of_the_source(algo):
    slot = profile_of(begun(0)[0])  # 16 ranks on 2 nodes; 16 channels were seen, 32 may be there
    assert connection({}) == 10 << 20 > 524_288 + 4_915_200 + 4_194_304
    assert connection({"NCCL_BUFFSIZE": str(8 << 20)}) == 14 << 20
    ring = 2 * 32 * connection({})
    expected = {
        "ring": ring,
        "pat": 8 * ring,
        "nvls": 2 * 32 * 8 * (2 << 20) + ring,
        "collnet_direct": 9 * ring,
    }
    assert of_first_use(algo, slot) == expected[algo]
