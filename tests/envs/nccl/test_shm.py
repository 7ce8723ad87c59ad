"""Rings and tables in shared memory: nothing lost unseen, nothing torn, nothing that a bad file can break."""

import os
import shutil
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from dynamiccl.envs.nccl import rings
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.plugin.build import plugin_path
from dynamiccl.envs.nccl.rings import RING_VERSION, Ring
from dynamiccl.envs.nccl.shm import RunFolder, decode_table, encode_table, trial_of
from dynamiccl.traces.records import COLL, RECORD_BYTES, Decision, Rule, Table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nccl_releases import REACH

KNOWN = 1024  # places for what is told once, before the ring


@pytest.fixture
def producer(folder, tmp_path, monkeypatch):
    """A copy of the plugin with a ring of its own in ``folder``."""
    monkeypatch.setenv("DYNAMICCL_RUN", str(folder.path))
    copy = tmp_path / "plugin.so"
    shutil.copy(plugin_path(), copy)
    plugin = Plugin.load(copy)
    assert plugin.open() and plugin.open()
    return plugin


def write(plugin: Plugin, first: int, n: int) -> None:
    """``n`` records whose bytes all depend on their number, so that a torn one shows."""
    for i in range(first, first + n):
        plugin.emit(record(i))


def record(i: int) -> bytes:
    return struct.pack("<QB7x14Q", 0, COLL, *([i] * 14))


def sound(records: np.ndarray) -> bool:
    words = records.view(np.uint64).reshape(-1, 16)[:, 2:]
    return bool((words == words[:, :1]).all())


def numbers(records: np.ndarray) -> list[int]:
    return [int(n) for n in records["comm_id"]]


def table_of(generation: int, n: int = 3, trial_steps: int = 0) -> Table:
    rules = [
        Rule(0, 0, "all_gather", i * 10, i * 10 + 9, Decision("ring", "ll", 1 + i % 64)) for i in range(n)
    ]
    return Table(generation, tuple(rules), trial_steps)


# -- rings ---------------------------------------------------------------------------------------------------------


def test_drain_gives_each_record_once_in_order(folder, producer):
    (ring,) = folder.rings()
    assert len(ring.drain()) == 0
    write(producer, 0, 1000)
    assert numbers(ring.drain()) == list(range(1000))
    write(producer, 1000, 5)
    assert numbers(ring.drain()) == list(range(1000, 1005))
    assert (ring.lost, ring.pid) == (0, os.getpid())


def test_ring_wraps(folder, producer):
    (ring,) = folder.rings()
    got = 0
    for _ in range(3):
        write(producer, got, 30_000)
        new = ring.drain()
        assert numbers(new) == list(range(got, got + 30_000)) and sound(new)
        got += 30_000
    assert got > ring.capacity and ring.lost == 0


