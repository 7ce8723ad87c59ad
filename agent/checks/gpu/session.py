"""Ranks that stay alive and do one part after the other as they are told; killed where a part does not end in time.

Three kinds: ``tuner`` has our plugin as tuner and profiler, silent until a table is set; ``profiler`` has the profiler
alone; ``none`` has neither. All of them run NCCL as this machine has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ....envs.nccl.plugin.build import job_env, plugin_path
from ....envs.nccl.shm import RunFolder
from ....traces.here import program
from .machine import Machine
from .mps import with_parent
from .parts.ours import is_ours

RANK = tuple(program("dynamiccl.agent.checks.gpu.parts.serve"))
#: Seconds more that a session's first part has: its processes have to import PyTorch, from a cold disk perhaps.
START_S = 60.0
#: How often the answer is looked for.
_POLL_S = 0.02


class PartFailed(RuntimeError):
    """A part did not end in time, or a rank died; the message is one line."""


def session_env(kind: str, machine: Machine, run: Path | None, base: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a session's ranks. ``run``: the run folder of a session with the tuner.

    If torchrun started the check, its variables are not for these ranks: rank 0 serves their store, and not torchrun.
    """
    env = {name: value for name, value in base.items() if not is_ours(name, value)}
    env = {name: value for name, value in env.items() if not name.startswith("TORCHELASTIC_")}
    env |= machine.env()
    if machine.emulated:
        env["DYNAMICCL_BYTES_SCALE"] = "1"
    if kind == "tuner":
        assert run is not None
        env |= job_env(run)
    elif kind == "profiler":
        env["NCCL_PROFILER_PLUGIN"] = str(plugin_path())
    return env


class Session:
    """The ranks of this node. ``port``: where all ranks meet; ``log`` gets all that they print."""

    def __init__(
        self,
        kind: str,
        machine: Machine,
        folder: Path,
        port: int = 0,
        extra: Mapping[str, str] | None = None,
        program: Sequence[str] = RANK,
    ) -> None:
        self.kind = kind
        self._run = RunFolder.create() if kind == "tuner" else None
        self._work = tempfile.TemporaryDirectory(prefix="dynamiccl-check-")
        self._answers = Path(self._work.name, "answers")
        self._answers.touch()
        self._read, self._start_s = 0, START_S
        run = self._run.path if self._run else None
        env = session_env(kind, machine, run, os.environ) | dict(extra or {})
        env["MASTER_ADDR"] = machine.nodes.address
        env["MASTER_PORT"] = str(port or free_port())
        told = {
            "backend": machine.backend,
            "folder": str(folder.resolve()),
            "answers": str(self._answers),
            "raised": machine.raised,
            "kind": kind,
        }
        with (folder / "log.txt").open("ab") as log:
            self._ranks = [
                _start([*program, json.dumps(told)], env | rank_env(machine, local), log)
                for local in range(machine.n_ranks)
            ]

    @property
    def is_alive(self) -> bool:
        """Whether all ranks run."""
        return all(rank.poll() is None for rank in self._ranks)

    def do(self, part: str, ends: float, grace: float, **options: Any) -> dict[str, Any]:
        """Have the ranks do a part; what rank 0 of this node answers.

        ``ends``: time.monotonic() until which it may measure; ``grace`` seconds later the ranks are killed, a
        session's first part START_S later still. Raises PartFailed, also where a rank dies.
        """
        line = json.dumps({"part": part, "ends": ends, "options": options}) + "\n"
        for rank in self._ranks:
            assert rank.stdin is not None
            with contextlib.suppress(OSError):  # one that died is found below
                rank.stdin.write(line.encode())
                rank.stdin.flush()
        last = ends + grace + self._start_s
        self._start_s = 0.0
        while time.monotonic() < last:
            if answer := self._answer():
                return answer
            if not self.is_alive:
                codes = [rank.poll() for rank in self._ranks]
                self.close()
                raise PartFailed(f"a rank ended with status {next(filter(None, codes), 0)}: log.txt says why")
            time.sleep(_POLL_S)
        self.close()
        raise PartFailed("stopped by its deadline")

    def _answer(self) -> dict[str, Any]:
        text = self._answers.read_text()
        line, newline, _ = text[self._read :].partition("\n")
        if not newline:
            return {}
        self._read += len(line) + 1
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Kill the ranks with all that they started; nothing of theirs has to be saved."""
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
            if rank.stdin is not None:
                with contextlib.suppress(OSError):
                    rank.stdin.close()
        if self._run is not None:
            self._run.close()
            self._run = None
        self._work.cleanup()


def rank_env(machine: Machine, local: int) -> dict[str, str]:
    """What names one rank of this node to torch.distributed, and to NCCL where ranks pose as hosts."""
    rank = machine.nodes.number * machine.n_ranks + local
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(machine.nodes.count * machine.n_ranks),
        "LOCAL_WORLD_SIZE": str(machine.n_ranks),
    }
    return env | ({"NCCL_HOSTID": f"rank-{rank}"} if machine.placement == "hosts" else {})


def free_port() -> int:
    """A port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(command: Sequence[str], env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command),
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=with_parent,
    )
