"""``dynamiccl doctor``: check this environment, and list each problem with its cure."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

from . import Argument, Json, Option, refusing, results


def doctor(
    command: Annotated[list[str] | None, Argument(help="The job, after --. It is read, not run.")] = None,
    trace: Annotated[
        Path | None, Option(help="Also look for a slow rank in this trace, recording or run.")
    ] = None,
    json: Json = False,
) -> None:
    """Check this machine and environment: can a job be tuned here, and safely?

    Each problem is printed with its cure. The exit status is 1 if something must be changed, else 0. Run it in the
    job's environment. It reads only --nproc-per-node from the job's command.

    \b
    dynamiccl doctor -- torchrun --nproc-per-node 8 train.py
    dynamiccl doctor --trace runs/tune/latest
    """
    from ..checks.doctor import checked, examine, gather

    facts = gather(command)
    findings, looked_at = examine(facts), checked(facts)
    if trace:
        looked_at["ranks' times"] = _slow_rank(trace)
    if json:
        print(
            json_module.dumps(
                {"checked": looked_at, "findings": [vars(finding) for finding in findings]}, indent=1
            )
        )
    else:
        for name, found in looked_at.items():
            print(f"{name:<14}{found}")
        for finding in findings:
            print(
                f"{'CHANGE' if finding.must_change else 'note  '}  {finding.what}\n        -> {finding.cure}"
            )
        if not facts.nccl and not facts.n_gpus:  # the GPU nodes may use another Python
            print(
                "Without NCCL a job is tuned on the emulated cluster only: dynamiccl tune --cluster dgx-h100-2x8"
            )
        elif not findings:
            print("no problem found")
    raise SystemExit(any(finding.must_change for finding in findings))


def _slow_rank(recording: Path) -> str:
    """Whether the ranks of a recorded job wait for one of them, in words."""
    from ...traces.importers.recording import read_recording
    from ...traces.outside import TraceError
    from ..report.slow_rank import TOO_FEW, find

    with refusing(TraceError):
        slow = find(read_recording([results(recording)]))
    if slow is None:
        return TOO_FEW
    return slow or "the other ranks wait for no rank longer than a setting can gain"
