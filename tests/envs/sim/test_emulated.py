"""The emulated backend: results are gloo's, times are the fabric's."""

import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from statistics import median

import pytest
import torch
import torch.distributed as dist
from dynamiccl.envs.nccl_model.clusters import cluster
from dynamiccl.envs.nccl_model.cost_model import channels, choice
from dynamiccl.envs.sim.emulated.backend import EmulatedGroup, EmulatedWork
from dynamiccl.envs.sim.emulated.clock import FLOPS_PER_NS, Collective
from dynamiccl.envs.sim.emulated.settings import Emulated
from dynamiccl.envs.sim.emulated.timeline import CROWD, Arrivals, part_of, with_neighbours
from dynamiccl.envs.sim.fabric.fabric import Fabric
from job_log import read_log
from paths import HELPERS

BYTES_SCALE = 128.0


def ranks(case, n=2, **env):
    """Run a case of emulated_ranks.py on ``n`` processes; what rank 0 printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), "--standalone"]
    done = subprocess.run(
        [*command, str(HELPERS / "emulated_ranks.py"), case],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def emulated(**env):
    return {
        "DYNAMICCL_CLUSTER": "dgx-h100-2x8",
        "DYNAMICCL_BYTES_SCALE": str(BYTES_SCALE),
        "DYNAMICCL_COMPUTE_SCALE": "1",
        **env,
    }


ASKS_FOR_GLOO = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
where = {"rank": 0, "world_size": 1, "store": dist.HashStore()}
if sys.argv[1] == "mesh":
    init_device_mesh("cpu", (1,))
else:
    dist.init_process_group(*sys.argv[2:], **where)
print(dist.get_backend(), dist.get_backend(dist.new_group()), dist.get_backend(dist.new_group(backend="gloo")))
"""


MONITORED = """
import torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
dist.monitored_barrier()
dist.monitored_barrier(dist.new_group(), timedelta(seconds=5), wait_all_ranks=True)
dist.monitored_barrier(dist.new_group(backend="gloo"))
print(dist.get_backend())
"""


def test_a_monitored_barrier_works_on_the_emulated_cluster():
    """DeepSpeed#4488, composer#1321. Before: ValueError, only for the backend gloo; the job ended."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **emulated()}
    done = subprocess.run(
        [sys.executable, "-c", MONITORED], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout == "emulated\n", done.stderr[-2000:]


@pytest.mark.parametrize(
    "said",
    [
        ["say", "gloo"],
        *(
            pytest.param(said, marks=pytest.mark.slow)
            for said in (["say"], ["say", "cpu:gloo,cuda:nccl"], ["mesh"])
        ),
    ],
)
def test_a_script_that_says_gloo_runs_on_the_emulated_cluster_as_it_is(said):
    """Before: such a job was told that it runs no collective that a tuner can reach."""
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", ASKS_FOR_GLOO, *said]
    done = subprocess.run(
        command, env={**os.environ, **alone, **emulated()}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["emulated", "emulated", "gloo"], done.stderr


class Moved:
    """A collective of gloo's whose bytes have been moved."""

    def wait(self):
        return True

    def is_completed(self):
        return True


def test_a_job_that_asks_whether_a_collective_is_over_need_not_wait_for_it():
    """Before: False until somebody waited, so that a job that asked again and again stood still for ever."""
    work = EmulatedWork(Moved(), None, None, None, [])
    assert work.is_completed()


@pytest.mark.slow
def test_values_are_gloos():
    assert ranks("values", **emulated()) == ranks("values", BACKEND="gloo")


COMPUTE_US = 2 * 1024**3 / FLOPS_PER_NS / 1e3  # one product of 1024 x 1024 matrices on the emulated GPU


