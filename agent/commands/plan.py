"""``dynamiccl plan``: memory, traffic and time of each ZeRO stage for a model, before a job starts.

``zero_workload/formulas.py`` computes the figures. With a run's folder, the measured figures are shown too.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import click

from . import JSON, RUN, Number, argument, command, fail, given, option, refusing

if TYPE_CHECKING:
    from ...zero_workload.formulas import Machine

GB = 1e9
#: Below so many parameters amounts are printed in MB, and no stage is advised: a step is latency, not bytes.
SMALL = 1e8
#: Names of dtypes that gradients are reduced in -> bytes.
REDUCE = {"bf16": 2, "fp16": 2, "fp32": 4}
#: Part of a cluster preset's name -> GB of memory, TFLOP/s that a step reaches. 150 of an A100's 312 are the design
#: documents'; 400 of an H100's 989 is what Llama 3 reached (Grattafiori et al., 2024: 380 to 430). A B200's and an
#: L40S's are the same share of 2,250 and 362.
GPUS = {"a100": (80, 150), "h100": (80, 400), "h200": (141, 400), "b200": (180, 900), "pcie": (48, 150)}
#: Modes of recomputation in words.
MODES = {"every": "every k-th"}


@command
@argument("run", type=RUN, required=False, help="A run's folder: show its measured figures too.")
@option("--params", type=Number(1), help="Parameters, e.g. 7e9.")
@option("--ranks", type=click.IntRange(1), help="Data-parallel ranks.")
@option(
    "--layers", type=click.IntRange(0), default=0, help="Transformer layers; 0: those of a published model."
)
@option("--width", type=click.IntRange(0), default=0, help="Model width; 0: as the layers.")
@option("--heads", type=click.IntRange(0), default=0, help="Attention heads; 0: as the layers.")
@option("--vocab", type=click.IntRange(0), default=0, help="Tokens of the vocabulary; 0: as the layers.")
@option("--seq", type=click.IntRange(1), default=2048, help="Tokens in a sequence.")
@option("--batch", type=click.IntRange(1), default=1, help="Sequences per rank and micro-batch.")
@option("--accumulate", type=click.IntRange(1), default=1, help="Micro-batches in a step.")
@option("--optimizer", default="adam", help="adam, adan, lion or sgd.")
@option("--precision", default="mixed", help="mixed (16 bit, fp32 masters) or fp32.")
@option("--reduce-dtype", help="bf16, fp16 or fp32: dtype in which gradients are reduced.")
@option("--attention", default="flash", help="flash, or materialised (holds its probabilities).")
@option("--tensor", type=click.IntRange(1), default=1, help="Ranks that share each matrix.")
@option("--cluster", help="A preset of `tune`, or a .toml file: its GPU and bandwidth.")
@option("--memory", type=Number(0.001), default=80.0, help="Memory of a GPU, in GB.")
@option("--bandwidth", type=Number(0.001), default=100.0, help="Send bandwidth of a rank, in GB/s.")
@option("--latency", type=Number(0), default=10.0, help="Latency of a collective, in microseconds.")
@option("--tflops", type=Number(0.001), default=150.0, help="Compute speed of a GPU, in TFLOP/s.")
@option("--plot", help="Draw memory against traffic into this SVG file.")
@JSON
@click.pass_context
def plan(
    ctx: click.Context,
    run: str | None,
    params: float | None,
    ranks: int | None,
    layers: int,
    width: int,
    heads: int,
    vocab: int,
    seq: int,
    batch: int,
    accumulate: int,
    optimizer: str,
    precision: str,
    reduce_dtype: str | None,
    attention: str,
    tensor: int,
    cluster: str | None,
    memory: float,
    bandwidth: float,
    latency: float,
    tflops: float,
    plot: str | None,
    json: bool,
) -> None:
    """Compute memory, traffic and time of ZeRO stages 0 to 3 for a transformer, and advise a stage and recomputation.

    \b
    dynamiccl plan --params 7e9 --ranks 8 --batch 4
    dynamiccl plan --params 70e9 --ranks 64 --cluster dgx-h100-2x8
    dynamiccl plan runs/tune/latest     # also what a run used
    """
    from ...zero_workload import formulas

    measured: dict[str, Any] = {}
    if run is not None:
        measured = _measured(run)
        params = params or measured["params"]
        ranks = ranks or measured["ranks"]
        of_run = _settings(measured, ctx)
        layers, width, heads, seq, batch, precision, accumulate, reduce_dtype, attention, vocab = of_run
    if params is None or ranks is None:
        fail("give --params and --ranks, e.g. --params 7e9 --ranks 8")
    _check_names(optimizer, precision, attention, reduce_dtype)
    itemsize = formulas.PRECISIONS[precision][0]
    n, d, h, v = _sizes(params, layers, width, heads, vocab)
    shape = formulas.Shape(n, d, h, seq, batch, itemsize, v, attention == "materialised")
    with refusing(ValueError, OverflowError):
        speeds = {"memory": memory, "bandwidth": bandwidth, "tflops": tflops}
        machine = _machine(speeds, latency, cluster, ranks * tensor, given(ctx))
        reduced = REDUCE[reduce_dtype] if reduce_dtype else None
        told = estimate(params, ranks, shape, machine, optimizer, precision, tensor, accumulate, reduced)
        if measured:
            told["measured"] = compare(measured)
        if plot:
            draw(told, plot)
    print(json_module.dumps(told, indent=2) if json else "\n".join(lines(told)))


def _check_names(optimizer: str, precision: str, attention: str, reduce_dtype: str | None) -> None:
    """Refuse the names of options that the formulas have no figures for."""
    from ...zero_workload.formulas import MOMENTS, PRECISIONS

    if optimizer not in MOMENTS or precision not in PRECISIONS:
        known = f"{', '.join(MOMENTS)}; {', '.join(PRECISIONS)}"
        fail(f"no figures for {optimizer} in {precision}: known are {known}")
    if attention not in ("flash", "materialised"):
        fail(f"--attention is flash or materialised, not {attention}")
    if reduce_dtype is not None and reduce_dtype not in REDUCE:
        fail(f"--reduce-dtype is {', '.join(REDUCE)}, not {reduce_dtype}")


def _sizes(params: float, layers: int, width: int, heads: int, vocab: int) -> list[int]:
    """A model's layers, width, heads and vocabulary: each that is 0 is that of the published model nearest in size."""
    from ...zero_workload.formulas import published

    if layers and not width:  # another depth than the published one has another width
        width = max(128, round((params / (12 * layers)) ** 0.5 / 128) * 128)
    if width and not heads:
        heads = max(1, width // 128)
    sizes = zip((layers, width, heads, vocab), published(params), strict=True)
    return [one or other for one, other in sizes]


def _machine(
    speeds: dict[str, float], latency: float, cluster: str | None, ranks: int, given: Collection[str]
) -> Machine:
    """The machine of the formulas: ``speeds`` (GB, GB/s, TFLOP/s) and the ``latency`` in microseconds.

    With a ``cluster`` its figures for so many ``ranks`` replace the speeds that were not ``given``. Raises ValueError.
    """
    from ...zero_workload.formulas import Machine

    if cluster is not None:
        speeds = speeds | {k: x for k, x in of_cluster(cluster, ranks).items() if k not in given}
    return Machine(speeds["memory"] * GB, speeds["tflops"] * 1e12, speeds["bandwidth"] * GB, latency * 1e-6)


def of_cluster(name: str, ranks: int) -> dict[str, float]:
    """GB of memory, GB/s of a ring's link and TFLOP/s of so many ``ranks`` of a preset or a cluster's file.

    A ring on one node runs at what NCCL's channels move within it. On several it also crosses the network, which has
    the ports of a node. Raises ValueError.
    """
    from ...envs.nccl_model.clusters import cluster, resize

    one = cluster(name)
    nodes = max(1, -(-ranks // one.gpus_per_node))
    there = resize(one, nodes)
    bandwidth = there.ring.channels * there.ring.bw_intra
    if nodes > 1:
        bandwidth = min(bandwidth, there.ring.channels * there.ring.bw_inter, there.n_nics * there.nic_gbs)
    found = {"bandwidth": bandwidth}
    for part, (memory, tflops) in GPUS.items():
        if part in name.lower():
            found |= {"memory": float(memory), "tflops": float(tflops)}
    return found


def estimate(
    params: float,
    ranks: int,
    shape: Any,
    machine: Any,
    optimizer: str,
    precision: str,
    tensor: int = 1,
    accumulate: int = 1,
    reduced: int | None = None,
) -> dict[str, Any]:
    """Everything that ``plan`` prints, ready for JSON: bytes, seconds, and one entry for each stage and mode.

    ``reduced``: bytes of a gradient as it is sent; None: the precision's.
    """
    from ...zero_workload import formulas as f

    here = params / tensor
    weight, usual, _ = f.state_bytes(optimizer, precision)
    gradient = usual if reduced is None else reduced
    layer = here / shape.layers
    compute = f.compute_seconds(here, shape.batch, shape.seq, machine)
    prefetch = min(
        shape.layers, f.prefetch_depth(layer, compute / 3 / shape.layers, machine.bandwidth, weight)
    )
    modes = f.modes(shape)
    held = {mode: f.activations(shape, mode, tensor) for mode in modes}
    again = {mode: f.recomputed_share(shape, mode) for mode in modes}
    job = f.Job(here, ranks, shape.layers, compute, weight, gradient, accumulate)
    logits = f.logits(shape, tensor)
    stages, pairs = [], []
    for stage in range(4):
        kept = f.held_gradient(stage, gradient, precision, accumulate)
        parts = f.model_states(here, ranks, stage, optimizer, precision, kept)
        sent = f.traffic(here, ranks, stage, False, weight, gradient, accumulate)
        row: dict[str, Any] = dict(zip(("weights", "gradients", "optimizer"), parts, strict=True))
        beside = (
            logits + f.RUNTIME + (f.gathered(here, shape.layers, weight, prefetch) if stage == 3 else 0.0)
        )
        fits = {}
        for mode in modes:
            total = sum(parts) + held[mode] + beside
            fits[mode] = total <= machine.memory
            seconds = f.step_seconds(job, stage, again[mode], machine)
            pair = {
                "stage": stage,
                "recompute": mode,
                "again": again[mode],
                "total": total,
                "seconds": seconds,
            }
            pairs.append({**pair, "fits": fits[mode]})
        row |= {"stage": stage, "total": sum(parts), "sent": sent, "seconds": sent / machine.bandwidth}
        less = f.reduction(here, ranks, stage, optimizer, precision, gradient, accumulate)
        stages.append({**row, "reduction": less, "beside": beside, "fits": fits})
    values = []
    for name, saved, flops in f.recomputation_value(shape, tensor):
        values.append({"what": name, "saved": saved, "flops": flops, "bytes_per_flop": saved / flops})
    advice = advised(pairs, params, ranks)
    return {
        "params": params,
        "ranks": ranks,
        "shape": vars(shape),
        "optimizer": optimizer,
        "precision": precision,
        "tensor": tensor,
        "accumulate": accumulate,
        "machine": vars(machine),
        "stages": stages,
        "pairs": pairs,
        "classic_sent": f.traffic(here, ranks, 1, True, weight, gradient),
        "layer_activations": f.layer_activations(shape, tensor=tensor),
        "activations": held,
        "logits": logits,
        "recomputed": again,
        "recomputation_value": values,
        "best_interval": f.interval(shape, tensor),
        "runtime": f.RUNTIME,
        "compute_seconds": compute * accumulate,
        "stage_3_seconds": accumulate * f.stage_3_seconds(here, shape.layers, machine, weight, gradient),
        "break_even_batch": f.break_even_batch(
            here, shape.layers, shape.seq, machine, weight=weight, gradient=gradient
        ),
        "prefetch": prefetch,
        "gradient_bytes": gradient,
        "hybrid": _hybrid(here, ranks, shape, optimizer, precision, gradient, tensor, accumulate),
        "tensor_sent": accumulate * f.tensor_traffic(shape, tensor, shape.layers),
        "advice": advice,
        "recommended_stage": advice.get("stage"),
    }


def _hybrid(
    params: float,
    ranks: int,
    shape: Any,
    optimizer: str,
    precision: str,
    gradient: int,
    tensor: int,
    accumulate: int,
) -> dict[str, float]:
    """The hybrid by layer size: blocks, embedding and head of over 100 M parameters are sharded, the rest is not."""
    from ...zero_workload import formulas as f

    ends = min(2 * shape.vocab * shape.width / tensor, params / 2)  # embedding and head
    layer = (params - ends) / shape.layers
    small = (params - ends) * (layer <= f.LARGE_LAYER) + ends * (ends / 2 <= f.LARGE_LAYER)
    held, sent = f.hybrid(params - small, small, ranks, optimizer, precision, gradient, accumulate)
    return {"layer_params": layer, "small": small, "held": held, "sent": sent}


def advised(pairs: list[dict[str, Any]], params: float, ranks: int) -> dict[str, Any]:
    """The pair of stage and recomputation that takes the least time of those that fit, with the runner-up and why.

    Stage 0 is for one rank. Of two as fast: the lower stage, then less recomputation, then the one that holds less.
    Where none fits: the one that holds least. Of a small model: why there is none.
    """
    if params < SMALL:
        return {"none": "no advice: any stage fits so small a model, whose step is latency, not bytes"}
    allowed = [pair for pair in pairs if (pair["stage"] == 0) == (ranks == 1)]
    fitting = [pair for pair in allowed if pair["fits"]]
    if not fitting:
        return {"least": min(allowed, key=lambda pair: float(pair["total"]))}
    fitting.sort(
        key=lambda pair: (round(pair["seconds"], 6), *(pair[key] for key in ("stage", "again", "total")))
    )
    best = fitting[0]
    runner_up = next(iter(fitting[1:]), None)
    return {**best, "runner_up": runner_up}


def lines(told: dict[str, Any]) -> list[str]:
    """The plan for people: at most 40 lines of 80 columns."""
    unit, name, much = (GB, "GB", "B") if told["params"] >= SMALL else (1e6, "MB", "M")
    shape = told["shape"]
    amount = f"{told['params'] / unit:.4g} {much} parameters"
    size = f"{amount} ({shape['layers']} x {shape['width']}), {told['ranks']} ranks, {told['optimizer']}"
    found = [f"{size}, {told['precision']}", "", *_stage_lines(told, unit, name), ""]
    found += _activation_lines(told, unit, name)
    found += ["", "what to recompute first         saves   bytes a FLOP"]
    for row in told["recomputation_value"]:
        found.append(f"{row['what']:<26} {row['saved'] / unit:7.3g} {name} {row['bytes_per_flop']:9.2g}")
    compute, sends = (told[key] * 1e3 for key in ("compute_seconds", "stage_3_seconds"))
    found += ["", f"compute {compute:.3g} ms, stage 3 sends for {sends:.3g} ms"]
    if told["params"] >= SMALL:
        found.append(f"below 5 % of the compute from a batch of {told['break_even_batch']}")
        ahead = f"{told['prefetch']} layer{'s' if told['prefetch'] > 1 else ''} ahead"
        found.append(f"gather {ahead} (k* = gather / compute of a layer)")
    mixed = told["hybrid"]
    kept = f"{mixed['held'] / unit:.4g} {name}, {mixed['sent'] / unit:.4g} {name} sent"
    kept = f"{mixed['layer_params'] / 1e6:.4g} M a layer, {mixed['small'] / 1e6:.4g} M at stage 2: {kept}"
    found += ["hybrid (parts over 100 M parameters at stage 3, smaller ones at 2):", f"  {kept}"]
    if told["tensor"] > 1:
        found.append(f"tensor parallel ranks send {told['tensor_sent'] / unit:.3g} {name} more")
    found += ["", *_advice_lines(told)]
    if "measured" in told:
        found += ["", *measured_lines(told["measured"])]
    return found


def _advice_lines(told: dict[str, Any]) -> list[str]:
    """The pair that is advised, its bytes and time, the runner-up, and why."""
    advice = told["advice"]
    room = f"{told['machine']['memory'] / GB:g} GB"
    if "none" in advice:
        return [advice["none"]]
    if "least" in advice:
        least = advice["least"]
        held = f"stage {least['stage']}, {_mode(told, least)}, takes {least['total'] / GB:.4g}"
        return [f"no stage fits: {held} of {room}", "take more ranks, --tensor, a smaller batch, or offload"]
    found = [f"use {_pair(told, advice, room)}"]
    other = advice["runner_up"]
    if other is None:
        return [*found, "nothing else fits"]
    found.append(f"next {_pair(told, other, room)}")
    more = other["again"] - advice["again"]
    later = (other["seconds"] - advice["seconds"]) * 1e3
    if later < 0.5:
        why = "it is as fast, and shards more than the memory needs"
        if other["stage"] == advice["stage"]:
            why = "it is as fast, and " + ("recomputes more" if more > 0 else "holds more")
    elif more > 0:
        why = f"it computes {more:.0%} again: {later:.3g} ms"
    else:
        why = f"it waits {later:.3g} ms longer for transfers"
    return [*found, f"why: {why}"]


def _pair(told: dict[str, Any], pair: dict[str, Any], room: str) -> str:
    held = f"{pair['total'] / GB:.4g} of {room}"
    return f"stage {pair['stage']}, {_mode(told, pair)}: {held}, {_ms(pair['seconds'])} ms a step"


def _mode(told: dict[str, Any], pair: dict[str, Any]) -> str:
    mode = pair["recompute"]
    if mode == "none":
        return "nothing recomputed"
    return f"recompute {MODES.get(mode, mode)}" + (
        f" (k = {told['best_interval']})" if mode == "every" else ""
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def draw(told: dict[str, Any], path: str) -> None:
    """Draw what a rank holds against what it sends: the stages, and between 2 and 3 hybrids by how much is sharded.

    Raises ValueError if matplotlib is not installed, or the file cannot be written.
    """
    from ...zero_workload import formulas as f

    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'dynamiccl[plot]'") from None
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    here = told["params"] / told["tensor"]
    shares = [number / 20 for number in range(21)]
    how = [told[name] for name in ("ranks", "optimizer", "precision", "gradient_bytes", "accumulate")]
    mixed = [f.hybrid(here * x, here * (1 - x), *how) for x in shares]
    axes.plot([sent / GB for _, sent in mixed], [held / GB for held, _ in mixed], label="hybrids of 2 and 3")
    for row in told["stages"]:
        axes.plot(row["sent"] / GB, row["total"] / GB, "o", label=f"stage {row['stage']}")
    axes.axhline(told["machine"]["memory"] / GB, linestyle=":", color="black", label="memory of a GPU")
    axes.set_xlabel("GB that a rank sends in a step")
    axes.set_ylabel("GB of model states on a rank")
    axes.set_ylim(bottom=0)
    axes.legend()
    try:
        figure.savefig(path, format="svg")
    except OSError as error:
        raise ValueError(f"--plot {path}: {error.strerror}") from error


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
    world = head["n_ranks"] * head.get("tensor_parallel", 1)
    # The job adds its losses over all ranks, so its widest communicator stands for the whole emulated cluster.
    gpus = trace.events["n_ranks"].max() / world if trace.header.get("emulated") else 1
    sent = sent_in_a_step(trace.events, scale, gpus)
    return {**head, "params": head["n_params"], "ranks": head["n_ranks"], "sent": sent}


def sent_in_a_step(events: Any, scale: float = 1, gpus: float = 1) -> dict[str, float]:
    """Bytes that one rank sends in a step on rings, by collective: the median over the steps that were seen whole.

    ``scale``: emulated bytes for one of the job's; ``gpus``: emulated GPUs for one of its processes.
    """
    if events.empty:
        return {}
    one = events[events["pid"] == events["pid"].iloc[0]]
    steps = sorted(one["step"].unique())[1:-1]  # the first holds the set-up, the last may be cut
    whole = one[one["step"].isin(steps)]
    found: dict[str, float] = {}
    for func, calls in whole.groupby("func"):
        times = 2 if func == "all_reduce" else 1
        n_ranks = calls["n_ranks"] / gpus
        bytes_sent = calls["n_bytes"] * times * (n_ranks - 1) / n_ranks
        by_step = bytes_sent.groupby(calls["step"]).sum()
        found[str(func)] = float(by_step.median()) / scale
    return found


def compare(measured: dict[str, Any]) -> dict[str, Any]:
    """Measured bytes beside the formulas' for the run's stage and options, and by how much they differ.

    Raises:
        ValueError: the formulas do not cover the run: its optimizer, or several micro-batches.
    """
    from ...zero_workload import formulas as f

    precision, optimizer = _precision(measured["dtype"]), _optimizer(measured.get("optimizer"))
    if measured.get("accumulate", 1) > 1:
        raise ValueError("the formulas are those of one micro-batch: run the job without --accumulate")
    params, ranks, stage = measured["params"], measured["ranks"], measured["stage"]
    sharing = measured.get("hsdp") or ranks
    memory = measured["memory"]
    weight, usual, _ = f.state_bytes(optimizer, precision)
    gradient = REDUCE[measured["reduce_dtype"]] if measured.get("reduce_dtype") else usual
    whole = measured.get("whole_params", 0)  # --hybrid leaves them at stage 2
    formulas = [0.0, 0.0, 0.0, 0.0]
    for count, at in ((params - whole, stage), (whole, min(stage, 2))):
        held = f.model_states(
            count, sharing, at, optimizer, precision, f.held_gradient(at, gradient, precision)
        )
        states = 4 * f.KEPT_BESIDE.get(optimizer, 0) * count / (sharing if at else 1)
        sent = f.traffic(count, sharing, at, measured.get("classic", False), weight, gradient)
        both = zip(formulas, (*held[:2], held[2] + states, sent), strict=True)
        formulas = [before + more for before, more in both]
    formulas[3] += _sent_beside(measured, ranks, sharing, weight, gradient)
    used = {**memory, "optimizer": memory.get("host", memory["optimizer"])}
    rows: list[dict[str, Any]] = []
    for name, formula in zip(("weights", "gradients", "optimizer"), formulas[:3], strict=True):
        rows.append({"what": name, "measured": used[name], "formula": formula})
    sent_measured = sum(measured["sent"].values())
    rows.append({"what": "sent in a step", "measured": sent_measured, "formula": formulas[3]})
    for row in rows:
        row["off"] = row["measured"] / row["formula"] - 1 if row["formula"] else 0.0
    return {"stage": stage, "rows": rows, "by_collective": measured["sent"]}


def _sent_beside(measured: dict[str, Any], ranks: int, sharing: int, weight: int, gradient: int) -> float:
    """Bytes sent in a step beside those of the stage: units that are gathered once, replicas, tensor parallelism, the
    engine's agreement, the job's losses.
    """
    from ...zero_workload import formulas as f

    replicas, tensor = ranks // sharing, measured.get("tensor_parallel", 1)
    sent = -f.ring(sharing) * weight * measured.get("kept_params", 0)
    sent += f.replica_traffic(measured["params"], sharing, replicas, gradient)
    sent += f.scalar_traffic(measured["n_tensors"], sharing, replicas)
    sent += 2 * f.ring(ranks * tensor) * 4 * (ranks + 1)
    if tensor > 1:
        model = measured["model"]
        sizes = (model["layers"], model["width"], model["heads"], model["seq"])
        shape = f.Shape(*sizes, measured["batch"], weight)
        sent += f.tensor_traffic(shape, tensor, measured.get("checkpoints", 0))
        sent += 2 * f.ring(tensor) * 4  # the norm
    return sent


def _stage_lines(told: dict[str, Any], unit: float, name: str) -> list[str]:
    """What a rank holds and sends at each stage, in units of ``unit`` bytes; ``less``: by this factor than stage 0."""
    found = [f"{name} of a rank  weights gradients optimizer    total   less    sent  transfer"]
    for row in told["stages"]:
        held = [f" {row[key] / unit:8.4g}" for key in ("weights", "gradients", "optimizer", "total")]
        rest = f" {row['reduction']:6.3g} {row['sent'] / unit:7.4g} {row['seconds'] * 1e3:6.3g} ms"
        found.append(f"stage {row['stage']}     {''.join(held)}{rest}")
    found.append(f"stage 1 by all-reduce (--classic) sends {told['classic_sent'] / unit:.4g} {name}")
    found.append("all-reduces, as at stage 0, are tuned by `tune --all-reduce` alone")
    return found


def _activation_lines(told: dict[str, Any], unit: float, name: str) -> list[str]:
    """What activations take under each kind of recomputation, and a step's time with each stage that it fits with."""
    shape = told["shape"]
    tokens = f"{shape['batch']} x {shape['seq']} tokens"
    linear, quadratic = (f"{n / unit:.3g} {name}" for n in told["layer_activations"])
    values, part = f"{2 + 12 / told['tensor']:.3g}", f" / {told['tensor']}" if told["tensor"] > 1 else ""
    attention = f"B H L^2{part} {quadratic}" if shape["materialised"] else "flash attention"
    found = [f"activations of {tokens}: {values} BLd {linear}, {attention} a layer"]
    found.append("recompute  activations   again   ms a step where it fits: stage 0, 1, 2, 3")
    for mode, n_bytes in told["activations"].items():
        of_mode = [pair for pair in told["pairs"] if pair["recompute"] == mode]
        times = "".join(f"{_ms(pair['seconds']) if pair['fits'] else '-':>9}" for pair in of_mode)
        again = f"{told['recomputed'][mode]:6.1%}"
        found.append(f"{MODES.get(mode, mode):<11} {n_bytes / unit:7.3g} {name}  {again} {times}")
    found.append(f"k-th: k* = sqrt(n c / a) = {told['best_interval']} (c a layer's input, a its activations)")
    more = f"logits {told['logits'] / unit:.3g}, CUDA and NCCL {told['runtime'] / unit:.3g}"
    layers = told["stages"][3]["beside"] - told["stages"][2]["beside"]
    found.append(f"beside: {more}, layers gathered at stage 3 {layers / unit:.3g} {name}")
    return found


def _settings(measured: dict[str, Any], ctx: click.Context) -> list[Any]:
    """A run's layers, width, heads, seq, batch, precision, micro-batches, dtype of reduction, attention and vocabulary;
    what the command line gives overrides them.
    """
    model = measured["model"]
    of_run = {name: model[name] for name in ("layers", "width", "heads", "seq")}
    of_run |= {"batch": measured["batch"], "precision": _precision(measured["dtype"])}
    of_run |= {"accumulate": measured.get("accumulate", 1), "reduce_dtype": measured.get("reduce_dtype")}
    of_run |= {"attention": "materialised" if model.get("materialised") else "flash", "vocab": 256}
    by_user = given(ctx)
    settings = ctx.params | {name: value for name, value in of_run.items() if name not in by_user}
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
