"""The probe in real jobs of two processes on gloo: attached without a line of user code, and never in the way.

This file is also the job: ``python test_probe.py LOOP...`` runs the named training loops one after the other and
prints one JSON line a rank.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.traces.records import STEP, STEP_DTYPE, Decision, Rule, Table

STEPS = 14


# -- the job ----------------------------------------------------------------------------------------------------------


def job(names: list[str]) -> None:
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    said = {"rank": rank, "losses": {}, "generations": {}}
    jitter = random.Random(rank)
    for name in names:
        loop = (LOOPS | ODD_LOOPS)[name]
        losses, generations = [], []
        step = loop(torch, dist)
        for i in range(STEPS):
            time.sleep(jitter.random() * float(os.environ.get("JITTER_S", "0")))
            generations.append(generation())
            losses.append(step(i))
        said["losses"][name], said["generations"][name] = losses, generations
    print(json.dumps(said), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def generation() -> int:
    """Generation of the active table in this process."""
    if "DYNAMICCL_RUN" not in os.environ:
        return 0
    from dynamiccl.envs.nccl.plugin import Plugin

    return Plugin.load().generation


def model(torch):
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))


def batch(torch, dist, i):
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * i + rank))


def plain(torch, dist) -> Callable[[int], float]:
    net = model(torch)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

    def step(i: int) -> float:
        loss = net(batch(torch, dist, i)).square().mean()
        loss.backward()
        if dist.is_initialized():
            for p in net.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def wrapped(wrap, make_optimizer):
    def loop(torch, dist) -> Callable[[int], float]:
        net = wrap(torch, model(torch))
        optimizer = make_optimizer(torch, net)

        def step(i: int) -> float:
            loss = net(batch(torch, dist, i)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    return loop


def ddp(torch, net):
    return torch.nn.parallel.DistributedDataParallel(net)


def fsdp2(torch, net):
    from torch.distributed.fsdp import fully_shard

    for part in net:
        if hasattr(part, "weight"):
            fully_shard(part)
    return fully_shard(net)


def compiled(torch, net):
    return torch.compile(ddp(torch, net), backend="eager")


def adam(torch, net):
    return torch.optim.AdamW(net.parameters(), 1e-2)


def compiled_adam(torch, net):
    optimizer = adam(torch, net)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


def zero(torch, net):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)


def accumulation(torch, dist) -> Callable[[int], float]:
    net = ddp(torch, model(torch))
    optimizer = adam(torch, net)

    def step(i: int) -> float:
        with net.no_sync():
            net(batch(torch, dist, 3 * i)).square().mean().backward()
        loss = net(batch(torch, dist, 3 * i + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def two_optimizers(torch, dist) -> Callable[[int], float]:
    """As a GAN trains: two models, the second's optimizer steps every other time."""
    first, second = ddp(torch, model(torch)), ddp(torch, model(torch))
    one, two = adam(torch, first), adam(torch, second)

    def step(i: int) -> float:
        loss = first(batch(torch, dist, i)).square().mean()
        loss.backward()
        one.step()
        one.zero_grad()
        if i % 2:
            second(batch(torch, dist, i)).abs().mean().backward()
            two.step()
            two.zero_grad()
        return loss.item()

    return step


def exception(torch, dist) -> Callable[[int], float]:
    """Every third step fails between backward and optimizer, on all ranks, and the loop goes on."""
    inner = plain(torch, dist)

    def step(i: int) -> float:
        if i % 3 == 2:
            try:
                raise RuntimeError("out of memory, say")
            except RuntimeError:
                return 0.0
        return inner(i)

    return step


def broken_network(torch, dist) -> Callable[[int], float]:
    """In step 7 the probe of one rank loses its connections; the job's own group is sound."""
    inner = plain(torch, dist)

    def step(i: int) -> float:
        from dynamiccl.envs.nccl import probe

        if i == 7 and dist.get_rank() == int(os.environ["VICTIM"]):
            probe._probe._agreement._drop_group()
        return inner(i)

    return step


def one_rank_steps(torch, dist) -> Callable[[int], float]:
    """Only rank 0 has an optimizer, as a learner among actors."""
    inner = plain(torch, dist) if dist.get_rank() == 0 else None

    def step(i: int) -> float:
        if inner is not None:
            return inner(i)
        for p in model(torch).parameters():
            dist.all_reduce(torch.zeros_like(p))
        return 0.0

    return step


