"""A table must not bring NVIDIA/nccl#2389 into a job: over nodes, with registered buffers, Simple after LL."""

import pandas as pd
import pytest
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.traces.reasons import names
from dynamiccl.traces.records import PAIRS, Offer
from dynamiccl.traces.spaces import N_CHANNELS, N_PAIRS
from fake_job import COST, FakeJob

SIMPLE = [pair for pair, (_, proto) in enumerate(PAIRS, 1) if proto == "simple"]


def offered(own, registered, small, n_nodes=2):
    """(whether Simple may be tried, by slot; texts) of a job whose all-reduces run under the protocol ``small``."""
    job = FakeJob(lambda decisions: 100.0)
    for key in job.assembler.offers:
        job.assembler.offers[key] = Offer(COST, "ring", own, 1, registered)
    told = job.take_events

    def events():
        found = told().assign(n_nodes=n_nodes)
        return pd.concat([found, found.iloc[:4].assign(func="all_reduce", n_bytes=64, proto=small)])

    job.take_events = events
    windows = LiveWindows(job)
    tuned, _ = windows.begin()
    masks = tuned.mask.reshape(-1, N_PAIRS, N_CHANNELS)
    return masks[:, SIMPLE].any(axis=(1, 2)).tolist(), windows.withheld


def test_simple_that_would_newly_follow_ll_is_not_tried():
    may, texts = offered("ll128", True, "ll")
    assert may == [False, False] and [names(text) for text in texts] == [["after-ll"]] * 2


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("NCCL itself runs Simple there", {"own": "simple"}),
        ("no buffer is registered", {"registered": False}),
        ("nothing runs LL", {"small": "ll128"}),
        ("one node", {"n_nodes": 1}),
    ],
)
def test_elsewhere_it_is(what, changed):
    asked = {"own": "ll128", "registered": True, "small": "ll"} | changed
    assert offered(**asked) == ([True, True], []), what
