"""A table must not bring NVIDIA/nccl#2389 into a job: over nodes, with registered buffers, Simple after LL."""

import numpy as np
import pandas as pd
import pytest
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.search.interfaces import TABLE, Plan
from dynamiccl.traces.reasons import names
from dynamiccl.traces.records import PAIRS, Decision, Offer
from dynamiccl.traces.spaces import N_CHANNELS, N_PAIRS, config_of
from fake_job import COST, GATHER, SCATTER, FakeJob

SIMPLE = [pair for pair, (_, proto) in enumerate(PAIRS, 1) if proto == "simple"]


def with_small_calls(events, n_nodes, proto):
    """The events, and some all-reduces under ``proto``."""
    found = events.assign(n_nodes=n_nodes)
    return pd.concat([found, found.iloc[:4].assign(func="all_reduce", n_bytes=64, proto=proto)])


def offered(own, registered, small, n_nodes=2):
    """(whether Simple may be tried, by slot; texts) of a job whose all-reduces run under the protocol ``small``."""
    job = FakeJob(lambda decisions: 100.0)
    for key in job.assembler.offers:
        job.assembler.offers[key] = Offer(COST, "ring", own, 1, registered)
    told = job.take_events

    job.take_events = lambda: with_small_calls(told(), n_nodes, small)
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


def test_buffers_that_are_registered_later_take_simple_out_of_the_table(monkeypatch):
    """PyTorch warms up eagerly, and its capture registers them. Before: what the first steps told held for good."""
    job = FakeJob(lambda decisions: 100.0)
    for key in job.assembler.offers:
        job.assembler.offers[key] = Offer(COST, "ring", "ll128", 1, False)
    told = job.take_events
    monkeypatch.setattr(job, "take_events", lambda: with_small_calls(told(), 2, "ll"))
    windows = LiveWindows(job)
    tuned, _ = windows.begin()
    simple, safe = Decision("ring", "simple", 8), Decision("ring", "ll128", 8)
    for row in (simple, safe):
        assert tuned.mask[:, config_of(row)].all()
    job.confirm({GATHER: simple, SCATTER: safe})
    plan = Plan(TABLE, np.array([config_of(simple), config_of(safe)]), 4)
    assert windows.measure(plan).obeyed.all()
    key = next(key for key in job.assembler.offers if key[1] == "all_gather")
    job.assembler.offers[key] = Offer(COST, "ring", "ll128", 1, True)
    measured = windows.measure(plan)
    assert job.confirmed == {SCATTER: safe} and job.in_force == {SCATTER: safe}
    assert measured.obeyed.tolist() == [False, True]
    assert not tuned.mask[0, config_of(simple)] and tuned.mask[0, config_of(safe)]
    assert [names(text) for text in windows.withheld] == [["after-ll"]] * 2
