"""NCCL_ALGO and NCCL_PROTO as NCCL reads them, and what the doctor makes of them."""

import sys

import pytest
from command import invoke, start
from dynamiccl.agent.checks.doctor import Facts, examine, gather
from dynamiccl.envs.nccl.variables import CELLS, narrowing
from dynamiccl.traces.names import TUNED_FUNCS
from dynamiccl.traces.records import Decision, Rule, Table

#: Those of all_gather and reduce_scatter.
TWO = {cell for cell in CELLS if cell[0] in TUNED_FUNCS}


def cells(*, func=None, algo=None, proto=None, of=TWO):
    """The cells that have these parts."""
    return {c for c in of if func in (None, c[0]) and algo in (None, c[1]) and proto in (None, c[2])}


#: Algorithms, protocols, the cells that are removed. NCCL's own comments on its parser give the first three.
GRAMMAR = [
    ("ring,collnetdirect;allreduce:tree,collnetdirect", "", cells(algo="nvls") | cells(algo="pat")),
    ("", "LL,Simple;allreduce:^LL", cells(proto="ll128")),
    ("", "^LL128;allreduce:LL128", cells(proto="ll128")),
    ("", "^LL128", cells(proto="ll128")),
    ("", "^ll128,LL", cells(proto="ll128") | cells(proto="ll")),
    ("allreduce:tree", "allreduce:simple", set()),
    ("broadcast:ring;reduce:^tree", "", set()),
    ("", "", set()),
    (";", ";;", set()),
    ("RING", "sImPlE", TWO - cells(algo="ring", proto="simple")),
    ("allgather:ring", "", cells(func="all_gather") - cells(algo="ring")),
    ("AllGather:Ring;ReduceScatter:NVLS,PAT", "", cells(func="all_gather") - cells(func="all_gather", algo="ring")
     | cells(func="reduce_scatter", algo="ring") | cells(func="reduce_scatter", algo="collnet_direct")),
    ("tree;allgather:^nvls", "", cells(func="reduce_scatter") | cells(algo="nvls")),  # a later entry replaces
    ("allgather:tree;allgather:ring", "", cells(func="all_gather") - cells(algo="ring")),
    ("^", "^", set()),
    ("tree", "", TWO),
    ("nvls", "LL", TWO),
]  # fmt: skip


@pytest.mark.parametrize(("algos", "protos", "removed"), GRAMMAR)
def test_the_parser_removes_the_cells_that_nccl_removes(algos, protos, removed):
    found = narrowing({"NCCL_ALGO": algos, "NCCL_PROTO": protos})
    assert found.removed & TWO == removed and not found.unknown
    assert found.leaves_nothing("") == (removed == TWO)


#: The same of all_reduce, whose places are others.
SUMS = [
    ("allreduce:^tree", "", cells(algo="tree", of=CELLS)),
    ("tree", "allreduce:simple;allgather:ll", cells(func="all_reduce", of=CELLS) - {("all_reduce", "tree", "simple")}),
    ("allgather:ring", "reducescatter:^LL", set()),
    ("nvls", "", cells(func="all_reduce", of=CELLS)),
    ("allreduce:pat", "", cells(func="all_reduce", of=CELLS)),
]  # fmt: skip


@pytest.mark.parametrize(("algos", "protos", "removed"), SUMS)
def test_it_removes_the_cells_of_all_reduce_that_nccl_removes(algos, protos, removed):
    found = narrowing({"NCCL_ALGO": algos, "NCCL_PROTO": protos})
    assert found.removed - TWO == removed and not found.unknown
    assert found.leaves_nothing("protocol") == (found.removed == CELLS)


@pytest.mark.parametrize("way", ["", "protocol"])
def test_a_job_whose_sums_are_tuned_is_told_what_the_variables_take_from_them(way):
    """Before: `NCCL_ALGO=allreduce:...` went unexamined, whatever --all-reduce said."""
    env = {"NCCL_ALGO": "allreduce:tree;allgather:pat,nvls", "NCCL_PROTO": "allreduce:LL128"}
    told = {finding.name: finding.what for finding in examine(Facts(env, all_reduce=way))}
    assert ("of all_reduce" in told["narrowed offer"]) == ("unguarded LL128" in told) == bool(way)
    none = examine(Facts({"NCCL_ALGO": "allreduce:ring;allgather:tree;reducescatter:tree"}, all_reduce=way))
    assert any(finding.must_change for finding in none) == (not way)


@pytest.mark.parametrize(("asked", "way"), [(None, "algo"), ("", ""), ("protocol", "protocol")])
def test_what_a_command_is_asked_counts_and_not_what_an_earlier_job_left_in_the_environment(
    monkeypatch, asked, way
):
    monkeypatch.setenv("DYNAMICCL_ALL_REDUCE", "algo")
    assert gather(all_reduce=asked).all_reduce == way


def test_a_table_may_not_want_of_an_all_reduce_what_the_variables_remove():
    table = Table(1, (Rule(0, 0, "all_reduce", 0, 9, Decision("ring", "ll", 8)),))
    (trap,) = [one for one in examine(Facts({"NCCL_ALGO": "allreduce:tree"}, table=table)) if one.must_change]
    assert trap.name == "never offered" and "tree/ll128, tree/ll, tree/simple" in trap.cure


