"""Tables in files, jobs under a fixed table, and the doctor."""

import json
import os
import re
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
from command import clean, refused
from command import start as run
from dynamiccl.agent.checks.doctor import TRAPS, Facts, checked, examine, gather
from dynamiccl.agent.checks.faults import FAULTS
from dynamiccl.agent.checks.interpreter import Interpreter
from dynamiccl.agent.checks.profiler import POOL_MIB, RING_BYTES
from dynamiccl.envs.nccl.plugin import build
from dynamiccl.envs.nccl.tables import MAX_BYTES, load_table, to_json
from dynamiccl.traces.records import PAIRS, Decision, Rule, Table
from nccl_late import TELLS_LATE
from nccl_releases import REACH


def said(*words, **env):
    """What a command says that becomes no job, in this process, with ``env`` as ``run`` has it."""
    with patch.dict(os.environ, clean(**env), clear=True):
        return refused(words)


def test_there_and_back(tmp_path):
    table = Table(
        1,
        (
            Rule(0, 0, "all_gather", 0, 100, Decision("ring", "ll")),
            Rule(16, 2, "all_gather", 50, 60, Decision("ring", "simple", 4)),
            Rule(8, 1, "all_gather", 0, 9, Decision(None, None, 4)),
            Rule(0, 0, "reduce_scatter", 5, MAX_BYTES, Decision("pat", "simple", 64)),
        ),
    )
    (tmp_path / "t.json").write_text(to_json(table))
    assert load_table(tmp_path / "t.json") == table


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("allgather,0,1,ring,ll,2,-1,-1", "line 1: Expecting value"),
        (
            '{"dynamiccl_table": 1, "rules": [{"func": "all_gather", "n_channels": 99}]}',
            "0 .NCCL decides. to 64",
        ),
        ('{"dynamiccl_table": 1, "rules": [{"func": "all_gather", "n_ranks": 8}]}', "named together"),
        ("{", "line 1"),
        ("{}", "format None"),
        ('{"dynamiccl_table": 2}', "format 2, this release reads 1"),
        ('{"dynamiccl_table": 1, "rules": [{"func": "allgather"}]}', "rule 1: func is one of"),
        ('{"dynamiccl_table": 1, "rules": [{"func": "all_gather", "algo": "ring"}]}', "set together"),
        ('{"dynamiccl_table": 1, "rules": [{"func": "all_gather", "min_bytes": -1}]}', "min_bytes"),
        ('{"dynamiccl_table": 1, "rules": [{"func": "all_gather"}, {"func": "all_gather"}]}', "overlap"),
    ],
)
def test_bad_tables_name_place_and_cure(tmp_path, text, says):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as raised:
        load_table(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


JOB = """
import numpy as np, os
from dynamiccl.envs.nccl.plugin.build import plugin_path
from nccl_releases import Communicator, choose
comm = Communicator(plugin_path(), 5, 8, 1, 0, os.environ["RELEASE"])
for seq in range(4):
    cost = np.full((7, 3), -1, np.float32)
    cost[1] = 10, 20, 30
    print(comm.get_coll_info("all_gather", 4096, cost), *choose(cost))
    comm.stop(comm.start_coll("all_gather", seq, 128, "float32", 1, 16, "ring", "simple"))
comm.finalize()
"""


def small_gathers(folder, func="all_gather"):
    """A file with a table: all-gathers up to 64 KiB on four channels."""
    path = folder / "gathers.json"
    path.write_text(to_json(Table(1, (Rule(0, 0, func, 0, 65536, Decision("ring", "simple", 4)),))))
    return path


@pytest.mark.parametrize("told", [{}, {TELLS_LATE: "3"}], ids=["at once", "later"])
def test_apply_runs_a_job_under_the_table(tmp_path, told):
    path = small_gathers(tmp_path)
    command = ["apply", str(path), "--no-gate", "--", sys.executable, "-c", REACH + JOB]
    for release in ("2.22.3", "2.27.7", "2.29.7"):
        done = run(*command, RELEASE=release, **told)
        assert done.stdout.split() == ["4", "1", "2"] * 4, done.stderr


def test_apply_says_what_is_wrong(tmp_path):
    path = small_gathers(tmp_path)
    for args, says in (
        ((str(path),), "say what to run"),
        ((str(tmp_path / "none"), "--", "true"), "cannot be read"),
        ((str(tmp_path), "--", "true"), "the run has confirmed no table"),
        ((str(path), "--", "no-such-program"), "not a program"),
    ):
        done = said("apply", *args)
        assert done.exit_code == 2 and says in done.stderr and "Traceback" not in done.stderr


def table(*decisions: Decision) -> Table:
    return Table(1, tuple(Rule(0, 0, "all_gather", i, i, d) for i, d in enumerate(decisions)))


SEEDED = {
    "nothing offered": Facts({"NCCL_ALGO": "Tree"}),
    "narrowed offer": Facts({"NCCL_PROTO": "^LL128"}),
    "unguarded LL128": Facts({"NCCL_PROTO": "LL,LL128,Simple"}),
    "sockets": Facts({"NCCL_NSOCKS_PERTHREAD": "4"}),
    "unknown words": Facts({"NCCL_ALGO": "ring, tree"}),
    "more than a value": Facts({"NCCL_PROTO": "Simple # safe here"}),
    "NCCL_ENV_PLUGIN": Facts({"NCCL_ENV_PLUGIN": "/site/libnccl-env-site.so"}),
    "other Python": Facts(python=Interpreter("/x/python", False, "torchrun", torch=False)),
    "launch blocking": Facts({"CUDA_LAUNCH_BLOCKING": "1"}),
    "LL128 on Grace": Facts(nccl=(2, 28, 9), machine="aarch64"),
    "NCCL_TUNER_PLUGIN": Facts({"NCCL_TUNER_PLUGIN": "libnccl-ofi-tuner.so"}),
    "NCCL_PROFILER_PLUGIN": Facts({"NCCL_PROFILER_PLUGIN": "inspector"}),
    "NCCL_NET_PLUGIN": Facts({"NCCL_NET_PLUGIN": "aws-ofi"}),
    "old NCCL": Facts(nccl=(2, 21, 5)),
    "no profiler": Facts(nccl=(2, 28, 2)),
    "plugin path": Facts({"NCCL_TUNER_PLUGIN": "/x/libnccl-tuner-dynamiccl.so"}, nccl=(2, 27, 3)),
    "proxy slots": Facts(nccl=(2, 28, 9), machine="aarch64"),
    "registered buffers": Facts(nccl=(2, 31, 2)),
    "profiler fault": Facts(nccl=(2, 30, 3)),
    "profiler overhead": Facts(nccl=(2, 31, 2)),
    "channels": Facts(nccl=(2, 32, 3)),
    "channel limit": Facts({"NCCL_MAX_NCHANNELS": "4"}, table=table(Decision("ring", "ll", 8))),
    "kernel times": Facts(n_gpus=8, shm_free=2**26),
    "never offered": Facts(table=table(Decision("ring", "ll"), Decision("tree", "ll"))),
    "bypass": Facts({"NCCL_CTA_POLICY": "2"}),
    "CTA policy": Facts({"NCCL_CTA_POLICY": "1"}),
    "ranks on a GPU": Facts(nccl=(2, 29, 7), n_gpus=1, ranks_per_node=2),
    "autoload": Facts({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}),
    "number": Facts({"DYNAMICCL_SAMPLE_EVERY": "abc"}),
    "compiler": Facts(has_compiler=False),
    "plugin": Facts(plugin_fault="version `GLIBC_2.38' not found"),
    "shared memory": Facts(n_gpus=8, shm_free=64 * 2**20),
    "switched off": Facts(switched_off="/etc/dynamiccl/off"),
    "fixed table": Facts({"DYNAMICCL_TABLE": "x", "DYNAMICCL_RUN": "/y"}),
}


@pytest.mark.parametrize("name", list(SEEDED))
def test_each_trap_is_found(name):
    found = {finding.name: finding for finding in examine(SEEDED[name])}
    assert name in found and found[name].cure
    assert set(SEEDED) == {trap for trap, *_ in TRAPS} | {fault.name for fault in FAULTS}


def test_each_variable_that_passes_the_tuner_by_is_named():
    """Before: the second was told only once the first was cured."""
    found = examine(Facts({"NCCL_SYM_NOWIN_ENABLE": "1", "NCCL_CTA_POLICY": "ZERO"}))
    assert [finding.cure for finding in found] == ["unset NCCL_SYM_NOWIN_ENABLE", "unset NCCL_CTA_POLICY"]


def test_words_are_filled_from_what_was_found():
    found = [*examine(SEEDED["never offered"]), *examine(SEEDED["ranks on a GPU"])]
    assert "rule 2 of the table wants tree/ll" in found[0].what and "ring/ll" in found[0].cure
    assert found[1].what == "2 ranks share 1 GPUs: NCCL refuses" and "NCCL_HOSTID" in found[1].cure
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in found[1].cure  # else the next release is refused without it
    (protocol,) = examine(SEEDED["narrowed offer"])
    assert protocol.what.startswith(
        "NCCL_PROTO=^LL128 takes ring/ll128 of all_gather and ring/ll128 of reduce_scatter"
    )


@pytest.mark.parametrize(("every", "must"), [("0", []), ("1", [True])])
def test_slow_kernel_times_matter_only_where_they_are_asked_for(every, must):
    found = examine(Facts({"DYNAMICCL_SAMPLE_EVERY": every}, nccl=(2, 31, 2)))
    assert [finding.must_change for finding in found if finding.name == "profiler overhead"] == must


@pytest.mark.parametrize(
    ("free_mib", "nccl", "room"),
    [
        (64, None, 0),
        (2 * 272 + 65, (2, 29, 7), 0),
        (2 * 272 + 66, (2, 31, 2), 1),
        (6 * 272 + 65, None, 2),
        (6 * 272 + 66, None, None),
        (64, (2, 32, 3), None),
    ],
)
def test_the_sum_that_nccl_takes_for_kernel_times_is_said(free_mib, nccl, room):
    """Before: "0 traps" in a container in which our kernel times made a rank die, then the sum of one communicator,
    and then none of our rings: 272 MiB were said to be enough for one. Half of what is free stays the job's."""
    found = examine(Facts(n_gpus=8, shm_free=free_mib * 2**20, nccl=nccl))
    words = [one.what for one in found if one.name == "kernel times"]
    if room is None:
        assert words == []
        return
    assert not any(one.must_change for one in found if one.name == "kernel times")
    needs = f"{free_mib} MiB free. NCCL takes 272 MiB for the kernel times of 8 ranks, for each communicator"
    assert needs in words[0] and f"beside our rings there is room for {room}." in words[0]


@pytest.mark.parametrize(
    "facts", [Facts(), Facts({"DYNAMICCL_CLUSTER": "2 x 8 h100"}, (2, 29, 7))], ids=["no GPU", "emulated"]
)
def test_no_crash_of_nccl_is_told_where_none_runs(facts):
    """Before: a note about NCCL's crash in each CPU-only container, and on the emulated cluster."""
    small = replace(facts, shm_free=2**26)
    assert "kernel times" not in {one.name for one in examine(small)}
    assert "kernel times" in {one.name for one in examine(replace(small, env={}, n_gpus=8))}


@pytest.mark.parametrize(("gib", "n_ranks"), [(2, 8), (4, 16)])
def test_the_memory_that_a_cure_names_is_enough(gib, n_ranks):
    """Before: one GiB for 16 ranks, whose three communicators each take 1,632 MiB and leave as much."""
    names = {"kernel times", "shared memory"}
    found = [one for one in examine(Facts(n_gpus=n_ranks, shm_free=2**26)) if one.name in names]
    assert {one.name for one in found} == names
    assert all(f"{gib}g" in one.cure and str(n_ranks) in one.cure for one in found)
    assert not names & {one.name for one in examine(Facts(n_gpus=n_ranks, shm_free=gib * 2**30))}
    assert names & {one.name for one in examine(Facts(n_gpus=2 * n_ranks, shm_free=gib * 2**30))}


def number_in_c(file, name):
    """A constant of the plugin's sources."""
    (found,) = re.findall(rf"\b{name} = ([\d< ]+)", (build.HERE / file).read_text())
    return eval(found)


def test_the_plugin_and_the_table_of_faults_name_the_same_releases_and_memory():
    (fault,) = (fault for fault in FAULTS if fault.name == "kernel times")
    major, minor = fault.below
    assert number_in_c("room.c", "FIRST_RELEASE_WITHOUT_CRASH") == 10_000 * major + 100 * minor
    assert number_in_c("room.c", "POOL_BYTES") == POOL_MIB << 20
    records = [number_in_c("plugin.h", f"DCCL_{name}_RECORDS") for name in ("RING", "KNOWN")]
    assert 128 + sum(records) * 128 == RING_BYTES


@pytest.mark.parametrize(("free_mib", "is_said"), [(80, True), (576, True), (577, False)])
def test_rings_are_whole_where_an_eighth_of_the_free_space_holds_them(free_mib, is_said):
    """Before: 72 MiB were enough for 8 ranks, then 521, with which the last seven have half a ring."""
    found = [
        one
        for one in examine(Facts(ranks_per_node=8, shm_free=free_mib * 2**20))
        if one.name == "shared memory"
    ]
    assert bool(found) == is_said
    assert not found or f"{free_mib} MiB free; 8 ranks need 577" in found[0].what


@pytest.mark.parametrize(
    ("value", "whose"),
    [
        ("/x/libnccl-profiler-inspector.so", "NVIDIA's Inspector"),
        ("mine", "another profiler"),
        ("/venvs/dynamiccl/lib/libnccl-profiler-site.so", "another profiler"),
    ],
)
def test_who_has_the_profiler_s_place_is_named(value, whose):
    (found,) = examine(Facts({"NCCL_PROFILER_PLUGIN": value}))
    assert whose in found.what


@pytest.mark.parametrize("value", ["none", "NONE", "/x/libnccl-tuner-dynamiccl.so", "dynamiccl"])
def test_nobody_has_the_profiler_s_place(value):
    """NCCL reads "none" in letters of any case."""
    assert "NCCL_PROFILER_PLUGIN" not in {
        trap.name for trap in examine(Facts({"NCCL_PROFILER_PLUGIN": value}))
    }


def test_a_clean_environment_has_none():
    clean = Facts({}, (2, 29, 7), 8, 8, 2**33, True, table(*(Decision(*pair, 8) for pair in PAIRS)))
    assert [trap.name for trap in examine(clean)] == ["registered buffers"]
    assert examine(replace(clean, nccl=None)) == [] and not examine(Facts(nccl=(2, 29, 7)))[0].must_change
    assert examine(Facts()) == [] and not any(trap.must_change for trap in examine(Facts(nccl=(2, 28, 3))))


def test_silent_hangs_of_nccl_are_traps_of_their_releases():
    """NVIDIA/nccl#2353: the proxy loses slots on aarch64, until 2.29.3. #2389: registered buffers, since 2.24."""

    def found(machine, *nccl):
        return {trap.name: trap.must_change for trap in examine(Facts(nccl=nccl, machine=machine))}

    assert found("aarch64", 2, 29, 2)["proxy slots"] and found("aarch64", 2, 28, 9)["proxy slots"]
    assert "proxy slots" not in found("aarch64", 2, 29, 3) and "proxy slots" not in found("x86_64", 2, 28, 9)
    held = {
        release: "registered buffers" in found("x86_64", 2, release, 4) for release in (23, 24, 28, 32, 33)
    }
    assert held == {23: False, 24: True, 28: True, 32: True, 33: False}
    assert gather().machine == os.uname().machine


def test_doctor_says_what_it_looked_at():
    """Before: `[]`, or "nothing in the way of the tuner", and not a word of what had been looked at."""
    told = checked(
        Facts({"NCCL_DEBUG": "INFO"}, (2, 29, 7), 8, shm_free=2**33, table=table(Decision("ring", "ll")))
    )
    assert told["NCCL"] == "2.29.7" and told["GPUs"] == "8" and told["shared memory"] == "8.0 GiB free"
    assert told["variables"] == "NCCL_DEBUG" and told["traps"].endswith(" 1 here")
    assert {"PyTorch", "plugin"} < checked(Facts()).keys() and checked(Facts())["NCCL"].startswith("none")
    assert checked(Facts(has_compiler=False))["plugin"] == "no C compiler"


def test_doctor_loads_the_plugin_that_is_there(tmp_path):
    """Before: "plugin built, no compiler needed" and status 0, of a library that the machine's loader refuses."""
    (broken := tmp_path / "broken.so").write_bytes(b"of another machine")
    done = said("doctor", "--json", DYNAMICCL_PLUGIN=str(broken))
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and told["checked"]["plugin"] == "built, but cannot be loaded"
    (found,) = (one for one in told["findings"] if one["name"] == "plugin")
    assert str(broken) in found["what"]


def test_doctor_reads_the_environment_and_the_configuration_file(tmp_path):
    conf = tmp_path / "nccl.conf"
    conf.write_text("# site defaults, set in 2021\nNCCL_ALGO=Tree\n")
    done = said("doctor", "--json", NCCL_CONF_FILE=str(conf), HOME=str(tmp_path))
    told = json.loads(done.stdout)
    assert done.exit_code == 1 and [f["name"] for f in told["findings"]] == ["nothing offered"]
    assert "NCCL_ALGO" in told["checked"]["variables"]
    done = run("doctor", HOME=str(tmp_path))
    assert done.returncode == 0 and "CHANGE" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    "trap",
    [
        {"NCCL_ALGO": "Tree"},
        pytest.param({"NCCL_ALGO": "", "CUDA_LAUNCH_BLOCKING": "1"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("command", ["tune", "env", "apply"])
def test_what_must_be_changed_is_refused_with_its_cure_and_nothing_is_started(tmp_path, command, trap):
    """Before: only `doctor` itself looked.

    Seen at 679c0ae, ``tune`` never asks ``doctor``: starts with NCCL_ALGO=Tree without a word.
    """
    began = tmp_path / "began"
    job = ["--", sys.executable, "-c", f"open({str(began)!r}, 'w')"]
    words = {"tune": ["--out", str(tmp_path / "out")], "env": [], "apply": [str(small_gathers(tmp_path))]}[
        command
    ]
    words += job if command != "env" else []
    found = json.loads(said("doctor", "--json", HOME=str(tmp_path), **trap).stdout)["findings"]
    (cure,) = [finding["cure"] for finding in found if finding["must_change"]]
    done = said(command, *words, HOME=str(tmp_path), **trap)
    (line,) = done.stderr.strip().splitlines()
    assert done.exit_code == 2 and line.startswith("error:") and cure in line and "--force" in line, (
        done.stderr
    )
    assert not began.exists() and not (tmp_path / "out").exists() and not done.stdout
    # Said all the same by one who wants it so.
    done = run(command, "--force", *words, HOME=str(tmp_path), **trap)
    assert done.returncode == 0 and "warning:" in done.stderr and cure in done.stderr, done.stderr
    assert began.exists() == (command != "env")


def test_no_compiler_is_asked_for_where_the_plugin_lies_in_the_package(monkeypatch, tmp_path):
    """Before: `tune` refused to start in an image that had the plugin and no compiler."""
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.delenv("DYNAMICCL_PLUGIN", raising=False)
    monkeypatch.setattr(build, "INSTALLED", tmp_path)
    assert "compiler" in {trap.name for trap in examine(gather())}
    (tmp_path / f"{build.LIBRARY}.build").write_text(build.build_of())
    assert "compiler" not in {trap.name for trap in examine(gather())}


def test_ranks_per_node_from_the_command():
    assert gather(["torchrun", "--nproc_per_node=4", "train.py"]).ranks_per_node == 4
    assert gather(["torchrun", "--nproc-per-node", "8"]).ranks_per_node == 8
