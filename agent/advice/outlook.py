"""Whether there is anything to win, in one of three answers with its reason: how `advise` and `doctor` end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ...traces.names import tuned_funcs

if TYPE_CHECKING:
    from ...traces.files import Trace
    from ..report.summary import RunSummary

NOTHING, SWEEP, UNKNOWN = "nothing to win here", "worth a sweep", "cannot tell: profile first"
#: How to profile.
CURE = "record 30 steps with torch.profiler for `dynamiccl advise`, or start the job with `dynamiccl tune`"


class Outlook(NamedTuple):
    """The answer, and its reason."""

    answer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.answer} ({self.reason})"


def of_machine(facts: Any, findings: Iterable[Any]) -> Outlook:
    """Of a machine whose job nobody has seen, by the facts and findings of ``agent/checks/doctor.py``."""
    for finding in findings:
        if finding.name == "nothing offered":
            return Outlook(NOTHING, finding.what)
    has_none = "" if facts.nccl or facts.n_gpus else ", and neither NCCL nor a GPU is in sight"
    return Outlook(UNKNOWN, f"doctor has looked at no job{has_none}: {CURE}")


def of_trace(trace: Trace) -> Outlook:
    """Of a run or a recording."""
    from ...traces.outside import TraceError
    from ..report.summary import RunSummary
    from .advise import Advice

    summary = RunSummary.of_trace(trace)
    if summary.speedup is not None:
        return of_run(summary)
    way = trace.all_reduce
    if trace.steps.empty or not trace.events["func"].isin(tuned_funcs(way)).any():
        return without_steps(set(trace.events["func"]), way)
    if trace.offers.empty:
        return _of_shares(trace)
    try:
        return of_advice(Advice(trace).as_dict())
    except (TraceError, ValueError) as error:
        return Outlook(UNKNOWN, f"{error}")


def _named(all_reduce: str) -> str:
    """The collectives that are tuned under the job's option, in words."""
    *some, last = tuned_funcs(all_reduce)
    return f"{', '.join(some)} and {last}"


def _of_shares(trace: Trace) -> Outlook:
    """Of a profile, which does not say what NCCL offers: by what the tuned collectives take of the steps."""
    from .advise import LEAST_STEPS, WORTH

    calls = trace.events[trace.events["func"].isin(tuned_funcs(trace.all_reduce))]
    if calls["start_ns"].isna().all():
        return Outlook(UNKNOWN, f"the recording has no times of calls: {CURE}")
    taken = (calls["end_ns"] - calls["start_ns"]).groupby(calls["rank"]).sum()
    steps = trace.steps.groupby("rank")["duration_ns"]
    share = min(1.0, float((taken / steps.sum()).max()))
    n_steps = int(steps.size().max())
    told = f"{_named(trace.all_reduce)} take {share:.1%} of the step"
    if share < WORTH:
        return Outlook(NOTHING, told)
    if n_steps < LEAST_STEPS:
        return Outlook(UNKNOWN, f"{n_steps} steps are recorded, {LEAST_STEPS} are needed: {CURE}")
    return Outlook(SWEEP, f"{told}; `dynamiccl advise` with --cluster predicts how much of it can be saved")


def of_run(summary: RunSummary) -> Outlook:
    """Of a run that has measured tables."""
    if summary.kept and summary.saved:
        return Outlook(SWEEP, f"this run has measured a table that saves {summary.saved[0]:.1%} of the step")
    return Outlook(NOTHING, "this run has measured tables, and kept none")


def without_steps(funcs: Iterable[str], all_reduce: str = "") -> Outlook:
    """Of a recording that tells these functions of NCCL and no steps, or none that a table reaches."""
    tuned = tuned_funcs(all_reduce)
    if not set(funcs) & set(tuned):
        none = " and ".join(f"no {func}" for func in tuned)
        return Outlook(NOTHING, f"{none} was recorded, and a table reaches no other call")
    return Outlook(UNKNOWN, f"the recording has no steps, so no share of a step: {CURE}")


def of_advice(told: dict[str, Any]) -> Outlook:
    """Of what :meth:`.advise.Advice.as_dict` says."""
    from .advise import LEAST_STEPS, WORTH

    communication, left_out = told["communication"], told["left_out"]
    low, high = (max(0.0, told["possible"][end]) for end in ("low", "high"))
    if communication + left_out < WORTH:
        return Outlook(NOTHING, f"{_named(told['all_reduce'])} take {communication:.1%} of the step")
    if left_out > communication:
        return Outlook(UNKNOWN, f"{left_out:.0%} of the step is in calls of NCCL that cannot be read")
    if told["steps"] < LEAST_STEPS:
        return Outlook(UNKNOWN, f"{told['steps']} steps are recorded, {LEAST_STEPS} are needed: {CURE}")
    if told["unseen"] or told["possible"]["median"] >= WORTH:
        return Outlook(SWEEP, f"the best settings are predicted to save {low:.0%} to {high:.0%} of the step")
    return Outlook(NOTHING, f"the best settings are predicted to save at most {high:.1%} of the step")
