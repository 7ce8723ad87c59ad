"""What the daemon says of its run: the summary, from what was asked, what the search came to and how the job stands."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from ...envs.bench.strata import percentile_of_gain
from ...envs.live.job import Job
from ...traces.reasons import RunEnds, names
from ..report.outputs import logged
from ..report.summary import RunSummary
from ..report.verdict import DEFAULT
from .compare import row_of
from .request import Request
from .tuner import Outcome, SlotChoice


def summarise(request: Request, outcome: Outcome, job: Job, before: RunSummary) -> RunSummary:
    """The summary so far. ``before``: the one that an earlier tuner of the run left, which found what stands."""
    losses: list[float | None] = [*logged(request.job_log, "loss")] or [None]
    emulated = asdict(request.emulated) if request.emulated else {}
    found = before or measured_by(outcome, bool(emulated))
    agreement = {"state": job.state[0].name, "text": job.state[1]} if job.state else {}
    texts = {"ended": outcome.ended, "no_table": _no_table(outcome, found), "agreement": agreement.get("text", "")}
    return replace(
        found,
        cluster=emulated.get("cluster"),
        emulated=bool(emulated),
        bytes_scale=emulated.get("bytes_scale", 1.0),
        compute_scale=emulated.get("compute_scale", 1.0),
        stage=request.facts.get("stage"),
        n_processes=len(job.ranks) or request.facts.get("n_processes"),
        n_ranks=max((c.n_ranks for c in job.assembler.comms.values()), default=None),
        policy=request.policy,
        steps=job.last_step,
        loss_first=losses[0],
        loss_last=losses[-1],
        default_share_after=outcome.default_share,
        kept=outcome.kept,
        in_force=found.in_force if outcome.kept else DEFAULT,
        dropped=outcome.dropped or None,
        not_obeyed=list(map(str, outcome.disobeyed)),
        refused=[_refusal(*r) for r in outcome.refused],
        agreement=agreement or None,
        consistency={"calls_checked": job.audit.calls_checked, "mismatches": job.audit.mismatches},
        records_lost=sum(job.lost.values()),
        ended=outcome.ended or None,
        reasons={key: names(text) for key, text in texts.items()},
        job_status=job.status,
    )


def _no_table(outcome: Outcome, found: RunSummary) -> str:
    """Why no table is in force after a verdict."""
    return outcome.dropped or (RunEnds.NO_GAIN() if found.is_decided and not outcome.kept else "")


def measured_by(outcome: Outcome, emulated: bool) -> RunSummary:
    """What the search and its comparisons gave."""
    found = RunSummary(windows=outcome.windows, decisions=list(map(_decision, outcome.choices)))
    found.steps_to_first_gain, found.steps_to_verdict = outcome.first_gain, outcome.steps_to_verdict
    ledger = outcome.ledger
    found.comparisons = [one.told() for one in ledger.paired]
    found.in_force = ledger.letter(outcome.decisions) if outcome.kept else DEFAULT
    told = {found.in_force, *(name for one in ledger.paired for name in (one.table, one.against))}
    rows = {name: [row_of(*row) for row in table.items()] for name, table in ledger.tables.items()}
    found.tables = {name: table for name, table in rows.items() if name in told}
    found.cost_s, found.budget_s = ledger.search_ms / 1e3, ledger.budget_ms / 1e3
    found.trials, found.trials_cost_s = ledger.trials, ledger.trials_ms / 1e3
    if v := outcome.verdict:
        found.detectable, found.aa_speedup_ci95 = v.detectable, [v.same.low, v.same.high] if v.same else None
        if v.tuned:
            found.speedup, found.speedup_ci95 = v.tuned.speedup, [v.tuned.low, v.tuned.high]
            if emulated:
                found.family = percentile_of_gain(1 - 1 / v.tuned.speedup)
        if v.default and v.table:
            first, last = v.default.told(), v.table.told()
            found.compared, found.compared_steps = last["table"], [first["steps"][0], last["steps"][1]]
            found.default_step_ms, found.default_windows = first["against_ms"], first["against_windows"]
            found.tuned_step_ms, found.tuned_windows = last["table_ms"], last["table_windows"]
    return found


def _decision(choice: SlotChoice) -> dict[str, Any]:
    found = row_of(choice.profile.slot, choice.decision)
    return found | {"own": choice.profile.own, "tried": choice.tried, "reason": choice.reason}


def _refusal(slot: Any, decision: Any, why: str) -> dict[str, Any]:
    return {"slot": str(slot), "decision": str(decision), "reason": next(iter(names(why)), None), "why": why}
