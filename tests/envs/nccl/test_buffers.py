"""Buffers of tables: who holds one, and for how long. The empty table needs none."""

import pytest
from both_modes import tells
from dynamiccl.envs.nccl.plugin.bindings import NoRoom
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces.records import Table
from nccl_releases import Communicator
from test_switch import call, calls, message, plugin

__all__ = ["plugin", "tells"]  # fixtures

OWNER, BUFFERS = 1, 511


def table(generation: int) -> bytes:
    """Known by its channels, of which there are 60."""
    return message(1 + generation % 60)


def test_communicators_that_are_destroyed_hold_no_buffer(plugin):
    """Before: none was left after 31 lives under trials."""
    for life in range(BUFFERS + 20):
        comm = Communicator(plugin.path, 1000 + life, 8, 1, 0)
        plugin.stage(OWNER, table(life))
        plugin.switch(OWNER, 1000 + life, 1, 100)
        assert calls(comm, 3) == [0, 1 + life % 60, 1 + life % 60]
        comm.finalize()


def changes(plugin, comm, generation, distance, length):
    """A table of its own from the limit on: for a trial of so many collectives, or to stay (0)."""
    plugin.stage(OWNER, table(generation))
    limit = plugin.limit(OWNER, comm.comm_id, distance)
    plugin.switch(OWNER, comm.comm_id, limit, limit + length if length else 0)
    plugin.lift(OWNER, generation)


def test_250_communicators_that_rest_in_a_trial_hold_two_tables_each_and_the_next_is_tuned(plugin):
    """That of the trial, and the one that holds once it goes on."""
    comms = [Communicator(plugin.path, 1000 + i, 8, 1, 0) for i in range(251)]
    *resting, last = comms
    for i, comm in enumerate(resting):
        changes(plugin, comm, 2 * i, 1, 0)
        assert calls(comm, 2)[-1] == 1 + 2 * i % 60
        changes(plugin, comm, 2 * i + 1, 1, 10)
        assert calls(comm, 2)[-1] == 1 + (2 * i + 1) % 60
    for generation in range(1000, 1030):
        changes(plugin, last, generation, 1, 2)
        assert calls(last, 4) == [0, 1 + generation % 60, 1 + generation % 60, 0]
    for i, comm in enumerate(resting):
        assert calls(comm, 10)[-1] == 1 + 2 * i % 60
    for comm in comms:
        comm.finalize()


def test_a_communicator_that_rests_holds_eight_tables_at_most(plugin):
    """So many where each of its limits lay farther ahead than the one before, until no change has a place there."""
    comms, n_changed = [], 0
    for group in range(BUFFERS // 8 - 1):
        comms.append(Communicator(plugin.path, 1000 + group, 8, 1, 0))
        for distance in range(1, 40):
            if plugin.limit(OWNER, comms[-1].comm_id, distance) == 0:
                continue  # full
            changes(plugin, comms[-1], 40 * group + distance, distance, 100)
            n_changed += 1
        plugin.stage(OWNER, table(group))  # there is room
    assert n_changed == 7 * len(comms)
    for comm in comms:
        comm.finalize()


def test_communicators_that_rest_hold_no_table_that_never_holds_there(plugin):
    """Each rests in the midst of a trial of its own, while 20 further ones come, of which none ever holds there."""
    comms, generation = [], 0
    for group in range(60):
        comms.append(Communicator(plugin.path, 1000 + group, 8, 1, 0))
        for _ in range(20):
            generation += 1
            plugin.stage(OWNER, table(generation))
            for one in comms:
                limit = plugin.limit(OWNER, one.comm_id, 1 if one is comms[-1] else 64)
                plugin.switch(OWNER, one.comm_id, limit, limit + 100)
            plugin.lift(OWNER, generation)
            calls(comms[-1], 1)
        assert calls(comms[-1], 2) == [1 + generation % 60] * 2
    plugin.stage(OWNER, encode_table(Table(generation + 1)))
    for one in comms:
        limit = plugin.limit(OWNER, one.comm_id, 64)
        plugin.switch(OWNER, one.comm_id, limit, 0)
    plugin.lift(OWNER, generation + 1)
    assert calls(comms[0], 70)[-1] == 0
    for comm in comms:
        comm.finalize()


def test_a_table_without_a_buffer_is_told_of_and_the_empty_one_needs_none(plugin):
    """Nobody can hold so many but by changes that are all ahead."""
    comms = [Communicator(plugin.path, 1000 + i, 8, 1, 0) for i in range(90)]
    with pytest.raises(NoRoom, match="the 90 communicators of a rank hold all"):
        for at in range(6):
            for comm in comms:
                plugin.stage(OWNER, table(at))
                plugin.switch(OWNER, comm.comm_id, 10 * (at + 1), 0)
    assert call(comms[0]) == 0
    assert plugin.stage(OWNER, encode_table(Table(77))) == 77
    plugin.switch(OWNER, comms[0].comm_id, 1, 0)
    assert calls(comms[0], 100) == [0] * 100, "before: no space left on device"
    assert plugin.stage(OWNER, table(3)) == 4, "what that communicator held is free again"
    for comm in comms:
        comm.finalize()
