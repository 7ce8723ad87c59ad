"""``dynamiccl stop``: end tuning."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING

from . import JSON, RUN, Number, argument, become_owner, command, option, refusing, run_folder

if TYPE_CHECKING:
    from ..daemon.stopping import Stopped


@command
@argument(
    "run", type=RUN, help="Results folder (--out), e.g. runs/tune/latest, or the run folder in shared memory."
)
@option("--wait", type=Number(0), default=30, help="Seconds to wait until all ranks report the default.")
@JSON
def stop(run: str, wait: float, json: bool) -> None:
    """End tuning for good and restore NCCL's default on all ranks. The job continues.

    The tuner of the run ends. Without a tuner the table is withdrawn too. Then the command waits until every
    communicator of the job reports the default. If the tuner does not answer for half of --wait, the table is
    withdrawn, and the command names the process to kill. A rank that once waited too long for the job's store keeps its
    table until the job ends: the command says so. `dynamiccl tune --attach RUN --again`
    starts again. Give the command on the node of rank 0, as the job's user or as root, with that node's results folder.
    If nodes share a folder, runs/tune/latest may belong to another node.

    The exit status is 0 once all ranks report the default or the job has ended, 1 if not within --wait seconds or if
    rank 0 is on another node, and 2 if the folder holds no run or the run had ended before.

    \b
    dynamiccl stop runs/tune/latest
    """
    from ...envs.nccl.shm import RunFolder  # noqa: F401 -- while root may still read its own installation
    from ..daemon.stopping import end_tuning

    with refusing(ValueError, OSError):
        path = run_folder(run)
        become_owner(path)
        found = end_tuning(path, wait)
    if json:
        names = ("had_tuner", "job_runs", "in_force", "tuner_left", "why")
        print(json_module.dumps({"run": str(path), **{name: getattr(found, name) for name in names}}))
    else:
        print(_outcome(found))
        if found.tuner_left is not None:
            which = str(found.tuner_left or "that holds the file `tuner` of the run folder")
            print(f"the tuner does not answer: end it by SIGKILL (process {which})")
    raise SystemExit(0 if found.is_over else 1)


def _outcome(found: Stopped) -> str:
    """What came of it, in words."""
    if not found.has_rank_0:
        return (
            "no rank 0 was seen on this node: run this command on its node, with that node's results folder"
        )
    if not found.has_begun:
        return "no table has been used yet: the job stays under NCCL's default"
    if found.in_force:
        has_ended = "; tuning has ended" if found.tuner_left is None else ""
        return f"NCCL's default is restored on all ranks{has_ended}"
    if not found.job_runs:
        return "the job is over"
    why = f": {found.why}" if found.why else ""
    return (
        f"NCCL's default is set, but not all ranks have reported it yet{why}. Run this command again to check"
    )
