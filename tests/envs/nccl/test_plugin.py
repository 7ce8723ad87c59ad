"""The real plugin, through every version that it exports, called as each NCCL release calls it."""

import ctypes
import os
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from both_modes import tells
from dynamiccl.envs.nccl.plugin.build import (
    HEADERS,
    HERE,
    LIBRARY,
    PluginBuildError,
    compiler,
    nccl_env,
    plugin_path,
)
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces import records as rec
from dynamiccl.traces.records import ALGOS, PAIRS, PROTOS, Decision, Rule, Slot, Table
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_releases import Communicator, choose, versions
from plugin_run import MB, RELEASES, fixed, offer, plugin, run

__all__ = ["plugin", "run", "tells"]  # fixtures


def test_symbols_are_those_of_the_versions_and_the_control_functions():
    names = subprocess.run(
        ["nm", "-D", "--defined-only", plugin_path()], capture_output=True, text=True, check=True
    ).stdout.split()[2::3]
    versions_of = {f"ncclTunerPlugin_v{v}" for v in (3, 4, 5, 6)} | {f"ncclProfiler_v{v}" for v in (4, 5, 6)}
    assert {n for n in names if n.startswith("nccl")} == versions_of
    assert all(n.startswith("dynamiccl_") for n in names if not n.startswith("nccl"))


def test_records_in_c_are_those_of_python(tmp_path):
    """Offsets and sizes, from the compiler's mouth."""
    fields = {
        "comm": ("rank", "n_ranks", "n_nodes", "name"),
        "offer": ("cost_us", "n_pipe_ops"),
        "coll": ("seq", "enqueue_ns", "rank", "asked_bytes"),
        "state": ("rank", "code", "text"),
        "kernel": ("seq", "start_ns", "end_ns", "rank"),
        "at_step": rec.STEP_DTYPE.names[12:-1],
    }
    dtypes = {
        "comm": rec.COMM_DTYPE,
        "offer": rec.OFFER_DTYPE,
        "coll": rec.COLL_DTYPE,
        "state": rec.STATE_DTYPE,
        "kernel": rec.KERNEL_DTYPE,
        "at_step": rec.STEP_DTYPE,
        "wait": rec.WAIT_DTYPE,
    }
    expected = {f"{k}.{f}": dtypes[k].fields[f][1] for k, names in fields.items() for f in names}
    heads = ("stamp", "kind", "func", "algo", "proto", "n_channels", "dtype", "flags")
    heads += ("comm_id", "n_bytes", "step", "generation")
    expected |= {f: rec.COLL_DTYPE.fields[f][1] for f in heads}
    lines = [f'printf("{f} %zu\\n", offsetof(struct dccl_record, {f}));' for f in expected]
    rule = [f'printf("rule.{f} %zu\\n", offsetof(struct dccl_rule, {f}));' for f in rec.RULE_DTYPE.names]
    expected |= {f"rule.{f}": rec.RULE_DTYPE.fields[f][1] for f in rec.RULE_DTYPE.names}
    source = tmp_path / "offsets.c"
    source.write_text(
        '#include <stdio.h>\n#include "plugin.h"\nint main(void) {' + "".join(lines + rule) + "return 0; }"
    )
    program = tmp_path / "offsets"
    subprocess.run([*compiler(), "-std=c11", f"-I{HERE}", source, "-o", program], check=True)
    said = dict(line.split() for line in subprocess.check_output([program], text=True).splitlines())
    assert {k: int(v) for k, v in said.items()} == expected


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_obeys_the_table(plugin, release):
    slot = Slot(0, 0, "all_gather", rec.size_class(MB))
    plugin.activate(encode_table(Table.of(3, {slot: Decision("ring", "simple", 8)})))
    comm = Communicator(plugin.path, 42, 8, 1, 0, release)
    cost = offer(ring_ll=10, ring_ll128=20, ring_simple=30, nvls_simple=25)
    n_channels = comm.get_coll_info("all_gather", MB, cost)
    assert choose(cost) == (ALGOS.index("ring"), PROTOS.index("simple"))
    assert n_channels == 8
    assert (
        cost[ALGOS.index("ring"), 0] == 10
        and (cost == offer(ring_ll=10, ring_ll128=20, nvls_simple=25)).sum() == 20
    )
    # The message one byte above the class, and the other collective, are not in the table.
    for func, n_bytes in (("all_gather", MB + 1), ("reduce_scatter", MB)):
        cost = offer(ring_ll=10, ring_simple=30)
        assert comm.get_coll_info(func, n_bytes, cost) == 0
        assert np.array_equal(cost, offer(ring_ll=10, ring_simple=30))
    comm.finalize()


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_unset_stays_unset(plugin, release):
    comm = Communicator(plugin.path, 42, 8, 1, 0, release)
    slot = Slot(0, 0, "all_gather", 20)
    cases = [
        (Decision("ring", "simple"), 0, 0),  # pair without channels: NCCL's count stays
        (Decision("ring", "simple"), 5, 5),
        (Decision(None, None, 4), 0, 4),  # channels without a pair: NCCL's pair stays
        (Decision("pat", "simple", 4), 0, 0),  # not offered: the whole decision is void
    ]
    for decision, before, after in cases:
        plugin.activate(encode_table(Table.of(1, {slot: decision})))
        cost = offer(ring_ll=10, ring_simple=30)
        assert comm.get_coll_info("all_gather", MB, cost, n_channels=before) == after
        forced = decision.algo == "ring"
        assert choose(cost) == ((1, 2) if forced else (1, 0))
        assert forced or np.array_equal(cost, offer(ring_ll=10, ring_simple=30))
    nothing = offer()
    assert comm.get_coll_info("all_gather", MB, nothing) == 0 and np.array_equal(nothing, offer())
    comm.finalize()


