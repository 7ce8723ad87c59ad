"""``dynamiccl tune`` on the job of the truth part: by the rule, then by the LSTM, whose tuner is killed in a trial."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....envs.nccl.run_folder import TABLE
from ....envs.nccl.shm import TableFile, trial_steps_of
from ...report.summary import RunSummary
from ...report.verdict import verdict
from .machine import Machine
from .mps import with_parent

_CLI = (sys.executable, "-m", "dynamiccl.agent.cli")
#: More steps than there is time for: the deadline ends the job.
STEPS = 1_000_000
#: Part of the time that the rule has.
RULE_PART = 0.4
#: Seconds that a tuner has to sum up after its deadline.
SUM_UP_S = 8.0


class Tune:
    """Both runs, in ``tune/`` of the results, packed at the end."""

    def __init__(
        self, machine: Machine, folder: Path, env: Mapping[str, str], share: float, pieces: int
    ) -> None:
        told = {"backend": machine.backend, "share": share, "pieces": pieces, "steps": STEPS}
        program = [sys.executable, "-m", "dynamiccl.agent.checks.gpu.parts.job", json.dumps(told)]
        self.machine, self.folder, self.env = machine, folder, dict(env)
        self.work = folder / "tune"
        self.job = machine.ranks(program)

    def run(self, ends: float) -> dict[str, Any]:
        """Both until ``ends`` (time.monotonic()); the verdicts."""
        began = time.monotonic()
        self.work.mkdir()
        verdicts, told = {}, {}
        rule_ends = began + RULE_PART * (ends - began)
        self._tune("expected-improvement", rule_ends, kills=False)
        verdicts["rule"] = self._verdict("expected-improvement")
        told["killed"] = self._tune("lstm", ends, kills=True)
        verdicts["lstm"] = self._verdict("lstm")
        self._pack()
        found = [text for text in verdicts.values() if text]
        return {"ok": bool(found), "verdicts": verdicts, **told}

    def _verdict(self, policy: str) -> str:
        summary = RunSummary.read(self.work / policy)
        return verdict(summary) if summary else ""

    def _tune(self, policy: str, ends: float, kills: bool) -> str:
        """One job with its tuner; what became of the tuner that is killed."""
        out = self.work / policy
        command = [*_CLI, "tune", "--out", str(out), "--no-memory", "--force", "--policy", policy]
        if self.machine.emulated:
            command += ["--cluster", self.machine.emulated.cluster, "--bytes-scale", "1"]
        said = ""
        with (self.folder / "log.txt").open("ab") as log:
            job = self._start([*command, "--", *self.job], log)
            joined = None
            if kills:
                said = self._kill_in_trial(job, out, ends)
                if said.startswith("killed"):
                    joined = self._start([*_CLI, "tune", "--attach", str(out)], log)
            _wait(job, ends)
            _end(job)
            if joined is not None:
                _end(joined)
        return said

    def _start(self, command: list[str], log: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env={**self.env, **self.machine.env()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=with_parent,
        )

    def _kill_in_trial(self, job: subprocess.Popen[bytes], out: Path, ends: float) -> str:
        """Wait until a trial runs, and kill the tuner in it; leave it the last half of the time to come back."""
        latest = time.monotonic() + 0.7 * (ends - time.monotonic())
        while time.monotonic() < latest and job.poll() is None:
            if _is_in_trial(out / "run") and (tuner := _tuner_of(job.pid)):
                os.kill(tuner, signal.SIGKILL)
                return "killed in a trial; another one joined"
            time.sleep(0.02)
        return "no trial to kill it in"

    def _pack(self) -> None:
        with tarfile.open(self.folder / "tune.tar.gz", "w:gz") as archive:
            for path in sorted(self.work.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    archive.add(path, path.relative_to(self.work))
        shutil.rmtree(self.work, ignore_errors=True)


def _is_in_trial(run: Path) -> bool:
    """Whether the table of a run folder is a trial."""
    with contextlib.suppress(OSError):
        table = TableFile((run / TABLE).resolve())
        try:
            found = table.read()
        finally:
            table.close()
        return found is not None and trial_steps_of(found[1]) > 0
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
