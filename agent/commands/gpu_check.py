"""``dynamiccl lab gpu-check``: everything that only a machine with GPUs can tell, in one run."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from . import fail, refusing


def gpu_check(
    dry: Annotated[bool, typer.Option("--dry", help="On the emulated cluster, even where there is a GPU.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Only this part: sweep, overhead or zero3.")] = None,
    budget: Annotated[float, typer.Option(min=20, help="Seconds that all parts together may take.")] = 480,
    ranks: Annotated[int | None, typer.Option(min=2, max=64, help="Default: one a GPU, 2 on a single GPU.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results; default: envs/results on GPUs, else runs/gpu-check.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="The least of everything: does the script work?")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Is the plugin loaded and obeyed on these GPUs, what does it cost, what does each config take, does tuning help?

    \b
    sweep     plugin loaded on every rank; then each offered algorithm and protocol x channels x sizes of all_gather and
              reduce_scatter, forced by a table: seen in the events, results compared bit for bit with NCCL's own way
    overhead  ZeRO-3 with and without the plugin, in turn
    zero3     dynamiccl tune on ZeRO-3: default against tuned, default against itself

    Without a GPU all of it runs on the emulated cluster, and every figure says so. Exit status 1 if anything is wrong.
    """
    from ..gpu_check import DRY, PARTS, REAL, SMALL, Check, Machine
    from ..terminal import terminal

    for part in only or ():
        if part not in PARTS:
            fail(f"--only is one of {', '.join(PARTS)}, not {part}")
    console = terminal(stderr=True, quiet=json)
    with refusing(OSError, ValueError, RuntimeError):
        machine = Machine.here(ranks, dry)
        out = out or Path("runs/gpu-check" if machine.emulated else "envs/results")
        extent = SMALL if small else DRY if machine.emulated else REAL
        check = Check(machine, extent, out, budget, lambda text: console.print(text, highlight=False))
        console.print(f"{machine.device}, {machine.n_ranks} ranks, results in {check.folder}", highlight=False)
        result = check.run(only or PARTS)
    if json:
        print(json_module.dumps(result, indent=1))
    else:
        print(f"{'all well' if result['ok'] else 'SOMETHING IS WRONG'} ({result['label']}): {check.folder}/check.json")
    raise SystemExit(0 if result["ok"] else 1)