@pytest.mark.parametrize(
    ("value", "unknown", "removed"),
    [
        ("ring, tree", ["NCCL_ALGO:  tree"], TWO - cells(algo="ring")),  # NCCL trims nothing
        ("alltoall:ring", ["NCCL_ALGO: alltoall"], set()),
        ("ring;nvls", ["NCCL_ALGO: nvls"], TWO - cells(algo="ring")),  # only the first may lack a function
        ("mesh", ["NCCL_ALGO: mesh"], TWO),
    ],
)
def test_words_that_nccl_does_not_know_are_told(value, unknown, removed):
    found = narrowing({"NCCL_ALGO": value})
    assert list(found.unknown) == unknown and found.removed & TWO == removed


@pytest.mark.parametrize("value", ["LL128", "LL,LL128,Simple", "^LL", "allgather:^Simple"])
def test_a_list_that_enables_ll128_skips_nccls_safety_test(value):
    """In NCCL's list LL128 stands at 2, "if safe", until a list that enables it says 1."""
    found = {finding.name: finding for finding in examine(Facts({"NCCL_PROTO": value}))}
    assert narrowing({"NCCL_PROTO": value}).unguarded and not found["unguarded LL128"].must_change
    assert not narrowing({"NCCL_PROTO": "^LL128"}).unguarded


@pytest.mark.parametrize(
    ("env", "names", "must"),
    [
        ({"NCCL_PROTO": "^LL128"}, ["narrowed offer"], False),  # eth-cscs/cscs-docs#253: before, refused
        (
            {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "allreduce:simple"},
            [],
            False,
        ),  # nccl#1670: before, refused
        ({"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}, ["narrowed offer"], False),  # channels are left
        ({"NCCL_ALGO": "Tree"}, ["nothing offered"], True),
    ],
)
def test_a_job_is_refused_only_if_nothing_is_left_to_tune(env, names, must):
    found = examine(Facts(env))
    assert [finding.name for finding in found] == names
    assert any(finding.must_change for finding in found) == must


def test_empty_variables_count_as_not_set(tmp_path, monkeypatch):
    """NVIDIA/nccl#1914. Before: three refusals. NCCL does not put an empty variable's value from its file either."""
    (tmp_path / "nccl.conf").write_text("NCCL_ALGO=Tree\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "nccl.conf"))
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_PROFILER_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_NET_PLUGIN"):
        monkeypatch.setenv(name, "")
    told = invoke(["doctor"])
    assert told.exit_code == 0 and "CHANGE" not in told.stdout, told.stdout


@pytest.mark.parametrize("command", ["tune", "apply"])
def test_tune_and_apply_go_on_under_a_narrowed_offer(tmp_path, command):
    """Before: both refused to start, and told the site to allow LL128."""
    (tmp_path / "t.json").write_text(
        '{"dynamiccl_table": 1, "rules": [{"func": "all_gather", "n_channels": 4}]}'
    )
    words = {
        "tune": ["tune", "--no-memory", "--out", tmp_path / "out"],
        "apply": ["apply", tmp_path / "t.json"],
    }
    done = start(
        *words[command], "--", sys.executable, "-c", "print('ran')", NCCL_PROTO="^LL128", HOME=str(tmp_path)
    )
    assert done.returncode == 0 and done.stdout == "ran\n" and "CHANGE" not in done.stderr, done.stderr


def test_a_table_may_not_want_what_the_variables_remove():
    """Before: only the switches of PAT and NVLS were looked at."""
    table = Table(1, (Rule(0, 0, "all_gather", 0, 9, Decision("ring", "ll128", 8)),))
    found = examine(Facts({"NCCL_PROTO": "^LL128"}, table=table))
    (trap,) = [finding for finding in found if finding.must_change]
    assert trap.name == "never offered" and "ring/ll128" in trap.what and "ring/ll, ring/simple" in trap.cure
    assert not any(f.must_change for f in examine(Facts({"NCCL_PROTO": "allreduce:LL"}, table=table)))


def test_ll128_over_nodes_on_grace_is_a_trap_until_it_is_excluded():
    """NVIDIA/nccl#2001, #2053: from 2.27 on."""

    def names(env, *nccl, machine="aarch64"):
        return [
            finding.name for finding in examine(Facts(env, nccl, machine=machine)) if "Grace" in finding.name
        ]

    assert names({}, 2, 29, 7) and names({"NCCL_PROTO": "allreduce:^LL128"}, 2, 27, 3)
    assert not names({}, 2, 29, 7, machine="x86_64") and not names({}, 2, 26, 5)
    assert not names({"NCCL_LL128_C2C": "0"}, 2, 29, 7) and not names({"NCCL_PROTO": "^LL128"}, 2, 29, 7)


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("2", True), ("0", False), ("", False)])
def test_launch_blocking_is_refused(value, refused):
    found = [f for f in examine(Facts({"CUDA_LAUNCH_BLOCKING": value})) if f.name == "launch blocking"]
    assert [f.must_change for f in found] == [True] * refused
