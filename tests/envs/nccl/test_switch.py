"""Tables change at a call: a staged one holds from a collective of a communicator until another, and not before."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from both_modes import tells
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.plugin.build import job_env, plugin_path
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces.records import MIXED, Decision, Rule, Table
from nccl_groups import Groups
from nccl_releases import Call, Communicator
from plugin_run import MB, fixed, offer

__all__ = ["tells"]  # a fixture: each test runs in both modes


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A copy of the plugin, with globals of its own, in a run without a ring: collectives are counted."""
    monkeypatch.setenv("DYNAMICCL_RUN", str(tmp_path / "of another node"))
    copy = tmp_path / "plugin.so"
    shutil.copy(plugin_path(), copy)
    return Plugin.load(copy)


@pytest.fixture
def join(plugin):
    """Makes communicators on that plugin."""
    made = []

    def one(comm_id: int = 7, release: str = "2.29.7") -> Communicator:
        made.append(Communicator(plugin.path, comm_id, 8, 1, 0, release))
        return made[-1]

    yield one
    plugin.lift(1, 0)
    for comm in made:
        comm.finalize()


def message(n_channels: int) -> bytes:
    """A table whose generation is the number of channels that it answers with."""
    return encode_table(
        Table(n_channels, (Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "simple", n_channels)),))
    )


def call(comm: Communicator, func: str = "all_gather", n_bytes: int = MB) -> int:
    """One collective; the channels that it was answered with: the generation of the table that answered, 0 = none."""
    return timed_call(comm, func, n_bytes)[0]


