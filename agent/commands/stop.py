"""``dynamiccl stop``: the off switch."""

from __future__ import annotations

import json as json_module
import time
from typing import Annotated, Any

from . import Argument, Json, Option, refusing, run_folder


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
    from ...envs.live.job import Job
    from ...envs.live.locks import is_locked
    from ...envs.nccl.run_folder import STOP, TUNER
    from ...envs.nccl.shm import RunFolder

    with refusing(ValueError, OSError):
        path = run_folder(run)
        folder = RunFolder(path)
        (path / STOP).touch()
        job = Job(folder)
        by_tuner = is_locked(path / TUNER)
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
