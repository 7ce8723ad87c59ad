"""Step time of our stages against the library's, on gloo: two ranks, same model and data, interleaved.

``python tests/test_zero_speed.py`` prints the figures; as a test it runs shorter.
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
from dynamiccl.zero_workload.data import Corpus
from dynamiccl.zero_workload.model import ModelConfig, Transformer
from dynamiccl.zero_workload.peers import PEERS, Peer
from test_zero import World, adamw, two  # noqa: F401  (fixture)
from torch.distributed.fsdp import fully_shard

MODEL = ModelConfig(layers=6, width=192, heads=6, seq=64)


def interleaved(name: str, rounds: int, block: int) -> tuple[list[float], list[float]]:
    """Milliseconds a step of ours and of the peer: ``rounds`` times ``block`` steps of each, in turn."""
    torch.manual_seed(0)
    ours_model, theirs_model = Transformer(MODEL), Transformer(MODEL)
    settings: dict[str, Any] = {"param_dtype": torch.float32, "bucket_bytes": 2**21}
    ours = zero(ours_model, adamw(1e-3), stage=PEERS[name], **settings)
    theirs = Peer(name, theirs_model, adamw(1e-3), **settings)
    corpus, rank = Corpus(None, MODEL.seq), dist.get_rank()
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


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Median over the rounds of ours / theirs, and the lower end of its 95 % interval (bootstrap over rounds)."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return statistics.median(pairs), medians[50]


@pytest.mark.parametrize("name", ["zero-optimizer", "fsdp2-no-reshard", "fsdp2"])
def test_not_slower_than_the_library(name: str, two: World) -> None:  # noqa: F811
    median, low = ratio(*two.run(interleaved, name, 8, 3)[0])
    # Stage 1 is ahead by a few per cent only, which a busy machine can hide: it fails when it is slower for certain.
    assert (low if name == "zero-optimizer" else median) <= 1.0, (median, low)


LARGER = ModelConfig(layers=4, width=256, heads=4, seq=128)
DELAY_MS = 20


def delayed(rounds: int) -> dict[str, list[float]]:
    """Milliseconds a step, ours at stage 3 and FSDP2, with every collective free and with 20 ms on the stream each."""
    from dynamiccl.envs.sim import backend, timeline

    os.environ.update(DYNAMICCL_CLUSTER="dgx-h100-2x8")
    timeline.Timeline._duration_ns = lambda *_: int(DELAY_MS * 1e6)
    timeline.Fabric.slowdown = lambda *_: 0.0
    backend.register()
    groups = {"free": dist.new_group(backend="gloo"), "delayed": dist.new_group(backend="emulated")}
    corpus, rank = Corpus(None, LARGER.seq), dist.get_rank()
    batch = corpus.batch(8 * rank, 8 * rank + 8, step=0, seed=0)
    jobs: dict[str, tuple[torch.nn.Module, Any]] = {}
    for kind, group in groups.items():
        torch.manual_seed(0)
        model = Transformer(LARGER)
        ours = zero(model, adamw(1e-3), stage=3, group=group, param_dtype=torch.float32)
        jobs[f"ours {kind}"] = model, ours
        model = Transformer(LARGER)
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        jobs[f"fsdp2 {kind}"] = model, adamw(1e-3)(model.parameters())
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 2):
        for name, (model, engine) in sorted(jobs.items()):  # free and delayed steps of one engine are neighbours
            dist.barrier()
            begin = time.perf_counter()
            model(*batch).backward()
            engine.step()
            if name.startswith("fsdp2"):
                engine.zero_grad()
            if turn > 1:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def hidden_share(times: dict[str, list[float]]) -> float:
    """Of the time that FSDP2 waits for delayed collectives, the share that our stage 3 does not; both are medians of
    differences between neighbouring steps.
    """
    waits = [
        statistics.median(a - b for a, b in zip(times[f"{name} delayed"], times[f"{name} free"], strict=True))
        for name in ("ours", "fsdp2")
    ]
    return 1 - waits[0] / waits[1]


def test_stage_3_hides_what_fsdp2_exposes_on_cpu(two: World) -> None:  # noqa: F811
    assert hidden_share(two.run(delayed, 6)[0]) >= 0.6


if __name__ == "__main__":
    world = World(2)
    result = world.run(delayed, 8, timeout=600)[0]
    print({name: round(statistics.median(values)) for name, values in result.items()})
    print(f"{DELAY_MS} ms a collective: stage 3 hides {hidden_share(result):.0%} of what FSDP2 exposes", flush=True)
    for peer in ["ddp", "zero-optimizer", "fsdp2-no-reshard", "fsdp2"]:
        a, b = world.run(interleaved, peer, int(sys.argv[1]) if len(sys.argv) > 1 else 20, 3, timeout=600)[0]
        median, low = ratio(a, b)
        print(
            f"stage {PEERS[peer]} against {peer}: {statistics.median(a):.1f} and {statistics.median(b):.1f} ms a step, "
            f"median ratio {median:.3f} over {len(a)} rounds, with 97.5 % certainty at least {low:.3f}",
            flush=True,
        )
    world.close()