def test_lapped_reader_counts_what_it_missed(folder, producer):
    (ring,) = folder.rings()
    total = ring.capacity + 5000
    write(producer, 0, total)
    new = ring.drain()
    assert numbers(new) == list(range(total - ring.capacity // 2, total))
    assert ring.lost == total - ring.capacity // 2


def test_threads_race_a_reader(folder, producer):
    """Four C loops (ctypes lets the lock go) against one reader: whole records, each at most once, sums add up."""
    (ring,) = folder.rings()
    per_thread = 40_000

    def produce(k: int) -> None:
        write(producer, k * per_thread, per_thread)

    threads = [threading.Thread(target=produce, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    parts = []
    while any(t.is_alive() for t in threads):
        parts.append(ring.drain())
        time.sleep(0.002)
    parts.append(ring.drain())
    new = np.concatenate(parts)
    assert sound(new)
    assert len(new) + ring.lost == 4 * per_thread
    assert len(set(numbers(new))) == len(new)
    for k in range(4):
        mine = [n for n in numbers(new) if n // per_thread == k]
        assert mine == sorted(mine)


def test_a_half_written_record_is_waited_for_then_given_up(folder, producer, monkeypatch):
    (ring,) = folder.rings()
    write(producer, 0, 10)
    (path,) = folder.path.glob("ring-*")
    with path.open("r+b") as file:  # the fifth record's writer is asleep
        file.seek(128 + (KNOWN + 4) * RECORD_BYTES)
        file.write(b"\xff" * 8)
    assert numbers(ring.drain()) == [0, 1, 2, 3]
    assert len(ring.drain()) == 0
    monkeypatch.setattr(rings, "_PATIENCE_S", 0.0)
    assert numbers(ring.drain()) == [5, 6, 7, 8, 9]
    assert ring.lost == 1


def test_a_fork_does_not_write_into_its_parents_ring(folder, producer):
    write(producer, 0, 3)
    child = os.fork()
    if child == 0:
        write(producer, 100, 3)  # no ring: goes nowhere
        producer.open()
        write(producer, 200, 2)
        os._exit(0)
    os.waitpid(child, 0)
    rings = {ring.pid: numbers(ring.drain()) for ring in folder.rings()}
    assert rings == {os.getpid(): [0, 1, 2], child: [200, 201]}


@pytest.mark.parametrize(
    ("obstacle", "said"),
    [
        ("missing", ""),  # its run is over
        ("not a folder", "Not a directory"),
        ("others may write", "others may write to it"),
        ("unset", ""),
    ],
)
def test_no_ring_no_harm(tmp_path, obstacle, said):
    """Whatever is wrong with the folder: the job runs without a ring, and says why."""
    path = tmp_path / "run"
    if obstacle == "not a folder":
        path.write_text("")
    elif obstacle == "others may write":
        path.mkdir()
        path.chmod(0o777)
    env = {**os.environ, "DYNAMICCL_RUN": str(path)}
    if obstacle == "unset":
        del env["DYNAMICCL_RUN"]
    program = """
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from nccl_releases import Communicator
p = Plugin.load()
c = Communicator(p.path, 1, 2, 1, 0)
print(p.open(), c.profiler.mask)
p.emit(bytes(128))
c.finalize()
"""
    done = subprocess.run(
        [sys.executable, "-c", REACH + program], env=env, capture_output=True, text=True, check=True
    )
    # Of a run: collectives are counted all the same, where they are called (2) and where they are launched (2048).
    mask = "0" if obstacle == "unset" else str(2 + 2048)
    assert done.stdout.split() == ["False", mask]
    assert done.stderr.count("\n") == bool(said) and said in done.stderr


def forge(
    path,
    capacity: int = 8,
    head: int = 0,
    magic: bytes = b"DCCLRNG1",
    version: int = RING_VERSION,
    cut: int = 0,
) -> None:
    body = struct.pack("<8sIIQI", magic, version, RECORD_BYTES, capacity, 1).ljust(64, b"\0")
    body += struct.pack("<Q", head).ljust(64, b"\0")
    for i in range(min(capacity, 1024)):
        body += struct.pack("<Q", i + 1).ljust(RECORD_BYTES, b"\0")
    path.write_bytes(body[: len(body) - cut])


def test_bad_ring_files_are_refused_with_a_reason(folder):
    forge(folder.path / "ring-1", magic=b"WHATEVER")
    forge(folder.path / "ring-2", version=9)
    forge(folder.path / "ring-3", capacity=7)
    forge(folder.path / "ring-4", capacity=2**40)
    forge(folder.path / "ring-5", cut=1)
    (folder.path / "ring-6").write_bytes(b"")
    (folder.path / "ring-7").symlink_to("/dev/zero")
    os.mkfifo(folder.path / "ring-8")
    (folder.path / "ring-9").mkdir()
    forge(folder.path / "ring-10", head=8)
    assert [ring.name for ring in folder.rings()] == ["ring-10"]
    assert sorted(folder.refused) == [f"ring-{i}" for i in range(1, 10)]
    assert len(folder.rings()[0].drain()) == 8


def test_a_ring_that_goes_bad_while_it_is_read(folder):
    path = folder.path / "ring-1"
    forge(path, head=8)
    ring = Ring(path)
    assert len(ring.drain()) == 8
    for head in (3, 2**63):  # backwards, absurd
        with path.open("r+b") as file:
            file.seek(64)
            file.write(struct.pack("<Q", head))
        with pytest.raises(ValueError, match="damaged"):
            ring.drain()
    with path.open("r+b") as file:
        file.seek(64)
        file.write(struct.pack("<Q", 12))
        file.truncate(300)
    with pytest.raises(ValueError, match="cut off"):
        ring.drain()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=2000), st.integers(0, 2**64 - 1), st.booleans())
def test_hostile_rings_never_break_the_reader(folder, noise, head, keep_header):
    path = folder.path / "ring-1"
    body = struct.pack("<8sIIQI", b"DCCLRNG1", RING_VERSION, RECORD_BYTES, 8, 1).ljust(64, b"\0")
    body += struct.pack("<Q", head).ljust(64, b"\0")
    path.write_bytes((body if keep_header else b"") + noise + bytes(9 * RECORD_BYTES))
    try:
        ring = Ring(path)
    except ValueError:
        return
    try:
        for _ in range(2):
            assert len(ring.drain()) <= ring.capacity
    except ValueError:
        pass
    finally:
        ring.close()


# -- tables --------------------------------------------------------------------------------------------------------


def test_table_there_and_back(folder):
    assert folder.table.read() is None
    for generation, n, trial_steps in ((1, 3, 0), (2, 126, 40), (3, 0, 2**32 - 1)):
        table = table_of(generation, n, trial_steps)
        folder.table.publish(table)
        found, message = folder.table.read()
        assert (found, message) == (generation, encode_table(table))
        assert decode_table(message) == table and trial_of(message).trial_steps == trial_steps
    with pytest.raises(ValueError, match="at most 126"):
        folder.table.publish(table_of(4, 127))
    assert folder.table.read()[0] == 3


def test_a_daemon_that_died_while_it_wrote(folder):
    folder.table.publish(table_of(1))
    with (folder.path / "table").open("r+b") as file:
        file.seek(16)
        file.write(struct.pack("<I", 2))  # the next one's number, and no more of it
    assert folder.table.read() is None
    RunFolder(folder.path).table.publish(table_of(3))  # its successor
    assert folder.table.read()[0] == 3


def test_reader_never_sees_a_torn_table(folder):
    """A writer in another process, tables of changing length: what is read is one of them, whole."""
    program = f"""
import sys
from dynamiccl.envs.nccl.shm import TableFile
from dynamiccl.traces.records import Decision, Rule, Table
from pathlib import Path
file = TableFile(Path({str(folder.path / "table")!r}), write=True)
tables = [Table(g, tuple(Rule(0, 0, "all_gather", i * 10, i * 10 + 9, Decision("ring", "ll", g)) for i in range(g)))
          for g in range(1, 60)]
print("ready", flush=True)
while True:
    for table in tables:
        file.publish(table)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        seen, read = set(), 0
        end = time.monotonic() + 2
        while time.monotonic() < end:
            found = folder.table.read()
            if found is None:
                continue
            generation, message = found
            table = decode_table(message)
            assert len(table.rules) == generation == table.generation
            assert {rule.decision.n_channels for rule in table.rules} == {generation}
            seen.add(generation)
            read += 1
        assert read > 100 and len(seen) > 5
    finally:
        child.kill()
        child.wait()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_hostile_tables_are_refused_by_python_and_by_the_plugin_alike(data):
    message = bytearray(encode_table(table_of(5, 4)))
    for _ in range(data.draw(st.integers(0, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    raw = bytes(message[: data.draw(st.integers(0, len(message)))] if data.draw(st.booleans()) else message)
    plugin = Plugin.load()
    try:
        table = decode_table(raw)
    except ValueError:
        with pytest.raises(ValueError, match="refuses"):
            plugin.activate(raw)
    else:
        assert plugin.activate(raw) == table.generation


def test_lookups_race_activations(tmp_path):
    """Threads ask while another activates table after table: each answer is a row of one of them, never a mixture."""
    copy = tmp_path / "plugin.so"
    shutil.copy(plugin_path(), copy)
    plugin = Plugin.load(copy)
    from nccl_releases import Communicator, choose

    # Table g forces ring/ll with g channels or ring/simple with 32 + g: the pair tells the parity of the count.
    def message(g: int) -> bytes:
        decision = Decision("ring", "ll", g) if g % 2 else Decision("ring", "simple", g)
        rules = [Rule(0, 0, "all_gather", i * 10, i * 10 + 9, decision) for i in range(500 + g)]
        return encode_table(Table(g, tuple(rules)))

    messages = [message(g) for g in range(1, 65)]
    plugin.activate(messages[0])
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for m in messages:
                plugin.activate(m)

    swapper = threading.Thread(target=swap)
    swapper.start()
    comm = Communicator(plugin.path, 1, 2, 1, 0)
    try:
        answers = set()
        for i in range(20_000):
            cost = np.full((7, 3), -1, np.float32)
            cost[1] = 10, 20, 30
            n = comm.get_coll_info("all_gather", i % 5000, cost)
            _, proto = choose(cost)
            assert n >= 1 and proto == (0 if n % 2 else 2)
            answers.add(n)
        assert len(answers) > 10
    finally:
        stop.set()
        swapper.join()
        comm.finalize()
