"""The untouched table: what a raised communicator does where no table decides, against what NCCL does by itself."""

import numpy as np
import pandas as pd
import pytest
from dynamiccl.envs.live.confirmed import note_confirmed, read_confirmed
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.live.untouched import as_run, fault, of_run, own_limit
from dynamiccl.envs.nccl.agreement.in_force import InForce
from dynamiccl.envs.nccl.plugin.bindings import Span
from dynamiccl.envs.nccl.shm import RunFolder, decode_table, encode_table
from dynamiccl.envs.nccl.tables import load_table, to_json
from dynamiccl.envs.nccl.untouched import FUNCS, MAX_BYTES, ClassChannels, Untouched
from dynamiccl.traces.records import Decision, Rule, Slot, Table
from untouched_run import FILED, filed, write_untouched

TWO = ClassChannels(2, 2, 2, 256)


@pytest.mark.parametrize("channels", [2, 6])
def test_raised_communicators_under_the_table_ran_as_untouched_ones_at_every_size(channels):
    keys = ["func", "n_bytes"]
    untouched, raised = (
        filed(f"{kind}_{channels}").set_index(keys).sort_index() for kind in ("untouched", "raised")
    )
    assert len(untouched) >= 99 and {"all_gather", "reduce_scatter", "all_reduce"} == set(
        untouched.index.levels[0]
    )
    sizes = untouched.index.get_level_values("n_bytes")
    assert sizes.min() == 1 << 10 and sizes.max() == 64 << 20
    ran = ["algo", "proto", "n_channels"]
    pd.testing.assert_frame_equal(untouched[ran], raised[ran])
    before = (
        filed(f"before_{channels}").set_index(keys).sort_index()
    )  # raised, and no table yet: the check can fail
    assert (before["n_channels"] > untouched["n_channels"]).sum() > 20


@pytest.mark.parametrize("channels", [2, 6])
def test_the_model_says_what_ran_at_every_size(channels):
    events = filed(f"untouched_{channels}").assign(n_ranks=2)
    assert events["n_channels"].max() == channels
    assert (as_run(events, channels, 256, 22809) == events["n_channels"]).all()
    assert not (as_run(events, channels, 512, 22809) == events["n_channels"]).all()
    assert (own_limit(events, channels, 256) >= events["n_channels"]).all()


def test_whole_runs_under_the_table_are_within_the_spread_of_untouched_ones():
    """Few runs, and the luck of the ports makes them differ: this shows no more than that none is far off."""
    rows = pd.read_csv(FILED / "times.csv")
    untouched, raised = (rows[rows["arm"].isin(arms)] for arms in (["plain", "again"], ["raised"]))
    assert len(untouched) >= 12 and len(raised) >= 3
    assert untouched["step_ms"].min() * 0.98 < raised["step_ms"].median() < untouched["step_ms"].max()
    more = raised["shared_kib"].median() - untouched["shared_kib"].median()
    assert more / 6 / 1024 == pytest.approx(18.4, abs=0.1)  # MiB a channel
    assert raised["sockets"].median() - untouched["sockets"].median() == 12


def rule(low, high):
    return Rule(2, 2, "all_gather", low, high, Decision("ring", "simple", 8))


@pytest.mark.parametrize(
    ("rules", "gaps"),
    [
        ([], [(0, MAX_BYTES)]),
        ([(0, 10)], [(11, MAX_BYTES)]),
        ([(5, 10), (20, 30)], [(0, 4), (11, 19), (31, MAX_BYTES)]),
        ([(5, MAX_BYTES)], [(0, 4)]),
    ],
)
def test_each_message_has_a_row_or_a_ceiling(rules, gaps):
    chosen = tuple(rule(low, high) for low, high in rules)
    whole = Untouched(8, (TWO,)).over(Table(3, chosen, 40))
    ceilings = [r for r in whole.rules if r.threads and r.func == "all_gather"]
    assert [(r.min_bytes, r.max_bytes) for r in ceilings] == gaps
    assert {r.func for r in whole.rules} == set(FUNCS) and whole.deciding == chosen
    assert (whole.generation, whole.trial_steps) == (3, 40)
    back = decode_table(encode_table(whole))
    assert sorted(back.rules, key=repr) == sorted(whole.rules, key=repr)
    assert Untouched(8, (TWO,)).over(whole) == whole


def test_a_tables_file_keeps_the_ceilings(tmp_path):
    whole = Untouched(8, (TWO,)).over(Table(1, (rule(5, 10),)))
    (tmp_path / "table.json").write_text(to_json(whole))
    assert load_table(tmp_path) == whole
    (tmp_path / "table.json").write_text(to_json(whole).replace('"threads": 256', '"threads": 300', 1))
    with pytest.raises(ValueError, match="threads, 256 or 512"):
        load_table(tmp_path)


