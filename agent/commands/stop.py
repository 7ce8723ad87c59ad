"""``dynamiccl stop``: end tuning."""

from __future__ import annotations

import json as json_module
from typing import Annotated

from . import Argument, Json, Option, become_owner, refusing, run_folder


def stop(
    run: Annotated[
        str,
        Argument(help="Results folder (--out), e.g. runs/tune/latest, or the run folder in shared memory."),
    ],
    wait: Annotated[float, Option(min=0, help="Seconds to wait until the job runs under the default.")] = 30,
    json: Json = False,
) -> None:
    """End tuning for good and restore NCCL's default on all ranks. The job continues.

    The tuner of the run ends. Without a tuner the table is withdrawn too. `dynamiccl tune --attach RUN --again` starts
    again. Give the command on the node of rank 0, as the job's user or as root, with that node's results folder. If
    nodes share a folder, runs/tune/latest may belong to another node. A job that hangs takes no step: end it instead.

    The exit status is 0 once the job runs under the default or has ended, 1 if it does not within --wait seconds or
    rank 0 is on another node, and 2 if the folder holds no run or the run had ended before.

    \b
    dynamiccl stop runs/tune/latest
    """
    from ..daemon.stopping import end_tuning

    with refusing(ValueError, OSError):
        path = run_folder(run)
        become_owner(path)
        found = end_tuning(path, wait)
    if json:
        what = {"had_tuner": found.had_tuner, "job_runs": found.job_runs, "in_force": found.in_force}
        print(json_module.dumps({"run": str(path), **what}))
    elif not found.has_rank_0:
        print(
            "no rank 0 was seen on this node: run this command on its node, with that node's results folder"
        )
    elif not found.has_begun:
        print("no table has been used yet: the job stays under NCCL's default")
    elif found.in_force:
        print("NCCL's default is restored on all ranks; tuning has ended")
    elif not found.job_runs:
        print("the job is over")
    else:
        print("NCCL's default is set, but no step has run under it yet: run this command again to check")
    raise SystemExit(0 if found.is_over else 1)