LOOPS = {
    "plain": plain,
    "ddp": wrapped(ddp, adam),
    "fsdp2": wrapped(fsdp2, adam),
    "zero": wrapped(ddp, zero),
    "accumulation": accumulation,
    "two optimizers": two_optimizers,
    "exception": exception,
    "compile": wrapped(compiled, compiled_adam),
}
ODD_LOOPS = {"broken network": broken_network, "one rank steps": one_rank_steps}


# -- launching it ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(args: list[str], n: int, env: dict[str, str]) -> list[subprocess.Popen]:
    """``n`` ranks of this file (or of one process outside torch.distributed for n = 1)."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("DYNAMICCL_", "NCCL_"))}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **env}
    processes = []
    for rank in range(n):
        world = {"RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank)} if n > 1 else {}
        processes.append(
            subprocess.Popen(
                [sys.executable, __file__, *args],
                env=base | world,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def table(generation: int) -> Table:
    return Table(generation, (Rule(3, "all_gather", 0, 2**30, Decision("ring", "ll", 1 + generation % 64)),))


def finish(processes: list[subprocess.Popen], run: RunFolder | None = None) -> tuple[list[dict], list[str]]:
    """Publishes a table every few milliseconds until the job ends; what the ranks printed, and their errors."""
    generation = run.table.read()[0] if run and run.table.read() else 0
    end = time.monotonic() + 120
    while any(p.poll() is None for p in processes) and time.monotonic() < end:
        if run:
            generation += 1
            run.table.publish(table(generation))
        time.sleep(0.02)
    out = [p.communicate(timeout=20) for p in processes]
    return [json.loads(o.splitlines()[-1]) for o, _ in out if o.strip()], [e for _, e in out]


@pytest.fixture
def run():
    folder = RunFolder.create()
    yield folder
    folder.close()


def steps_of(run: RunFolder) -> dict[int, np.ndarray]:
    """STEP records by rank."""
    found = {}
    for ring in run.rings():
        records = ring.drain()
        steps = records[records["kind"] == STEP].view(STEP_DTYPE)
        assert ring.lost == 0
        if len(steps):
            found[int(steps["rank"][-1])] = steps
    return found


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def framework_jobs():
    """All loops in one job with the probe, tables changing all the time, and the same job alone."""
    names = list(LOOPS)
    alone, errors = finish(start(names, 2, {}))
    assert len(alone) == 2, errors
    folder = RunFolder.create()
    env = {**folder.env(), "JITTER_S": "0.02"}
    attached, errors = finish(start(names, 2, env), folder)
    assert len(attached) == 2, errors
    yield alone, attached, errors, steps_of(folder)
    folder.close()


@pytest.mark.parametrize("name", list(LOOPS))
def test_ranks_switch_at_the_same_step_and_losses_stay(framework_jobs, name):
    alone, attached, _, _ = framework_jobs
    by_rank = {said["rank"]: said for said in attached}
    assert by_rank[0]["generations"][name] == by_rank[1]["generations"][name]
    for before, after in zip(alone, attached, strict=True):
        assert before["losses"][name] == after["losses"][name], "not bit-equal"


def test_tables_do_change_and_steps_are_recorded(framework_jobs):
    _, attached, errors, steps = framework_jobs
    seen = [g for name in LOOPS for g in attached[0]["generations"][name]]
    assert len(set(seen)) > 10 and seen == sorted(seen)
    assert set(steps) == {0, 1}
    for mine in steps.values():
        # Every loop loses the step in which its optimizer is first seen; the one that fails loses every third.
        expected = sum(STEPS - 1 for name in LOOPS if name != "exception") + len(LOOPS) - 1 - STEPS // 3
        assert abs(len(mine) - expected) <= 2 * len(LOOPS)
        assert np.array_equal(mine["step"], np.arange(len(mine)))
        assert (mine["duration_ns"] > 0).all() and np.isnan(mine["loss"]).all()
    assert len(steps[0]) == len(steps[1])
    assert np.array_equal(steps[0]["generation"], steps[1]["generation"])
    assert not any("dynamiccl" in error for error in errors), errors


def test_a_job_of_one_process(run):
    said, errors = finish(start(["plain"], 1, run.env()), run)
    assert len(set(said[0]["generations"]["plain"])) > 1, errors
    assert len(steps_of(run)[0]) == STEPS - 2


def wait_for_steps(run: RunFolder, n: int) -> None:
    """Until every rank has ended ``n`` more steps."""
    count: dict[int, int] = {}
    end = time.monotonic() + 60
    while (len(count) < 2 or min(count.values()) < n) and time.monotonic() < end:
        time.sleep(0.02)
        for rank, steps in steps_of(run).items():
            count[rank] = count.get(rank, 0) + len(steps)
    assert len(count) == 2, "the job did not get going"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_does_not_leave_the_other_hanging(run, victim):
    processes = start(["plain"], 2, {**run.env(), "JITTER_S": "0.2"})
    wait_for_steps(run, 3)
    processes[victim].send_signal(signal.SIGKILL)
    started = time.monotonic()
    out, error = processes[1 - victim].communicate(timeout=30)
    assert time.monotonic() - started < 15
    assert processes[1 - victim].returncode == 1 and not out  # gloo's own error ended it, as without us
    assert "Traceback" in error and "dynamiccl/envs" not in error.split("Traceback")[-1]
    processes[victim].communicate()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_loses_the_others_still_has_their_table(run, victim):
    """The protocol's hard case, in a real job: nobody switches alone, the table then stays, and it is said."""
    env = {**run.env(), "VICTIM": str(victim), "JITTER_S": "0.05"}
    said, errors = finish(start(["broken network"], 2, env), run)
    first, second = (s["generations"]["broken network"] for s in said)
    assert first == second, errors
    assert len(set(first[:8])) > 2 and len(set(first[10:])) == 1
    assert all("stop agreeing" in error and "Traceback" not in error for error in errors)


