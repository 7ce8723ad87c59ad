"""Hostile tables, rings and table files against their readers: ``python tests/tools/fuzz.py --minutes 5``.

Each input is a sound one with a few bytes changed, cut or repeated, half of them sealed again with a right checksum so
that the checks behind the checksum are reached too. A reader may refuse; it may not crash, hang, accept what its twin
refuses, or let a bad row through. A crash of the plugin ends the process, which is the finding.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.plugin.build import FLAGS, SOURCES, compile_once, compiler
from dynamiccl.envs.nccl.rings import _HEAD, _HEAD_AT, _HEAD_BYTES, RING_MAGIC, RING_VERSION, Ring
from dynamiccl.envs.nccl.shm import decode_table, encode_table
from dynamiccl.envs.nccl.tables import load_table, to_json
from dynamiccl.traces.records import FUNCS, PAIRS, RECORD_BYTES, Decision, Rule, Table

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

from nccl_releases import Communicator, choose


def mutate(sound: bytes, rng: random.Random) -> bytes:
    """``sound`` with up to four changes."""
    data = bytearray(sound)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.choice((1, 8, 32)))
        elif kind == 2 and len(data) > 8:
            at -= at % 8
            data[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
        elif at < len(data):
            data[at] = rng.randrange(256)
        if not data:
            break
    return bytes(data)


def sealed(message: bytes) -> bytes:
    """A table message with the checksum that its bytes should have."""
    if len(message) < 64:
        return message
    end = 64 + 32 * struct.unpack_from("<I", message, 12)[0]
    bare = message[:20] + bytes(12) + message[32:64]
    return message[:20] + struct.pack("<I", zlib.crc32(message[64:end], zlib.crc32(bare))) + message[24:]


def random_table(rng: random.Random) -> Table:
    """A sound table of up to 30 rows."""
    rules, low = [], 0
    for _ in range(rng.randrange(30)):
        low += rng.randint(1, 2**20)
        decision, threads = Decision(*rng.choice(PAIRS), rng.randrange(65)), 0
        if rng.random() < 0.25:  # a ceiling
            decision, threads = Decision(None, None, rng.randint(1, 64)), rng.choice((256, 512))
        rules.append(
            Rule(
                *rng.choice(((0, 0), (8, 1))),
                rng.choice(FUNCS[2:4]),
                low,
                low := low + rng.randint(0, 2**20),
                decision,
                threads,
            )
        )
    return Table(rng.randrange(2**32), tuple(rules), rng.choice((0, 1, rng.randint(2, 9999), 2**32 - 1)))


def fixed(plugin: Plugin) -> int:
    """Generation of the table that holds where nothing was agreed."""
    plugin.ended()  # what was asked so far
    return plugin.ended().generation


def fuzz_table(plugin: Plugin, comm: Communicator, rng: random.Random) -> str:
    """One message to the plugin and to Python; then a question, whatever table is active now."""
    message = mutate(encode_table(random_table(rng)), rng)
    if rng.random() < 0.5:
        message = sealed(message)
    before = fixed(plugin)
    try:
        plugin.activate(message)
        outcome = "table taken"
        table = decode_table(message)  # what the plugin takes, Python understands
        assert fixed(plugin) == table.generation
    except ValueError as error:
        assert "plugin refuses" in str(error), f"only the plugin took it: {error}"
        assert fixed(plugin) == before
        outcome = "table refused"
    cost = np.full((7, 3), -1, np.float32)
    cost[1] = 10, 20, 30
    n_channels = comm.get_coll_info(rng.choice(FUNCS[2:4]), rng.randrange(2**24), cost)
    assert 0 <= n_channels <= 64 and choose(cost)[0] == 1 and (cost[[0, 2, 3, 4, 5, 6]] == -1).all()
    return outcome


def fuzz_ring(path: Path, rng: random.Random) -> str:
    """One ring file, changed again while it is read."""
    capacity = 16
    head = _HEAD.pack(RING_MAGIC, RING_VERSION, RECORD_BYTES, capacity, 1, 4).ljust(_HEAD_AT, b"\0")
    n = rng.randrange(3 * capacity)
    slots = [bytes(RECORD_BYTES)] * capacity
    for i in range(n):
        slots[i % capacity] = struct.pack("<QB", i + 1, rng.randrange(7)).ljust(RECORD_BYTES, b"\1")
    head = (head + struct.pack("<QQ", n, 3)).ljust(_HEAD_BYTES, b"\0")
    sound = head + bytes(4 * RECORD_BYTES) + b"".join(slots)
    path.write_bytes(mutate(sound, rng))
    try:
        ring = Ring(path)
    except ValueError:
        return "ring refused"
    try:
        assert len(ring.drain()) <= ring.capacity + 4
        path.write_bytes(mutate(sound, rng))
        assert len(ring.drain()) <= ring.capacity + len(ring.known())
        assert ring.lost >= 0
        return "ring read"
    except ValueError:
        return "ring given up"
    finally:
        ring.close()


def fuzz_text(path: Path, rng: random.Random) -> str:
    """One table in JSON."""
    table = random_table(rng)
    path.write_bytes(mutate(to_json(table).encode(), rng))
    try:
        encode_table(load_table(path))
        return "text read"
    except ValueError as error:
        assert "\n" not in str(error)
        return "text refused"


def fuzz(n: int, seed: int = 1) -> Counter[str]:
    """Feed each reader ``n`` inputs; how many ended how. The same seed gives the same inputs, on a slow machine too.
    AssertionError is a finding."""
    rng, counts = random.Random(seed), Counter[str]()
    plugin = Plugin.load()
    comm = Communicator(plugin.path, 1, 8, 1, 0)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(n):
            counts[fuzz_table(plugin, comm, rng)] += 1
            counts[fuzz_ring(Path(folder, "ring-1"), rng)] += 1
            counts[fuzz_text(Path(folder, "table"), rng)] += 1
    comm.finalize()
    return counts


def under_sanitizers() -> None:
    """Start again with a plugin built with AddressSanitizer and UndefinedBehaviorSanitizer, and their runtime."""
    flags = (*FLAGS, "-shared", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    library = compile_once("sanitized.so", SOURCES, flags)
    runtime = subprocess.check_output([*compiler(), "-print-file-name=libasan.so"], text=True).strip()
    # The interpreter's own leaks are not the question.
    env = {"LD_PRELOAD": runtime, "DYNAMICCL_PLUGIN": str(library), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-m", __spec__.name, *(word for word in sys.argv[1:] if word != "--sanitize")]
    os.execve(sys.executable, command, {**os.environ, **env})


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer (gcc) in the plugin")
    args = parser.parse_args()
    if args.sanitize:
        under_sanitizers()
    print(f"seeds from {args.seed} on, 1,000 inputs each", flush=True)
    counts, end, seed = Counter[str](), time.monotonic() + 60 * args.minutes, args.seed
    while time.monotonic() < end:
        counts += fuzz(1000, seed)
        seed += 1
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())) + "; no finding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
