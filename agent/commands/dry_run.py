"""``dynamiccl lab dry-run``: the collectives of a training step as a trace, on a machine without GPUs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from . import fail

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
    try:
        calls, n_params = run(PRESETS[model], ranks=ranks, stage=stage, engine=engine, **cut, **settings)
    except ValueError as error:
        fail(str(error))
    also = "".join(f"-{key}-{value}" for key, value in cut.items() if value not in (0, 1) or value is True)
    name = f"{model}-{engine}-{stage}-{ranks}{also}{'-fp32' if reduce_dtype == 'fp32' else ''}"
    folder = out or Path("runs", "dry-run", name)
    summary: dict[str, Any] = {"model": model, "n_params": n_params, "ranks": ranks, "stage": stage, "engine": engine}
    summary |= {**cut, "reduce_dtype": reduce_dtype}
    try:
        with TraceWriter(folder, {**summary, "dry_run": True}, existing="replace") as trace:
            trace.write(_events(calls, ranks_per_node), _steps())
    except TraceError as error:
        fail(str(error))
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


def _events(calls: list[Any], ranks_per_node: int) -> Any:
    """Rows of an events table for rank 0; algorithm, protocol and channels are unset: nobody has chosen."""
    import zlib

    import pandas as pd

    from ...traces.assemble import EVENT_COLUMNS, complete

    count: dict[tuple[str, str], int] = {}
    rows = []
    for order, call in enumerate(calls):
        key = (call.group, call.func)
        count[key] = count.get(key, -1) + 1
        rows.append({
            "seq": count[key],
            "comm_id": zlib.crc32(f"{call.group}/{call.n_ranks}".encode()),
            "rank": 0,
            "n_ranks": call.n_ranks,
            "n_nodes": _nodes(call, ranks_per_node),
            "func": call.func,
            "n_bytes": call.n_bytes,
            "dtype": call.dtype,
            "algo": "auto",
            "proto": "auto",
            "n_channels": 0,
            "table_generation": 0,
            "enqueue_ns": order,  # an order, not a time
            "start_ns": None,
            "end_ns": None,
            "step": 0,
            "pid": 0,
        })  # fmt: skip
    return complete(pd.DataFrame(rows), EVENT_COLUMNS)


def _steps() -> Any:
    import pandas as pd

    from ...traces.assemble import STEP_COLUMNS

    blank = {name: float("nan") if kind.startswith("float") else 0 for name, kind in STEP_COLUMNS.items()}
    return pd.DataFrame([blank], columns=list(STEP_COLUMNS)).astype(STEP_COLUMNS)
