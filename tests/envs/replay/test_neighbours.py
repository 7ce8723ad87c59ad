"""What tables saved, by neighbouring windows: a job that gets slower by itself is no table's fault."""

from types import SimpleNamespace

import numpy as np
import pytest
from dynamiccl.envs.replay.decisions import _effects
from dynamiccl.envs.replay.neighbours import SteadyWindow, savings
from dynamiccl.traces.spaces import decision_of

#: Tables by generation. 1 and 3 are one, under two generations; 2 is tried against them.
KEPT, TRIED, OTHER = "ring/simple/8", "ring/simple/4", "ring/ll128/8"


def table(decision):
    whole = {"func": "all_gather", "min_bytes": 1, "max_bytes": 1 << 30, "n_ranks": 0, "n_nodes": 0}
    return ({**whole, "decision": decision},)


TABLES = {0: (), 1: table(KEPT), 2: table(TRIED), 3: table(KEPT), 4: table(OTHER)}
SLOT = SimpleNamespace(slot=SimpleNamespace(func="all_gather", n_ranks=16, n_nodes=2), n_bytes=1 << 20)


def job(*stretches, pid=1, first=0):
    """Windows of (generation, ms of each step, steps)."""
    windows = []
    for generation, ms, n_steps in stretches:
        durations = np.broadcast_to(np.asarray(ms, float), n_steps)
        windows.append(SteadyWindow(generation, durations, first + 1, first + n_steps, pid))
        first += n_steps + 1
    return windows


def saved(windows):
    """What each decision saved."""
    return {one.rules[0]["decision"]: one.saving for one in savings(windows, TABLES)}


def test_a_job_that_gets_slower_is_no_tables_fault():
    """Before: -0.20 and -0.16. No table has an effect; after the verdict the whole job takes 20 % longer."""
    windows = job((0, 10.0, 50), (1, 10.0, 50), (1, 12.0, 100), *[(2, 12.0, 10), (3, 12.0, 10)] * 10)
    effects = _effects(windows, TABLES, [SLOT])
    assert {str(decision_of(config)) for _, config in effects} == {KEPT, TRIED}
    assert list(effects.values()) == pytest.approx([0.0, 0.0], abs=1e-9)


def test_only_the_steps_beside_a_change_are_compared():
    """Before: medians of whole windows, so of steps that may lie hours apart."""
    slower = np.linspace(10.0, 20.0, 1000)
    windows = job((0, 10.0, 30), (1, slower, 1000), (2, 20.0, 10), (1, 20.0, 10))
    assert saved(windows) == pytest.approx({KEPT: 0.0, TRIED: 0.0}, abs=0.02)


def test_savings_add_up_over_neighbours():
    """A table that saves 20 % of a step that takes 10 %, then 50 % longer by itself; the other one saves 40 %."""
    windows = job((0, 10.0, 20), (1, 8.0, 20), (1, 12.0, 20), (2, 9.0, 10), (3, 12.0, 10), (2, 9.0, 4))
    assert saved(windows) == pytest.approx({KEPT: 0.2, TRIED: 0.4})
    few = _effects(windows[:2], TABLES, [SLOT])
    assert list(few.values()) == pytest.approx([0.2], abs=0.001), "two windows tell it too"


def test_what_ran_before_the_first_default_is_compared_with_it():
    assert saved(job((1, 8.0, 10), (0, 10.0, 10))) == pytest.approx({KEPT: 0.2})


@pytest.mark.parametrize(
    "later",
    [job((2, 30.0, 10), (4, 15.0, 10), pid=2), job((2, 30.0, 10), (4, 15.0, 10), first=10_000)],
    ids=["another life", "steps between are gone"],
)
def test_a_table_with_no_way_to_the_default_is_not_measured(later):
    """Before: compared with a default of another life of the job, or of hours before."""
    windows = job((0, 10.0, 10), (1, 8.0, 10))
    assert saved(windows + later) == pytest.approx({KEPT: 0.2})
    pid, first = later[-1].pid, later[-1].last + 1
    more = job((3, 15.0, 10), pid=pid, first=first)
    found = saved(windows + later + more)
    assert found == pytest.approx({KEPT: 0.2, OTHER: 0.2, TRIED: -0.6}), "by a table that both lives ran"


def test_a_step_of_no_time_and_an_unknown_table_tell_nothing():
    assert saved(job((0, 10.0, 10), (1, 0.0, 10), (0, 10.0, 10), (77, 5.0, 10), (2, 9.0, 10))) == {}