@pytest.mark.parametrize("release", RELEASES)
def test_the_row_of_a_class_goes_before_the_row_for_all(plugin, release):
    slots = {
        Slot(0, 0, "all_gather", 20): Decision("ring", "simple"),
        Slot(16, 1, "all_gather", 20): Decision("ring", "ll"),
    }
    rules = [Rule.of(s, d) for s, d in slots.items()]
    rules.append(Rule(16, 2, "all_gather", 0, 2**40, Decision()))  # these are left alone
    plugin.activate(encode_table(Table(1, tuple(rules))))
    chosen = {}
    for n_ranks, n_nodes in ((8, 1), (16, 1), (16, 2), (1, 16)):
        comm = Communicator(plugin.path, 7, n_ranks, n_nodes, 0, release)
        cost = offer(ring_ll=20, ring_ll128=10, ring_simple=30)
        comm.get_coll_info("all_gather", MB, cost)
        chosen[n_ranks, n_nodes] = PROTOS[choose(cost)[1]]
        comm.finalize()
    assert chosen == {(8, 1): "simple", (16, 1): "ll", (16, 2): "ll128", (1, 16): "simple"}


decisions = st.sampled_from([Decision(None, None, 3), *(Decision(*p, n) for p in PAIRS for n in (0, 1, 64))])
costs = st.lists(
    st.sampled_from([-1.0, 0.0, 1.5, 40.0, 1e6, float("nan"), float("inf"), -0.5, 1.7e38]),
    min_size=21,
    max_size=21,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_tables_and_offers_against_the_rules_in_python(run, data):
    """The plugin, whatever it is offered, does what twenty lines of Python say it should."""
    plugin = run[1]
    bounds = sorted(data.draw(st.lists(st.integers(0, 2**48), min_size=2, max_size=12, unique=True)))
    rules = []
    for sizes in ((0, 0), (8, 1)):
        for low, high in zip(bounds[::2], bounds[1::2], strict=False):
            if data.draw(st.booleans()):
                rules.append(Rule(*sizes, "reduce_scatter", low, high, data.draw(decisions)))
    plugin.activate(encode_table(Table(1, tuple(rules))))
    n_bytes = data.draw(st.one_of(st.sampled_from(bounds), st.integers(0, 2**48)))
    cost = np.array(data.draw(costs), np.float32).reshape(7, 3)
    fits = [r for r in rules if r.min_bytes <= n_bytes <= r.max_bytes]
    rule = next((r for n in (8, 0) for r in fits if r.n_ranks == n), None)
    valid = (cost >= 0) & (cost < 1e30)
    wanted, runs = None, None
    if rule is not None and rule.decision.algo is None:
        runs = choose(np.where(valid, cost, -1))
    elif rule is not None:
        cell = ALGOS.index(rule.decision.algo), PROTOS.index(rule.decision.proto)
        if valid[cell]:
            wanted = runs = cell
    clipped = runs is not None and ALGOS[runs[0]] in ("tree", "ring", "nvls", "pat") and valid.any()
    n_wanted = rule.decision.n_channels if clipped else 0
    comm = Communicator(plugin.path, 42, 8, 1, 0, data.draw(st.sampled_from(RELEASES)))
    after = cost.copy()
    assert comm.get_coll_info("reduce_scatter", n_bytes, after, n_channels=0) == n_wanted
    comm.finalize()
    if wanted is None:
        assert np.array_equal(after, cost, equal_nan=True)
    else:
        assert choose(after) == wanted
    assert np.array_equal(after[~valid], cost[~valid], equal_nan=True), (
        "a cell that was not offered was touched"
    )
    assert not (after[valid] < 0).any()


def test_broken_callers_survive(plugin):
    """NULL and nonsense in every argument: success, and nothing written."""
    plugin.activate(
        encode_table(Table(1, (Rule(0, 0, "all_gather", 0, 2**63, Decision("pat", "simple", 9)),)))
    )
    library = plugin.shared_object
    info = ctypes.CFUNCTYPE(
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p),
    )((ctypes.c_void_p * 4).in_dll(library, "ncclTunerPlugin_v5")[2])
    comm = Communicator(plugin.path, 42, 8, 1, 0)
    context, cost = comm.tuner.context, offer(ring_ll=10, pat_simple=20)
    table = cost.ctypes.data
    for args in (
        (None, 2, MB, 1, table, 7, 3, 0, None),
        (context, 2, MB, 1, None, 7, 3, 0, None),
        (context, -1, MB, 1, table, 7, 3, 0, None),
        (context, 99, MB, 1, table, 7, 3, 0, None),
        (context, 2, MB, 1, table, 0, 3, 0, None),
        (context, 2, MB, 1, table, 7, -3, 0, None),
        (context, 2, MB, 1, table, 6, 3, 0, None),  # an older NCCL without PAT
        (context, 2, MB, 1, table, 2**30, 2**30, 0, None),
    ):
        assert info(*args) == 0
        assert np.array_equal(cost, offer(ring_ll=10, pat_simple=20)), args
    assert info(context, 2, MB, 1, table, 7, 3, 0, None) == 0  # no place for the channels: the pair alone
    assert choose(cost) == (6, 2)
    comm.finalize()


