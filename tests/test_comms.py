"""What the plugin knows of the communicators of its process, and what the probe is told of it."""

import os
import subprocess
import sys

import pytest
from dynamiccl.envs.nccl.build import build_of
from dynamiccl.envs.sim.nccl_caller import Communicator
from dynamiccl.traces import records as rec
from test_plugin import MB, drained, offer, plugin, run

__all__ = ["plugin", "run"]  # fixtures


COUNTED = """
import os, numpy as np
from dynamiccl.envs.nccl.plugin import Plugin
from dynamiccl.envs.sim.nccl_caller import Communicator
plugin = Plugin.load()
print(plugin.tuners, plugin.asked, *plugin.abi, plugin.counts())
comms = [Communicator(plugin.path, 40 + i, 8, 1, 0, os.environ["RELEASE"]) for i in range(2)]
for n in range(5):
    comms[n % 2].get_coll_info("all_gather", 4096, np.full((7, 3), 1, np.float32))
    comms[n % 2].start_coll("all_gather", n, 10, 4, 1, 16, "ring", "ll")
comms[0].start_coll("send_recv", 9, 10, 4, 1, 16, "ring", "ll")
comms[1].finalize()
print(plugin.tuners, plugin.asked, *plugin.abi, plugin.counts())
print(plugin.identity())
plugin.forget_communicators()
print(plugin.counts(), plugin.widest)
"""


@pytest.mark.parametrize(
    ("release", "abi", "counts"), [("2.22.3", (3, 0), {}), ("2.27.7", (4, 4), {40: 3}), ("2.32.3", (6, 6), {40: 3})]
)
def test_what_nccl_has_done_with_the_plugin_is_told(tmp_path, release, abi, counts):
    """That Python can load the library says nothing of NCCL. Counted also on nodes without a run folder, so no ring."""
    env = {**os.environ, "RELEASE": release, "DYNAMICCL_RUN": str(tmp_path / "of another node")}
    out = subprocess.check_output([sys.executable, "-c", COUNTED], env=env, text=True).splitlines()
    assert out == ["0 0 0 0 {}", f"2 5 {abi[0]} {abi[1]} {counts}", out[2], "{} 8"]
    assert out[2] == f"{build_of()} table 2 tuner {abi[0]} profiler {abi[1]}"


def test_a_collective_says_what_nccl_asked_about(run, plugin):
    """Grouped calls are asked about once, with the sum of their sizes, before the first of them is enqueued."""
    drained(run)
    comm = Communicator(plugin.path, 99, 8, 1, 0)
    cost = offer(ring_ll=10)

    def enqueue(func: str, n_bytes: int) -> None:
        comm.start_coll(func, 1, n_bytes // 8 // 4, "float32", 1, 16, "ring", "ll")

    enqueue("all_gather", MB)  # never asked
    for _ in range(3):
        comm.get_coll_info("all_gather", MB, cost)  # 2.32 asks thrice
    enqueue("all_gather", MB)
    for func, n_bytes in (("all_gather", 4 * MB), ("all_gather", 64 * MB), ("reduce_scatter", 2 * MB)):
        comm.get_coll_info(func, n_bytes, cost)
    for func, n_bytes in (*[("all_gather", MB)] * 4, *[("all_gather", 32 * MB)] * 2, *[("reduce_scatter", MB)] * 2):
        enqueue(func, n_bytes)
    comm.get_coll_info("all_gather", 8 * MB, cost)
    enqueue("all_gather", 8 * MB)
    comm.finalize()
    got = drained(run)
    asked = [int(n) // MB for n in got[got["kind"] == rec.COLL]["asked_bytes"]]
    assert asked == [0, 1, 4, 4, 4, 4, 64, 64, 2, 2, 8]