@pytest.mark.slow
def test_times_are_the_fabrics():
    """A gather ends when the model says, two queue up, compute hides one and pays for it, a late rank delays."""
    scale = 300.0  # longer than a gather
    times = {n: median(v) for n, v in ranks("times", **emulated(DYNAMICCL_COMPUTE_SCALE=str(scale))).items()}
    c = cluster("dgx-h100-2x8")
    n_bytes = int(4 * (1 << 18) * BYTES_SCALE)
    algo, proto = choice(c, "all_gather", n_bytes)
    n_channels, _ = channels(c, "all_gather", n_bytes, algo, proto)
    fabric = Fabric.of(c, seed=0)
    expected = fabric.time_us("all_gather", n_bytes, algo, proto, n_channels)
    slowed = fabric.beside("all_gather", n_bytes, algo, proto, n_channels)[0] * times["sync"]
    product = times["compute"]
    assert product == pytest.approx(COMPUTE_US * scale, rel=0.01) and product > 1.5 * expected
    assert times["sync"] == pytest.approx(expected, rel=0.1)  # the fabric's noise
    assert times["two"] == pytest.approx(2 * times["sync"], rel=0.1)
    assert times["hidden"] == pytest.approx(product + slowed, rel=0.02)
    assert times["late"] == pytest.approx(product + times["sync"], rel=0.1)


@pytest.mark.slow
def test_a_busy_machine_changes_no_emulated_time():
    quiet = ranks("times", **emulated())
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert ranks("times", **emulated()) == quiet
    finally:
        for process in spin:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_training_is_bit_equal_with_and_without_emulation(tmp_path):
    losses = {}
    for backend in ("gloo", "emulated"):
        log = tmp_path / backend
        command = [sys.executable, "-m", "dynamiccl.zero_workload", "--stage", "3", "--steps", "6", "--quiet"]
        command += ["--layers", "2", "--width", "32", "--heads", "4", "--backend", backend, "--log", str(log)]
        env = {**os.environ, **(emulated(DYNAMICCL_COMPUTE_SCALE="1") if backend == "emulated" else {})}
        subprocess.run(command, env=env, check=True, timeout=120)
        losses[backend] = [step["loss"] for step in read_log(log)[1]]
    assert len(losses["gloo"]) == 6 and losses["gloo"] == losses["emulated"]


