"""``lab gpu-check``: one script that asks a machine with GPUs all that only it can tell, in under nine minutes.

Each part has its own deadline and runs in child processes, which are killed at it. Results are appended as they
arrive: killing the check at any moment leaves what was measured. Late parts fall away from the end. Without a
GPU the same script runs on the emulated cluster.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..results.files import SCHEMA, write_json
from ..results.judge import BLOCK
from .machine import Machine
from .mps import Mps
from .session import RANK, PartFailed, Session
from .tune import Tune

#: Seconds of each part in the order in which they run; on GPUs 8:30 in all.
SECONDS = {
    "nccl": {
        "smoke": 40.0,
        "sweep": 95.0,
        "contention": 75.0,
        "noise": 70.0,
        "outside": 30.0,
        "truth": 80.0,
        "joint": 45.0,
        "tune": 55.0,
        "host": 20.0,
    },
    "emulated": {
        "smoke": 20.0,
        "sweep": 15.0,
        "contention": 8.0,
        "noise": 10.0,
        "outside": 15.0,
        "truth": 20.0,
        "joint": 8.0,
        "tune": 60.0,
        "host": 8.0,
    },
}
#: Bytes of the whole buffers that are swept, and those that are measured first: of the model.
SIZES = {"nccl": [2**k for k in (14, 16, 18, 20, 22, 23, 24, 26)], "emulated": [2**16, 2**18, 2**20]}
MODEL_BYTES = {"nccl": 2**23, "emulated": 2**18}
#: Share of the collectives in a step: of the races, and of the A/A steps bound by sockets and by the GPU.
SHARE = 0.4
AA_SHARES = {"collectives": 0.6, "compute": 0.2}
#: Alternating steps of a race, and steps of an A/A series.
STEPS = {"nccl": 450, "emulated": 200}
AA_STEPS = {"nccl": 1200, "emulated": 200}
#: Kind of session -> the first part that needs it.
KINDS = {"tuner": "smoke", "profiler": "outside", "none": "host"}
#: Blocks of steps with and without the silent tuner, in the order a b b a, and the steps of each.
BLOCKS, BLOCK_STEPS = 8, 60
#: Seconds beyond its deadline after which a part's processes are killed, and beyond the plan for all together.
GRACE_S, SPARE_S = 5.0, 30.0
#: A part that would have less than this share of its time is left out.
LEAST_PART = 0.3


@dataclass(frozen=True)
class Plan:
    """What one run does: seconds of each part, sizes and steps. ``program``: what a rank runs."""

    seconds: Mapping[str, float]
    sizes: Sequence[int]
    model_bytes: int
    steps: int
    aa_steps: int
    block_steps: int = BLOCK_STEPS
    grace_s: float = GRACE_S
    program: Sequence[str] = field(default=RANK)

    @classmethod
    def of(cls, backend: str, minutes: float | None = None) -> Plan:
        """The whole script; with ``minutes`` the sweep alone, after the smoke test."""
        seconds = SECONDS[backend]
        if minutes is not None:
            seconds = {"smoke": seconds["smoke"], "sweep": max(60 * minutes - seconds["smoke"], 1.0)}
        return cls(seconds, SIZES[backend], MODEL_BYTES[backend], STEPS[backend], AA_STEPS[backend])


class Check:
    """One run in a folder of its own below ``out``. ``say`` hears what goes on."""

    def __init__(
        self, machine: Machine, out: Path, say: Callable[[str], object], plan: Plan | None = None
    ) -> None:
        self.machine, self.plan = machine, plan or Plan.of(machine.backend)
        self._say = say
        self._sessions: dict[str, Session] = {}
        self._made = 0  # sessions so far
        self._mps: Mps | None = None
        now = datetime.now(UTC)
        self.facts = machine.facts()
        self.run: dict[str, Any] = {"schema": SCHEMA, "began": f"{now:%Y-%m-%dT%H:%M:%SZ}", **self.facts}
        self.folder = out / _name(machine, now)
        self.folder.mkdir(parents=True)

    def say(self, text: str) -> None:
        """Tell it, and leave it in log.txt."""
        self._say(text)
        with contextlib.suppress(OSError), (self.folder / "log.txt").open("a") as log:
            log.write(f"{text}\n")

    def do_all(self) -> dict[str, Any]:
        """All parts in their order; what run.json holds at the end. Raises OSError."""
        began = time.monotonic()
        last = began + sum(self.plan.seconds.values()) + SPARE_S
        self.run |= {"plan": dict(self.plan.seconds), "mps": "", "parts": {}, "ok": False}
        self._write()
        try:
            if self.machine.shares_gpus:
                self._mps = Mps(self.machine.n_ranks)
                self.run["mps"] = self._mps.state
                self.say(f"MPS: {self._mps.state}")
            for name, planned in self.plan.seconds.items():
                self._part(name, planned, last)
        finally:
            self._close()
        told = self.run["parts"]
        self.run["ok"] = all(part["status"] == "done" and part.get("ok", False) for part in told.values())
        self.run["ended"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        self.run["took_s"] = round(time.monotonic() - began, 1)
        self._write()
        return self.run

    def _part(self, name: str, planned: float, last: float) -> None:
        """One part by its deadline; its entry in run.json."""
        began = time.monotonic()
        seconds = min(planned, last - began)
        entry: dict[str, Any] = {"planned_s": planned, "took_s": 0.0, "status": "left out"}
        smoke = self.run["parts"].get("smoke")
        if smoke is not None and not smoke.get("ok"):
            entry["why"] = "the smoke test failed"
        elif seconds < LEAST_PART * planned:
            entry["why"] = "no time was left"
        else:
            self.say(f"{name}: at most {seconds:.0f} s")
            entry["clocks"] = [self.machine.clocks()]
            entry |= self._tried(name, began + seconds)
            entry["clocks"].append(self.machine.clocks())
        entry["took_s"] = round(time.monotonic() - began, 1)
        self.run["parts"][name] = entry
        self._write()
        self.say(f"  {entry['status']} after {entry['took_s']:.0f} s {entry.get('why', '')}".rstrip())

    def _tried(self, name: str, ends: float) -> dict[str, Any]:
        part: Callable[[float], dict[str, Any]] = getattr(self, f"_{name}")
        try:
            return {"status": "done", **part(ends)}
        except PartFailed as error:
            return {"status": "stopped" if "deadline" in str(error) else "failed", "why": str(error)}
        except (OSError, ValueError, RuntimeError) as error:
            return {"status": "failed", "why": f"{type(error).__name__}: {error}"}

    # -- the parts ---------------------------------------------------------------------------------------------------

    def _smoke(self, ends: float) -> dict[str, Any]:
        """Start all ranks that the plan needs, together, and see whether the plugin is loaded."""
        kinds = [kind for kind, part in KINDS.items() if part in self.plan.seconds]
        for kind in kinds:
            self._session(kind)
        answers = {kind: self._do(kind, "smoke", ends) for kind in kinds}
        told = answers["tuner"]
        told["our_variables"] = {kind: answer["our_variables"] for kind, answer in answers.items()}
        if not told["ok"]:
            told["why"] = "the plugin is not loaded and obeyed on every rank: `dynamiccl doctor` names causes"
        return told

    def _sweep(self, ends: float) -> dict[str, Any]:
        return self._do("tuner", "sweep", ends, sizes=list(self.plan.sizes), first=[self.plan.model_bytes])

    def _contention(self, ends: float) -> dict[str, Any]:
        return self._do("tuner", "contention", ends)

    def _noise(self, ends: float) -> dict[str, Any]:
        told: dict[str, Any] = {"ok": True, "series": {}}
        for left, (bound, share) in zip((2, 1), AA_SHARES.items(), strict=True):
            now = time.monotonic()
            options = {
                "race": f"bound by {bound}",
                "arm": "default",
                "share": share,
                "steps": self.plan.aa_steps,
            }
            one = self._do("tuner", "noise", now + (ends - now) / left, **options)
            told["series"][bound] = one
            told["ok"] = told["ok"] and one["ok"]
        return told

    def _outside(self, ends: float) -> dict[str, Any]:
        """Arm (a), the silent tuner, against arm (b), a process without our tuner: blocks of steps in turn."""
        told: dict[str, Any] = {"answers": []}
        pieces = 0
        for block in range(BLOCKS):
            kind = "tuner" if block % 4 in (0, 3) else "profiler"
            now = time.monotonic()
            options = {"race": "outside", "arm": kind, "share": SHARE, "steps": self.plan.block_steps}
            options |= {"pieces": pieces, "begin": block * BLOCK}
            one = self._do(kind, "noise", now + (ends - now) / (BLOCKS - block), **options)
            pieces = one["pieces"]
            told["answers"].append({"arm": kind, **one})
        told["ok"] = all(one["ok"] for one in told["answers"])
        return told

    def _truth(self, ends: float) -> dict[str, Any]:
        return self._do("tuner", "truth", ends, share=SHARE, steps=self.plan.steps)

    def _joint(self, ends: float) -> dict[str, Any]:
        return self._do("tuner", "joint", ends)

    def _tune(self, ends: float) -> dict[str, Any]:
        if self.machine.nodes.count > 1:
            return {"ok": True, "why": "on one node only"}
        pieces = self.run["parts"].get("truth", {}).get("pieces", 0)
        env = {**os.environ, **(self._mps.env if self._mps else {})}
        return Tune(self.machine, self.folder, env, SHARE, pieces).run(ends)

    def _host(self, ends: float) -> dict[str, Any]:
        """What a call costs with the plugin and without, in turn."""
        ns: dict[str, list[int]] = {"none": [], "tuner": []}
        for left, kind in ((4, "none"), (3, "tuner"), (2, "tuner"), (1, "none")):
            now = time.monotonic()
            ns[kind] += self._do(kind, "host", now + (ends - now) / left)["ns"]
        return {"ok": all(ns.values()), "ns": ns}

    # -- sessions ----------------------------------------------------------------------------------------------------

    def _do(self, kind: str, part: str, ends: float, **options: Any) -> dict[str, Any]:
        """Have the ranks of a session do a part."""
        return self._session(kind).do(part, ends, self.plan.grace_s, **options)

    def _session(self, kind: str) -> Session:
        """The ranks of this kind; they are started where they do not run."""
        session = self._sessions.get(kind)
        if session is None or not session.is_alive:
            self._end(kind)
            self._made += 1
            port = self.machine.nodes.port and self.machine.nodes.port + self._made
            extra = self._mps.env if self._mps else {}
            program = self.plan.program
            session = Session(kind, self.machine, self.folder, port, extra, program)
            self._sessions[kind] = session
        return session

    def _end(self, kind: str) -> None:
        session = self._sessions.pop(kind, None)
        if session is not None:
            session.close()

    def _close(self) -> None:
        for kind in list(self._sessions):
            self._end(kind)
        if self._mps is not None:
            self._mps.stop()

    def _write(self) -> None:
        write_json(self.folder / "run.json", self.run)


def _name(machine: Machine, now: datetime) -> str:
    """Name of a folder: date, time, device, versions, and a hash that no other run has."""
    words = [f"{now:%Y-%m-%dT%H%M%S}", *machine.device.lower().split()]
    words += [f"{name}-{machine.versions[name]}" for name in ("nccl", "torch") if name in machine.versions]
    words = [re.sub(r"[^A-Za-z0-9.-]", "-", word) for word in words]
    unique = hashlib.sha256(f"{now.timestamp()} {os.getpid()} {machine}".encode()).hexdigest()[:8]
    node = [f"node{machine.nodes.number}"] if machine.nodes.number else []
    return "_".join([*words, unique, *node])


def stop_by_signal() -> None:
    """From now on SIGTERM and SIGHUP end the check as Ctrl-C does: its ranks and its MPS end with it."""

    def interrupt(number: int, _frame: Any) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