def test_messages_that_are_no_table_change_nothing(plugin):
    good = encode_table(
        Table(9, (Rule(0, 0, "all_gather", 0, 9, Decision()), Rule(0, 0, "all_gather", 10, 20, Decision())))
    )
    assert plugin.activate(good) == 9
    row = rec.RULE_DTYPE.itemsize

    def sealed(head: bytes, rows: bytes) -> bytes:
        bare = head[:20] + bytes(12) + head[32:]
        return head[:20] + struct.pack("<I", zlib.crc32(rows, zlib.crc32(bare))) + head[24:] + rows

    head, rows = good[:64], good[64:]
    wrong = {
        "empty": b"",
        "short": good[:63],
        "cut": good[:-1],
        "magic": b"X" + good[1:],
        "version": sealed(head[:8] + struct.pack("<I", 1) + head[12:], rows),
        "half a class": sealed(head, struct.pack("<I", 8) + rows[4:row]),
        "rows": sealed(head[:12] + struct.pack("<I", 1025) + head[16:], rows),
        "flipped": good[:70] + bytes([good[70] ^ 1]) + good[71:],
        "order": sealed(head, rows[row:] + rows[:row]),
        "overlap": sealed(head, rows[:row] * 2),
        "algo": sealed(head, rows[:25] + b"\x07" + rows[26:]),
        "half a pair": sealed(head, rows[:25] + b"\x01" + rows[26:]),
        "channels": sealed(head, rows[:27] + b"\x41" + rows[28:]),
        "func": sealed(head, rows[:row] + rows[row : row + 24] + b"\x08" + rows[row + 25 :]),
    }
    for name, message in wrong.items():
        with pytest.raises(ValueError, match="refuses"):
            plugin.activate(message)
        assert fixed(plugin) == 9, name
    assert plugin.activate(sealed(head, rows)) == 9  # the seal of this test is the real one


