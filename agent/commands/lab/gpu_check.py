"""``dynamiccl lab gpu-check``: a sweep, races and contention on the GPUs here, in one run of nine minutes."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path

from .. import CLUSTER, JSON, PATH, Number, argument, command, emulation, fail, option, refusing


@command
@argument(
    "folders", type=PATH, nargs=-1, help="Run nothing: show these results, each compared with the others."
)
@option(
    "--races", is_flag=True, help="Run the races alone, 4 minutes: a gain is claimed only if two runs agree."
)
@option("--minutes", type=Number(0.2, 60), help="End after so many minutes. Default: 9, with --races 4.")
@option(
    "--out", type=PATH, help="Parent of the new folder. Default: envs/results on GPUs, else runs/gpu-check."
)
@CLUSTER
@JSON
def gpu_check(
    folders: Sequence[Path],
    races: bool,
    minutes: float | None,
    out: Path | None,
    cluster: str | None,
    json: bool,
) -> None:
    """Measure on the GPUs of this node a table against NCCL untouched, and what a collective costs the compute beside
    it.

    \b
    kernels     NCCL's kernels by setting
    sweep       times of calls by setting and size
    race-*      dynamiccl tune on an FSDP2 job
    contention  a matrix product beside a collective

    If a part fails, the others run, and the exit status is 1. Without a GPU it is emulated.

    \b
    dynamiccl lab gpu-check
    """
    if folders:
        _show(folders)
        return
    from ...checks.gpu.check import Check, parts_of, stop_by_signal
    from ...checks.gpu.machine import Machine
    from ...report.terminal import terminal

    if cluster:
        emulation(cluster)
    console = terminal(stderr=True, quiet=json, highlight=False)
    stop_by_signal()
    with refusing(OSError, ValueError):
        machine = Machine.here(cluster)
        check = Check(
            machine, out or Path("runs/gpu-check" if machine.emulated else "envs/results"), console.print
        )
        console.print(f"{machine.device}, {machine.n_ranks} ranks, results in {check.folder}")
        try:
            parts = parts_of(machine, check.folder.resolve(), races)
            result = check.do_all(parts, 60 * (minutes or (4 if races else 9)))
        except KeyboardInterrupt:
            fail(f"interrupted; what was measured is in {check.folder}")
    ok = all(part["status"] == "done" for part in result["parts"].values())
    if json:
        print(json_module.dumps(result | {"folder": str(check.folder), "ok": ok}, indent=1))
    else:
        _show([check.folder])
        print(f"{'all parts ended well' if ok else 'A PART DID NOT END WELL'}: {check.folder}")
    raise SystemExit(0 if ok else 1)


def _show(folders: Sequence[Path]) -> None:
    """Print the results of each folder, compared with the others."""
    from ...checks.gpu.figures import Folder, page

    with refusing(ValueError, OSError):
        print(page([Folder.read(folder) for folder in folders]))
