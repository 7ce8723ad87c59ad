"""``dynamiccl oracle``: what a perfect tuner would gain on an emulated cluster, by trying everything."""

from __future__ import annotations

import json
import sys
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
    from ...envs.sim import schedule
    from ...envs.sim.clusters import cluster as preset
    from ...envs.sim.fabric import Fabric
    from ...traces.records import Slot

    if not 0 < exposed < 1:
        fail(f"--exposed is a part of the step between 0 and 1, not {exposed}")
    if hidden < 1 or layers < 1:
        fail("--hidden and --layers must be at least 1")
    try:
        c = preset(cluster)
        if stream is None:
            sizes = schedule.llama_units(hidden, layers, 32000, hidden * 11 // 4)
            if units:
                sizes = _sizes(units)
            work = schedule.zero_step(stage, sizes, c.n_ranks)
        else:
            work = schedule.from_aicb(stream)
    except OSError as error:
        fail(f"cannot read {stream}: {error.strerror}")
    except ValueError as error:
        fail(str(error))
    fabric = Fabric.of(c, seed)
    work = schedule.with_exposure(work, c, fabric, exposed)
    default = work.run(c, fabric)
    alone = work.run(c, fabric, schedule.best_alone(work, c, fabric)).total_us
    chosen = schedule.best_step(work, c, fabric)
    best = work.run(c, fabric, chosen).total_us
    decisions = []
    for (func, size), decision in chosen.items():
        slot = Slot(0, 0, func, size)
        row = {"func": func, "min_bytes": slot.min_bytes, "max_bytes": slot.max_bytes}
        decisions.append({**row, "algo": decision.algo, "proto": decision.proto, "n_channels": decision.n_channels})
    found = {
        "emulated": True,
        "cluster": c.name,
        "seed": seed,
        "workload": work.name,
        "exposed": round(schedule.shares(default, work.ops)["exposed"], 4),
        "default_step_us": round(default.total_us, 1),
        "best_alone_us": round(alone, 1),
        "best_step_us": round(best, 1),
        "saved_alone": round(1 - alone / default.total_us, 4),
        "saved": round(1 - best / default.total_us, 4),
        "decisions": decisions,
    }
    if json_:
        json.dump(found, sys.stdout, indent=1)
        print()
        return
    print(f"{c.name} (emulated, seed {seed}), {work.name}, {found['exposed']:.0%} of the default step exposed")
    print(f"  NCCL's own choices        {default.total_us / 1e3:9.2f} ms")
    print(f"  each collective quickest  {alone / 1e3:9.2f} ms  ({found['saved_alone']:.1%} less)")
    print(f"  the step shortest         {best / 1e3:9.2f} ms  ({found['saved']:.1%} less)")
    for (func, size), decision in chosen.items():
        print(f"    {Slot(0, 0, func, size)!s:28} {decision}")