def timed_call(comm: Communicator, func: str = "all_gather", n_bytes: int = MB) -> tuple[int, bool]:
    """The same, and whether the times of its kernel are asked for."""
    n_channels = comm.get_coll_info(func, n_bytes, offer(ring_ll=10, ring_simple=30))
    handle = comm.start_coll(func, 0, n_bytes // 8 // 4, "float32", 1, 16, "ring", "ll")
    comm.stop(handle)
    return n_channels, comm.is_timed(handle)


def calls(comm: Communicator, n: int) -> list[int]:
    return [call(comm) for _ in range(n)]


def test_a_staged_table_holds_nothing_until_a_switch(plugin, join):
    comm = join()
    plugin.activate(message(3))
    assert plugin.stage(1, message(4)) == 4 and call(comm) == 3
    assert plugin.stage(1, message(5)) == 5 and call(comm) == 3  # takes the other's place
    with pytest.raises(ValueError, match="refuses"):
        plugin.stage(1, b"no table")
    plugin.switch(1, 7, 2, 0)
    assert call(comm) == 5
    plugin.activate(message(9))
    assert call(comm) == 5 and fixed(plugin) == 9
    assert call(join(8)) == 9, "where nothing was agreed"


def test_a_trial_holds_from_one_collective_until_another_then_what_was_there_to_stay(plugin, join):
    comm, other = join(), join(8)
    plugin.activate(message(1))
    plugin.stage(1, message(2))
    plugin.switch(1, 7, 2, 5)
    assert calls(comm, 7) == [1, 1, 2, 2, 2, 1, 1]
    assert calls(other, 7) == [1] * 7
    plugin.stage(1, message(3))
    plugin.switch(1, 7, 8, 0)
    plugin.stage(1, message(4))
    plugin.switch(1, 7, 10, 12)
    assert calls(comm, 7) == [1, 3, 3, 4, 4, 3, 3]


def test_a_later_switch_cuts_a_trial_short(plugin, join):
    comm = join()
    for generation, since, until in ((1, 1, 100), (2, 3, 5), (3, 6, 0)):
        plugin.stage(1, message(generation))
        plugin.switch(1, 7, since, until)
    assert calls(comm, 8) == [0, 1, 1, 2, 2, 0, 3, 3]


def test_memory_for_switches_is_used_again(plugin, join):
    """Before each the count is past the last one, as in rounds."""
    comm, said = join(), []
    for generation in range(1, 65):
        assert plugin.stage(1, message(generation)) == generation
        limit = plugin.limit(1, 7, 2)
        assert limit == 3 * generation - 1
        plugin.switch(1, 7, limit, limit + 1)
        plugin.lift(1, generation)
        said += calls(comm, 3)
    assert said == list(itertools.chain.from_iterable((0, 0, g) for g in range(1, 65)))


def held(plugin: Plugin) -> None:
    deadline = time.monotonic() + 10
    while not plugin.waiting():
        assert time.monotonic() < deadline, "no thread waits at the limit"
        time.sleep(0.001)


@pytest.mark.parametrize("generation", [0, 2])
def test_a_question_at_the_limit_waits_until_lifted(plugin, join, generation):
    """With a decision it is then answered by the new table, which so holds from exactly that collective on."""
    comm, said = join(), []
    plugin.activate(message(1))
    plugin.stage(1, message(2))
    assert calls(comm, 3) == [1] * 3
    assert plugin.limit(1, 7, 2) == 5 and plugin.waiting() == 0
    thread = threading.Thread(target=lambda: said.extend(calls(comm, 4)))
    thread.start()
    held(plugin)
    time.sleep(0.05)
    assert plugin.waiting() == 1 and plugin.comms()[7].made == 5
    assert call(join(8)) == 1, "a communicator that came later has no limit"
    if generation:
        plugin.switch(1, 7, 5, 0)
    plugin.lift(1, generation)
    thread.join(10)
    assert not thread.is_alive() and plugin.waiting() == 0
    assert said == [1, 1, *[generation or 1] * 2]


def test_no_limit_holds_a_call_for_ever(plugin, join):
    """All communicators of the agreement go on under their tables, and no switch of it is taken any more."""
    comm, other, said = Communicator(plugin.path, 7, 8, 1, 0), join(8), []
    plugin.activate(message(1))
    plugin.stage(1, message(2))
    plugin.hold(1)
    assert plugin.limit(1, 7, 1) == 1 and plugin.limit(1, 8, 1) == 1
    began = time.monotonic()
    thread = threading.Thread(target=lambda: said.extend([*calls(comm, 3), *calls(other, 3)]))
    thread.start()
    thread.join(10)
    assert said == [1] * 6 and 1 <= time.monotonic() - began < 2, "the second one is not held as well"
    for comm_id in (7, 8):
        with pytest.raises(TimeoutError):
            plugin.switch(1, comm_id, 10, 0)
        assert plugin.limit(1, comm_id, 1) == 0
    comm.finalize()
    join()
    assert plugin.limit(1, 7, 5) == 5, "another communicator of that id"


FROZEN = """
import os, signal, sys, threading, time
sys.path[:0] = {path!r}
from test_switch import Communicator, Plugin, calls, message
plugin = Plugin.load({plugin!r})
comm, said = Communicator(plugin.path, 7, 8, 1, 0), []
plugin.activate(message(1)); plugin.stage(1, message(2)); plugin.hold(2)
assert plugin.limit(1, 7, 1) == 1
thread = threading.Thread(target=lambda: said.extend(calls(comm, 3)))
thread.start()
while not plugin.waiting():
    time.sleep(0.001)
print("held", flush=True)
sys.stdin.readline()
plugin.switch(1, 7, 1, 0)
plugin.lift(1, 2)
thread.join(10)
print(said)
"""


def test_a_process_that_was_frozen_does_not_give_up_as_it_goes_on(plugin):
    """A suspended job, or a debugger: the time that it stood still is no time that the store did not answer."""
    program = FROZEN.format(path=sys.path, plugin=str(plugin.path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as job:
        assert job.stdout.readline() == "held\n", job.stderr.read()
        job.send_signal(signal.SIGSTOP)
        time.sleep(3)
        job.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        said, told = job.communicate("go on\n", timeout=30)
    assert said == "[1, 2, 2]\n" and "has not answered" not in told, told


def test_limits_are_not_before_the_last_switch_and_are_refused_where_switches_would_be_forgotten(
    plugin, join
):
    comm = Communicator(plugin.path, 7, 8, 1, 0)
    assert plugin.limit(1, 99, 5) == 0, "no such communicator"
    for generation in range(1, 8):
        since = 10 * generation
        assert plugin.limit(1, 7, 5) == max(5, since - 10), "where the last switch is"
        plugin.lift(1, 0)
        plugin.stage(1, message(generation))
        plugin.switch(1, 7, since, 0)
    assert plugin.limit(1, 7, 5) == 0, "its last switches are all ahead of it"
    assert calls(comm, 20) == [0] * 10 + [1] * 10
    assert plugin.limit(1, 7, 5) == 70 and plugin.limit(1, 7, 55) == 75
    plugin.lift(1, 0)
    comm.finalize()
    assert plugin.limit(1, 7, 5) == 0 and plugin.comms() == {}
    join()
    assert plugin.limit(1, 7, 5) == 5, "another communicator of that id has no switches"


def test_a_step_is_told_by_the_table_that_answered_it(plugin, join):
    one, two, out = join(1), join(2), join(3)
    plugin.activate(message(3))
    call(one)
    assert plugin.ended().generation == 3 == plugin.ended().generation
    plugin.stage(1, message(4))
    plugin.switch(1, 1, 1, 3)
    plugin.switch(1, 2, 1, 2)
    plugin.lift(1, 4)
    said = []
    for comms in ([one, two], [one, out], [two], [two, one], [one], []):
        for comm in comms:
            call(comm)
        said.append(plugin.ended().generation)
    # A whole step of 4 with one that was left out; but two's first call is below its switch, and trials end.
    assert said == [MIXED, 4, 4, 3, 3, 4]


@pytest.mark.parametrize("release", ["2.28.9", "2.29.7", "2.32.3"])
def test_ranks_that_issue_the_same_have_the_same_marks(plugin, join, release):
    """Communicators with ids of their own stand for ranks. An all-reduce does not count, but is in the hash."""
    same, also, other, swapped = (join(i, release) for i in range(1, 5))

    def issue(comm: Communicator, n: int) -> None:
        call(comm, ("all_gather", "reduce_scatter", "all_reduce")[n % 3], MB << n % 5)

    for n in range(200):
        for comm in (same, also):
            issue(comm, n)
        issue(other, n if n != 100 else 101)
        issue(swapped, {40: 41, 41: 40}.get(n, n))
        also.start_coll("send_recv", 9, 10, 4, 1, 16, "ring", "ll")
    views = plugin.comms()
    assert {i: (v.n_ranks, v.n_nodes, v.made) for i, v in views.items()} == {
        1: (8, 1, 134),
        2: (8, 1, 134),
        3: (8, 1, 133),  # an all-reduce in place of a reduce-scatter
        4: (8, 1, 134),  # a reduce-scatter before an all-reduce
    }
    marks = [views[i].marks for i in range(1, 5)]
    assert sorted(marks[0]) == [16 * n for n in range(1, 9)] and marks[0] == marks[1]
    assert len(set(marks[0].values())) == 8
    assert {at for at in marks[0] if marks[2][at] == marks[0][at]} == {16, 32, 48, 64}
    assert {at for at in marks[0] if marks[3][at] == marks[0][at]} == {16}
    for n in range(4599):
        issue(same, n)
    fine, coarse = range(3200 - 7 * 16, 3201, 16), range(3072 - 7 * 256, 3073, 256)
    assert plugin.comms()[1].made == 3200
    assert sorted(plugin.comms()[1].marks) == sorted({*fine, *coarse})


@pytest.mark.parametrize("release", ["2.28.9", "2.29.7", "2.30.7", "2.32.3"])
def test_ranks_that_group_their_collectives_otherwise_have_other_marks(plugin, join, release):
    """NCCL cuts the channels of a group's collectives to their shares: such ranks would not run one call alike."""
    calls = [Call("all_gather", 2**18), Call("all_gather", 2**21)]

    def issue(comm_id: int, grouped: bool) -> Groups:
        comm = Groups(plugin.path, comm_id, 8, 1, 0, release)
        for n in range(16):
            for group in [calls] if grouped or n != 3 else [calls[:1], calls[1:]]:
                ordered = sorted(group, key=lambda one: one.count, reverse=release >= "2.29")
                comm.group(ordered, offer(ring_ll=10))
        return comm

    comms = [issue(1, True), issue(2, True), issue(3, False)]
    marks = [plugin.comms()[i].marks for i in (1, 2, 3)]
    for comm in comms:
        comm.finalize()
    assert set(marks[0]) == {16, 32} and marks[0] == marks[1] and marks[0][16] != marks[2][16]


@pytest.mark.parametrize("release", ["2.28.9", "2.29.7", "2.30.7", "2.32.3"])
def test_all_collectives_of_a_group_run_under_one_table(plugin, release):
    """All its questions come at one count, however many a release asks: a switch within a group waits for its end."""
    answers: list[set[int]] = []

    comm = Groups(plugin.path, 7, 8, 1, 0, release)
    ask = comm.tuner.ask

    def noted(func, n_bytes, cost, n_pipe_ops=1, **more):
        answer = ask(func, n_bytes, cost, n_pipe_ops, **more)
        if func == "all_gather" and n_pipe_ops:
            answers[-1].add(answer)
        return answer

    comm.tuner.ask = noted
    calls = [Call("all_gather", 2**18), Call("all_gather", 2**21), Call("reduce_scatter", 2**18)]
    plugin.stage(1, message(3))
    plugin.switch(1, 7, 4, 8)  # the second collective of the second group, the third of the third
    for _ in range(4):
        answers.append(set())
        comm.group(calls, offer(ring_ll=10, ring_simple=30))
    comm.finalize()
    assert answers == [{0}, {0}, {3}, {0}]


@pytest.mark.slow
def test_the_child_of_a_fork_begins_anew(folder):
    """A child that trains has a ring and a probe of its own; the parent's go on."""
    program = """
import os, torch
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
def train(n):
    for _ in range(n):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
train(5)
child = os.fork()
train(7 if child else 4)
if child:
    assert os.waitpid(child, 0)[1] == 0
    print(os.getpid(), child)
else:
    os._exit(0)
"""
    env = {**os.environ, **job_env(folder.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "dynamiccl" not in done.stderr, done.stderr
    parent, child = map(int, done.stdout.split())
    steps = {ring.pid: ring.drain()["step"].tolist() for ring in folder.rings()}
    assert steps == {parent: list(range(11)), child: [0, 1, 2]}


def test_two_agreements_of_a_process_do_not_meddle_with_each_other(plugin, join):
    """Before: the thread of a group that was destroyed lifted the limits of the next, and 80 of 640 calls split."""
    comm, said = join(), []
    one, two = plugin.join(), plugin.join()
    assert 0 < one != two > 0
    calls(comm, 3)
    plugin.stage(one, message(5))
    assert plugin.limit(one, 7, 1) == 4 and plugin.limit(two, 7, 1) == 0
    plugin.stage(two, message(6))
    thread = threading.Thread(target=lambda: said.extend(calls(comm, 3)))
    thread.start()
    held(plugin)
    plugin.lift(two, 6)
    plugin.part(two)
    time.sleep(0.05)
    assert plugin.waiting() == 1
    plugin.switch(one, 7, 4, 0)
    plugin.lift(one, 5)
    thread.join(10)
    assert said == [0, 5, 5] and plugin.join() == two
    plugin.part(one)
    plugin.part(two)


def test_an_agreement_that_ends_leaves_the_next_no_table_and_takes_none_from_others(plugin, join):
    """Another one whose table was gone could not switch while its other ranks did."""
    comm, one, two = join(), plugin.join(), plugin.join()
    plugin.stage(one, message(5))
    plugin.stage(two, message(6))
    plugin.part(one)
    assert plugin.join() == one
    with pytest.raises(OSError, match="Invalid argument"):
        plugin.switch(one, 7, 1, 0)
    plugin.switch(two, 7, plugin.limit(two, 7, 1), 0)
    plugin.lift(two, 6)
    assert calls(comm, 2) == [0, 6]
    plugin.part(one)
    plugin.part(two)


def test_there_are_no_more_agreements_than_places(plugin):
    owners = [plugin.join() for _ in range(9)]
    assert owners == [*range(1, 9), 0]


def test_a_switch_that_the_plugin_refuses_is_an_error_but_where_the_communicator_is_gone(plugin, join):
    comm = join()
    with pytest.raises(OSError, match="Invalid argument"):
        plugin.switch(1, 7, 3, 0)
    plugin.stage(1, message(2))
    plugin.switch(1, 99, 3, 0)
    assert call(comm) == 0