@pytest.mark.slow
def test_a_wrong_environment_is_said_and_breaks_nothing():
    for env, word in (
        ({"DYNAMICCL_CLUSTER": "dgx-h1000"}, "dgx-h100"),
        ({"DYNAMICCL_CLUSTER": "dgx-h100-2x8", "DYNAMICCL_COMPUTE_SCALE": "fast"}, "COMPUTE_SCALE"),
        ({"DYNAMICCL_CLUSTER": "dgx-h100-2x8", "DYNAMICCL_BYTES_SCALE": "-1"}, "must be above 0"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.ones(1))"],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 and word in done.stderr and "Traceback" not in done.stderr


def test_a_group_is_a_part_of_the_cluster():
    c = cluster("dgx-h100-2x8")

    def shape(ranks, world):
        part = part_of(c, ranks, world)
        return part.n_nodes, part.gpus_per_node

    assert part_of(c, [0, 1], 2) == c == part_of(c, range(16), 16)
    assert part_of(c, [2, 3], 4) == part_of(c, [0, 1], 4) == cluster("dgx-h100-1x8")
    # Before: a group of one process of each node was taken for a node's.
    assert shape([0, 2], 4) == shape([1, 3], 4) == (2, 4)
    assert shape([3], 8) == (1, 2) and shape([3, 7], 8) == (2, 2) and shape([0], 16) == (1, 2)
    assert shape([0, 5, 9, 14], 16) == (2, 2) and shape(range(8), 32) == (1, 4)


def test_communicators_share_the_links():
    """Together they take as long as if they shared evenly; on other links, or with room, none waits for another."""

    def at(start, duration, near, far=0.0, end=0):
        beside = (0.1, near, far)
        return Collective(1, duration, beside, 0, None, start_ns=start, end_ns=end)

    alone = at(1000, 4000, 1.0)
    assert with_neighbours(alone, []) == 4000
    assert with_neighbours(alone, [at(0, 900, 1.0, end=900)]) == 4000, "it has ended"
    crowd = 1 + CROWD
    assert with_neighbours(at(1000, 4000, 0.5), [at(0, 9000, 0.5, end=9000)]) == round(4000 * crowd)
    assert with_neighbours(at(1000, 4000, 0.0, 1.0), [at(0, 9000, 1.0, end=9000)]) == round(4000 * crowd)
    # The first has 2000 ns to go on a full link: the other makes a tenth of its pace until then.
    assert with_neighbours(alone, [at(0, 3000, 1.0, end=3000)]) == pytest.approx(
        2000 + 4000 - 200 / crowd, abs=2
    )
    half = at(0, 3000, 0.5, end=3000)
    assert with_neighbours(alone, [half]) == pytest.approx(2000 + 4000 - 1000 / crowd, abs=2)
    assert with_neighbours(alone, [half, at(0, 9000, 0.2, end=9000)]) > with_neighbours(alone, [half])


def test_a_neighbour_slows_only_from_its_start():
    """A collective that is waited for late finds its successors on other communicators known already."""

    def at(start, duration, near=1.0, end=0):
        return Collective(1, duration, (0.1, near, 0.0), 0, None, start_ns=start, end_ns=end)

    first = at(0, 1000)
    assert with_neighbours(first, [at(10_000, 1000, end=11_000)]) == 1000
    assert with_neighbours(first, [at(1000, 1000, end=2000)]) == 1000
    # It has 400 ns to go as the other begins, and makes a tenth of its pace beside it.
    crowd = 1 + CROWD
    assert with_neighbours(first, [at(600, 1000, end=1600)]) == pytest.approx(2000 - 100 / crowd, abs=2)
    # Between two of them it is alone.
    two = [at(-500, 700, 0.5, end=200), at(5000, 100, end=5100)]
    assert with_neighbours(first, two) == pytest.approx(1200 - 100 / crowd, abs=2)
    # Before: a machine that was up for 104 days hung, as a float has no more digits.
    late = 2**54 + 1
    assert with_neighbours(at(late, 1000), [at(late + 601, 1000, end=late + 1601)]) > 1500


def test_a_number_that_cannot_be_used_is_refused_before_the_job():
    """Before: NaN, infinity and negative seeds were taken, and ended the job in its first collective."""
    for wrong in ({"bytes_scale": float("nan")}, {"compute_scale": float("inf")}, {"bytes_scale": 0.0}):
        with pytest.raises(ValueError, match="must be above 0 and finite"):
            Emulated(**wrong)
    with pytest.raises(ValueError, match="seed must be 0 or above"):
        Emulated(seed=-1)


@pytest.mark.parametrize("text", ["1.5", "nan", "inf", "-1"])
def test_a_seed_in_the_environment_is_a_whole_number(monkeypatch, text):
    monkeypatch.setenv("DYNAMICCL_CLUSTER", "dgx-h100-2x8")
    monkeypatch.setenv("DYNAMICCL_SEED", text)
    with pytest.raises(ValueError, match=r"seed|SEED"):
        Emulated.from_env()


def test_collectives_without_options_are_gloos():
    """Before: `_allgather_base(output, input)` asked torch.distributed for a class that is only in distributed_c10d."""

    class Gloo:
        def __getattr__(self, name):
            return lambda *args: (name, args[-1])

    group = EmulatedGroup.__new__(EmulatedGroup)
    group._timeline, group._gloo = None, Gloo()
    one = torch.ones(1)
    for call in (group.all_gather_single, group.reduce_scatter_single):
        name, options = call(one, one)
        assert name in ("_allgather_base", "_reduce_scatter_base") and options is not None


def test_no_page_stays_where_a_rank_dies_while_its_group_is_made(tmp_path, monkeypatch):
    """Before: 16 KiB of shared memory a rank and communicator, for good."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os.path, "isdir", lambda path: False)  # no /dev/shm
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistError):
        Arrivals(store, 0, 2)
    assert store.get("arrivals") and not list(tmp_path.iterdir())
