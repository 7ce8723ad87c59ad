"""What a run of the tuner came to, as ``summary.json`` holds it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ..envs.live import Job
from ..envs.strata import standing
from ..traces.reasons import RunEnds, names
from .outputs import logged
from .request import Request
from .tuner import Outcome


def summarise(request: Request, outcome: Outcome, job: Job, before: dict[str, Any]) -> dict[str, Any]:
    """The summary so far. ``before``: the one that an earlier tuner of the run left, which found what stands.

    ``reasons`` has the names of ``traces.reasons`` for the texts in it: why the run has ended, why no table of it is in
    force, why the ranks change none.
    """
    losses = logged(request.job_log, "loss")
    found: dict[str, Any] = {"regime": outcome.regime, **_measured(outcome, request.emulated is not None)}
    found |= {"windows": outcome.windows, "steps_to_first_gain": outcome.first_gain}
    found |= {"steps_to_verdict": outcome.steps_to_verdict, "decisions": [_decision(c) for c in outcome.choices]}
    found = {name: before.get(name, value) for name, value in found.items()}
    no_table = outcome.dropped or (RunEnds.NO_GAIN() if found["speedup"] is not None and not outcome.kept else "")
    reasons = {"ended": outcome.ended, "no_table": no_table, "agreement": job.state[1] if job.state else ""}
    e = request.emulated
    told: dict[str, Any] = {"cluster": e.cluster if e else None, "emulated": e is not None}
    told |= {"bytes_scale": e.bytes_scale if e else 1.0, "compute_scale": e.compute_scale if e else 1.0}
    told |= {"stage": request.facts.get("stage"), "n_processes": len(job.ranks) or request.facts.get("n_processes")}
    told["n_ranks"] = max((c.n_ranks for c in job.assembler.comms.values()), default=None)
    told |= {"policy": request.policy, "steps": job.last_step}
    told |= {"loss_first": losses[0] if losses else None, "loss_last": losses[-1] if losses else None, **found}
    told |= {"default_share_after": outcome.default_share, "searches_begun_anew": outcome.reopened - outcome.returned}
    told |= {"regimes_returned": outcome.returned, "kept": outcome.kept, "dropped": outcome.dropped or None}
    told |= {
        "not_obeyed": [str(item) for item in outcome.disobeyed],
        "refused": [_refusal(*r) for r in outcome.refused],
    }
    told["agreement"] = {"state": job.state[0].name, "text": job.state[1]} if job.state else None
    told["consistency"] = {"calls_checked": job.audit.calls_checked, "mismatches": job.audit.mismatches}
    told |= {"records_lost": sum(job.lost.values()), "ended": outcome.ended or None}
    return told | {"reasons": {key: names(text) for key, text in reasons.items()}, "job_status": job.status}


def _measured(outcome: Outcome, emulated: bool) -> dict[str, Any]:
    """What the comparisons gave, None where there is no verdict."""
    keys = ("default_step_ms", "tuned_step_ms", "speedup", "speedup_ci95", "aa_speedup_ci95", "family")
    if (v := outcome.verdict) is None:
        return dict.fromkeys(keys)
    intervals = [[v.tuned.low, v.tuned.high], [v.same.low, v.same.high]]
    stands = standing(1 - 1 / v.tuned.speedup) if emulated else None
    return dict(zip(keys, (v.default_ms, v.tuned_ms, v.tuned.speedup, *intervals, stands), strict=True))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def _decision(choice: Any) -> dict[str, Any]:
    slot, d = choice.profile.slot, choice.decision
    found = {"func": slot.func, "min_bytes": slot.min_bytes, "max_bytes": slot.max_bytes, "algo": d.algo}
    return found | {"proto": d.proto, "n_channels": d.n_channels or None, "reason": choice.reason}


def _refusal(slot: Any, decision: Any, why: str) -> dict[str, Any]:
    return {"slot": str(slot), "decision": str(decision), "reason": next(iter(names(why)), None), "why": why}
