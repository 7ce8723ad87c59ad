"""``dynamiccl lab gpu-check``: everything that only a machine with GPUs can tell, in one run."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

from . import EmulatedCluster, Json, Option, emulation, refusing


def gpu_check(
    cluster: EmulatedCluster = None,
    budget: Annotated[float, Option(min=20, help="Seconds that both parts together may take.")] = 480,
    out: Annotated[
        Path | None, Option(help="Folder. Default: envs/results on GPUs, else runs/gpu-check.")
    ] = None,
    json: Json = False,
) -> None:
    """Is the plugin loaded and obeyed on these GPUs, are results right, does tuning help?

    \b
    sweep  plugin loaded on every rank; then each offered algorithm and protocol
           x channels x sizes of all_gather and reduce_scatter, forced by a
           table: seen in the events, results compared with what they must be
    zero3  dynamiccl tune on ZeRO-3: default against tuned, default against itself

    Without a GPU all of it runs on the emulated cluster, and every figure says so. Exit status 1 if anything is wrong.
    """
    from ..checks.gpu_check import Check, Machine
    from ..report.terminal import terminal

    if cluster:
        emulation(cluster)
    console = terminal(stderr=True, quiet=json, highlight=False)
    with refusing(OSError, ValueError):
        machine = Machine.here(cluster)
        out = out or Path("runs/gpu-check" if machine.emulated else "envs/results")
        check = Check(machine, out, console.print)
        console.print(f"{machine.device}, {machine.n_ranks} ranks, results in {check.folder}")
        result = check.run(budget)
    if json:
        print(json_module.dumps(result, indent=1))
    else:
        print(
            f"{'all well' if result['ok'] else 'SOMETHING IS WRONG'} ({result['label']}): {check.folder}/check.json"
        )
    raise SystemExit(0 if result["ok"] else 1)