@pytest.fixture
def run():
    folder = RunFolder.create()
    Untouched(8, (TWO,)).write(folder.path)
    folder.close(remove=False)
    folder = RunFolder(folder.path)
    yield folder
    folder.close()


def test_every_table_of_the_run_has_them_the_empty_one_too(run):
    """So what fails closed, and what `dynamiccl stop` leaves, is NCCL untouched."""
    job = Job(run)
    job.confirm({})
    _, message = run.table.read()
    table = decode_table(message)
    assert len(table.rules) == len(FUNCS) and not table.deciding and read_confirmed(run.path) == {}
    assert (run.path / "confirmed").read_bytes() == message
    slot = Slot(2, 2, "all_gather", 20)
    job.confirm({slot: Decision("ring", "simple", 8)})
    assert read_confirmed(run.path) == {slot: Decision("ring", "simple", 8)}
    assert len(decode_table(run.table.read()[1]).rules) == len(FUNCS) + 2
    in_force = InForce()
    in_force.decided(run.table.read()[1], {7: Span(10)})
    assert not in_force.is_default()
    in_force.decided(message, {7: Span(20)})
    assert in_force.is_default()


def test_a_damaged_word_of_the_run_is_said_with_the_cure(run):
    (run.path / "untouched.json").write_text('{"headroom": 8}')
    with pytest.raises(ValueError, match=r"untouched.json is damaged .*: start the job again"):
        RunFolder(run.path)


def test_a_table_that_was_left_in_the_run_folder_is_written_whole(run):
    note_confirmed(run.path, run.whole(Table(4, (rule(5, 10),))))
    assert len(decode_table((run.path / "confirmed").read_bytes()).rules) == len(FUNCS) + 2


def events(**changed):
    row = {"func": "all_gather", "n_ranks": 2, "n_nodes": 2, "captured": False, "n_bytes": 1 << 20}
    row |= {"asked_bytes": 1 << 20, "algo": "ring", "n_channels": 2, **changed}
    return pd.DataFrame([row])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"n_nodes": 1}, "shows no communicators of 2 ranks on 1 nodes"),
        ({"captured": True}, "CUDA graphs"),
        ({"asked_bytes": 1 << 21}, "in groups"),
        ({"n_channels": 8}, "ran on 8 channels, without it on 2"),
        ({"algo": "nvls", "n_channels": 16}, ""),
    ],
)
def test_what_is_not_untouched_is_said(changed, why):
    found = fault(Untouched(8, (TWO,)), events(**changed))
    assert why in found if why else not found


def test_a_tables_own_channels_are_no_fault():
    assert not fault(Untouched(8, (TWO,)), events(n_channels=8), is_default=False)
    assert not fault(Untouched(8, (TWO,)), pd.DataFrame())


def test_limits_do_not_fall_with_size():
    n_bytes = np.arange(1, 1 << 20, 997)
    for proto in ("ll", "ll128", "simple"):
        rows = pd.DataFrame({"n_bytes": n_bytes, "algo": "ring", "proto": proto, "n_ranks": 8})
        limit = own_limit(rows, 24, 512)
        assert (np.diff(limit) >= 0).all() and limit.min() == 1 and limit.max() == 24


def test_what_nccl_does_untouched_is_read_from_a_run(tmp_path):
    assert of_run(write_untouched(tmp_path / "a"), 8) == Untouched(8, (TWO,))
    six = write_untouched(tmp_path / "b", filed("untouched_6"), header={"nccl": "-"})
    assert of_run(six, 8) == Untouched(8, (ClassChannels(2, 2, 6, 256),))
    large = filed("untouched_2")
    large = large[large["n_bytes"] >= 1 << 20]  # both numbers of threads fit: the usual one
    assert of_run(write_untouched(tmp_path / "c", large), 8).classes[0].threads == 512


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"header": {"headroom": 8}}, "is a run with --headroom: give one without it"),
        ({"captured": True}, "shows no call of its own"),
        ({"table_generation": 7}, "shows no call of its own"),
        ({"algo": "collnet_direct"}, "NCCL runs collnet_direct on communicators of 2 ranks on 2 nodes"),
        ({"n_channels": 3}, "by ring/ll on 3 channels on .*, and our model says 1: --headroom cannot hold"),
    ],
)
def test_a_run_that_does_not_show_it_is_refused(tmp_path, changed, why):
    with pytest.raises(ValueError, match=why):
        of_run(write_untouched(tmp_path, **changed), 8)
