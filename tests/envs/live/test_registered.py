"""A table must not bring NVIDIA/nccl#2389 into a job: over nodes, with registered buffers, Simple after LL."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from dynamiccl.agent.daemon.tuner import Tuner
from dynamiccl.agent.policies.choosing import make_chooser
from dynamiccl.envs.live.job_ends import OtherJob
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.search.interfaces import TABLE, Plan
from dynamiccl.traces.reasons import RowRefused
from dynamiccl.traces.records import PAIRS, Decision, Offer
from dynamiccl.traces.spaces import N_CHANNELS, N_PAIRS, config_of
from fake_job import COST, GATHER, FakeJob

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
    assert may == [False, False] and [why.reason for why in texts] == [RowRefused.AFTER_LL] * 2


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


def warmed_up():
    """Windows of a job that has registered no buffer in its first steps, and what the search was told."""
    job = FakeJob(lambda decisions: 100.0 - 5 * len(decisions), noise=0.001)
    for key in job.assembler.offers:
        job.assembler.offers[key] = Offer(COST, "ring", "ll128", 1, False)
    told = job.take_events
    job.take_events = lambda: with_small_calls(told(), 2, "ll")
    windows = LiveWindows(job)
    return job, windows, windows.begin()[0]


def register(job, comm_id=None):
    """As a first capture does: on the communicator of the calls, or on another one of its class."""
    key = next(key for key in job.assembler.offers if key[1] == "all_gather")
    if comm_id is not None:
        key = (comm_id, *key[1:])
        job.assembler.comms = {comm_id: SimpleNamespace(n_ranks=GATHER.n_ranks, n_nodes=GATHER.n_nodes)}
    job.assembler.offers[key] = Offer(COST, "ring", "ll128", 1, True)


@pytest.mark.parametrize("comm_id", [None, 99])
def test_buffers_that_are_registered_later_are_seen_before_anything_more_runs(comm_id):
    """PyTorch warms up eagerly, and its capture registers them. Before: what the first steps told held for good."""
    job, windows, tuned = warmed_up()
    simple = config_of(Decision("ring", "simple", 8))
    assert tuned.mask[:, simple].all()
    plan = Plan(TABLE, np.array([simple, simple]), 4)
    windows.measure(plan)
    register(job, comm_id)
    published = len(job.tables)
    with pytest.raises(OtherJob) as reason:
        windows.measure(plan)
    assert len(job.tables) == published and reason.value.why.reason is RowRefused.AFTER_LL
    windows.measure(plan)  # told once
    tuned, _ = windows.begin()
    assert not tuned.mask[:, simple].any() and tuned.mask[:, config_of(Decision("ring", "ll128", 8))].all()


def test_the_tuner_begins_anew_without_what_has_become_dangerous():
    """The table leaves the job at once, its gain the summary, and later trials have no such row."""
    job, windows, _ = warmed_up()
    tuner = Tuner(windows, make_chooser("expected-improvement"))
    assert tuner.run().kept
    register(job)
    tuner.step()
    since = len(job.tables)
    summary = tuner.outcome
    assert not summary.kept and job.confirmed == {} and summary.dropped.reason is RowRefused.AFTER_LL
    assert summary.speedup is None and not tuner.search.is_over
    while not tuner.search.is_over:
        tuner.step()
    rows = [rule for table in job.tables[since:] for rule in table.rules]
    assert rows and not any(rule.decision.proto == "simple" for rule in rows)
    assert tuner.outcome.kept and tuner.outcome.dropped is None
