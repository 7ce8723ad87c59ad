"""``dynamiccl doctor``: check this environment, and list each problem with its cure."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...traces.outside import shown
from . import JSON, PATH, command, job, option, refusing, results

if TYPE_CHECKING:
    from ...traces.files import Trace
    from ...traces.queries.consistency import Consistency
    from ..checks.doctor import Finding


@command
@job("The job, after --. It is read, not run.")
@option(
    "--trace",
    type=PATH,
    multiple=True,
    help="Also look for a slow rank in this trace, recording or run. Repeat it for the runs of a job's other "
    "nodes: all ranks are compared.",
)
@JSON
def doctor(command: list[str] | None, trace: Sequence[Path], json: bool) -> None:
    """Check this machine and environment: can a job be tuned here, and safely?

    Each problem is printed with its cure; exit status 1: something must be changed. Run it in the job's environment.
    Its last line is the answer: nothing to win, worth a sweep, or cannot tell.

    \b
    dynamiccl doctor -- torchrun --nproc-per-node 8 train.py
    dynamiccl doctor --trace runs/node0 --trace runs/node1    # equal settings?
    """
    from ..advice.outlook import of_machine, of_trace
    from ..checks.doctor import checked, examine, gather

    facts = gather(command)
    findings, looked_at = examine(facts), checked(facts)
    outlook = of_machine(facts, findings)
    if trace:
        traces = _read(trace)
        looked_at["ranks' times"] = _slow_rank(traces)
        looked_at["settings"], differing = _settings(traces)
        findings += differing
        outlook = of_trace(traces[0])
    if json:
        told = {"checked": looked_at, "findings": [vars(finding) for finding in findings]}
        print(json_module.dumps({**told, "outlook": outlook._asdict()}, indent=1))
    else:
        _tell(looked_at, findings)
        if not facts.nccl and not facts.n_gpus:  # the GPU nodes may use another Python
            print(
                "Without NCCL a job is tuned on the emulated cluster only: dynamiccl tune --cluster dgx-h100-2x8"
            )
        elif not findings:
            print("no problem found")
        print(outlook)
    raise SystemExit(any(finding.must_change for finding in findings))


def _tell(looked_at: dict[str, str], findings: list[Finding]) -> None:
    """What was looked at, and each problem with its cure, for people."""
    for name, found in looked_at.items():
        found = shown(found)
        print(f"{name:<14}{found}" if len(name) < 14 else f"{name}: {found}")
    for finding in findings:
        kind = "CHANGE" if finding.must_change else "note  "
        print(f"{kind}  {finding.what}\n        -> {finding.cure}")


def _read(runs: Sequence[Path]) -> list[Trace]:
    """The traces of these runs or recordings, with the ranks of the job in their events."""
    from ...traces.importers.recording import read_recording
    from ...traces.outside import TraceError
    from ..report.slow_rank import events_of_job

    with refusing(TraceError, OSError):
        traces = [read_recording([results(path)]) for path in runs]
    return [replace(trace, events=events_of_job(trace)) for trace in traces]


def _settings(traces: list[Trace]) -> tuple[str, list[Finding]]:
    """Whether all ranks ran each collective with the same setting: in words, and what must change."""
    from ...traces.queries.consistency import across_nodes
    from ..checks.doctor import Finding

    found = across_nodes(traces)
    settings, sizes = found.settings, found.sizes
    if not sizes.calls_checked:
        return _not_compared(traces), []
    told = f"{sizes.calls_checked:,} collectives compared, {settings.mismatches:,} with different settings"
    findings = []
    if settings.mismatches:
        what = f"ranks ran one collective with different settings: {_example(settings)}"
        cure = "keep these folders and report them; until the cause is known, use the off switch"
        findings.append(Finding("mismatch", what, cure, must_change=True))
    if sizes.mismatches:
        what = f"ranks issued one collective with different sizes: {_example(sizes)}"
        findings.append(
            Finding("sizes", what, "this is a fault of the job: its ranks must agree", must_change=True)
        )
    return told, findings


def _not_compared(traces: list[Trace]) -> str:
    """Why no collective could be compared, in words."""
    import pandas as pd

    ours = [trace.events for trace in traces if "source" not in trace.header]
    if not ours:
        return "not compared: another tool's recording does not number the calls"
    if any(events["captured"].any() for events in ours):
        return "not compared: the calls are captured in CUDA graphs"
    told = "not known: no collective was recorded on two ranks"
    comms = pd.concat([trace.comms for trace in traces])
    recorded = comms.groupby("comm_id")["rank"].nunique()
    ranks = comms.groupby("comm_id")["n_ranks"].max()
    are_elsewhere = bool((ranks > recorded).any()) and not any(t.header.get("emulated") for t in traces)
    return f"{told}; give --trace for the results of each host of the job" if are_elsewhere else told


def _example(found: Consistency) -> str:
    """The first mismatch, in words."""
    first = found.examples[0]
    views = [
        f"rank {rank}: {ran['algo']}/{ran['proto']}/{ran['n_channels']}, {ran['n_bytes']} bytes"
        for rank, ran in first["ranks"].items()
    ]
    return f"{first['func']} {first['seq']}: {'; '.join(views)}"


def _slow_rank(traces: list[Trace]) -> str:
    """Whether the ranks of a recorded job wait for one of them, in words."""
    import pandas as pd

    from ...traces.queries.lives import last_life
    from ..report.slow_rank import TOO_FEW, find_in

    lives = [last_life(trace) for trace in traces]
    events = pd.concat([life.events for life in lives], ignore_index=True)
    steps = pd.concat([life.steps for life in lives], ignore_index=True)
    slow = find_in(events, steps)
    if slow is None:
        return TOO_FEW
    return slow or "the other ranks wait for no rank longer than a setting can gain"
