"""``dynamiccl lab oracle``: what a perfect tuner would gain on an emulated cluster, by trying everything."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import fail


def _sizes(units: str) -> list[int]:
    try:
        sizes = [int(float(text) * 1e6) for text in units.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--units are megabytes above 0 with commas between, not {units!r}")
    return sizes


def oracle(
    cluster: Annotated[str, typer.Option(help="Cluster preset or a .toml file.")] = "dgx-h100-2x8",
    stage: Annotated[int, typer.Option(help="ZeRO stage: 1, 2 or 3.")] = 3,
    hidden: Annotated[int, typer.Option(help="Width of the Llama-like model (2048: 1B, 4096: 7B).")] = 2048,
    layers: Annotated[int, typer.Option(help="Its layers.")] = 16,
    exposed: Annotated[float, typer.Option(help="Part of the default step that waits for communication.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Fabric: 0 is the documented one, others are drawn around it.")] = 0,
    units: Annotated[str, typer.Option(help="MB of each unit's 16-bit parameters in place of a model: 18,160,9.")] = "",
    stream: Annotated[Path | None, typer.Option(help="An AICB stream (CSV) in place of the model.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Sweep every config of every slot on one emulated ZeRO step: the default, each collective best, the step best."""
    from ...envs.job_suites import quickest_alone
    from ...envs.sim import workloads
    from ...envs.sim.clusters import cluster as preset
    from ...envs.sim.documented import one_job
    from ...envs.sim.jobs import SLOTS
    from ...envs.sim.jobs import oracle as best_of
    from ...traces import spaces
    from ...traces.records import Slot

    if not 0 < exposed < 1:
        fail(f"--exposed is a part of the step between 0 and 1, not {exposed}")
    if hidden < 1 or layers < 1:
        fail("--hidden and --layers must be at least 1")
    try:
        c = preset(cluster)
        if stream is None:
            sizes = workloads.llama_units(hidden, layers, 32000, hidden * 11 // 4)
            if units:
                sizes = _sizes(units)
            work = workloads.zero_step(stage, sizes, c.n_ranks)
        else:
            work = workloads.from_aicb(stream)
        job = one_job(work, c, seed, exposed)
    except OSError as error:
        fail(f"cannot read {stream}: {error.strerror}")
    except ValueError as error:
        fail(str(error))
    default, alone = float(job.default_us[0]), float(job.step_us(quickest_alone(job))[0][0])
    chosen, us = best_of(job)
    best = float(us[0])
    decisions, lines = [], []
    for k, (func, size) in enumerate(list(work.slots())[:SLOTS]):
        slot = Slot(c.n_ranks, c.n_nodes, func, size)
        decision = spaces.decision_of(spaces.actions_of(chosen[0, [k]])[0])
        row = {"func": func, "min_bytes": slot.min_bytes, "max_bytes": slot.max_bytes}
        decisions.append({**row, **asdict(decision)})
        lines.append(f"    {slot!s:28} {decision}")
    found = {
        "emulated": True,
        "cluster": c.name,
        "seed": seed,
        "workload": work.name,
        "exposed": exposed,
        "default_step_us": round(default, 1),
        "best_alone_us": round(alone, 1),
        "best_step_us": round(best, 1),
        "saved_alone": round(1 - alone / default, 4),
        "saved": round(1 - best / default, 4),
        "decisions": decisions,
    }
    if json_:
        print(json.dumps(found, indent=1))
        return
    print(f"{c.name} (emulated, seed {seed}), {work.name}, {exposed:.0%} of the default step exposed")
    print(f"  NCCL's own choices        {default / 1e3:9.2f} ms")
    print(f"  each collective quickest  {alone / 1e3:9.2f} ms  ({found['saved_alone']:.1%} less)")
    print(f"  the step shortest         {best / 1e3:9.2f} ms  ({found['saved']:.1%} less)")
    print(*lines, sep="\n")
