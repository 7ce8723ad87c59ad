"""Jobs cut in more ways than one: replicas of shards (HSDP), other reductions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dry_run import Call, CollectiveLog
from dynamiccl.zero_workload import Engine, zero
from dynamiccl.zero_workload.engine.agreement import message_numel
from dynamiccl.zero_workload.job import train as train_module
from dynamiccl.zero_workload.job.model import Transformer
from dynamiccl.zero_workload.job.parallel import groups
from job_log import SMALL_MODEL, read_log
from peers import Peer, mesh_of
from test_zero import TINY, adamw, run, saved_and_resumed, train_alone
from test_zero_exact import OVER_GLOO
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from world import World

FP32: dict[str, Any] = {"param_dtype": torch.float32, "bucket_bytes": 2**14}


Bytes = Counter[tuple[str, str]]  # by communicator and collective


def without_note(calls: list[Call], engine: Engine) -> list[Call]:
    """``calls`` without what ranks tell each other once a step, see ``engine.agreement``; there is such."""
    sizes = 4 * message_numel(len(engine.params)), 4
    rest = [call for call in calls if call.func != "all_reduce" or call.n_bytes not in sizes]
    assert len(rest) < len(calls)
    return rest


def traffic(job: Any, names: dict[str, str], accumulation: int = 1) -> Bytes:
    """Bytes of one step in steady state; communicators have their names in ``names``."""
    run(job, range(1), accumulation=accumulation)
    with CollectiveLog() as log:
        run(job, range(1), accumulation=accumulation)
    total: Bytes = Counter()
    for call in without_note(log.calls[:-1], job):  # the last averages the losses
        total[names.get(call.group, "all"), OVER_GLOO.get(call.func, call.func)] += call.n_bytes
    return total


def stage_3_traffic(recompute: str) -> tuple[Bytes, int]:
    """Bytes of a step, and those of the padded parameters."""
    config = replace(TINY, recompute=recompute)
    job = zero(Transformer(config), adamw(1e-2), stage=3, keep_last=False, **FP32)
    return traffic(job, {}), 4 * sum(bucket.numel for bucket in job.buckets)


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_recomputation_gathers_nothing_more_at_stage_3(two: World, recompute: str) -> None:
    """The gather for backward serves the forward that is run again: 3 times the parameters in all, as without."""
    sent, whole = two.run(stage_3_traffic, recompute)[0]
    assert sent == {("all", "reduce_scatter"): whole, ("all", "all_gather"): 2 * whole}


# HSDP: sharded over 2 ranks, replicated over 2 -----------------------------------------------------------------------


def hsdp(settings: dict[str, Any], steps: int) -> tuple[list[float], Bytes, dict[str, int], int]:
    """Losses of ours, bytes by communicator, memory at rest, bytes of the padded parameters; 0 for a peer."""
    torch.manual_seed(0)
    model = Transformer(TINY)
    group, replicas = groups(2).values()
    names = {group.group_name: "shard", replicas.group_name: "replicas"}
    settings = {**FP32, **settings}
    if "name" in settings:
        mesh = mesh_of({"replicas": replicas, "group": group})
        job: Any = Peer(settings.pop("name"), model, adamw(1e-2), mesh=mesh, **settings)
    else:
        job = zero(model, adamw(1e-2), group=group, replicas=replicas, **settings)
    accumulation = settings.get("gradient_accumulation", 1)
    losses = run(job, range(steps), accumulation=accumulation)
    if not isinstance(job, Engine):
        return losses, Counter(), {}, 0
    bytes_of = traffic(job, names) if accumulation == 1 else Counter()
    return losses, bytes_of, job.memory(), 4 * sum(b.numel for b in job.buckets)


@pytest.mark.slow
def test_hsdp_agrees_with_one_process_and_with_fsdp2(four: World) -> None:
    alone = train_alone(10, max_norm=0.5)
    for stage, accumulation, peer in ((2, 1, "fsdp2-no-reshard"), (3, 2, "fsdp2")):
        settings = {"max_norm": 0.5, "gradient_accumulation": accumulation}
        ranks = four.run(hsdp, {"stage": stage, **settings}, 10)
        assert all(losses == ranks[0][0] for losses, *_ in ranks)
        assert ranks[0][0] == pytest.approx(alone, rel=1e-5)
        theirs, *_ = four.run(hsdp, {"name": peer, **settings}, 10)[0]
        assert theirs == pytest.approx(ranks[0][0], rel=1e-5)


def hsdp_saved_and_resumed(stage: int, folder: str) -> tuple[list[float], list[float]]:
    """Losses of three steps after saving, and of the same steps by an engine of other weights that has loaded."""

    def job(seed: int) -> Engine:
        torch.manual_seed(seed)
        return zero(Transformer(TINY), adamw(1e-2), stage=stage, **groups(2), **FP32)

    return saved_and_resumed(job(0), job(1), folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_hsdp_saves_and_resumes(four: World, stage: int, tmp_path: Path) -> None:
    for through, again in four.run(hsdp_saved_and_resumed, stage, str(tmp_path)):
        assert again == through and len(set(through)) == 3


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
        assert memory == {
            "weights": whole // (2 if stage == 3 else 1),
            "gradients": whole // 2,
            "optimizer": whole,
        }


# How gradients are reduced ------------------------------------------------------------------------------------------


def reduced(settings: dict[str, Any], steps: int) -> tuple[list[float], Bytes, dict[str, int], int]:
    """Losses, bytes by communicator, memory at rest, padded parameters; the last three of ours only."""
    torch.manual_seed(0)
    model, settings = Transformer(TINY), {"bucket_bytes": 2**14, **settings}
    accumulation = settings.get("gradient_accumulation", 1)
    if "name" in settings:
        peer = Peer(settings.pop("name"), model, adamw(1e-2), **settings)
        return run(peer, range(steps), accumulation=accumulation), Counter(), {}, 0
    names = {}
    if settings.pop("apart", False):
        settings["reduce_scatter_group"] = apart = dist.new_group()
        names[apart.group_name] = "apart"
    engine = zero(model, adamw(1e-2), **settings)
    losses = run(engine, range(steps), accumulation=accumulation)
    bytes_of = traffic(engine, names, accumulation)
    return losses, bytes_of, engine.memory(), sum(b.numel for b in engine.buckets)


@pytest.mark.slow
def test_float32_reduction_of_bfloat16_gradients(two: World) -> None:
    exact = train_alone(15, max_norm=None)
    both: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    theirs = two.run(reduced, {"name": "fsdp2", **both}, 15)[0][0]
    spread = max(abs(a - b) for a, b in zip(theirs, exact, strict=True))
    assert 0 < spread < 0.1
    for stage in range(4):
        losses, sent, memory, numel = two.run(reduced, {"stage": stage, "keep_last": False, **both}, 15)[0]
        assert max(abs(a - b) for a, b in zip(losses, exact, strict=True)) <= 1.5 * spread, stage
        reduction = ("all", "reduce_scatter" if stage else "all_reduce")
        assert sent.pop(reduction) == 4 * numel  # twice what bfloat16 sends
        assert sent == ({("all", "all_gather"): 2 * (2 if stage == 3 else 1) * numel} if stage else {})
        if stage >= 2:
            assert memory["gradients"] == 4 * numel // 2


def test_a_communicator_for_reduce_scatters_changes_no_digit(two: World) -> None:
    plain: dict[str, Any] = {"stage": 3, "keep_last": False, "max_norm": 0.5}
    losses, sent, _, numel = two.run(reduced, plain, 5)[0]
    beside, apart, _, _ = two.run(reduced, {**plain, "apart": True}, 5)[0]
    assert beside == losses
    scattered = ("all", "reduce_scatter")
    assert apart.pop(("apart", "reduce_scatter")) == sent[scattered] == 2 * numel
    assert apart == {("all", "all_gather"): 4 * numel}


# The job, cut up ------------------------------------------------------------------------------------------------------

SMALL = [*SMALL_MODEL, "--steps", "5", "--bucket-mb", "0.02"]


def job(arguments: list[str], folder: str) -> tuple[list[float], Bytes, dict[str, int]]:
    """Losses of the job, bytes by communicator of one step more, memory at rest."""
    args = train_module.parser().parse_args([*SMALL, *arguments, "--log", str(Path(folder, "log"))])
    train_module.check(args)
    one: Any = train_module.Job(args, torch.device("cpu"))
    one.run()
    with CollectiveLog() as log:
        one._step(9)[1].wait()
    engine: Engine = one.engine
    names = {engine.comm.group.group_name if engine.comm.group else "0": "shard"}
    if engine.comm.replicas and engine.comm.replicas.group:
        names[engine.comm.replicas.group.group_name] = "replicas"
    total: Bytes = Counter()
    for call in without_note(log.calls, engine):
        if call.n_bytes != 4 * 5:  # the losses
            total[names.get(call.group, "all"), OVER_GLOO.get(call.func, call.func)] += call.n_bytes
    losses = [step["loss"] for step in read_log(Path(folder, "log"))[1]]
    return losses, total, engine.memory()


LAYERS, WIDTH, SEQ, BYTES = 2, 32, 32, 256
# Bytes of parameters, of a layer's matrices and norms, embeddings, the last norm and the head; none needs padding.
DENSE = 4 * (LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + (2 * BYTES + SEQ + 2) * WIDTH)


@pytest.mark.slow
def test_the_job_cut_by_hsdp_trains_alike_and_sends_what_the_formulas_say(
    four: World, tmp_path: Path
) -> None:
    def run_job(text: str) -> tuple[list[float], Bytes, dict[str, int]]:
        done: tuple[list[float], Bytes, dict[str, int]] = four.run(
            job, text.split(), str(tmp_path), timeout=300
        )[0]
        return done

    whole = run_job("--batch 2 --stage 2")[0]
    losses, sent, memory = run_job("--batch 2 --hsdp 2 --stage 2")
    assert losses == pytest.approx(whole, rel=1e-5)
    expected: Bytes = Counter({("shard", func): DENSE for func in ("reduce_scatter", "all_gather")})
    expected["replicas", "all_reduce"] = DENSE // 2
    assert sent == expected
    assert memory == {"weights": DENSE, "gradients": DENSE // 2, "optimizer": DENSE}
    losses, *_ = run_job("--batch 2 --hsdp 2 --stage 3 --reduce-scatter-group --clip 100")
    assert losses == pytest.approx(whole, rel=1e-5)


BUCKET = "a number of at least 0.001 and below 1e9"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--prefetch -1", "--prefetch: a whole number from 0 up, not -1"),
        *((f"--clip {x}", f"--clip: a number above 0 and below 1e9, not {x}") for x in ("-1", "0", "nan")),
        *((f"--bucket-mb {x}", f"--bucket-mb: {BUCKET}, not {x}") for x in ("inf", "nan", "0", "0.0009")),
        ("--log /", "--log: / is a folder: name a file in it"),
        ("--hsdp 3", r"2 ranks are not 3 that shard \(HSDP\), times replicas"),
        ("--recompute-every 2", "recompute_every counts blocks: give it with recompute='block'"),
        ("--recompute selective", "fused attention does not keep: give it with materialised=True"),
        ("--timeout -5", "--timeout: a number above 0 and below 1e9, not -5"),
    ],
)
def test_the_job_refuses(arguments: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train_module.check(train_module.parser().parse_args(arguments.split()))


def refused(make: str) -> str:
    """The message with which a rank refuses ``make``."""
    model = Transformer(TINY)
    try:
        if make == "tensor parallel":
            mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
            zero(parallelize_module(model, mesh, {"head": ColwiseParallel()}), adamw(1e-3), stage=2)
        elif make == "replicas":
            zero(model, adamw(1e-3), stage=1, replicas=dist.group.WORLD)
        elif make == "peer":
            Peer("ddp", model, adamw(1e-3), reduce_dtype=torch.float32, param_dtype=torch.bfloat16)
        else:
            groups(3)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("tensor parallel", "head.weight is a DTensor, cut up already"),
        ("replicas", "replicas of shards exist at stages 2 and 3"),
        ("peer", "ddp has none"),
        ("ranks", "2 ranks are not 3 that shard (HSDP)"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank(make: str, words: str, two: World) -> None:
    assert all(words in message for message in two.run(refused, make))
