"""Two tables take turns by the count of collectives, and steps that belong to one of them or to none."""

import itertools

import pytest
from both_modes import tells
from dynamiccl.envs.nccl.plugin.bindings import Plugin, Span
from dynamiccl.traces.records import MIXED
from nccl_groups import Groups
from nccl_releases import Call, Communicator
from plugin_run import offer
from test_switch import calls, message, timed_call
from test_switch import join as join
from test_switch import plugin as plugin

__all__ = ["tells"]  # a fixture: each test runs in both modes


def test_a_trial_of_few_calls_holds_at_one_of_so_many_and_what_stays_at_the_others(plugin, join):
    """The same calls on every rank, about as many as said, and in no step with a pattern of the job's."""
    ranks = [join(), Communicator(plugin.path, 8, 8, 1, 1)]
    plugin.activate(message(1))
    plugin.stage(1, message(2))
    for comm_id in (7, 8):
        plugin.switch(1, comm_id, *Span(96, 896, length=1, one_of=8))
    said = [[timed_call(comm) for _ in range(1000)] for comm in ranks]
    assert said[0] == said[1] and set(said[0]) == {(1, False), (2, True)}, "these alone are timed"
    tried = [at for at, generation in enumerate(said[0]) if generation == (2, True)]
    assert min(tried) >= 96 and max(tried) < 896
    assert len(tried) == 100
    for every in (2, 3, 4, 8, 33):
        assert len({at % every for at in tried}) > 0.8 * every
    ranks[1].finalize()


@pytest.mark.parametrize("release", ["2.28.9", "2.29.7", "2.32.3"])
def test_few_calls_of_a_job_that_groups_its_calls_are_tried_as_often(plugin, release):
    """Before: a group was tried only if the call that begins it was the one in eight, which some never are."""
    comm = Groups(plugin.path, 7, 8, 1, 0, release)
    plugin.stage(1, message(3))
    plugin.switch(1, 7, *Span(0, 8 * 50, length=1, one_of=8))
    tried = []
    for _ in range(100):
        comm.answers = []
        comm.group([Call("all_gather", 2**18)] * 8, offer(ring_ll=10, ring_simple=30))
        tried.append(set(comm.answers))
    comm.finalize()
    assert tried[50:] == [{0}] * 50 and 35 < tried[:50].count({3}) <= 50, (
        "two of the calls may be in one group"
    )


def labels(plugin: Plugin, comm: Communicator, steps: list[int]) -> list[tuple[int, int, bool]]:
    """What the plugin says of steps of so many calls: the table that answered, its trial, whether it is whole."""
    said = []
    for n in steps:
        calls(comm, n)
        said.append(plugin.ended()[:3])
    return said


@pytest.mark.parametrize(
    ("swap", "turn_steps", "tables"), [(0, 1, "2112"), (1, 1, "1221"), (0, 2, "22111122"), (1, 2, "11222211")]
)
def test_two_tables_take_turns_by_steps(plugin, join, swap, turn_steps, tables):
    """A B B A, from the decision alone; and the steps before and after belong to no turn."""
    comm = join()
    plugin.activate(message(1))
    plugin.stage(1, message(2))
    span = Span(20, 20 + 10 * 8, 5 * turn_steps, 5, 2, swap)
    plugin.switch(1, 7, *span)
    plugin.lift(1, 2)
    said = labels(plugin, comm, [5] * 14)
    turns = [(int(table), 2, True) for table in (tables * 4)[:16]]
    assert said == [(1, 0, False)] * 4 + turns[:10] if turn_steps == 1 else said[4:] == turns[:10]


