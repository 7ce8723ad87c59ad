"""``dynamiccl stop``: the off switch."""

from __future__ import annotations

import json as json_module
from typing import Annotated

from . import Argument, Json, Option, refusing, run_folder


def stop(
    run: Annotated[str, Argument(help="The --out of the run (runs/tune/latest), or its run folder.")],
    wait: Annotated[float, Option(min=0, help="Seconds to wait until the job runs under the default.")] = 30,
    json: Json = False,
) -> None:
    """End tuning and restore NCCL's default, now and for good; the job goes on.

    The tuner of the run ends. If there is none, the table is withdrawn all the same. `dynamiccl tune --attach RUN
    --again` starts again. The exit status is 0 once the job is seen to run under the default, 1 if it is not in time.

    \b
    dynamiccl stop runs/tune/latest
    """
    from ..daemon.stopping import end_tuning

    with refusing(ValueError, OSError):
        path = run_folder(run)
        found = end_tuning(path, wait)
    if json:
        what = {"had_tuner": found.had_tuner, "job_runs": found.job_runs, "in_force": found.in_force}
        print(json_module.dumps({"run": str(path), **what}))
    elif not found.has_begun:
        print("the job has run no collective yet: it begins, and goes on, with NCCL's default")
    elif found.in_force:
        print("NCCL's default is restored on all ranks; nothing is tuned any more")
    elif not found.job_runs:
        print("the job is over")
    else:
        print(
            "NCCL's default is set, but no step under it was seen yet: run the command again to look once more"
        )
    raise SystemExit(0 if found.is_over else 1)
