"""The plan of a communicator as the plugin tells it: what it will answer from its next call on."""

import random

import pytest
from dynamiccl.envs.nccl.plugin.bindings import Plan
from dynamiccl.envs.nccl.shm import encode_table, rows_hash
from dynamiccl.traces.records import Table
from test_switch import call, calls, join, message, plugin, tells

__all__ = ["join", "plugin", "tells"]  # fixtures


def plan(plugin):
    return plugin.comms()[7].plan


def test_a_communicator_without_a_table_has_the_default(plugin, join):
    comm = join()
    assert plan(plugin) == Plan()
    calls(comm, 3)
    assert plan(plugin) == Plan(made=3)


def test_equal_rows_are_equal_plans_whatever_their_number(plugin, join):
    join()
    hashes = []
    for generation, rows in ((3, message(3)), (9, message(3)), (4, message(4)), (5, encode_table(Table(5)))):
        plugin.stage(1, rows)
        plugin.switch(1, 7, generation, 0)
        assert plan(plugin).stays == rows_hash(rows) and plan(plugin).since == generation
        hashes.append(plan(plugin).stays)
    assert hashes[0] == hashes[1] != hashes[2] and hashes[3] == 0


def test_a_trial_is_told_with_its_end(plugin, join):
    comm = join()
    plugin.stage(1, message(1))
    plugin.switch(1, 7, 1, 0)
    plugin.stage(1, message(2))
    plugin.switch(1, 7, 3, 6)
    for count in range(6):
        found = plan(plugin)
        assert (found.stays, found.since) == (rows_hash(message(1)), 3)
        assert found.trial and (found.first, found.last, found.made) == (3, 6, count)
        call(comm)
    found = plan(plugin)
    assert not found.tries and (found.stays, found.last) == (rows_hash(message(1)), 6)


def test_a_table_that_comes_to_stay_cuts_the_trial_in_the_plan_too(plugin, join):
    comm = join()
    plugin.stage(1, message(2))
    plugin.switch(1, 7, 1, 100)
    calls(comm, 2)
    plugin.stage(1, encode_table(Table(3)))
    plugin.switch(1, 7, 4, 0)
    found = plan(plugin)
    assert (found.stays, found.since, found.first, found.last) == (0, 4, 1, 4) and found.tries
    calls(comm, 2)
    assert not (plan(plugin).stays or plan(plugin).tries)


def test_a_rank_that_gave_up_at_a_limit_says_so(plugin, join):
    comm = join()
    plugin.hold(0)
    plugin.limit(1, 7, 1)
    calls(comm, 2)
    assert plan(plugin).gave_up


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_says_what_the_plugin_answers(plugin, join, seed):
    """Switches of any kind at random: each later call is answered as the plan before it says, as far as it says."""
    draw, comm = random.Random(seed), join()
    channels = {0: 0}
    for generation in range(1, 12):
        plugin.stage(1, message(generation))
        channels[rows_hash(message(generation))] = generation
        limit = plugin.limit(1, 7, draw.randrange(1, 6))
        length = draw.choice([0, 0, draw.randrange(1, 9)])
        plugin.switch(1, 7, limit, limit + length if length else 0)
        plugin.lift(1, generation)
        for _ in range(draw.randrange(8)):
            now = plan(plugin)
            answered = call(comm)
            if now.trial and now.first <= now.made < now.last:
                assert answered != channels[now.stays]
            elif now.made >= now.since:
                assert answered == channels[now.stays]
