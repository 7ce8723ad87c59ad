"""The identity of a life: one start of a process."""

import os
import subprocess
import sys

from dynamiccl.envs.nccl import life


def _in_a_fork(work):
    reads, writes = os.pipe()
    if not (child := os.fork()):
        os.write(writes, repr(work()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reads, 1000).decode()
    os.close(reads)
    os.close(writes)
    return child, told


def test_a_process_keeps_its_identity_and_each_fork_has_its_own():
    """Ranks may be forked from a launcher that has imported this."""
    own = life.own()
    assert 0 < own < 2**64 and own == life.own()
    told = {_in_a_fork(life.own)[1] for _ in range(3)} | {str(own)}
    assert len(told) == 4


def test_each_start_has_its_own():
    command = [sys.executable, "-c", "from dynamiccl.envs.nccl import life; print(life.own())"]
    told = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(told) == 2


def test_what_the_plugin_is_told_is_of_this_process_also_in_a_fork(monkeypatch):
    """A child that does not announce its own inherits a word that names its parent."""
    monkeypatch.setattr(life, "_is_announced", False)
    monkeypatch.delenv(life.VARIABLE, raising=False)
    life.announce()
    assert os.environ[life.VARIABLE] == f"{os.getpid()}:{life.own()}"
    child, told = _in_a_fork(lambda: (life.own(), os.environ[life.VARIABLE]))
    own, said = eval(told)
    assert said == f"{child}:{own}" and own != life.own()


RINGS = """
import os, sys
from pathlib import Path
from dynamiccl.envs.nccl import life
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.rings import Ring
if "announced" in sys.argv:
    life.announce()
plugin = Plugin.load()
def ring():
    plugin.open()
    print(life.own(), Ring.of_this_process(Path(os.environ["DYNAMICCL_RUN"])).life, flush=True)
ring()
own = Ring.of_this_process(Path(os.environ["DYNAMICCL_RUN"]))
assert own.start() == ""
plugin.started(2**64 - 1)
assert own.start() == "f" * 16
child = os.fork()
if not child:
    ring()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_ring_has_the_identity_of_its_process(folder):
    """A process that announces none, as one without our probe, has a number of its own in its ring."""
    told = {}
    for how in ("announced", ""):
        env = {**os.environ, "DYNAMICCL_RUN": str(folder.path), life.VARIABLE: f"1:{life.own()}"}
        done = subprocess.run(
            [sys.executable, "-c", RINGS, how], env=env, capture_output=True, text=True, check=True
        )
        told[how] = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
        assert len(told[how]) == 2, done.stderr
    assert all(own == ring for own, ring in told["announced"])
    assert all(own != ring for own, ring in told[""])
    rings = [ring for lines in told.values() for _, ring in lines]
    assert len(set(rings)) == 4 and 0 not in rings and life.own() not in rings
