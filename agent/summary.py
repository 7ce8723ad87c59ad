"""What a run of the tuner came to: the schema of ``summary.json``, which every view of a run reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..envs.strata import standing
from ..traces.reasons import RunEnds, names
from ..traces.segments import atomically
from .outputs import logged

if TYPE_CHECKING:
    from ..envs.live import Job
    from .request import Request
    from .tuner import Outcome

_FILE = "summary.json"


@dataclass
class RunSummary:
    """One run, in the order of ``summary.json``; what is not known, or not yet, is None or empty."""

    cluster: str | None = None
    emulated: bool | None = None
    bytes_scale: float | None = None
    compute_scale: float | None = None
    stage: int | None = None
    n_processes: int | None = None
    n_ranks: int | None = None
    policy: str | None = None
    steps: int | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    regime: str | None = None
    default_step_ms: float | None = None
    tuned_step_ms: float | None = None
    speedup: float | None = None  # this and what stands around it: None without a verdict
    speedup_ci95: list[float] | None = None
    aa_speedup_ci95: list[float] | None = None  # the default against itself
    family: dict[str, float] | None = None  # where an emulated job stands among random ones
    windows: int | None = None
    steps_to_first_gain: int | None = None
    steps_to_verdict: int | None = None
    decisions: list[dict[str, Any]] = field(default_factory=list)
    default_share_after: float | None = None
    searches_begun_anew: int | None = None
    regimes_returned: int | None = None
    kept: bool | None = None
    dropped: str | None = None
    not_obeyed: list[str] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    agreement: dict[str, str] | None = None
    consistency: dict[str, int] = field(default_factory=dict)  # calls_checked, mismatches
    records_lost: int | None = None
    ended: str | None = None
    reasons: dict[str, list[str]] = field(default_factory=dict)  # names of ``traces.reasons`` for the texts in here
    job_status: int | None = None
    memory: dict[str, Any] | None = None
    failure: str | None = None
    run: str | None = None  # the run folder, then what is in the folder of the results
    trace: str | None = None
    table: str | None = None
    report: str | None = None
    log: str | None = None

    def __bool__(self) -> bool:
        """False where a run has left no word."""
        return self != RunSummary()

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> RunSummary:
        """What a JSON object tells, of this release or another: other keys are left out."""
        known = (f.name for f in fields(cls))
        return cls(**{name: found[name] for name in known if found.get(name) is not None})

    @classmethod
    def read(cls, *folders: Path) -> RunSummary:
        """What the first of these folders tells that holds a whole ``summary.json``."""
        return cls.of(next(filter(None, (read_json(folder / _FILE) for folder in folders)), {}))

    def write(self, folder: Path) -> None:
        """Replace the folder's ``summary.json`` at once. Raises TraceError."""
        atomically(folder / _FILE, lambda path: path.write_text(json.dumps(vars(self), indent=2) + "\n"))

    def speedup_text(self) -> str:
        """The speed-up with its interval, and the interval of the default against itself."""
        spread = [("95 %", self.speedup_ci95), ("default against itself", self.aa_speedup_ci95)]
        told = [f"{name} [{ends[0]:.3f}, {ends[1]:.3f}]" for name, ends in spread if ends]
        return "  ".join([f"speed-up {self.speedup:.3f}", *told])


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
            found.family = standing(1 - 1 / v.tuned.speedup)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _decision(choice: Any) -> dict[str, Any]:
    slot, d = choice.profile.slot, choice.decision
    found = {"func": slot.func, "min_bytes": slot.min_bytes, "max_bytes": slot.max_bytes, "algo": d.algo}
    return found | {"proto": d.proto, "n_channels": d.n_channels or None, "reason": choice.reason}


def _refusal(slot: Any, decision: Any, why: str) -> dict[str, Any]:
    return {"slot": str(slot), "decision": str(decision), "reason": next(iter(names(why)), None), "why": why}
