"""``dynamiccl tune`` on the job of the truth part: by the rule, whose tuner is killed in a trial, then by the LSTM."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ....envs.nccl.run_folder import TABLE
from ....envs.nccl.shm import TableFile, trial_of
from ....traces.here import program
from ...report.summary import RunSummary
from ...report.verdict import verdict
from .machine import Machine
from .mps import with_parent

#: More steps than there is time for: the deadline ends the job.
STEPS = 1_000_000
#: Part of the time that the rule has; from then on its tuner is killed in its next trial.
RULE_PART = 0.5
#: Part of the time after which it is killed without one.
LATEST_PART = 0.65
#: Seconds that a tuner has to sum up after its deadline.
SUM_UP_S = 8.0


class Tune:
    """One job and, one after the other, two tuners of it. All is in ``tune/`` of the results, packed at the end."""

    def __init__(
        self, machine: Machine, folder: Path, env: Mapping[str, str], share: float, pieces: int
    ) -> None:
        told = {"backend": machine.backend, "share": share, "pieces": pieces, "steps": STEPS}
        job = [*program("dynamiccl.agent.checks.gpu.parts.job"), json.dumps(told)]
        self.machine = machine
        self.folder = folder
        self.env = {**env, **machine.env()}
        self.work = folder / "tune"
        self.job = machine.ranks(job)

    def run(self, ends: float) -> dict[str, Any]:
        """Both until ``ends`` (time.monotonic()); the verdicts."""
        self.work.mkdir()
        rule, lstm = self.work / "rule", self.work / "lstm"
        first = [*program(), "tune", "--out", str(rule), "--no-memory", "--force"]
        first += ["--policy", "expected-improvement"]
        if self.machine.emulated:
            first += ["--cluster", self.machine.emulated.cluster, "--bytes-scale", "1"]
        second = [
            *program(),
            "tune",
            "--attach",
            str(rule),
            "--policy",
            "lstm",
            "--out",
            str(lstm),
            "--no-memory",
        ]
        with (self.folder / "log.txt").open("ab") as log:
            job = self._start([*first, "--", *self.job], log)
            joined = None
            try:
                killed = _kill_in_trial(job, rule / "run", ends)
                joined = self._start(second, log)
                _wait(job, ends)
            finally:
                _end(job)
                if joined is not None:
                    _end(joined)
        summaries = {"rule": RunSummary.read(rule), "lstm": RunSummary.read(lstm)}
        self._pack()
        verdicts = {name: verdict(one) for name, one in summaries.items() if one}
        return {"ok": _is_well(summaries.values()), "killed": killed, "verdicts": verdicts}

    def _start(self, command: list[str], log: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=with_parent,
        )

    def _pack(self) -> None:
        with tarfile.open(self.folder / "tune.tar.gz", "w:gz") as archive:
            for path in sorted(self.work.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    archive.add(path, path.relative_to(self.work))
        shutil.rmtree(self.work, ignore_errors=True)


def _is_well(summaries: Iterable[RunSummary]) -> bool:
    """Whether a tuner has measured, and ranks never ran a collective in two ways."""
    measured, mismatches = 0, 0
    for one in summaries:
        measured += one.windows or 0
        mismatches += one.consistency.get("mismatches", 0)
    return measured > 0 and mismatches == 0


def _kill_in_trial(job: subprocess.Popen[bytes], run: Path, ends: float) -> str:
    """Kill the tuner in its first trial after its part of the time; what became of it."""
    left = ends - time.monotonic()
    soonest, latest = ends - (1 - RULE_PART) * left, ends - (1 - LATEST_PART) * left
    _wait(job, soonest)
    while time.monotonic() < latest and not _is_in_trial(run):
        time.sleep(0.02)
    tuner = _tuner_of(job.pid)
    if tuner is None:
        return "the tuner had ended before"
    in_trial = _is_in_trial(run)
    os.kill(tuner, signal.SIGKILL)
    return f"killed {'in a trial' if in_trial else 'outside of a trial'}; the LSTM's joined"


def _is_in_trial(run: Path) -> bool:
    """Whether the table of a run folder is a trial."""
    with contextlib.suppress(OSError):
        table = TableFile((run / TABLE).resolve())
        try:
            found = table.read()
        finally:
            table.close()
        return found is not None and trial_of(found[1]).trial_steps > 0
    return False


def _tuner_of(launcher: int) -> int | None:
    """The process of the tuner that a launcher has started."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"--attach" in words:
                return int(child)
    return None


def _wait(process: subprocess.Popen[bytes], ends: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(ends - time.monotonic(), 0.0))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it, so that it sums up; kill what is left after a while."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SUM_UP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
