"""All-reduces count, and are offered, where the job's option says so; without it nothing is otherwise than before."""

import numpy as np
import pytest
from dynamiccl.envs.nccl.plugin.bindings import Span
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.run_folder import ALL_REDUCE
from dynamiccl.envs.nccl.shm import RunFolder, encode_table
from dynamiccl.traces.assemble import Assembler
from dynamiccl.traces.names import ALL_REDUCE_WAYS
from dynamiccl.traces.records import ALGOS, Decision, Rule, Table
from nccl_groups import Groups
from nccl_releases import Call, Communicator, choose
from plugin_run import MB, drained, offer, plugin, run
from test_switch import join

__all__ = ["join", "plugin", "run"]  # fixtures
NAMES = {"a": "all_gather", "g": "reduce_scatter", "r": "all_reduce"}


def calls(groups):
    return [[Call(NAMES[one], 2**18) for one in group] for group in groups.split()]


def made(plugin, groups, release="2.28.9"):
    """Collectives that count after these groups, and the hash of the first sixteen."""
    comm = Groups(plugin.path, 7, 8, 2, 0, release)
    for group in calls(groups):
        comm.group(group, offer(ring_ll=10, ring_simple=30))
    view = plugin.comms()[7]
    comm.finalize()
    return view.made, view.marks


@pytest.mark.parametrize("release", ["2.28.9", "2.32.3"])
@pytest.mark.parametrize(
    ("groups", "without", "counted"), [("r r r", 0, 3), ("a r ar rg", 3, 6), ("rr a", 1, 3)]
)
def test_all_reduces_count_under_the_option_alone(plugin, monkeypatch, release, groups, without, counted):
    assert made(plugin, groups, release)[0] == without
    for way in ALL_REDUCE_WAYS:
        monkeypatch.setenv("DYNAMICCL_ALL_REDUCE", way)
        assert made(plugin, groups, release)[0] == counted
    monkeypatch.setenv("DYNAMICCL_ALL_REDUCE", "")
    assert made(plugin, groups, release)[0] == without


def test_the_hash_of_a_call_is_the_same_with_the_option(plugin, monkeypatch):
    """It names each all-reduce in either case."""
    _, marks = made(plugin, "a " * 16)
    _, other = made(plugin, "a " * 15 + "ra")
    monkeypatch.setenv("DYNAMICCL_ALL_REDUCE", "protocol")
    assert made(plugin, "a " * 16)[1] == marks != other


def test_an_option_that_only_some_ranks_have_is_no_common_identity(plugin, monkeypatch):
    before = plugin.identity()
    monkeypatch.setenv("DYNAMICCL_ALL_REDUCE", "protocol")
    assert plugin.identity() == before + " all_reduce protocol"


def test_what_nccl_offers_for_an_all_reduce_is_told_under_the_option_alone(run, plugin, monkeypatch):
    def offers():
        comm = Communicator(plugin.path, 43, 8, 1, 0)
        for func in ("all_gather", "all_reduce"):
            comm.get_coll_info(func, MB, offer(ring_ll=20, tree_ll=10, nvls_tree_simple=30))
        comm.finalize()
        assembler = Assembler()
        assembler.add(drained(run), pid=1)
        return {func: one for (comm_id, func, _), one in assembler.offers.items() if comm_id == 43}

    assert set(offers()) == {"all_gather"}
    monkeypatch.setenv("DYNAMICCL_ALL_REDUCE", "algo")
    found = offers()["all_reduce"]
    assert (found.algo, found.proto) == ("tree", "ll") and np.isclose(
        found.cost_us[ALGOS.index("nvls_tree"), 2], 30
    )


