"""What a run of ``dynamiccl tune`` was asked for: left in its folder, so that every tuner of the run goes on alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..envs.sim.emulated import Emulated
from .choosing import DEFAULT
from .tuner import Settings

#: Its file in the run folder.
REQUEST = "request.json"
# What of the settings can be said anew by whoever joins.
_SETTINGS = ("windows", "verify", "window_steps", "budget")
_AFRESH = ("policy", "seed", "bitwise", "out", "json", "memory", "log_level", "tensorboard")


@dataclass(frozen=True)
class Request:
    """One run of ``dynamiccl tune``."""

    out: Path | None = None  # None: a new folder, see ``outputs.claim``
    emulated: Emulated | None = None
    policy: str = DEFAULT
    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    bitwise: bool = False  # only what keeps the order of sums
    facts: dict[str, Any] = field(default_factory=dict)  # of the job, for the summary: stage, n_processes
    job: str = ""  # its command
    job_log: Path | None = None  # JSON lines with the loss of each step, where the job writes them
    json: str | None = None  # where the summary is also wanted, - is stdout
    memory: str | None = None  # where what was learned of clusters is kept; None: nowhere
    launched: bool = False  # the job prints on the same terminal
    metrics_port: int | None = None  # answer scrapes there, 0: on any free port
    metrics_address: str = "127.0.0.1"
    log_level: str = "info"  # of OUT/tuner.log
    tensorboard: str | None = None  # folder for scalars
    environment: dict[str, str] = field(default_factory=dict)  # the launch's settings
    evidence: list[list[Any]] = field(default_factory=list)  # of a recording: (slot's fields, evidence's) a slot

    def write(self, run: Path) -> None:
        """Leave the request in the run folder. Raises OSError."""
        (run / REQUEST).write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def read(cls, run: Path, options: Mapping[str, Any]) -> Request:
        """What was left in the run folder, if anything, with what the command line says besides (names of options).

        Raises ValueError when the file is damaged.
        """
        try:
            left = json.loads((run / REQUEST).read_text())
        except FileNotFoundError:
            left = {}
        try:
            left["settings"] = {**left.get("settings", {}), **{k: v for k, v in options.items() if k in _SETTINGS}}
            left |= {k: v for k, v in options.items() if k in _AFRESH}
            left["settings"] = Settings(**left["settings"])
            left["emulated"] = Emulated(**left["emulated"]) if left.get("emulated") else None
            for name in ("out", "job_log"):
                left[name] = Path(left[name]) if left.get(name) is not None else None
            for name in ("json", "tensorboard"):
                left[name] = str(left[name]) if left.get(name) is not None else None
            return cls(**left)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{run / REQUEST} is damaged ({error}): remove it, and say again what is wanted") from None
