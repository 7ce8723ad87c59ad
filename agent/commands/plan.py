"""``dynamiccl plan``: what each ZeRO stage costs for a model, before anything is started.

The figures are those of ``zero_workload.planner``; here they are asked for and shown.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from . import refusing


def plan(
    params: Annotated[float, typer.Option(help="Parameters, e.g. 7e9.")],
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks.")],
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = 32,
    hidden: Annotated[int, typer.Option(help="Model width; 0: from params and layers.")] = 0,
    heads: Annotated[int, typer.Option(help="Attention heads; 0: hidden / 128.")] = 0,
    seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences a rank and step.")] = 1,
    optimizer: Annotated[str, typer.Option(help="adam, adan or lion.")] = "adam",
    precision: Annotated[str, typer.Option(help="mixed (16 bit, fp32 master weights) or fp32.")] = "mixed",
    bandwidth: Annotated[float, typer.Option(help="GB/s that a rank sends in a collective.")] = 100.0,
    latency: Annotated[float, typer.Option(help="Microseconds a collective.")] = 10.0,
    flops: Annotated[float, typer.Option(help="TFLOP/s that one rank reaches.")] = 150.0,
    memory: Annotated[float, typer.Option(help="GB that one rank has.")] = 80.0,
    runtime: Annotated[float, typer.Option(help="GB of it that CUDA, NCCL and libraries take.")] = 3.0,
    shard: Annotated[int, typer.Option(help="HSDP: shard over so many ranks, replicate over the rest; 0: all.")] = 0,
    tensor_parallel: Annotated[int, typer.Option(help="Ranks that share each matrix.")] = 1,
    fp32_reduce: Annotated[bool, typer.Option("--fp32-reduce", help="Gradients are reduced in fp32.")] = False,
    offload: Annotated[bool, typer.Option("--offload", help="Optimizer states on the CPU at stage 3.")] = False,
    partition_activations: Annotated[
        bool, typer.Option("--partition-activations", help="They also share each layer's kept input.")
    ] = False,
    expert_parallel: Annotated[int, typer.Option(help="Ranks that share the experts of each layer.")] = 1,
    expert_share: Annotated[float, typer.Option(help="Of the parameters, those that are experts'.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, in bytes and seconds.")] = False,
) -> None:
    """Memory, traffic and time of ZeRO stages 0 to 3 for a model of this size, and which stage to use."""
    import json

    from ...zero_workload.planner import Request, cut, estimate

    with refusing(ValueError, OverflowError):
        request = Request(
            params, ranks, layers, hidden, heads, seq, batch, optimizer, precision,
            bandwidth * 1e9, latency * 1e-6, flops * 1e12, memory * 1e9, runtime=runtime * 1e9,
        )  # fmt: skip
        result = estimate(request)
        if partition_activations and tensor_parallel == 1:
            raise ValueError("--partition-activations needs --tensor-parallel above 1")
        if shard or tensor_parallel > 1 or fp32_reduce or offload or expert_share:
            ways: Any = {"shard": shard, "tensor": tensor_parallel, "reduce_bytes": 4 * fp32_reduce}
            ways |= {"partition": partition_activations, "experts": expert_parallel, "expert_share": expert_share}
            result["cut"] = {str(n): cut(request, n, **ways, offload=offload and n == 3) for n in (2, 3)}
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _show(result)


#: Component -> colour and letter of its bar (the letter where colours are not shown).
_PARTS = (("weights", "cyan", "w"), ("gradients", "magenta", "g"), ("optimizer", "yellow", "o"))


def _show(result: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..terminal import terminal

    console = terminal()
    request, activations = result["request"], result["activations"]
    console.print(
        f"{request['params'] / 1e9:g} B parameters on {request['ranks']} ranks, {request['precision']} precision, "
        f"{request['optimizer']}; {request['layers']} layers of width {request['hidden']}, "
        f"batch {request['batch']} x {request['seq']} tokens a rank"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "weights", "grads", "optimizer", "total GB", "sent GB", "comm. ms", "step ms", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in result["stages"]:
        best = s["stage"] == result["recommended_stage"]
        table.add_row(
            f"{'> ' if best else ''}{s['stage']}",
            *(f"{s[f'{part}_bytes'] / 1e9:.4g}" for part, _, _ in _PARTS),
            f"{s['total_bytes'] / 1e9:.4g}",
            f"{s['traffic_bytes_per_step'] / 1e9:.4g}",
            f"{s['communication_s'] * 1e3:.4g}",
            f"{s['step_s'][0] * 1e3:.0f}-{s['step_s'][1] * 1e3:.0f}",
            "yes" if s["fits"] else "no",
            style="bold" if best else "",
        )
    console.print(table)
    largest = max(s["total_bytes"] for s in result["stages"])
    for number, parts in result.get("cut", {}).items():
        held = ", ".join(f"{name.removesuffix('_bytes').replace('_', ' ')} {n / 1e9:.4g}" for name, n in parts.items())
        console.print(f"stage {number} so cut, GB a rank: {held}")
    for s in result["stages"]:
        bar = Text(f"  stage {s['stage']} ")
        for part, colour, letter in _PARTS:
            bar.append(letter * round(50 * s[f"{part}_bytes"] / largest), style=f"{colour} on {colour}")
        console.print(bar.append(f" {s['total_bytes'] / 1e9:.4g} GB"))
    console.print(Text("          weights", "cyan").append(" gradients", "magenta").append(" optimizer", "yellow"))
    console.print(
        f"activations: {activations['all_bytes'] / 1e9:.3g} GB, or {activations['checkpointed_bytes'] / 1e9:.3g} GB "
        f"with a checkpoint every {activations['every']} layers (about a third more arithmetic)"
    )
    console.print(
        f"beside this {result['runtime_bytes'] / 1e9:g} GB go to CUDA, NCCL and libraries: counted in fits, --runtime"
    )
    console.print(
        f"stage 3: gather {result['prefetch']} layer(s) ahead; it sends 3 times the parameters, "
        f"{result['stages'][3]['passes_kept']:.2f} times with what the engine keeps between forward and backward"
    )
    console.print(
        f"on many ranks all that it sends takes at most 5 % of the arithmetic from batch {result['break_even_batch']} "
        f"a rank on, what it sends more than stage 2 from batch {result['break_even_extra_batch']} on"
    )
    if result["recommended_stage"] is None:
        console.print(f"no stage: {result['reason']}")
    else:
        console.print(f"use stage {result['recommended_stage']}: {result['reason']}")