@pytest.mark.parametrize(
    ("decision", "ran", "channels"),
    [
        (Decision("tree", "ll128", 0), (0, 1), 0),
        (Decision("tree", "simple", 4), (0, 2), 4),
        (Decision("ring", "simple", 4), (1, 2), 4),
        (Decision("tree", "ll", 4), (1, 1), 0),  # not offered
    ],
)
def test_a_row_of_an_all_reduce_is_obeyed(plugin, decision, ran, channels):
    plugin.activate(encode_table(Table(3, (Rule(0, 0, "all_reduce", 0, 2**40, decision),))))
    comm = Communicator(plugin.path, 42, 2, 1, 0)
    cost = offer(ring_ll128=10, ring_simple=30, tree_ll128=20, tree_simple=40)
    assert comm.get_coll_info("all_reduce", MB, cost) == channels and choose(cost) == ran
    comm.finalize()


@pytest.mark.parametrize(
    ("way", "own", "obeyed"),
    [
        ("", "tree", True),  # a table of the user's own, without the option
        ("algo", "tree", True),
        (
            "protocol",
            "tree",
            False,
        ),  # in this class of sizes NCCL goes from tree to ring: nobody allowed the change
        ("protocol", "ring", True),
        ("algo", "nvls", False),
        ("algo", "nvls_tree", False),
        ("algo", "collnet_chain", False),
    ],
)
def test_an_all_reduce_keeps_the_algorithm_that_the_user_did_not_give_away(
    plugin, monkeypatch, way, own, obeyed
):
    """Before: a row of a class of sizes replaced tree by ring without --all-reduce=algo, and NVLS by either."""
    monkeypatch.setenv("DYNAMICCL_ALL_REDUCE", way)
    row = Rule(0, 0, "all_reduce", 0, 2**40, Decision("ring", "ll128", 0))
    plugin.activate(encode_table(Table(3, (row,))))
    comm = Communicator(plugin.path, 42, 2, 1, 0)
    cost = offer(ring_ll128=20, **{f"{own}_simple": 5})
    mine = choose(cost)
    comm.get_coll_info("all_reduce", MB, cost)
    assert choose(cost) == ((1, 1) if obeyed else mine)
    comm.finalize()


def test_two_tables_take_turns_in_a_job_of_all_reduces_alone(plugin, join, monkeypatch):
    """DDP: without the option its communicator has no clock."""
    monkeypatch.setenv("DYNAMICCL_ALL_REDUCE", "protocol")
    comm = Groups(plugin.path, 7, 8, 1, 0, "2.28.9")

    def step():
        for group in calls("r r r"):
            comm.group(group, offer(ring_ll=10, ring_simple=30))
        return plugin.ended()[:3]

    def message(generation):
        rule = Rule(0, 0, "all_reduce", 0, 2**40, Decision("ring", "simple", generation))
        return encode_table(Table(generation, (rule,)))

    plugin.activate(message(1))
    plugin.ended()  # the step under way has tables of other tests
    assert {step() for _ in range(6)} == {(1, 0, False)}
    view = plugin.comms()[7]
    assert view.a_step == 3
    plugin.stage(1, message(2))
    plugin.switch(1, 7, *Span(view.made + 3, view.made + 27, 3, 3, 2))
    plugin.lift(1, 2)
    assert [step() for _ in range(9)] == [(1, 0, False), *((int(table), 2, True) for table in "21122112")]
    comm.finalize()


def test_the_option_lies_in_the_run_folder_and_in_the_job_s_environment(tmp_path):
    folder = RunFolder.create()
    try:
        assert folder.all_reduce == "" and job_env(folder.path)["DYNAMICCL_ALL_REDUCE"] == ""
        assert job_env(folder.path, all_reduce="algo")["DYNAMICCL_ALL_REDUCE"] == "algo"
        (folder.path / ALL_REDUCE).write_text("algo")
        assert RunFolder(folder.path).all_reduce == "algo"
        (folder.path / ALL_REDUCE).write_text("ring")
        with pytest.raises(ValueError, match="is damaged"):
            RunFolder(folder.path)
    finally:
        folder.close(remove=True)
