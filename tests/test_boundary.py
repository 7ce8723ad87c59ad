"""The boundary of a step: a table is checked and copied beside the job, and becomes active in one call."""

import os
import shutil
import subprocess
import sys

import pytest
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.plugin.build import plugin_path
from dynamiccl.envs.nccl.shm import encode_table
from dynamiccl.traces.records import Table


@pytest.fixture
def plugin(tmp_path):
    """A copy of the plugin, with globals of its own."""
    copy = tmp_path / "plugin.so"
    shutil.copy(plugin_path(), copy)
    return Plugin.load(copy)


def test_a_staged_table_changes_nothing_until_it_is_flipped(plugin):
    plugin.activate(encode_table(Table(3)))
    assert plugin.stage(encode_table(Table(4))) == 4 and plugin.generation == 3
    assert plugin.stage(encode_table(Table(5))) == 5 and plugin.generation == 3  # takes the other's place
    with pytest.raises(ValueError, match="refuses"):
        plugin.stage(b"no table")
    assert plugin.boundary(None, 1, flip=True) == 5 == plugin.generation
    with pytest.raises(ValueError, match="refuses"):
        plugin.flip()  # nothing is staged any more
    with pytest.raises(ValueError, match="refuses"):  # said, where it was dropped: this rank alone did not switch
        plugin.boundary(None, 2, flip=True)
    assert plugin.generation == 5
    plugin.stage(encode_table(Table(6)))
    plugin.activate(encode_table(Table(7)))
    with pytest.raises(ValueError, match="refuses"):
        plugin.flip()
    assert plugin.generation == 7


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
    env = {**os.environ, **folder.env(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "dynamiccl" not in done.stderr, done.stderr
    parent, child = map(int, done.stdout.split())
    steps = {ring.pid: ring.drain()["step"].tolist() for ring in folder.rings()}
    assert steps == {parent: list(range(11)), child: [0, 1, 2]}