def test_a_turn_of_more_tables_is_one_in_so_many(plugin, join):
    comm = join()
    plugin.activate(message(1))
    plugin.stage(1, message(2))
    plugin.switch(1, 7, *Span(0, 4 * 64, 4, 4, 8))
    plugin.lift(1, 2)
    said = [table for table, _, _ in labels(plugin, comm, [4] * 64)]
    places = [at for at, table in enumerate(said) if table == 2]
    assert [at // 8 for at in places] == list(range(8)) and len({at % 8 for at in places}) > 3


def test_steps_of_another_length_belong_to_no_table(plugin, join):
    """A step of 10 calls is pure when it lies in two turns of one table, and is not whole. Before, a step of both
    tables was called a step of the table that was there to stay."""
    comm = join()
    plugin.activate(message(1))
    plugin.stage(1, message(2))
    plugin.switch(1, 7, *Span(0, 5 * 16, 5, 5, 2))
    plugin.lift(1, 2)
    said = labels(plugin, comm, [5, 10, 5, 7, 5, 3, 5])
    mixed = (MIXED, 2, False)
    assert said[:4] == [(2, 2, True), (1, 2, False), (2, 2, True), mixed]
    assert said[4:] == [(1, 2, True), (1, 2, False), (2, 2, True)], "five calls in two turns of one table"


@pytest.mark.parametrize("release", ["2.28.9", "2.32.3"])
@pytest.mark.parametrize(
    ("step", "tenth"),
    [
        *(("ag b", ""), ("b ag", ""), ("ag bb", ""), ("ag", ""), ("ag r", ""), ("rag r", "")),
        *(("ag", "r"), ("ag", "rb"), ("b ag", "r r"), ("r ag", "r")),
    ],
)
def test_what_tables_are_not_made_for_leaves_a_step_whole(plugin, step, tenth, release):
    """Before: broadcasts at the end of a step were answered by the next turn's table, so no step was whole. And an
    all-reduce every ten steps (``tenth``) counted: the turns broke off again and again."""
    comm = Groups(plugin.path, 7, 8, 1, 0, release)
    names = {"a": "all_gather", "g": "reduce_scatter", "b": "broadcast", "r": "all_reduce"}
    steps = itertools.count()

    def label():
        more = tenth if next(steps) % 10 == 9 else ""
        for group in (step + " " + more).split():
            comm.group([Call(names[one], 2**18) for one in group], offer(ring_ll=10, ring_simple=30))
        return plugin.ended()[:3]

    plugin.activate(message(1))
    assert {label() for _ in range(6)} == {(1, 0, False)}
    a_step, made = plugin.comms()[7].a_step, plugin.comms()[7].made
    plugin.stage(1, message(2))
    assert a_step == 2
    plugin.switch(1, 7, *Span(made + a_step, made + 9 * a_step, a_step, a_step, 2))
    plugin.lift(1, 2)
    assert [label() for _ in range(9)] == [(1, 0, False), *((int(table), 2, True) for table in "21122112")]
    assert plugin.comms()[7].a_step == 2
    comm.finalize()


def test_few_calls_are_no_steps_of_a_table(plugin, join):
    """Before: all steps of such a trial were called its own, 14 of 16 of which another table had answered."""
    comm = join()
    plugin.activate(message(1))
    plugin.stage(1, message(2))
    plugin.switch(1, 7, *Span(16, 64, length=1, one_of=8))
    plugin.lift(1, 2)
    said = labels(plugin, comm, [4] * 20)
    assert {trial for _, trial, _ in said[4:16]} == {2} and not any(whole for _, _, whole in said)
    assert [table for table, _, _ in said].count(MIXED) == 6 and {table for table, _, _ in said} == {1, MIXED}


def test_a_step_of_two_communicators_is_whole_if_both_made_a_steps_calls(plugin, join):
    one, two = join(7), join(8)
    plugin.activate(message(1))
    plugin.stage(1, message(2))
    for comm_id, a_step in ((7, 4), (8, 2)):
        plugin.switch(1, comm_id, *Span(0, 32 * a_step, a_step, a_step, 2))
    plugin.lift(1, 2)
    said = []
    for n, m in ((4, 2), (4, 3), (4, 1), (4, 2), (4, 0), (4, 2)):
        calls(one, n), calls(two, m)
        said.append(plugin.ended()[:3])
    assert [whole for _, _, whole in said] == [True, False, False, True, False, False]


def test_in_long_turns_a_step_counts_if_one_table_has_answered_all_of_it(plugin, join):
    """Whatever its length, on each communicator, also where one has not come to its turns yet. One without a call
    is nobody's, and none is timed as few calls are."""
    one, two = join(7), join(8)
    plugin.activate(message(1))
    plugin.stage(1, message(2))
    plugin.switch(1, 7, *Span(3, 3 + 4 * 12, 12, 0, 2, 1))
    plugin.switch(1, 8, *Span(10, 10 + 4 * 3, 3, 0, 2, 1))
    plugin.lift(1, 2)
    said, blocks, timed = [], set(), set()
    steps = (4, 2), (5, 3), (6, 2), (2, 0), (0, 0), (3, 3), (7, 3), (12, 6), (12, 3), (3, 1)
    for n, m in steps:
        timed |= {timed_call(one)[1] for _ in range(n)} | {timed_call(two)[1] for _ in range(m)}
        end = plugin.ended()
        said.append(end[:3])
        blocks.add(end.block)
    current, trial, mixed = (1, 2, True), (2, 2, True), (MIXED, 2, False)
    assert said[:5] == [(1, 0, False), current, current, trial, (2, 2, False)]
    assert said[5:] == [mixed, mixed, trial, current, (1, 0, False)], (
        "8 has not begun, then is in its first turn"
    )
    assert blocks == {0} and timed == {False}


def test_what_the_steps_have_in_common_is_told(plugin, join):
    """Four steps alike make a rhythm; its phase is the same whenever it is asked; a longer step shifts it."""
    comm = join()
    calls(comm, 4)
    plugin.join()
    told = []
    for n in [2, *[5] * 6, 8, *[5] * 4]:
        calls(comm, n)
        plugin.ended()
        view = plugin.comms()[7]
        told.append((view.a_step, view.offset))
    ended_at = [(0, n) for n in (6, 11, 16, 21, 44, 49, 54, 59)]
    assert told == [*ended_at[:4], *[(5, 1)] * 3, *ended_at[4:], (5, 4)]
    assert plugin.comms()[7].steps == len(told)
    calls(comm, 11)
    assert plugin.comms()[7].a_step == 0, "no step has ended for two steps"


def test_a_lease_that_is_renewed_ends_at_the_next(plugin, join):
    comm = join()
    plugin.activate(message(1))
    for generation, since in ((2, 0), (3, 20)):
        plugin.stage(1, message(generation))
        plugin.switch(1, 7, *Span(since, since + 32, 4, 4, 2))
        plugin.lift(1, generation)
        if generation == 2:
            said = labels(plugin, comm, [4] * 2)
    said += labels(plugin, comm, [4] * 12)
    assert [table for table, _, _ in said] == [2, 1, 1, 2, 2, 3, 1, 1, 3, 3, 1, 1, 3, 1]
    assert [(trial, whole) for _, trial, whole in said] == [(2, True)] * 5 + [(3, True)] * 8 + [(0, False)]


def test_turns_without_an_end_or_a_number_are_refused(plugin, join):
    join()
    plugin.stage(1, message(2))
    for span in (Span(3, 0, 5, 5, 2), Span(3, 9, 5, 5, 0)):
        with pytest.raises(OSError, match="Invalid argument"):
            plugin.switch(1, 7, *span)
