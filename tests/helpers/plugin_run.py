"""A plugin of one's own and what it writes: for tests that call it as NCCL does."""

import os
import shutil

import numpy as np
import pytest
from dynamiccl.envs.nccl.plugin.bindings import Plugin
from dynamiccl.envs.nccl.plugin.build import plugin_path
from dynamiccl.envs.nccl.shm import RunFolder, encode_table
from dynamiccl.traces.records import ALGOS, PROTOS, Table

RELEASES = ("2.22.3", "2.24.3", "2.27.7", "2.28.9", "2.29.7", "2.30.7", "2.32.3", "2.32.6")
MB = 2**20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A copy of the plugin, with globals of its own, and the run folder that it writes its ring into."""
    copy = tmp_path_factory.mktemp("plugin") / "plugin.so"
    shutil.copy(plugin_path(), copy)
    folder = RunFolder.create()
    before = os.environ.get("DYNAMICCL_RUN")
    os.environ["DYNAMICCL_RUN"] = str(folder.path)
    plugin = Plugin.load(copy)
    assert plugin.open()
    if before is None:
        del os.environ["DYNAMICCL_RUN"]
    else:
        os.environ["DYNAMICCL_RUN"] = before
    yield folder, plugin
    folder.close()


@pytest.fixture
def plugin(run):
    run[1].activate(encode_table(Table()))
    return run[1]


def drained(run):
    (ring,) = run[0].rings()
    return ring.drain()


def fixed(plugin: Plugin) -> int:
    """Generation of the table that holds where nothing was agreed."""
    plugin.ended()  # what was asked so far
    return plugin.ended().generation


def offer(**cells: float) -> np.ndarray:
    """A cost table: ``offer(ring_ll=10)``; all other cells are not offered."""
    cost = np.full((len(ALGOS), len(PROTOS)), -1, np.float32)
    for name, us in cells.items():
        algo, _, proto = name.rpartition("_")
        cost[ALGOS.index(algo), PROTOS.index(proto)] = us
    return cost
