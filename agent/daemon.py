"""The daemon: start or join a job, run the tuner beside it, keep watch, and leave a trace, a summary and a report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..envs.live import Job, JobEnded, logged
from ..envs.live_env import DEFAULT, TRIAL, LiveEnv
from ..envs.nccl.shm import RunFolder
from ..traces.audit import audit
from ..traces.files import Trace, TraceWriter
from .baselines import make_policy
from .tuner import Line, Outcome, Settings, Tuner

#: After the verdict, the table is set against the default again every so many steps, and dropped after so many losses.
WATCH_STEPS, WATCH_LOSSES = 200, 3


@dataclass(frozen=True)
class Emulated:
    """The emulated cluster that a job without GPUs runs on."""

    cluster: str
    bytes_scale: float
    time_scale: float
    seed: int = 0
    weather: str = ""

    def env(self) -> dict[str, str]:
        """What tells the emulated backend, see ``envs.sim.timeline``."""
        return {
            "DYNAMICCL_CLUSTER": self.cluster,
            "DYNAMICCL_BYTES_SCALE": repr(self.bytes_scale),
            "DYNAMICCL_TIME_SCALE": repr(self.time_scale),
            "DYNAMICCL_SEED": str(self.seed),
            "DYNAMICCL_WEATHER": self.weather,
        }


@dataclass(frozen=True)
class Request:
    """One run of ``dynamiccl tune``."""

    out: Path
    command: Sequence[str] = ()  # what to start; empty: join the job of `run`
    run: RunFolder | None = None
    emulated: Emulated | None = None
    policy: str = "lstm"
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    facts: dict[str, Any] = field(default_factory=dict)  # of the job, for the summary: stage, n_processes
    headroom: int | None = None  # see ``nccl.build.nccl_env``
    job_log: Path | None = None  # JSON lines with the loss of each step, where the job writes them


class Daemon:
    """One request being served. ``on_window`` hears of every window, ``on_phase`` of what is being done."""

    def __init__(
        self,
        request: Request,
        on_window: Callable[[Line], None] = lambda line: None,
        on_phase: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.request, self.on_window, self.on_phase = request, on_window, on_phase
        self.policy = make_policy(request.policy, request.seed)  # before anything is started: a bad name costs nothing
        self.job: Job | None = None
        self.outcome = Outcome()

    def serve(self) -> dict[str, Any]:
        """Run to the end of the job; returns the summary (also ``summary.json``).

        Raises OSError if the command cannot be started, TraceError if the trace cannot be written. A KeyboardInterrupt,
        or SIGTERM, stops a job that we started; one that we have joined goes on, under NCCL's own choice. Both are
        answered with the summary of what was seen.
        """
        with _ended_politely():
            self._run()
        return self._summarise()

    def _run(self) -> None:
        request = self.request
        request.out.mkdir(parents=True, exist_ok=True)
        run = request.run or RunFolder.create()
        header = {"emulated": request.emulated is not None, "policy": request.policy, **request.facts}
        if request.emulated:
            header |= asdict(request.emulated)
        header["job"] = " ".join(request.command)
        try:
            with TraceWriter(request.out / "trace", header, existing="replace") as writer:
                self._serve(run, writer)
        finally:
            if self.job is not None and not self.job.is_alive():
                run.close()

    def _serve(self, run: RunFolder, writer: TraceWriter) -> None:
        request = self.request
        if request.command:
            self.on_phase("starting the job")
            extra = request.emulated.env() if request.emulated else {}
            self.job = Job.start(request.command, run, request.out / "job.log", extra, writer, request.headroom)
        else:
            self.job = Job(run, writer=writer)
        env = LiveEnv(
            self.job,
            window_steps=request.settings.window_steps,
            time_scale=request.emulated.time_scale if request.emulated else 1.0,
        )
        tuner = Tuner(env, self.policy, request.settings, self._tell)
        self.outcome = tuner.outcome
        try:
            self.on_phase("waiting for the job's first steps")
            tuner.run()
            self.on_phase(self.outcome.ended or "watching until the job ends")
            self._watch(env)
        except KeyboardInterrupt as reason:
            self.outcome.ended = str(reason) or "interrupted"
            self.outcome.kept = False
            self.job.publish({})
            self.job.stop()
            if self.job.is_alive():
                self.on_phase(f"{self.outcome.ended}: the job goes on, NCCL decides in it from its next steps on")
        finally:
            self.job.poll()
            self.job.take(everything=True)
            if self.job.damaged:
                writer.update_header(rings_damaged=self.job.damaged)

    def _watch(self, env: LiveEnv) -> None:
        """Until the job ends: compare now and then, and go back to the default once the table keeps losing."""
        assert self.job is not None
        job, losses, kept = self.job, 0, self.outcome.kept
        since = job.last_step
        try:
            while job.is_alive():
                job.rest()
                if not kept or job.last_step - since < WATCH_STEPS:
                    continue
                since = job.last_step
                default = env.measure(DEFAULT, {})
                tuned = env.measure(TRIAL, self.outcome.decisions)
                losses = losses + 1 if tuned.step_ms > default.step_ms else 0
                if losses >= WATCH_LOSSES:
                    kept = False
                    job.publish({})
                    self.on_phase("the table has lost three comparisons running: back to NCCL's own choice")
        except JobEnded:
            pass

    def _tell(self, line: Line) -> None:
        assert self.job is not None and self.job.writer is not None
        self.job.writer.log("window", asdict(line))
        self.on_window(line)

    def _summarise(self) -> dict[str, Any]:
        request, outcome = self.request, self.outcome
        trace = Trace.read(request.out / "trace")
        check = audit(trace.events)
        losses = logged(request.job_log, "loss")
        verdict = outcome.verdict
        ranks = trace.comms["n_ranks"]
        summary: dict[str, Any] = {
            "cluster": request.emulated.cluster if request.emulated else None,
            "emulated": request.emulated is not None,
            "bytes_scale": request.emulated.bytes_scale if request.emulated else 1.0,
            "time_scale": request.emulated.time_scale if request.emulated else 1.0,
            "stage": request.facts.get("stage"),
            "n_processes": int(trace.steps["rank"].nunique()) if len(trace.steps) else request.facts.get("n_processes"),
            "n_ranks": int(ranks.max()) if len(ranks) else None,
            "policy": request.policy,
            "regime": outcome.regime,
            "steps": int(trace.steps["index"].max()) if len(trace.steps) else 0,
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
            "default_step_ms": verdict.default_ms if verdict else None,
            "tuned_step_ms": verdict.tuned_ms if verdict else None,
            "speedup": verdict.tuned.speedup if verdict else None,
            "speedup_ci95": [verdict.tuned.low, verdict.tuned.high] if verdict else None,
            "aa_speedup_ci95": [verdict.same.low, verdict.same.high] if verdict else None,
            "kept": outcome.kept,
            "windows": outcome.windows,
            "decisions": [_decision(c) for c in outcome.choices],
            "consistency": {"calls_checked": check.calls_checked, "mismatches": check.mismatches},
            "records_lost": sum(self.job.lost.values()) if self.job else 0,
            "ended": outcome.ended or None,
            "job_status": self.job.status if self.job else None,
            "trace": str(request.out / "trace"),
            "report": str(request.out / "report.html"),
        }
        path = request.out / "summary.json"
        path.with_suffix(".tmp").write_text(json.dumps(summary, indent=2) + "\n")
        os.replace(path.with_suffix(".tmp"), path)
        try:
            _report(request.out / "report.html", summary, trace)
        except Exception as error:  # the page is the last thing made: what was measured must not be lost with it
            self.on_phase(f"the report could not be drawn ({type(error).__name__}: {error}); the rest is whole")
        return summary


@contextlib.contextmanager
def _ended_politely() -> Iterator[None]:
    """SIGTERM comes as a KeyboardInterrupt that says "terminated"; only the main thread can see to that."""

    def handle(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt("terminated")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(path: Path, summary: dict[str, Any], trace: Trace) -> None:
    from .report import write_report  # plotly: a second to import, needed once

    write_report(path, summary, trace)


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


def workload(
    stage: int, steps: int, ranks: int, log: Path, *, backend: str, seed: int = 0, extra: Sequence[str] = ()
) -> list[str]:
    """The command of our own training job, the one that ``dynamiccl tune`` runs when it is given none."""
    command = [sys.executable, "-m", "dynamiccl.zero_workload", "--stage", str(stage), "--steps", str(steps)]
    command += ["--ranks", str(ranks), "--backend", backend, "--seed", str(seed), "--log", str(log)]
    return command + (["--device", "cuda", "--dtype", "bf16"] if backend == "nccl" else []) + list(extra)
