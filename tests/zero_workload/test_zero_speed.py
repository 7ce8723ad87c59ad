"""Step time of our stages against the library's, on gloo: two ranks, same model and data, interleaved.

``python tests/zero_workload/test_zero_speed.py`` prints the figures; as a test it runs shorter.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import zero
from dynamiccl.zero_workload.job.data import Corpus
from dynamiccl.zero_workload.job.model import ModelConfig, Transformer
from dynamiccl.zero_workload.job.parallel import groups
from peers import PEERS, Peer, mesh_of
from test_zero import adamw
from world import World

MODEL = ModelConfig(layers=6, width=192, heads=6, seq=64)


def interleaved(
    name: str, rounds: int, block: int, shard: int = 0, **more: Any
) -> tuple[list[float], list[float]]:
    """Milliseconds a step of ours and of the peer: ``rounds`` times ``block`` steps of each, in turn; with ``shard`` on
    a mesh of replicas that are sharded over so many ranks.
    """
    torch.manual_seed(0)
    ours_model, theirs_model = Transformer(MODEL), Transformer(MODEL)
    settings: dict[str, Any] = {"param_dtype": torch.float32, "bucket_bytes": 2**21, **more}
    cut: Any = groups(shard)
    ours = zero(ours_model, adamw(1e-3), stage=PEERS[name], **cut, **settings)
    theirs = Peer(name, theirs_model, adamw(1e-3), mesh=mesh_of(cut), **settings)
    corpus, rank = Corpus(MODEL.seq), dist.get_rank()
    batches = [corpus.batch(2 * rank, 2 * rank + 2, step=i, seed=0) for i in range(block)]
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(rounds + 1):
        sides = [("ours", ours_model, ours), ("theirs", theirs.model, theirs)]
        for side, model, engine in sides if turn % 2 else reversed(sides):
            dist.barrier()
            begin = time.perf_counter()
            for tokens, targets in batches:
                engine.backward(model(tokens, targets))
                engine.step()
            dist.barrier()
            if turn:  # the first round warms both up
                times[side].append((time.perf_counter() - begin) / block * 1e3)
    return times["ours"], times["theirs"]


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Median over the rounds of ours / theirs, and its 95 % interval (bootstrap over rounds)."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return statistics.median(pairs), medians[50], medians[1949]


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("name", ["zero-optimizer", "fsdp2-no-reshard", "fsdp2"])
def test_not_slower_than_the_library(name: str, two: World) -> None:
    median, low, high = ratio(*two.run(interleaved, name, 8, 3)[0])
    # The target of stage 1 is not shown to be met, see "Speed" in zero_workload/README.md.
    assert median <= (1.02 if name == "zero-optimizer" else 1.0), (median, low, high)


def with_float32_reduction(rounds: int) -> tuple[list[float], list[float]]:
    return interleaved("fsdp2", rounds, 3, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.timing
def test_not_slower_than_fsdp2_with_the_same_reduce_dtype(two: World) -> None:
    median, _, _ = ratio(*two.run(with_float32_reduction, 6, timeout=400)[0])
    assert median <= 1.0, median


@pytest.mark.slow
@pytest.mark.timing
def test_not_slower_than_fsdp2_on_hsdp(four: World) -> None:
    for name in ("fsdp2-no-reshard", "fsdp2"):
        median, _, _ = ratio(*four.run(interleaved, name, 6, 3, 2, timeout=400)[0])
        assert median <= 1.0, (name, median)


LARGER = ModelConfig(layers=4, width=256, heads=4, seq=128)
DELAY_MS = 20


def emulate() -> Any:
    """From now on a collective takes 20 ms, on links that have room for several; returns this rank's emulated clock,
    whose ``held`` is the milliseconds that it was waited for ends of collectives."""
    from dynamiccl.envs.nccl.steps import clock as step_clock
    from dynamiccl.envs.sim.emulated import backend, timeline

    os.environ.update(DYNAMICCL_CLUSTER="dgx-h100-2x8", DYNAMICCL_COMPUTE_SCALE="1500")
    timeline.Timeline._duration_ns = lambda *_: int(DELAY_MS * 1e6)
    timeline.Fabric.beside = lambda *_: (0.0, 0.0, 0.0)
    backend.register()
    clock: Any = step_clock.now_ns.__self__
    if not hasattr(clock, "held"):
        wait_until = clock.wait_until

        def waiting(ns: int) -> int:
            before = clock.now()
            after: int = wait_until(ns)
            clock.held += (after - before) / 1e6
            return after

        clock.wait_until = waiting
    clock.held = 0.0
    return clock


def waited(clock: Any, jobs: dict[str, Any], batch: tuple[Any, ...], steps: int) -> dict[str, float]:
    """Milliseconds that a step of each job stands still, the median."""
    waits: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(steps + 2):
        for name, job in jobs.items():
            dist.barrier()
            clock.held = 0.0
            job.backward(job.model(*batch))
            job.step()
            waits[name].append(clock.held)
    return {name: statistics.median(values[2:]) for name, values in waits.items()}


def exposed(steps: int) -> dict[str, float]:
    """What a step stands still because collectives take 20 ms each: ours at stage 3, and FSDP2."""
    clock = emulate()
    group, rank = dist.new_group(backend="emulated"), dist.get_rank()
    batch = Corpus(LARGER.seq).batch(8 * rank, 8 * rank + 8, step=0, seed=0)
    torch.manual_seed(0)
    ours, theirs = Transformer(LARGER), Transformer(LARGER)
    # Both clip, so both wait for the norm: ours does in every step, that nothing that is not finite is applied.
    settings: dict[str, Any] = {"param_dtype": torch.float32, "max_norm": 1.0}
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    jobs = {
        "ours": zero(ours, adamw(1e-3), stage=3, group=group, **settings),  # with the units that anybody gets
        "fsdp2": Peer("fsdp2", theirs, adamw(1e-3), mesh=mesh, **settings),
    }
    return waited(clock, jobs, batch, steps)


def by_the_slowest(ranks: list[dict[str, float]]) -> dict[str, float]:
    """The rank that arrives last waits least, and sets the pace; the other also waits for it."""
    return {name: min(waits[name] for waits in ranks) for name in ranks[0]}


@pytest.mark.slow
def test_stage_3_hides_what_fsdp2_exposes_on_cpu(two: World) -> None:
    waits = by_the_slowest(two.run(exposed, 5))
    assert waits["fsdp2"] > 10 * DELAY_MS * 0.9  # or there was nothing to hide
    assert 1 - waits["ours"] / waits["fsdp2"] >= 0.6, waits


class Compute(torch.autograd.Function):
    """Takes half as long as a collective in forward, as long as one in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Any) -> torch.Tensor:
        ctx.clock = clock
        clock.count(DELAY_MS / 2 * 1e6)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.count(DELAY_MS * 1e6)
        return grads[0], None


