"""``dynamiccl plan``: memory, traffic and time of each ZeRO stage for a model, before a job starts.

``zero_workload/formulas.py`` computes the figures. With a run's folder, the measured figures are shown too.
"""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

from . import Argument, Call, Json, Option, fail, refusing

GB = 1e9
#: Below so many parameters amounts are printed in MB.
SMALL = 1e8


def plan(
    call: Call,
    run: Annotated[str | None, Argument(help="A run's folder: show its measured figures too.")] = None,
    params: Annotated[float | None, Option(min=1, help="Parameters, e.g. 7e9.")] = None,
    ranks: Annotated[int | None, Option(min=1, help="Data-parallel ranks.")] = None,
    layers: Annotated[int, Option(min=1, help="Transformer layers.")] = 32,
    width: Annotated[int, Option(min=0, help="Model width; 0: from params and layers.")] = 0,
    heads: Annotated[int, Option(min=0, help="Attention heads; 0: heads of 128 elements.")] = 0,
    seq: Annotated[int, Option(min=1, help="Tokens in a sequence.")] = 2048,
    batch: Annotated[int, Option(min=1, help="Sequences per rank.")] = 1,
    optimizer: Annotated[str, Option(help="adam, adan, lion or sgd.")] = "adam",
    precision: Annotated[str, Option(help="mixed (16 bit, fp32 masters) or fp32.")] = "mixed",
    tensor: Annotated[int, Option(min=1, help="Ranks that share each matrix.")] = 1,
    memory: Annotated[float, Option(min=0.001, help="Memory of a GPU, in GB.")] = 80.0,
    bandwidth: Annotated[float, Option(min=0.001, help="Send bandwidth of a rank, in GB/s.")] = 100.0,
    latency: Annotated[float, Option(min=0, help="Latency of a collective, in microseconds.")] = 10.0,
    tflops: Annotated[float, Option(min=0.001, help="Compute speed of a GPU, in TFLOP/s.")] = 150.0,
    json: Json = False,
) -> None:
    """Compute memory, traffic and time of ZeRO stages 0 to 3 for a transformer, and advise a stage.

    \b
    dynamiccl plan --params 7e9 --ranks 8 --batch 4
    dynamiccl plan runs/tune/latest     # also what a run used
    """
    from ...zero_workload import formulas

    measured: dict[str, Any] = {}
    if run is not None:
        measured = _measured(run)
        params = params or measured["params"]
        ranks = ranks or measured["ranks"]
        layers, width, heads, seq, batch, precision = _settings(measured, call)
    if params is None or ranks is None:
        fail("give --params and --ranks, e.g. --params 7e9 --ranks 8")
    if optimizer not in formulas.MOMENTS or precision not in formulas.PRECISIONS:
        known = f"{', '.join(formulas.MOMENTS)}; {', '.join(formulas.PRECISIONS)}"
        fail(f"no figures for {optimizer} in {precision}: known are {known}")
    itemsize = formulas.PRECISIONS[precision][0]
    width = width or max(128, round((params / (12 * layers)) ** 0.5 / 128) * 128)
    heads = heads or max(1, width // 128)
    shape = formulas.Shape(layers, width, heads, seq, batch, itemsize)
    machine = formulas.Machine(memory * GB, tflops * 1e12, bandwidth * GB, latency * 1e-6)
    with refusing(ValueError, OverflowError):
        told = estimate(params, ranks, shape, machine, optimizer, precision, tensor)
        if measured:
            told["measured"] = compare(measured)
    print(json_module.dumps(told, indent=2) if json else "\n".join(lines(told)))


def estimate(
    params: float, ranks: int, shape: Any, machine: Any, optimizer: str, precision: str, tensor: int = 1
) -> dict[str, Any]:
    """Everything that ``plan`` prints, ready for JSON: bytes, seconds, and one entry for each stage and mode."""
    from ...zero_workload import formulas as f

    here = params / tensor
    weight, gradient, _ = f.state_bytes(optimizer, precision)
    held = {mode: f.activations(shape, mode, tensor) for mode in f.MODES}
    stages, totals = [], {}
    for stage in range(4):
        parts = f.model_states(here, ranks, stage, optimizer, precision)
        sent = f.traffic(here, ranks, stage, weight=weight, gradient=gradient)
        totals[stage] = sum(parts) + held["sqrt"] + f.RUNTIME
        row = dict(zip(("weights", "gradients", "optimizer"), parts, strict=True))
        fits = {mode: sum(parts) + n_bytes + f.RUNTIME <= machine.memory for mode, n_bytes in held.items()}
        seconds = sent / machine.bandwidth
        stages.append(
            {"stage": stage, **row, "total": sum(parts), "sent": sent, "seconds": seconds, "fits": fits}
        )
    layer = here / shape.layers
    compute = f.compute_seconds(here, shape.batch, shape.seq, machine)
    small = 0.0 if layer > f.LARGE_LAYER else here
    mixed = f.hybrid(here - small, small, ranks, optimizer, precision)
    values = []
    for name, saved, flops in f.recomputation_value(shape, tensor):
        values.append({"what": name, "saved": saved, "flops": flops, "bytes_per_flop": saved / flops})
    return {
        "params": params,
        "ranks": ranks,
        "shape": vars(shape),
        "optimizer": optimizer,
        "precision": precision,
        "tensor": tensor,
        "machine": vars(machine),
        "stages": stages,
        "classic_sent": f.traffic(here, ranks, 1, True, weight, gradient),
        "layer_activations": f.layer_activations(shape, tensor=tensor),
        "activations": held,
        "recomputed": {mode: f.recomputed_share(shape, mode) for mode in f.MODES},
        "recomputation_value": values,
        "best_interval": f.best_interval(shape.layers),
        "runtime": f.RUNTIME,
        "compute_seconds": compute,
        "stage_3_seconds": f.stage_3_seconds(here, shape.layers, machine, weight, gradient),
        "break_even_batch": f.break_even_batch(
            here, shape.layers, shape.seq, machine, weight=weight, gradient=gradient
        ),
        "prefetch": f.prefetch_depth(layer, compute / 3 / shape.layers, machine.bandwidth, weight),
        "hybrid": {"layer_params": layer, "held": mixed[0], "sent": mixed[1]},
        "tensor_sent": f.tensor_traffic(shape, tensor, shape.layers),
        "recommended_stage": f.stage_that_fits(totals, machine.memory, ranks),
    }


def lines(told: dict[str, Any]) -> list[str]:
    """The plan for people: at most 40 lines of 80 columns."""
    machine = told["machine"]
    unit, name, much = (GB, "GB", "B") if told["params"] >= SMALL else (1e6, "MB", "M")
    amount = f"{told['params'] / unit:g} {much} parameters"
    size = f"{amount}, {told['ranks']} ranks, {told['optimizer']}, {told['precision']}"
    found = [size, "", *_stage_lines(told, unit, name), "", *_activation_lines(told, unit, name)]
    found += ["", "what to recompute first         saves   bytes a FLOP"]
    for row in told["recomputation_value"]:
        found.append(f"{row['what']:<26} {row['saved'] / unit:7.3g} {name} {row['bytes_per_flop']:9.2g}")
    times = f"compute {told['compute_seconds'] * 1e3:.3g} ms, stage 3 sends for {told['stage_3_seconds'] * 1e3:.3g} ms"
    found += ["", times, f"below 5 % of the compute from a batch of {told['break_even_batch']}"]
    mixed = told["hybrid"]
    found.append(f"gather {told['prefetch']} layers ahead (k* = gather / compute of a layer)")
    kept = f"{mixed['held'] / unit:.4g} {name}, {mixed['sent'] / unit:.4g} {name} sent"
    kept = f"{mixed['layer_params'] / 1e6:.4g} M a layer: {kept}"
    found += ["hybrid (layers over 100 M parameters at stage 3, smaller ones at 2):", f"  {kept}"]
    if told["tensor"] > 1:
        found.append(f"tensor parallel ranks send {told['tensor_sent'] / unit:.3g} {name} more")
    best = told["recommended_stage"]
    room = f"{machine['memory'] / GB:g} GB"
    offload = f"no stage fits {room}: take more ranks, or stage 3 with offload"
    found += [
        "",
        offload if best is None else f"use stage {best}: the lowest of 1 to 3 that fits {room} with sqrt",
    ]
    if "measured" in told:
        found += ["", *measured_lines(told["measured"])]
    return found


# A run --------------------------------------------------------------------------------------------------------------


def _measured(run: str) -> dict[str, Any]:
    """What a run of our own job left: the job's account, and bytes by collective of a step."""
    from pathlib import Path

    from ...traces.files import Trace, TraceError
    from ...traces.queries.lives import last_life
    from ..report.outputs import log_lines

    with refusing(TraceError, OSError, ValueError):
        trace = last_life(Trace.read(Path(run)))
        log = trace.folder.parent / "job.jsonl"
        if not log.is_file():
            fail(
                f"{run} has no job.jsonl: `plan RUN` knows runs of our own job (dynamiccl tune without a COMMAND)"
            )
        records = log_lines(log)
    begun = [i for i, record in enumerate(records) if "n_params" in record]  # a resumed run writes on
    last = records[begun[-1] :] if begun else []
    ended = [record for record in last if "memory" in record]
    if not ended:
        fail(f"{log} holds no memory: the job writes it when it ends")
    head = {**last[0], **ended[-1]}
    scale = trace.header.get("bytes_scale") or 1
    sent = sent_in_a_step(trace.events, head["n_ranks"], scale)
    return {**head, "params": head["n_params"], "ranks": head["n_ranks"], "sent": sent}


def sent_in_a_step(events: Any, ranks: int, scale: float = 1) -> dict[str, float]:
    """Bytes that one rank sends in a step on a ring, by collective: the median over the steps that were seen whole.

    ``scale``: emulated bytes for one of the job's.
    """
    if events.empty:
        return {}
    one = events[events["pid"] == events["pid"].iloc[0]]
    steps = sorted(one["step"].unique())[1:-1]  # the first holds the set-up, the last may be cut
    whole = one[one["step"].isin(steps)]
    found: dict[str, float] = {}
    for func, calls in whole.groupby("func"):
        times = 2 if func == "all_reduce" else 1
        by_step = calls["n_bytes"].groupby(calls["step"]).sum()
        share = (ranks - 1) / ranks
        found[str(func)] = float(by_step.median()) / scale * times * share
    return found


def compare(measured: dict[str, Any]) -> dict[str, Any]:
    """Measured bytes beside the formulas' for the run's stage, and by how much they differ.

    Raises:
        ValueError: the formulas do not cover the run: its optimizer, or several micro-batches.
    """
    from ...zero_workload import formulas as f

    precision, optimizer = _precision(measured["dtype"]), _optimizer(measured.get("optimizer"))
    if measured.get("accumulate", 1) > 1:
        raise ValueError("the formulas are those of one micro-batch: run the job without --accumulate")
    params, ranks, stage = measured["params"], measured["ranks"], measured["stage"]
    classic, memory = measured.get("classic", False), measured["memory"]
    weight, gradient, _ = f.state_bytes(optimizer, precision)
    *held, states = f.model_states(params, ranks, stage, optimizer, precision)
    states += 4 * f.KEPT_BESIDE.get(optimizer, 0) * params / (ranks if stage else 1)
    used = {**memory, "optimizer": memory.get("host", memory["optimizer"])}
    rows = []
    for name, formula in zip(("weights", "gradients", "optimizer"), (*held, states), strict=True):
        rows.append({"what": name, "measured": used[name], "formula": formula})
    sent = f.traffic(params, ranks, stage, classic, weight, gradient)
    sent -= f.ring(ranks) * weight * measured.get("kept_params", 0)
    sent += f.scalar_traffic(measured["n_tensors"], ranks) + 2 * f.ring(ranks) * 4 * (ranks + 1)
    rows.append({"what": "sent in a step", "measured": sum(measured["sent"].values()), "formula": sent})
    for row in rows:
        row["off"] = row["measured"] / row["formula"] - 1 if row["formula"] else 0.0
    return {"stage": stage, "rows": rows, "by_collective": measured["sent"]}


def _stage_lines(told: dict[str, Any], unit: float, name: str) -> list[str]:
    """What a rank holds and sends at each stage, in units of ``unit`` bytes."""
    found = [f"{name} of a rank  weights gradients optimizer    total     sent  transfer"]
    for row in told["stages"]:
        held = [f" {row[key] / unit:8.4g}" for key in ("weights", "gradients", "optimizer", "total", "sent")]
        found.append(f"stage {row['stage']}     {''.join(held)} {row['seconds'] * 1e3:7.3g} ms")
    found.append(f"stage 1 by all-reduce (--classic) sends {told['classic_sent'] / unit:.4g} {name}")
    return found


def _activation_lines(told: dict[str, Any], unit: float, name: str) -> list[str]:
    """What activations take under each kind of recomputation, and with which stages they fit."""
    shape = told["shape"]
    tokens = f"{shape['batch']} x {shape['seq']} tokens"
    linear, quadratic = (f"{n / unit:.3g} {name}" for n in told["layer_activations"])
    values, part = f"{2 + 12 / told['tensor']:.3g}", f" / {told['tensor']}" if told["tensor"] > 1 else ""
    found = [f"activations of {tokens}: {values} BLd {linear}, B H L^2{part} {quadratic} a layer"]
    found.append("recompute   activations  again   fits with stage")
    for mode, n_bytes in told["activations"].items():
        stages = [str(row["stage"]) for row in told["stages"] if row["fits"][mode]]
        again = f"{told['recomputed'][mode]:6.1%}"
        found.append(f"{mode:<11} {n_bytes / unit:8.3g} {name} {again}   {', '.join(stages) or 'none'}")
    kept = f"one layer in {told['best_interval']} is kept"
    found.append(f"sqrt: {kept}; {told['runtime'] / GB:g} GB are CUDA's, NCCL's")
    return found


def _settings(measured: dict[str, Any], call: Call) -> list[Any]:
    """layers, width, heads, seq, batch and precision of a run; what the command line gives overrides them."""
    of_run = {**measured["model"], "batch": measured["batch"], "precision": _precision(measured["dtype"])}
    settings = call.values | {name: value for name, value in of_run.items() if name not in call.given}
    return [settings[name] for name in of_run]


def _precision(dtype: str) -> str:
    return "fp32" if dtype == "fp32" else "mixed"


def _optimizer(option: str | None) -> str:
    """The formulas' name of the job's ``--optimizer MODULE:CLASS``. Raises ValueError if they have none."""
    from ...zero_workload.formulas import MOMENTS

    name = (option or "adam").rpartition(":")[2].lower().replace("adamw", "adam")
    if name not in MOMENTS:
        raise ValueError(f"no formulas for {option}: known are {', '.join(MOMENTS)}")
    return name


def measured_lines(compared: dict[str, Any]) -> list[str]:
    """The table of a run."""
    found = [f"this run, stage {compared['stage']}     measured      formula    off"]
    for row in compared["rows"]:
        both = f"{row['measured'] / 1e6:10.3f} MB {row['formula'] / 1e6:9.3f} MB"
        found.append(f"{row['what']:<20} {both} {row['off']:+6.1%}")
    return found
