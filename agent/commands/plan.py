"""``dynamiccl plan``: what each ZeRO stage holds and sends for a model, before anything is started.

The figures are those of ``zero_workload.job.planner``; here they are asked for and shown.
"""

from __future__ import annotations

from typing import Annotated

from . import Json, Option, refusing


def plan(
    params: Annotated[float, Option(help="Parameters, e.g. 7e9.")],
    ranks: Annotated[int, Option(help="All ranks.")],
    layers: Annotated[int, Option(help="Transformer layers.")] = 32,
    hidden: Annotated[int, Option(help="Model width; 0: from params and layers.")] = 0,
    seq: Annotated[int, Option(help="Tokens in a sequence.")] = 2048,
    batch: Annotated[int, Option(help="Sequences a rank and micro-batch.")] = 1,
    accumulate: Annotated[int, Option(help="Micro-batches a step.")] = 1,
    precision: Annotated[str, Option(help="mixed (16 bit, fp32 master weights) or fp32.")] = "mixed",
    memory: Annotated[float, Option(help="GB that one rank has.")] = 80.0,
    runtime: Annotated[float, Option(help="GB of it that CUDA, NCCL and libraries take.")] = 3.0,
    shard: Annotated[int, Option(help="HSDP: shard over so many ranks, replicate over the rest; 0: all.")] = 0,
    fp32_reduce: Annotated[bool, Option(help="Gradients are reduced in fp32.")] = False,
    as_json: Json = False,
) -> None:
    """Memory and traffic of ZeRO stages 0 to 3 for a dense transformer of this size, and which stage to use."""
    import json

    from ...zero_workload.job.planner import Request, estimate

    with refusing(ValueError, OverflowError):
        request = Request(
            params, ranks, layers, hidden, seq, batch, precision, memory * 1e9, runtime * 1e9,
            accumulate, shard, 4 * fp32_reduce,
        )  # fmt: skip
        result = estimate(request)
    if as_json:
        print(json.dumps(result, indent=2))
        return
    print(f"{params / 1e9:g} B parameters on {ranks} ranks, {precision} precision, Adam; GB of a rank:")
    figures = ("weights", "gradients", "optimizer", "total", "shard_sent", "replicas_sent")
    print("stage", *(f"{name.replace('_', ' '):>9}" for name in figures), "  fits")
    for s in result["stages"]:
        row = [f"{s[f'{name}_bytes'] / 1e9:.4g}".rjust(max(9, len(name))) for name in figures]
        print(f"{s['stage']:5}", *row, "   yes" if s["fits"] else "    no")
    print(f"what fits has room for {result['activations_bytes'] / 1e9:.3g} GB of activations, checkpointed, as well,")
    print(f"and for {runtime:g} GB that CUDA, NCCL and libraries take (--runtime)")
    best = result["recommended_stage"]
    print(f"{'no stage' if best is None else f'use stage {best}'}: {result['reason']}")
