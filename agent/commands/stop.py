"""``dynamiccl stop``: the off switch."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from . import Argument, Json, Option, refusing, run_folder

if TYPE_CHECKING:
    from ...envs.nccl.shm import RunFolder


def stop(
    run: Annotated[str, Argument(help="The --out of the run (runs/tune/latest), or its run folder.")],
    wait: Annotated[
        float, Option(min=0, help="Seconds to wait until the job has NCCL's own choice again.")
    ] = 30,
    json: Json = False,
) -> None:
    """End tuning and go back to NCCL's own choice, now and for good; the job goes on.

    The tuner of the run ends; without one the table is withdrawn all the same. `dynamiccl tune --attach RUN --again`
    begins once more. Exit status 0 once the job is seen to run without a table, 1 if that was not seen in time.

    \b
    dynamiccl stop runs/tune/latest
    """
    from ...envs.live.locks import is_locked
    from ...envs.nccl.run_folder import STATUS, STOP, TUNER
    from ...envs.nccl.shm import RunFolder

    with refusing(ValueError, OSError):
        path = run_folder(run)
        folder = RunFolder(path)
        (path / STOP).touch()
        by_tuner = is_locked(path / TUNER)
        if not (path / STATUS).exists() and _not_begun(folder):
            _say_not_begun(path, by_tuner, json)
            return
        from ...envs.live.job import Job  # pandas with it, which takes seconds

        job = Job(folder)
        begun = time.monotonic()
        while is_locked(path / TUNER) and time.monotonic() - begun < wait:
            time.sleep(0.05)  # it publishes the empty table on its way out
        if not by_tuner:
            job.confirm({})
        seen = _in_force(job, folder, max(0.0, wait - (time.monotonic() - begun)))
    what: dict[str, Any] = {
        "run": str(path),
        "had_tuner": by_tuner,
        "job_runs": job.is_alive(),
        "in_force": seen,
    }
    if json:
        print(json_module.dumps(what))
    elif seen:
        print("NCCL's own choice is in force on all ranks; nothing is tuned any more")
    elif not what["job_runs"]:
        print("the job is over")
    else:
        print(
            "NCCL's own choice is set, but no step of the job was seen under it yet: say it again to look once more"
        )
    raise SystemExit(0 if seen or not what["job_runs"] else 1)


def _not_begun(folder: RunFolder) -> bool:
    """Whether no process here has asked for a setting yet, and none would find a table if it did now."""
    from ...envs.nccl.shm import decode_table

    found = folder.table.read()
    no_table = folder.table.generation() == 0 or (found is not None and not decode_table(found[1]).rules)
    return no_table and not any(ring.calls()[0] for ring in folder.rings())


def _say_not_begun(path: Path, by_tuner: bool, json: bool) -> None:
    if json:
        told = {"run": str(path), "had_tuner": by_tuner, "job_runs": True, "in_force": True}
        print(json_module.dumps(told))
    else:
        print("the job has run no collective yet: it begins, and goes on, with NCCL's own choice")


def _in_force(job: Any, folder: Any, limit_s: float) -> bool:
    """Whether rank 0 ends a step under the newest table (or one that is as empty) within the time."""
    from ...envs.nccl.shm import decode_table

    end = time.monotonic() + limit_s
    while True:
        job.poll()
        found = folder.table.read()
        empty = found is not None and not decode_table(found[1]).rules
        for rows in job.new_steps():
            if empty and found is not None and int(rows["generation"][-1]) in (0, found[0]):
                return True
        if time.monotonic() > end or not job.is_alive():
            return False
        time.sleep(0.05)
