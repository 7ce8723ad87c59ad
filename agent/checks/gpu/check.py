"""``lab gpu-check``: a sweep, races and contention on the GPUs here, each a command of its own with a deadline.

What a part has written stays, whatever becomes of it, and no part waits for another's success. A second call on the
same machine repeats the races alone: a gain is claimed only if two calls agree.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ....envs.nccl.plugin.build import nccl_env, plugin_path
from ....traces.here import program
from ....traces.outside import write_whole
from ...daemon.launcher import kill_family
from .machine import Machine
from .mps import Mps, with_parent

SCHEMA = 2
#: Seconds that a part has to end after it was told to, beyond its time.
GRACE_S = 10.0
#: A part that would have less than this share of its time is left out.
LEAST_PART = 0.4
#: Channels of a DGX H100 untouched, to which both arms of a capped race are held.
CAP = 24


@dataclass(frozen=True)
class Part:
    """A command, its seconds, and what is added to its environment."""

    name: str
    seconds: float
    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Race:
    """NCCL untouched against at most ``channels``; with ``cap`` both arms have at most so many."""

    channels: int
    layer_mib: float
    cap: int = 0

    @property
    def name(self) -> str:
        """As in ``race-8-64mib-cap24``."""
        return f"race-{self.channels}-{self.layer_mib:g}mib" + (f"-cap{self.cap}" if self.cap else "")


#: What is raced, the likeliest gain first; late parts fall away where time is short.
ON_GPUS = (
    *(Race(n, 64) for n in (8, 16, 32)),
    *(Race(n, 64, CAP) for n in (8, 16)),
    *(Race(n, 256) for n in (8, 16)),
)
EMULATED = (Race(4, 0.25), Race(4, 0.25, CAP))


def parts_of(machine: Machine, folder: Path, only_races: bool = False) -> list[Part]:
    """All parts in their order: 9 minutes on GPUs, under 3 emulated; ``only_races``: 4 minutes on GPUs."""
    seconds = 30.0 if machine.emulated else 35.0
    races = [_race(machine, folder, race, seconds) for race in (EMULATED if machine.emulated else ON_GPUS)]
    if only_races:
        return races
    if machine.emulated:
        return [
            _ranks("kernels", machine, folder, 30),
            _sweep(machine, folder),
            *races,
            _ranks("contention", machine, folder, 30),
        ]
    first = [_ranks("kernels", machine, folder, 40), _sweep(machine, folder), *races[:5]]
    return [*first, _ranks("contention", machine, folder, 80), *races[5:]]


def _ranks(what: str, machine: Machine, folder: Path, seconds: float) -> Part:
    """A part of :mod:`.beside`, which ends by itself before its deadline."""
    words = [*program("dynamiccl.agent.checks.gpu.beside"), what, str(folder), str(seconds - 15)]
    env = nccl_env(plugin_path()) | ({"DYNAMICCL_BYTES_SCALE": "1"} if machine.emulated else {})
    return Part(what, seconds, machine.ranks(words), env)


def _sweep(machine: Machine, folder: Path) -> Part:
    words = [*program(), "sweep", "--out", str(folder / "sweep")]
    if machine.emulated:
        words += ["--bytes", "64KiB:64KiB", "--rounds", "4", "--cluster", machine.emulated.cluster]
        return Part("sweep", 40, machine.ranks(words))
    return Part("sweep", 100, machine.ranks([*words, "--bytes", "64KiB:64MiB"]))


def _race(machine: Machine, folder: Path, race: Race, seconds: float) -> Part:
    """``tune`` with the race's policy on the FSDP2 job; its results are those of any tuned job."""
    shape = {"--layers": 8 if race.layer_mib < 128 else 4, "--tokens": 4096}
    if machine.emulated:
        shape = {"--layers": 4, "--tokens": 32}
    job = [*program("dynamiccl.agent.checks.gpu.job"), "--layer-mib", f"{race.layer_mib:g}"]
    job += [word for name, value in shape.items() for word in (name, str(value))]
    job += ["--seconds", str(seconds - 5)]
    policy = f"dynamiccl.agent.checks.gpu.race:at_most_{race.channels}"
    words = [*program(), "tune", "--policy", policy, "--once", "--budget", "1", "--no-memory", "--force"]
    words += ["--out", str(folder / race.name)]
    if machine.emulated:
        words += ["--cluster", machine.emulated.cluster]
    env = {"NCCL_MAX_CTAS": str(race.cap)} if race.cap else {}
    return Part(race.name, seconds + 20, [*words, "--", *machine.ranks(job)], env)


class Check:
    """One call, in a folder of its own below ``out``. ``say`` hears what goes on."""

    def __init__(self, machine: Machine, out: Path, say: Callable[[str], object]) -> None:
        self.machine, self._say = machine, say
        now = datetime.now(UTC)
        device = re.sub(r"[^a-z0-9.-]+", "-", machine.device.lower())
        name = [
            f"{now:%Y-%m-%dT%H%M%S}",
            device,
            *([f"nccl-{machine.nccl}"] if machine.nccl else []),
            str(os.getpid()),
        ]
        self.folder = out / "_".join(name)
        self.folder.mkdir(parents=True)
        self.run: dict[str, Any] = {"schema": SCHEMA, "began": f"{now:%Y-%m-%dT%H:%M:%SZ}", **machine.facts()}

    def do_all(self, parts: Sequence[Part], seconds: float) -> dict[str, Any]:
        """All parts in their order within ``seconds``; what run.json holds at the end. Raises OSError."""
        last = time.monotonic() + seconds
        self.run |= {"parts": {}, "mps": ""}
        mps = Mps(self.machine.n_ranks) if self.machine.shares_gpus else None
        if mps is not None:
            self.run["mps"] = mps.state
        self._write()
        try:
            for part in parts:
                self._part(part, last, mps.env if mps else {})
        finally:
            if mps is not None:
                mps.stop()
        self.run["ended"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        self._write()
        return self.run

    def _part(self, part: Part, last: float, mps: Mapping[str, str]) -> None:
        began = time.monotonic()
        left = last - began - GRACE_S
        entry: dict[str, Any] = {
            "planned_s": part.seconds,
            "status": "left out",
            "clocks": [self.machine.clocks()],
        }
        if left >= LEAST_PART * part.seconds:
            self._say(f"{part.name}: at most {min(left, part.seconds):.0f} s")
            env = {**os.environ, **self.machine.env(), **mps, **part.env, "PYTHONUNBUFFERED": "1"}
            with (self.folder / f"{part.name}.log").open("wb") as log:
                entry["status"] = _run(part.words, env, log, min(left, part.seconds))
        entry |= {"took_s": round(time.monotonic() - began, 1)}
        entry["clocks"].append(self.machine.clocks())
        self.run["parts"][part.name] = entry
        self._write()
        self._say(f"  {entry['status']} after {entry['took_s']:.0f} s")

    def _write(self) -> None:
        write_whole(self.folder / "run.json", json.dumps(self.run, indent=1) + "\n")


def _run(words: Sequence[str], env: Mapping[str, str], log: Any, seconds: float) -> str:
    """Run a command; at its deadline it is told to end, then killed with all that it started."""
    process = subprocess.Popen(
        list(words),
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=with_parent,
    )
    try:
        status = process.wait(seconds)
        return "done" if status == 0 else f"status {status}"
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S / 2)
        return "stopped by its deadline"
    finally:
        kill_family(process.pid)
        process.wait()


def stop_by_signal() -> None:
    """From now on SIGTERM and SIGHUP end the check as Ctrl-C does: its parts and its MPS end with it."""

    def interrupt(number: int, _frame: Any) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
