"""What a run of the tuner came to, as ``summary.json`` holds it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ..envs.job_suites import standing
from ..envs.live import Job
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
    verdict = outcome.verdict
    found: dict[str, Any] = {
        "regime": outcome.regime,
        "default_step_ms": verdict.default_ms if verdict else None,
        "tuned_step_ms": verdict.tuned_ms if verdict else None,
        "speedup": verdict.tuned.speedup if verdict else None,
        "speedup_ci95": [verdict.tuned.low, verdict.tuned.high] if verdict else None,
        "aa_speedup_ci95": [verdict.same.low, verdict.same.high] if verdict else None,
        "family": standing(1 - 1 / verdict.tuned.speedup) if verdict and request.emulated else None,
        "windows": outcome.windows,
        "steps_to_first_gain": outcome.first_gain,
        "steps_to_verdict": outcome.steps_to_verdict,
        "decisions": [_decision(c) for c in outcome.choices],
    }
    found = {name: before.get(name, value) for name, value in found.items()}
    no_table = outcome.dropped or (RunEnds.NO_GAIN() if found["speedup"] is not None and not outcome.kept else "")
    reasons = {"ended": outcome.ended, "no_table": no_table, "agreement": job.state[1] if job.state else ""}
    return {
        "cluster": request.emulated.cluster if request.emulated else None,
        "emulated": request.emulated is not None,
        "bytes_scale": request.emulated.bytes_scale if request.emulated else 1.0,
        "time_scale": request.emulated.time_scale if request.emulated else 1.0,
        "stage": request.facts.get("stage"),
        "n_processes": len(job.ranks) or request.facts.get("n_processes"),
        "n_ranks": max((c.n_ranks for c in job.assembler.comms.values()), default=None),
        "policy": request.policy,
        "steps": job.last_step,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        **found,
        "default_share_after": outcome.default_share,
        "searches_begun_anew": outcome.reopened - outcome.returned,
        "regimes_returned": outcome.returned,
        "kept": outcome.kept,
        "dropped": outcome.dropped or None,
        "not_obeyed": [str(item) for item in outcome.disobeyed],
        "refused": [_refusal(*row) for row in outcome.refused],
        "agreement": {"state": job.state[0].name, "text": job.state[1]} if job.state else None,
        "consistency": {"calls_checked": job.audit.calls_checked, "mismatches": job.audit.mismatches},
        "records_lost": sum(job.lost.values()),
        "ended": outcome.ended or None,
        "reasons": {key: names(text) for key, text in reasons.items()},
        "job_status": job.status,
    }


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def _decision(choice: Any) -> dict[str, Any]:
    slot, d = choice.profile.slot, choice.decision
    return {
        "func": slot.func,
        "min_bytes": slot.min_bytes,
        "max_bytes": slot.max_bytes,
        "algo": d.algo,
        "proto": d.proto,
        "n_channels": d.n_channels or None,
        "reason": choice.reason,
    }


def _refusal(slot: Any, decision: Any, why: str) -> dict[str, Any]:
    return {"slot": str(slot), "decision": str(decision), "reason": next(iter(names(why)), None), "why": why}
