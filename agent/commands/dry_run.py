"""``dynamiccl lab dry-run``: the collectives of a training step as a trace, on a machine without GPUs."""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from . import fail, refusing

FUNCS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def dry_run(
    model: Annotated[str, typer.Option(help="gpt2, gpt2-xl, llama-7b, llama-13b, llama-70b or moe-8x7b.")] = "llama-7b",
    ranks: Annotated[int, typer.Option(help="All ranks.")] = 64,
    stage: Annotated[int, typer.Option(help="ZeRO stage, 0 to 3.")] = 3,
    engine: Annotated[str, typer.Option(help="zero (this package's) or fsdp2 (stages 2 and 3).")] = "zero",
    ranks_per_node: Annotated[int, typer.Option(help="GPUs of a node: how many nodes the trace speaks of.")] = 8,
    bucket_mb: Annotated[float, typer.Option(help="Bucket size in MiB, stages 0 to 2.")] = 25.0,
    shard: Annotated[int, typer.Option(help="HSDP: shard over so many ranks, replicate over the rest; 0: all.")] = 0,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that share each matrix.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="They share the sequence too.")
    ] = False,
    partition_activations: Annotated[
        bool, typer.Option("--partition-activations", help="They share what recomputing block by block keeps.")
    ] = False,
    expert_parallel: Annotated[int, typer.Option(help="Ranks that share the experts (moe-8x7b).")] = 1,
    reduce_dtype: Annotated[str, typer.Option(help="What gradients are reduced in: bf16 or fp32.")] = "bf16",
    reduce_scatter_group: Annotated[
        bool, typer.Option("--reduce-scatter-group", help="Reduce-scatters have a communicator of their own.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Trace folder; default runs/dry-run/MODEL-zero-STAGE-RANKS.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Record what a model of any size would send in one step, call by call, as an ordinary trace.

    It runs under fake tensors and a fake process group: no GPU, no memory. `dynamiccl tune -- COMMAND` writes the trace
    of a real job.
    """
    if min(ranks, ranks_per_node, tensor_parallel, expert_parallel) < 1 or bucket_mb <= 0 or shard < 0:
        fail("--ranks, --ranks-per-node, --tensor-parallel, --expert-parallel and --bucket-mb must be above 0")
    if reduce_dtype not in ("bf16", "fp32"):
        fail(f"--reduce-dtype is bf16 or fp32, not {reduce_dtype}")
    import json
    import time

    from ...traces.files import TraceError, TraceWriter
    from ...zero_workload.dryrun import dry_run as run
    from ...zero_workload.dryrun_models import PRESETS

    if model not in PRESETS:
        fail(f"no model {model}: take one of {', '.join(PRESETS)}")
    settings: dict[str, Any] = {"bucket_bytes": int(bucket_mb * 2**20)} if engine == "zero" else {}
    cut: dict[str, Any] = {"shard": shard, "tensor": tensor_parallel, "experts": expert_parallel}
    cut |= {"sequence": sequence_parallel, "partition": partition_activations, "apart": reduce_scatter_group}
    if reduce_dtype == "fp32":
        import torch

        settings["reduce_dtype"] = torch.float32
    begin = time.perf_counter()
    with refusing(ValueError):
        calls, n_params = run(PRESETS[model], ranks=ranks, stage=stage, engine=engine, **cut, **settings)
    also = "".join(f"-{key}-{value}" for key, value in cut.items() if value not in (0, 1) or value is True)
    name = f"{model}-{engine}-{stage}-{ranks}{also}{'-fp32' if reduce_dtype == 'fp32' else ''}"
    folder = out or Path("runs", "dry-run", name)
    summary: dict[str, Any] = {"model": model, "n_params": n_params, "ranks": ranks, "stage": stage, "engine": engine}
    summary |= {**cut, "reduce_dtype": reduce_dtype}
    with refusing(TraceError), TraceWriter(folder, {**summary, "dry_run": True}, existing="replace") as trace:
        trace.write(*_frames(calls, ranks_per_node))
    summary |= {"trace": str(folder), "calls": len(calls), "seconds": round(time.perf_counter() - begin, 1)}
    for func in FUNCS:
        sizes = [c.n_bytes for c in calls if c.func == func]
        summary[func] = {"calls": len(sizes), "n_bytes": sum(sizes), "parameters": round(sum(sizes) / 2 / n_params, 4)}
    counts = Counter((c.n_ranks, _nodes(c, ranks_per_node), c.group, c.func) for c in calls)
    names = ("n_ranks", "n_nodes", "communicator", "func", "calls")
    summary["communicators"] = [dict(zip(names, (*key, n), strict=True)) for key, n in sorted(counts.items())]
    if as_json:
        print(json.dumps(summary, indent=2))
        return
    print(f"{name}: {n_params / 1e9:.3f} B parameters, {len(calls)} collectives a step ({summary['seconds']} s)")
    for func in FUNCS:
        s = summary[func]
        if s["calls"]:
            print(f"  {func:14} {s['calls']:5} calls  {s['n_bytes'] / 1e9:9.3f} GB  {s['parameters']:.3f} x parameters")
    print(f"trace: {folder}")


def _nodes(call: Any, ranks_per_node: int) -> int:
    return len({place // ranks_per_node for place in range(0, call.n_ranks * call.stride, call.stride)})


def _frames(calls: list[Any], ranks_per_node: int) -> Any:
    """Events and steps of rank 0; algorithm, protocol and channels are unset: nobody has chosen."""
    from ...traces.importers_common import Imported

    found = Imported(steps=[{"index": 0, "rank": 0, "end_ns": 0, "duration_ns": 0}])
    for order, call in enumerate(calls):
        comm_id = zlib.crc32(f"{call.group}/{call.n_ranks}".encode())
        row = {"comm_id": comm_id, "rank": 0, "func": call.func, "n_bytes": call.n_bytes, "dtype": call.dtype}
        row |= {"n_ranks": call.n_ranks, "n_nodes": _nodes(call, ranks_per_node), "algo": "auto", "proto": "auto"}
        found.events.append({**row, "enqueue_ns": order})  # an order, not a time
    return found.frames()
