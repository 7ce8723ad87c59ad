"""Step time of our stages against the library's, on gloo: two ranks, same model and data, interleaved.

``python tests/test_zero_speed.py`` prints the figures; as a test it runs short and allows for a noisy machine.
"""

from __future__ import annotations

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


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["zero-optimizer", "fsdp2-no-reshard", "fsdp2"])
def test_not_slower_than_the_library(name: str, two: World) -> None:  # noqa: F811
    ours, theirs = two.run(interleaved, name, 6, 3)[0]
    assert ratio(ours, theirs) <= 1.15


if __name__ == "__main__":
    world = World(2)
    for peer in ["ddp", "zero-optimizer", "fsdp2-no-reshard", "fsdp2"]:
        a, b = world.run(interleaved, peer, int(sys.argv[1]) if len(sys.argv) > 1 else 20, 3, timeout=600)[0]
        print(
            f"stage {PEERS[peer]} against {peer}: {statistics.median(a):.1f} and {statistics.median(b):.1f} ms a step, "
            f"median ratio {ratio(a, b):.3f} over {len(a)} rounds",
            flush=True,
        )
    world.close()