def test_static_table_by_environment():
    """Without a daemon: the table travels in the environment, and nonsense there is said once and ignored."""
    message = encode_table(Table(4, (Rule(0, 0, "all_gather", 0, 2**40, Decision("ring", "simple")),)))
    program = "from dynamiccl.envs.nccl.plugin.bindings import Plugin as P; p = P.load(); "
    program += "print(p.open(), p.ended().generation)"
    for value, generation in (("hex:" + message.hex(), 4), ("hex:00zz", 0), ("/nowhere", 0), ("hex:", 0)):
        env = {**os.environ, "DYNAMICCL_TABLE": value}
        env.pop("DYNAMICCL_RUN", None)
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["False", str(generation)]
        assert ("DYNAMICCL_TABLE" in done.stderr) == (generation == 0)


def test_versions_by_release():
    assert versions("2.22.3") == ((3,), ())
    assert versions("2.26.2") == ((4, 3), ())
    assert versions("2.29.7") == ((5, 4, 3), (6, 5, 4))
    assert versions("2.32.3") == ((6, 5, 4, 3), (7, 6, 5, 4))
    for bad in ("2.21.5", "", "x.y", "1.2"):
        with pytest.raises(ValueError, match=r"2\.22"):
            versions(bad)


def test_build_says_what_is_missing(monkeypatch, tmp_path):
    monkeypatch.delenv("DYNAMICCL_PLUGIN", raising=False)
    plugin_folder = plugin_path().parent
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(PluginBuildError, match="install gcc or clang"):
        plugin_path()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\necho 'error: out of order' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    with pytest.raises(PluginBuildError, match="out of order"):
        plugin_path()
    assert (plugin_folder / LIBRARY).is_file()
    assert nccl_env(tmp_path / "x.so")["LD_LIBRARY_PATH"].split(":")[0] == str(tmp_path)
    assert set(HEADERS) <= {p.name for p in HERE.glob("*.h")}


#: A file system that is interrupted by a signal, so often.
INTERRUPTED_C = """
#include <unistd.h>
#include <errno.h>
#include <fcntl.h>
int posix_fallocate(int fd, off_t from, off_t size) {
  static int n;
  return n++ < 3 ? EINTR : ftruncate(fd, from + size);
}
"""


def test_a_signal_costs_no_rank_its_ring(tmp_path):
    """Before: where one came as the ring was reserved, the rank was said to find no room in shared memory."""
    source, library = tmp_path / "interrupted.c", tmp_path / "interrupted.so"
    source.write_text(INTERRUPTED_C)
    subprocess.run([*compiler(), "-shared", "-fPIC", "-w", str(source), "-o", str(library)], check=True)
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    env = {**os.environ, "DYNAMICCL_RUN": str(path), "LD_PRELOAD": str(library)}
    program = f"import ctypes; print(ctypes.CDLL({os.fspath(plugin_path())!r}).dynamiccl_open())"
    assert subprocess.check_output([sys.executable, "-c", program], env=env, text=True).split() == ["1"]
