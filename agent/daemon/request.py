"""What a run of ``dynamiccl tune`` was asked for: left in its folder, so that every tuner of the run goes on alike.

Imports nothing large: the launcher writes it before the job starts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...envs.sim.emulated.settings import Emulated
from ...traces.outside import read_json
from ..policies.choosing import DEFAULT

#: Its file in the run folder.
REQUEST = "request.json"


@dataclass(frozen=True)
class Request:
    """One run of ``dynamiccl tune``. Fields with the name of an option are said anew by whoever joins."""

    windows: int | None = None  # exploring windows of a search, at most; None: as the policy has it
    window_steps: int | None = None  # None: as the noise of the job asks for
    budget: float = 0.05  # share of the job's time that the search may lose against the default
    search_slots: str | None = None  # N:FOLDER, see ``search_slots``
    out: Path | None = None  # None: a new folder, see ``outputs.claim``
    emulated: Emulated | None = None
    policy: str = DEFAULT
    seed: int = 0
    once: bool = False  # leave the job alone after the verdict
    quiet: bool = False  # say nothing but the verdict
    bitwise: bool = False  # only what keeps the order of sums
    facts: dict[str, Any] = field(default_factory=dict)  # of the job, for the summary: stage, n_processes
    job: str = ""  # its command
    typed: str = ""  # the command line by which the run was started; "": it was joined
    job_log: Path | None = None  # JSON lines with the loss of each step, where the job writes them
    json: bool = False  # print the summary to stdout, and no text
    memory: str | None = None  # where what was learned of clusters is kept; None: nowhere
    launched: bool = False  # the job prints on the same terminal
    log_to: str | None = None  # a logger's name, see ``integrations.loggers``

    @classmethod
    def among(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Of a command's options those that are fields."""
        return {f.name: options[f.name] for f in fields(cls) if f.name in options}

    def write(self, run: Path) -> None:
        """Leave the request in the run folder. Raises OSError."""
        (run / REQUEST).write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def read(cls, run: Path, options: Mapping[str, Any]) -> Request:
        """What was left in the run folder, if anything, with what the command line says besides (names of options).

        Raises ValueError when the file is damaged.
        """
        try:
            left = read_json(run / REQUEST)
        except FileNotFoundError:
            left = {}
        except ValueError as error:
            raise _damaged(run, error) from None
        try:
            left |= cls.among(options)
            left["emulated"] = Emulated(**left["emulated"]) if left.get("emulated") else None
            for name in ("out", "job_log"):
                left[name] = Path(left[name]) if left.get(name) is not None else None
            return cls(**left)
        except (TypeError, ValueError) as error:
            raise _damaged(run, error) from None


def _damaged(run: Path, error: Exception) -> ValueError:
    return ValueError(f"{run / REQUEST} is damaged ({error}): remove it, and say again what is wanted")


#: Steps between two held-out losses of our own job, at least: each takes as long as some steps.
LEAST_APART = 50


def workload(
    stage: int, steps: int, ranks: int, log: Path, *, backend: str, seed: int = 0, extra: Sequence[str] = ()
) -> list[str]:
    """The command of our own training job, the one that ``dynamiccl tune`` runs when it is given none.

    On the emulated cluster the model is small, so that its steps are soon done: the scales make up for it.
    """
    command = [sys.executable, "-m", "dynamiccl.zero_workload", "--stage", str(stage), "--steps", str(steps)]
    command += ["--ranks", str(ranks), "--backend", backend, "--seed", str(seed), "--log", str(log)]
    command += ["--held-out-every", str(max(steps // 10, LEAST_APART))]
    if backend == "emulated":
        command += ["--layers", "2", "--width", "96", "--heads", "3", "--seq", "32", "--batch", "1"]
    return command + (["--device", "cuda", "--dtype", "bf16"] if backend == "nccl" else []) + list(extra)
