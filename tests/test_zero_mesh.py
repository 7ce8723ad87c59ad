"""Jobs cut in more ways than one: replicas of shards (HSDP), other reductions, experts, tensor parallelism."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dynamiccl.zero_workload import Engine, zero
from dynamiccl.zero_workload.dryrun import CollectiveLog
from dynamiccl.zero_workload.model import Transformer
from dynamiccl.zero_workload.parallel import subgroup
from dynamiccl.zero_workload.peers import Peer
from test_zero import TINY, adamw, run, train_alone
from world import World

FP32: dict[str, Any] = {"param_dtype": torch.float32, "bucket_bytes": 2**14}


def traffic(job: Any, names: dict[str, str], rows: int = 16) -> Counter[tuple[str, str]]:
    """Bytes of one step in steady state by communicator (its name in ``names``) and collective."""
    run(job, range(1), rows=rows)
    with CollectiveLog() as log:
        run(job, range(1), rows=rows)
    total: Counter[tuple[str, str]] = Counter()
    note = "all_reduce", 4 * (len(list(job.model.parameters())) + 1)  # see zero_workload/health.py
    assert sum(call.func == note[0] and call.n_bytes == note[1] for call in log.calls) >= 1
    for call in (c for c in log.calls[:-1] if (c.func, c.n_bytes) != note):  # the last averages the losses
        total[names.get(call.group, call.group), call.func.replace("all_to_all", "reduce_scatter")] += call.n_bytes
    return total


# HSDP: sharded over 2 ranks, replicated over 2 -----------------------------------------------------------------------


def hsdp(settings: dict[str, Any], steps: int) -> tuple[list[float], Counter[tuple[str, str]], dict[str, int], int]:
    """Losses of ours, bytes by communicator, memory at rest, bytes of the padded parameters; 0 for a peer."""
    torch.manual_seed(0)
    model = Transformer(TINY)
    group, replicas = subgroup((2, 2), 1), subgroup((2, 2), 0)
    names = {group.group_name: "shard", replicas.group_name: "replicas"}
    settings = {**FP32, **settings}
    if "name" in settings:
        ranks = torch.arange(4).view(2, 2)
        mesh = dist.device_mesh.DeviceMesh.from_group([replicas, group], "cpu", ranks, mesh_dim_names=("r", "s"))
        job: Any = Peer(settings.pop("name"), model, adamw(1e-2), mesh=mesh, **settings)
    else:
        job = zero(model, adamw(1e-2), group=group, replicas=replicas, **settings)
    accumulation = settings.get("gradient_accumulation", 1)
    losses = run(job, range(steps), accumulation=accumulation)
    if not isinstance(job, Engine):
        return losses, Counter(), {}, 0
    bytes_of = traffic(job, names) if accumulation == 1 else Counter()
    return losses, bytes_of, job.memory(), 4 * sum(b.numel for b in job.buckets)


def test_hsdp_agrees_with_one_process_and_with_fsdp2(four: World) -> None:
    alone = train_alone(10, max_norm=0.5)
    for stage, accumulation, peer in ((2, 1, "fsdp2-no-reshard"), (3, 2, "fsdp2")):
        settings = {"max_norm": 0.5, "gradient_accumulation": accumulation}
        ranks = four.run(hsdp, {"stage": stage, **settings}, 10)
        assert all(losses == ranks[0][0] for losses, *_ in ranks)
        assert ranks[0][0] == pytest.approx(alone, rel=1e-5)
        theirs, *_ = four.run(hsdp, {"name": peer, **settings}, 10)[0]
        assert theirs == pytest.approx(ranks[0][0], rel=1e-5)


def test_hsdp_sends_and_holds_what_the_formulas_say(four: World) -> None:
    for stage, gathers in ((2, 1), (3, 2)):
        settings: dict[str, Any] = {"stage": stage, "keep_last": False}
        _, sent, memory, whole = four.run(hsdp, settings, 1)[0]
        assert sent == {
            ("shard", "reduce_scatter"): whole,
            ("shard", "all_gather"): gathers * whole,
            ("replicas", "all_reduce"): whole // 2,  # a shard
        }
        # float32: the master is the weight's own shard
        assert memory == {"weights": whole // (2 if stage == 3 else 1), "gradients": whole // 2, "optimizer": whole}
