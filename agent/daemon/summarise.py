"""What the daemon says of its run: the summary, from what was asked, what the search came to and how the job stands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...envs.bench.strata import percentile_of_gain
from ...envs.live.job import Job
from ...traces.reasons import RunEnds, names
from ..report.outputs import logged
from ..report.summary import RunSummary
from .request import Request
from .tuner import Outcome


def summarise(request: Request, outcome: Outcome, job: Job, before: RunSummary) -> RunSummary:
    """The summary so far. ``before``: the one that an earlier tuner of the run left, which found what stands."""
    losses = logged(request.job_log, "loss")
    e = request.emulated
    found = before or _measured(outcome, e is not None)
    no_table = outcome.dropped or (RunEnds.NO_GAIN() if found.speedup is not None and not outcome.kept else "")
    reasons = {"ended": outcome.ended, "no_table": no_table, "agreement": job.state[1] if job.state else ""}
    return replace(
        found,
        cluster=e.cluster if e else None,
        emulated=e is not None,
        bytes_scale=e.bytes_scale if e else 1.0,
        compute_scale=e.compute_scale if e else 1.0,
        stage=request.facts.get("stage"),
        n_processes=len(job.ranks) or request.facts.get("n_processes"),
        n_ranks=max((c.n_ranks for c in job.assembler.comms.values()), default=None),
        policy=request.policy,
        steps=job.last_step,
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        default_share_after=outcome.default_share,
        searches_begun_anew=outcome.reopened - outcome.returned,
        regimes_returned=outcome.returned,
        kept=outcome.kept,
        dropped=outcome.dropped or None,
        not_obeyed=[str(item) for item in outcome.disobeyed],
        refused=[_refusal(*r) for r in outcome.refused],
        agreement={"state": job.state[0].name, "text": job.state[1]} if job.state else None,
        consistency={"calls_checked": job.audit.calls_checked, "mismatches": job.audit.mismatches},
        records_lost=sum(job.lost.values()),
        ended=outcome.ended or None,
        reasons={key: names(text) for key, text in reasons.items()},
        job_status=job.status,
    )


def _measured(outcome: Outcome, emulated: bool) -> RunSummary:
    """What the search and its comparisons gave."""
    found = RunSummary(regime=outcome.regime, windows=outcome.windows, decisions=list(map(_decision, outcome.choices)))
    found.steps_to_first_gain, found.steps_to_verdict = outcome.first_gain, outcome.steps_to_verdict
    if v := outcome.verdict:
        found.default_step_ms, found.tuned_step_ms, found.speedup = v.default_ms, v.tuned_ms, v.tuned.speedup
        found.speedup_ci95, found.aa_speedup_ci95 = [v.tuned.low, v.tuned.high], [v.same.low, v.same.high]
        if emulated:
            found.family = percentile_of_gain(1 - 1 / v.tuned.speedup)
    return found


def _decision(choice: Any) -> dict[str, Any]:
    slot, d = choice.profile.slot, choice.decision
    found = {"func": slot.func, "min_bytes": slot.min_bytes, "max_bytes": slot.max_bytes, "algo": d.algo}
    return found | {"proto": d.proto, "n_channels": d.n_channels or None, "reason": choice.reason}


def _refusal(slot: Any, decision: Any, why: str) -> dict[str, Any]:
    return {"slot": str(slot), "decision": str(decision), "reason": next(iter(names(why)), None), "why": why}
