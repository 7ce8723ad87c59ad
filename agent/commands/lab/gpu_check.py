"""``dynamiccl lab gpu-check``: measurements that need GPUs, in one run of under nine minutes."""

from __future__ import annotations

import json as json_module
import os
from collections.abc import Sequence
from pathlib import Path

from .. import CLUSTER, JSON, PATH, Number, argument, command, emulation, fail, option, refusing


@command
@argument(
    "folders", type=PATH, nargs=-1, help="Run nothing: show these results, each compared with the others."
)
@option("--minutes", type=Number(0.2, 600), help="Run only the sweep, for this many minutes.")
@option(
    "--out", type=PATH, help="Parent of the new folder. Default: envs/results on GPUs, else runs/gpu-check."
)
@CLUSTER
@JSON
def gpu_check(
    folders: Sequence[Path], minutes: float | None, out: Path | None, cluster: str | None, json: bool
) -> None:
    """Measure the gain of NCCL's settings on these GPUs, compared with NCCL untouched. It takes 8.5 minutes.

    \b
    smoke       is the plugin loaded, on every rank? are results right?
    sweep       times of all-gather and reduce-scatter by setting and size
    contention  how much does a collective slow down compute at the same time?
    noise       steps under the default; with and without an idle tuner
    truth       the best table against NCCL untouched, alternating at every step
    joint       do two concurrent collectives change each other's best setting?
    tune        dynamiccl tune on the same job; a killed tuner; --attach
    host        nanoseconds of a call, with the plugin and without

    Every part has a deadline. If you stop it, the measured parts stay. If ranks share a GPU, it starts its
    own MPS and stops it again. It respects CUDA_VISIBLE_DEVICES. Several nodes: run torchrun --nnodes N
    --nproc-per-node 1 --no-python dynamiccl lab gpu-check on each node. Without a GPU it runs on the emulated
    cluster in under three minutes, and every figure says so. Exit status 1 if something is wrong.

    \b
    dynamiccl lab gpu-check
    dynamiccl lab gpu-check --minutes 5
    dynamiccl lab gpu-check envs/results/FOLDER envs/results/ANOTHER
    """
    if folders:
        _show(folders)
        return
    from ...checks.gpu.check import Check, Plan, stop_by_signal
    from ...checks.gpu.machine import Machine
    from ...report.terminal import terminal

    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # torchrun started one process a GPU: the first of each node starts the ranks
    if cluster:
        emulation(cluster)
    console = terminal(stderr=True, quiet=json, highlight=False)
    stop_by_signal()
    with refusing(OSError, ValueError):
        machine = Machine.here(cluster)
        out = out or Path("runs/gpu-check" if machine.emulated else "envs/results")
        check = Check(machine, out, console.print, Plan.of(machine.backend, minutes))
        console.print(f"{machine.device}, {machine.n_ranks} ranks, results in {check.folder}")
        try:
            result = check.do_all()
        except KeyboardInterrupt:
            fail(f"interrupted; what was measured is in {check.folder}")
    if json:
        print(json_module.dumps(result | {"folder": str(check.folder)}, indent=1))
    else:
        _show([check.folder])
        print(f"{'all well' if result['ok'] else 'SOMETHING IS WRONG'}: {check.folder}")
    raise SystemExit(0 if result["ok"] else 1)


def _show(folders: list[Path]) -> None:
    """Print the results of each folder, compared with the others."""
    from ...checks.results.files import Results
    from ...checks.results.page import page

    with refusing(ValueError, OSError):
        read = [Results.read(folder) for folder in folders]
    for one in read:
        print(page(one, [other for other in read if other is not one]))
