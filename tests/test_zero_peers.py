"""The library implementations train the same model to the same losses, in the same harness."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload.data import Corpus
from dynamiccl.zero_workload.dryrun import CollectiveLog
from dynamiccl.zero_workload.model import Transformer
from dynamiccl.zero_workload.peers import PEERS, Peer
from test_zero import BATCH, TINY, World, adamw, train, train_alone, two  # noqa: F401  (fixtures)


def train_peer(name: str, steps: int, settings: dict[str, Any]) -> tuple[list[float], dict[str, int]]:
    torch.manual_seed(0)
    model = Transformer(TINY)
    peer = Peer(name, model, adamw(1e-2), **settings)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, corpus, losses = BATCH // size // peer.accumulation, Corpus(None, TINY.seq), []
    for step in range(steps):
        total = torch.zeros(())
        with CollectiveLog() as log:
            for micro in range(peer.accumulation):
                first = (micro * size + rank) * rows
                loss = peer.model(*corpus.batch(first, first + rows, step=step, seed=0))
                peer.backward(loss)
                total += loss.detach() / peer.accumulation
            peer.step()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        losses.append(total.item())
    funcs: dict[str, int] = {}
    for call in log.calls:
        funcs[call.func] = funcs.get(call.func, 0) + 1
    return losses, funcs


@pytest.mark.parametrize("name", PEERS)
def test_peers_agree_with_one_process_and_with_ours(name: str, two: World) -> None:  # noqa: F811
    alone = train_alone(20, max_norm=0.5)
    losses, funcs = two.run(train_peer, name, 20, {"max_norm": 0.5, "gradient_accumulation": 2})[0]
    if name.startswith("fsdp2"):
        assert {"all_gather", "reduce_scatter"} <= set(funcs)
    assert losses == pytest.approx(alone, rel=1e-5)
    ours = two.run(train, 20, {"stage": PEERS[name], "max_norm": 0.5, "gradient_accumulation": 2})[0]
    assert ours == pytest.approx(losses, rel=1e-5)


def test_bfloat16_stays_within_fsdp2s_spread(two: World) -> None:  # noqa: F811
    exact = train_alone(20, max_norm=None)
    theirs, _ = two.run(train_peer, "fsdp2", 20, {"param_dtype": torch.bfloat16})[0]
    spread = max(abs(a - b) for a, b in zip(theirs, exact, strict=True))
    for stage in range(4):
        ours = two.run(train, 20, {"stage": stage, "param_dtype": torch.bfloat16})[0]
        assert max(abs(a - b) for a, b in zip(ours, exact, strict=True)) <= max(2 * spread, 0.02), stage


def test_unknown_peer() -> None:
    with pytest.raises(ValueError, match="a peer is one of ddp, zero-optimizer"):
        Peer("horovod", torch.nn.Linear(1, 1), adamw(1e-3))
