"""What a machine with GPUs is asked: is the plugin loaded and obeyed, what does it cost, what does each config take,
and does tuning shorten a ZeRO-3 step? Without a GPU the same parts run on the emulated backend.

Each part is a set of processes under a time limit of its own: one that hangs or fails costs its own result only.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from ..envs.nccl.nvml import driver, gpus
from ..envs.nccl.ranks import placements
from ..envs.nccl.shm import RunFolder
from ..envs.nccl.sweep import rows_of
from ..envs.sim.emulated import Emulated
from .overhead import measure
from .request import workload

PARTS = ("sweep", "overhead", "zero3")
#: Share of the budget that each part may take; the rest is for starting and ending processes.
SHARES = {"sweep": 0.4, "overhead": 0.25, "zero3": 0.3}
#: Of the tuned job: without end, it is ended after its verdict.
STEPS = 1_000_000
RAN = ("ran_algo", "ran_proto", "ran_channels")
CSV_COLUMNS = (
    *("placement", "func", "n_bytes", "decision", "channels_asked", *RAN),
    *("kernel_us", "wall_us", "same_bits", "obeyed", "ranks_agree", "n_events"),
)


@dataclass(frozen=True)
class Extent:
    """How much of everything."""

    sizes: tuple[int, ...]  # bytes of the whole buffer
    channels: tuple[int, ...]
    reps: int
    pairs: int  # of jobs with and without the plugin
    overhead_steps: int
    steps_after: int  # of the tuned job, after its verdict
    windows: int
    verify: int
    model: tuple[str, ...]  # the workload's options


REAL = Extent(
    tuple(2**k for k in range(16, 29, 2)), (0, 1, 2, 4, 8, 16, 24, 32), 10, 5, 60, 200, 14, 8,
    ("--layers", "8", "--width", "1024", "--heads", "16", "--seq", "512", "--log-every", "1"),
)  # fmt: skip
DRY = Extent(
    (2**16, 2**19, 2**22), (0, 1, 4, 16), 3, 3, 30, 100, 8, 6,
    ("--layers", "2", "--width", "64", "--heads", "4", "--seq", "32", "--batch", "1", "--log-every", "1"),
)  # fmt: skip
#: For a test of the script itself.
SMALL = Extent((2**16,), (0, 4), 2, 3, 10, 20, 2, 6, DRY.model)


@dataclass(frozen=True)
class Machine:
    """Where the check runs. ``emulated`` holds the cluster in dry mode."""

    device: str
    n_gpus: int
    n_ranks: int
    placements: tuple[str, ...]
    versions: dict[str, str]
    mps: bool  # NVIDIA's multi-process service is there: ranks on one GPU run at the same time
    emulated: Emulated | None = None

    @property
    def backend(self) -> str:
        """Of torch.distributed."""
        return "emulated" if self.emulated else "nccl"

    @classmethod
    def here(cls, ranks: int | None = None, dry: bool = False) -> Machine:
        """This machine: its GPUs, or the emulated cluster where it has none (or ``dry``). Raises ValueError."""
        versions = {name: found for name in ("dynamiccl", "torch") if (found := _version(name))}
        versions |= {"python": platform.python_version()}
        names = gpus()
        if dry or not names:
            emulated = Emulated("dgx-h100-2x8", bytes_scale=1500.0, compute_scale=1000.0)
            return cls(f"emulated {emulated.cluster}", 0, ranks or 2, ("apart",), versions, False, emulated)
        import torch

        if not torch.distributed.is_nccl_available():
            raise ValueError(
                f"{len(names)} GPUs, but this PyTorch ({torch.__version__}) has no NCCL: install its CUDA build"
            )
        nccl = torch.cuda.nccl.version()
        versions |= {"nccl": ".".join(map(str, nccl)), "driver": driver(), "cuda": str(torch.version.cuda)}
        if ranks is not None and len(names) > 1 and ranks > len(names):
            raise ValueError(f"{ranks} ranks on {len(names)} GPUs: with several GPUs each rank has one of its own")
        pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")
        n_ranks = ranks or (len(names) if len(names) > 1 else 2)
        return cls(names[0], len(names), n_ranks, placements(len(names), nccl), versions, pipe.exists())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class Check:
    """One run of all parts. ``say`` hears what goes on."""

    def __init__(
        self, machine: Machine, extent: Extent, out: Path, budget_s: float, say: Callable[[str], object]
    ) -> None:
        self.machine, self.extent, self.budget_s, self.say = machine, extent, budget_s, say
        mark = "_".join(machine.device.lower().replace("/", "-").split())
        versions = [f"{name}-{machine.versions[name]}" for name in ("nccl", "torch") if name in machine.versions]
        self.folder = out / "_".join([date.today().isoformat(), mark, *versions])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []

    def run(self, parts: Sequence[str] = PARTS) -> dict[str, Any]:
        """Run the parts; the result, which also lies in ``check.json`` beside ``sweep.csv``."""
        started = time.monotonic()
        found: dict[str, Any] = {}
        for part in PARTS:
            if part in parts:
                self.say(part)
                begin = time.monotonic()
                found[part] = self._guarded(getattr(self, f"_{part}"), SHARES[part] * self.budget_s)
                found[part]["seconds"] = round(time.monotonic() - begin, 1)
        result = {
            "date": date.today().isoformat(),
            "emulated": self.machine.emulated is not None,
            "label": "emulated: no figure here is a GPU's" if self.machine.emulated else "measured",
            **{name: value for name, value in asdict(self.machine).items() if name != "emulated"},
            "cluster": asdict(self.machine.emulated) if self.machine.emulated else None,
            "parts": found,
            "ok": all(part["ok"] for part in found.values()),
            "seconds": round(time.monotonic() - started, 1),
        }
        (self.folder / "check.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    def _guarded(self, part: Callable[[float], dict[str, Any]], budget_s: float) -> dict[str, Any]:
        """A part that fails is a finding and does not end the others."""
        try:
            return part(budget_s)
        except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
            self.say(f"  failed: {error}")
            return {"ok": False, "error": str(error)}

    # -- load check, obedience, and the time of every config ----------------------------------------------------

    def _sweep(self, budget_s: float) -> dict[str, Any]:
        ways = self.machine.placements
        found = {way: self._sweep_one(way, budget_s / len(ways)) for way in ways}
        with open(self.folder / "sweep.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)
        return {"ok": all(way["ok"] for way in found.values()), "placements": found}

    def _sweep_one(self, placement: str, budget_s: float) -> dict[str, Any]:
        """One placement; what a sweep that was cut off has found counts, and that it was cut off is said."""
        extent, path = self.extent, self.folder / f"sweep-{placement}.jsonl"
        path.unlink(missing_ok=True)
        words = ["-m", "dynamiccl.envs.nccl.sweep", "--backend", self.machine.backend, "--out", str(path)]
        words += ["--sizes", *map(str, extent.sizes), "--channels", *map(str, extent.channels)]
        words += ["--reps", str(extent.reps), "--budget", str(0.7 * budget_s)]
        ended = self._job(self._ranks([sys.executable, *words], placement), budget_s, path, bytes_scale=1.0)
        head, *rows = list(rows_of(path)) or [{}]
        for row in rows:
            row |= {"placement": placement, **dict(zip(RAN, row["ran"], strict=True))}
        self.rows += rows
        loaded = bool(head.get("loaded")) and all(all(rank.values()) for rank in head["loaded"])
        forced = [row for row in rows if row["decision"] != "auto"]
        planned = len(extent.sizes) * 2
        wrong = {name: sum(not row[name] for row in rows) for name in ("obeyed", "ranks_agree", "same_bits")}
        summary = {
            "ok": loaded and bool(forced) and not any(wrong.values()) and ended == "",
            "ended": ended or "to the end",
            "loaded": loaded,
            "loaded_by_rank": head.get("loaded"),
            "nccl": head.get("nccl"),
            "configs": len(forced),
            "configs_offered": sum(row["n_configs"] for row in rows if "offered" in row),
            "cells": sum("offered" in row for row in rows),
            "cells_planned": planned,
            "events": sum(row["n_events"] for row in rows),
            "not_obeyed": wrong["obeyed"],
            "ranks_differ": wrong["ranks_agree"],
            "bits_differ": wrong["same_bits"],
            "best": _best(rows),
        }
        self.say(
            f"  {placement}: plugin {'loaded' if loaded else 'NOT LOADED'}, {summary['configs']} of "
            f"{summary['configs_offered']} configs, {wrong['obeyed']} not obeyed, {wrong['same_bits']} with "
            f"other bits, {wrong['ranks_agree']} where ranks differ" + (f"; {ended}" if ended else "")
        )
        return summary

    # -- cost of the plugin, and what tuning brings ---------------------------------------------------------------

    def _overhead(self, budget_s: float) -> dict[str, Any]:
        emulated = self.machine.emulated
        result = measure(
            self.extent.pairs,
            lambda log: self._workload(self.extent.overhead_steps, log),
            emulated.env() if emulated else {},
            lambda text: self.say(f"  {text}"),
            budget_s=budget_s,
        )
        percent = [100 * (x - 1) for x in (result.speedup, result.low, result.high)]
        if not np.isfinite(percent).all():
            raise RuntimeError(
                f"overhead: {result.n_pairs} pairs of jobs gave no figure with an interval: more steps or more pairs"
            )
        self.say(f"  overhead {percent[0]:+.2f} % [{percent[1]:+.2f}, {percent[2]:+.2f}]")
        return {"ok": True, "overhead_percent": percent[0], "ci95": percent[1:], "pairs": result.n_pairs}

    def _zero3(self, budget_s: float) -> dict[str, Any]:
        """``dynamiccl tune`` on our ZeRO-3 job, its comparisons and the A/A beside them."""
        extent, out, emulated = self.extent, self.folder / "zero3", self.machine.emulated
        shutil.rmtree(out, ignore_errors=True)  # nothing of an earlier run may pass for this one's
        out.mkdir()
        words = [sys.executable, "-m", "dynamiccl.agent.cli", "tune", "--out", str(out), "--window-steps", "3"]
        words += ["--windows", str(extent.windows), "--verify", str(extent.verify), "--json", str(out / "summary.json")]
        if emulated:
            scales = ["--bytes-scale", str(emulated.bytes_scale), "--compute-scale", str(emulated.compute_scale)]
            words += ["--cluster", emulated.cluster, *scales]
        log = out / "job.jsonl"
        command = [*words, "--", *self._workload(STEPS, log)]
        seen: list[int] = []  # steps of the job when the verdict was there

        def over() -> bool:
            if not seen and _summary(out).get("steps_to_verdict") is not None:
                seen.append(_lines(log))
            return bool(seen) and _lines(log) >= seen[0] + extent.steps_after

        ended = self._job(command, budget_s, log, over)
        summary = _summary(out)
        names = ("speedup", "speedup_ci95", "aa_speedup_ci95", "default_step_ms", "tuned_step_ms", "kept", "decisions")
        found: dict[str, Any] = {name: summary.get(name) for name in (*names, "consistency", "records_lost", "ended")}
        # Cut off after the verdict is as good as not cut off.
        ok = found["speedup"] is not None and found["consistency"]["mismatches"] == 0
        if ok:
            (low, high), same = found["speedup_ci95"], found["aa_speedup_ci95"]
            self.say(f"  ZeRO-3 default {found['default_step_ms']:.1f} ms, speed-up {found['speedup']:.3f} [{low:.3f}, "
                     f"{high:.3f}], default against itself [{same[0]:.3f}, {same[1]:.3f}]")  # fmt: skip
        else:
            self.say(f"  ZeRO-3: no result ({ended or found['ended']}); see {out}")
        return {"ok": ok, **found, "cut_off": ended or None}

    # -- processes --------------------------------------------------------------------------------------------------

    def _workload(self, steps: int, log: Path) -> list[str]:
        command = workload(3, steps, self.machine.n_ranks, log, backend=self.machine.backend, extra=self.extent.model)
        return self._ranks([*command, "--quiet"], self.machine.placements[0])

    def _ranks(self, command: list[str], placement: str) -> list[str]:
        """``command`` once a rank."""
        ranks = ["--ranks", str(self.machine.n_ranks), "--placement", placement]
        return [sys.executable, "-m", "dynamiccl.envs.nccl.ranks", *ranks, "--", *command]

    def _job(
        self,
        command: list[str],
        limit_s: float,
        grows: Path,
        over: Callable[[], bool] = lambda: False,
        bytes_scale: float | None = None,
    ) -> str:
        """Run a job of this part until it ends or is ``over``; '' if that was well and in time, else what happened.

        Progress is ``grows``'s lines.
        """
        emulated = self.machine.emulated
        env = dict(os.environ)
        run = RunFolder.create() if "dynamiccl.agent.cli" not in command else None  # `tune` makes its own
        if run:
            env |= run.env()
            env |= (emulated.env() if emulated else {}) | ({"DYNAMICCL_BYTES_SCALE": "1"} if bytes_scale else {})
        with open(self.folder / "jobs.log", "ab") as log:
            job = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        end, told = time.monotonic() + limit_s, time.monotonic()
        try:
            while job.poll() is None and time.monotonic() < end and not over():
                time.sleep(0.1)
                if time.monotonic() - told > 10:
                    told = time.monotonic()
                    self.say(f"  {_lines(grows)} done, {end - told:.0f} s left for this part")
            if job.poll() is None:
                job.send_signal(signal.SIGINT)  # `tune` then sums up what it saw; ranks are ended by their launcher
                try:
                    job.wait(60)
                except subprocess.TimeoutExpired:
                    os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
                return "" if over() else f"cut off after {limit_s:.0f} s"
        finally:
            if run:
                run.close()
        return f"ended with status {job.returncode}, see {self.folder / 'jobs.log'}" if job.returncode else ""


def _summary(out: Path) -> dict[str, Any]:
    """What `tune` has written so far."""
    path = out / "summary.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each collective and size: the fastest config, and how far two measurements of the default differ."""
    found = []
    for func, n_bytes in sorted({(row["func"], row["n_bytes"]) for row in rows}):
        mine = [row for row in rows if (row["func"], row["n_bytes"]) == (func, n_bytes)]
        timed = "kernel_us" if all(row["kernel_us"] is not None for row in mine) else "wall_us"
        default = [row[timed] for row in mine if row["decision"] == "auto"]
        fastest = min(mine, key=lambda row: row[timed])
        found.append(
            {
                "func": func,
                "n_bytes": n_bytes,
                "timed": timed,
                "default_us": float(np.mean(default)),
                "default_again_ratio": default[-1] / default[0] if len(default) > 1 else None,
                "fastest": fastest["decision"],
                "fastest_us": fastest[timed],
            }
        )
    return found
