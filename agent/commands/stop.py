"""``dynamiccl stop``: end tuning."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import JSON, RUN, Number, argument, become_owner, command, fail, option, refusing, run_folder

if TYPE_CHECKING:
    from ..daemon.stopping import Stopped


@command
@argument(
    "run",
    type=RUN,
    required=False,
    help="Results folder (--out), e.g. runs/tune/latest, or the run folder in shared memory.",
)
@option("--all", "every", is_flag=True, help="Stop every run of this user on this machine.")
@option("--wait", type=Number(0), default=30, help="Seconds to wait until all ranks report the default.")
@option("--bad", is_flag=True, help="The table did harm: no later run begins with it.")
@JSON
def stop(run: str | None, every: bool, wait: float, bad: bool, json: bool) -> None:
    """End tuning for good and restore NCCL's default on all ranks. The job continues.

    Give it on the node of rank 0, as the job's user or root. If the tuner does not answer, it withdraws the table and
    names the process to kill. Status: 0 done, 1 not within --wait or rank 0 elsewhere, 2 no run.

    \b
    dynamiccl stop runs/tune/latest
    dynamiccl stop --all
    """
    # Root reads these as long as it may still read its own installation.
    from ...envs.nccl.shm import RunFolder  # noqa: F401
    from ...envs.nccl.tables import set_aside  # noqa: F401
    from ..daemon.request import Request  # noqa: F401
    from ..daemon.stopping import end_tuning
    from ..report.verdict import verdict  # noqa: F401

    if (run is None) != every:
        fail("give either RUN, the results folder of one run, or --all")
    if run is None:
        _stop_all(wait, bad, json)
    with refusing(ValueError, OSError):
        path = run_folder(run)
        become_owner(path)
        found = end_tuning(path, wait, bad)
    if json:
        print(json_module.dumps(_facts(path, found)))
    else:
        print("\n".join(_lines(found)))
    raise SystemExit(0 if found.is_over else 1)


def _stop_all(wait: float, bad: bool, json: bool) -> NoReturn:
    """Stop every run of this user here. The status is 0 if all of them are over."""
    from ..daemon.stopping import call_off, end_tuning, living_runs

    told, is_over = list[dict[str, Any]](), True
    runs = living_runs()
    call_off(runs)
    for path in runs:
        try:
            found = end_tuning(path, wait, bad)
        except (ValueError, OSError) as error:  # the others are stopped all the same
            is_over = is_over and not path.exists()  # it has ended just now
            facts, lines = {"run": str(path), "error": str(error)}, [f"error: {error}"]
        else:
            is_over = is_over and found.is_over
            facts, lines = _facts(path, found), _lines(found)
        told.append(facts)
        if not json:
            print("\n".join(f"{path}: {line}" for line in lines), flush=True)
    if json:
        print(json_module.dumps(told))
    elif not runs:
        print("no run of this user is here")
    raise SystemExit(0 if is_over else 1)


def _facts(run: Path, found: Stopped) -> dict[str, Any]:
    """What --json prints."""
    names = ("had_tuner", "job_runs", "in_force", "tuner_left", "why", "forgotten")
    facts = {name: getattr(found, name) for name in names}
    return {"run": str(run), **facts, "table": str(found.table) if found.table else None}


def _lines(found: Stopped) -> list[str]:
    """What is printed."""
    lines = [_outcome(found)]
    if found.table is not None:
        lines.append(f"the table that was in use is in {found.table}; `dynamiccl apply` takes that file")
    if found.forgotten is not None:
        held = "no later run begins with it" if found.forgotten else "it holds nothing of this run"
        lines.append(f"the memory between jobs: {held}")
    if found.tuner_left is not None:
        which = str(found.tuner_left or "that holds the file `tuner` of the run folder")
        lines.append(f"the tuner does not answer: end it by SIGKILL (process {which})")
    return lines


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