class Block(torch.nn.Linear):
    """One unit."""

    def __init__(self, clock: Any) -> None:
        super().__init__(16, 16)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Compute.apply(super().forward(x), self.clock)
        return out


class Blocks(torch.nn.Module):
    """Eight units and nothing else."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(*(Block(clock) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(x).square().mean()
        return out


def overlapped(steps: int) -> dict[str, float]:
    """What a step of eight units stands still, with reduce-scatters on the gathers' communicator and on their own, at
    stages 2 and 3. A unit's backward takes as long as one collective, and it needs two. FSDP2 is not compared: its
    second group is one of gloo here, whose collectives take no emulated time.
    """
    clock = emulate()
    group, apart = (dist.new_group(backend="emulated") for _ in range(2))
    dist.all_reduce(torch.ones(1), group=group)  # connected
    dist.all_reduce(torch.ones(1), group=apart)
    settings: dict[str, Any] = {"param_dtype": torch.float32, "bucket_bytes": 4 * 17 * 16}
    jobs: dict[str, Any] = {}
    for name, beside in (("one", None), ("two", apart)):
        for stage in (2, 3):
            jobs[f"stage {stage}, {name}"] = zero(
                Blocks(clock), adamw(1e-3), stage=stage, group=group, reduce_scatter_group=beside, **settings
            )
    return waited(clock, jobs, (torch.ones(2, 16),), steps)


def test_reduce_scatters_on_a_communicator_of_their_own_run_beside_the_gathers(two: World) -> None:
    waits = by_the_slowest(two.run(overlapped, 3, timeout=400))
    # One communicator: two collectives a unit, one after the other, behind one unit's backward.
    assert waits["stage 3, one"] > 10 * DELAY_MS, waits
    assert waits["stage 3, two"] < 0.8 * waits["stage 3, one"], waits


if __name__ == "__main__":
    world = World(2)
    waits = by_the_slowest(world.run(exposed, 8, timeout=600))
    hidden = 1 - waits["ours"] / waits["fsdp2"]
    print(
        f"{DELAY_MS} ms a collective hold up a step for ms: {waits}; stage 3 hides {hidden:.0%} of FSDP2's",
        flush=True,
    )
    waits = by_the_slowest(world.run(overlapped, 8, timeout=600))
    print(
        "a step of eight units waits for ms: " + ", ".join(f"{k} {ms:.0f}" for k, ms in waits.items()),
        flush=True,
    )
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    print(f"ms a step, medians over {rounds} rounds of 3 steps of each in turn; ratio with its 95 % interval")
    print("| stage | ours | library | theirs | ours / theirs |\n|---|---|---|---|---|")
    for peer, stage in PEERS.items():
        a, b = world.run(interleaved, peer, rounds, 3, timeout=600)[0]
        median, low, high = ratio(a, b)
        times = f"| {stage} | {statistics.median(a):.1f} | {peer} | {statistics.median(b):.1f} |"
        print(f"{times} {median:.3f} [{low:.3f}, {high:.3f}] |", flush=True)
    world.close()