def test_a_rank_without_an_optimizer_delays_the_others_once(run):
    env = {**run.env(), "DYNAMICCL_ATTACH_S": "1.5"}
    said, errors = finish(start(["one rank steps"], 2, env), run)
    assert [set(s["generations"]["one rank steps"]) for s in said] == [{0}, {0}]
    assert "not every rank" in errors[0] and not errors[1]


def test_damaged_files_and_a_dead_daemon_change_nothing(run):
    """One job lives through noise, truncation, a half-written table, a table of another version and no folder."""
    processes = start(["plain"], 2, {**run.env(), "JITTER_S": "0.4"})
    run.table.publish(table(5))
    wait_for_steps(run, 3)
    path = run.path / "table"
    sound = path.read_bytes()
    noise = random.Random(1).randbytes(4096)
    for content in (noise, sound[:100], sound[:24] + b"\7" + sound[25:], sound[:8] + b"\2" + sound[9:], b""):
        path.write_bytes(content)
        with path.open("r+b") as file:  # so that the probe looks at it
            file.seek(24)
            file.write(bytes([content[24] & 1 if len(content) > 24 else 0, 9]))
        wait_for_steps(run, 1)
    run.close(remove=True)
    said, errors = finish(processes)
    assert [s["generations"]["plain"][-1] for s in said] == [5, 5], errors
    assert not any("Traceback" in error for error in errors)


def test_a_job_whose_run_is_not_set_is_untouched():
    """Nothing of ours is imported, and nothing hangs on the optimizers."""
    program = """
import sys, torch
from torch.optim.optimizer import _global_optimizer_post_hooks
ours = [m for m in sys.modules if m.startswith("dynamiccl.")]
assert set(ours) <= {"dynamiccl.envs", "dynamiccl.envs.nccl", "dynamiccl.envs.nccl.autoload"}, ours
assert not _global_optimizer_post_hooks
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("DYNAMICCL_")}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)


def test_import_torch_survives_a_broken_probe(tmp_path):
    """Whatever is wrong on our side, `import torch` and the steps after it work."""
    program = """
import torch
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(4):
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained")
"""
    broken = {
        "DYNAMICCL_RUN": str(tmp_path / "none"),
        "DYNAMICCL_PLUGIN": "/nowhere/plugin.so",
        "DYNAMICCL_CLUSTER": "no such cluster",
    }
    for name, value in broken.items():
        env = {k: v for k, v in os.environ.items() if not k.startswith("DYNAMICCL_")}
        env |= {"DYNAMICCL_RUN": str(tmp_path), name: value}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stdout == "trained\n"
        assert "Traceback" not in done.stderr and done.stderr.count("dynamiccl:") <= 1


if __name__ == "__main__":
    job(sys.argv[1:])
