"""What a machine with GPUs is asked: is the plugin loaded and obeyed, are results right, what does each config take,
and does tuning shorten a ZeRO-3 step? Without a GPU the same runs on the emulated cluster.

NCCL refuses two ranks on one GPU unless it is told otherwise, in one of two ways:

* ``shared``: NCCL_MULTI_RANK_GPU_ENABLE, NCCL 2.30.3 and newer; the ranks talk through the GPU's memory.
* ``hosts``: each rank claims to be a host of its own (NCCL_HOSTID), and the ranks talk through sockets. Every release.

Ranks that share a GPU take turns on it (without MPS), so their times say little of a cluster. Both placements raise the
number of channels to 16, since NCCL would make one or two and leave nothing to choose.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ...envs.nccl.plugin.build import job_env
from ...envs.nccl.shm import RunFolder
from ...envs.nccl.steps.nvml import driver, gpus
from ...envs.sim.emulated.settings import Emulated
from ..daemon.request import workload
from ..report.summary import RunSummary
from ..report.verdict import verdict

_CHANNELS = {"NCCL_MIN_CTAS": "16", "NCCL_MAX_CTAS": "16"}
#: Environment of a job, by placement of its ranks.
PLACEMENTS: dict[str, dict[str, str]] = {
    "apart": {},  # a GPU each, or no GPU at all
    "hosts": {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", **_CHANNELS},
    "shared": {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC", **_CHANNELS},
}
#: Bytes of the whole buffers that are swept, by backend of torch.distributed.
SIZES = {"nccl": [2**k for k in range(16, 29, 2)], "emulated": [2**16, 2**19, 2**22]}
#: Of the tuned job: some 150 to 400 to the verdict, unless its time is over before.
STEPS = 1000
#: Its options on GPUs; on the emulated cluster it is what `dynamiccl tune` runs.
GPU_MODEL = ("--layers", "8", "--width", "1024", "--heads", "16", "--seq", "512")


def placement(n_gpus: int, nccl: tuple[int, ...]) -> str:
    """The way in which two or more ranks can run here, of several the one nearest to a cluster."""
    if n_gpus != 1:
        return "apart"
    return "shared" if nccl >= (2, 30, 3) else "hosts"


@dataclass(frozen=True)
class Machine:
    """Where jobs of our own run. ``emulated`` is the cluster where there is no GPU, or none is wanted."""

    device: str
    n_ranks: int
    placement: str
    versions: dict[str, str]
    emulated: Emulated | None = None

    @classmethod
    def here(cls, cluster: str | None = None, ranks: int | None = None) -> Machine:
        """This machine: its GPUs, or an emulated cluster where it has none or ``cluster`` names one.

        Raises ValueError, OSError.
        """
        versions = {name: version(name) for name in ("dynamiccl", "torch")} | {"python": platform.python_version()}
        names = gpus()
        if cluster or not names:
            emulated = Emulated(cluster) if cluster else Emulated()
            return cls(f"emulated {emulated.cluster}", ranks or 2, "apart", versions, emulated)
        if not torch.distributed.is_nccl_available():
            raise ValueError(f"{len(names)} GPUs, but this PyTorch ({torch.__version__}) has no NCCL")
        if ranks is not None and ranks > len(names) > 1:
            raise ValueError(f"{ranks} ranks on {len(names)} GPUs: with several GPUs each rank has one of its own")
        nccl = torch.cuda.nccl.version()
        versions |= {"nccl": ".".join(map(str, nccl)), "driver": driver(), "cuda": str(torch.version.cuda)}
        return cls(names[0], ranks or max(len(names), 2), placement(len(names), nccl), versions)

    @property
    def backend(self) -> str:
        """Of torch.distributed."""
        return "emulated" if self.emulated else "nccl"

    def env(self) -> dict[str, str]:
        """What a job has in its environment."""
        emulated = self.emulated.env() if self.emulated else {}
        return {"OMP_NUM_THREADS": "1", **PLACEMENTS[self.placement], **emulated}

    def ranks(self, program: Sequence[str]) -> list[str]:
        """The command that runs ``program`` once a rank."""
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        words += ["--nproc-per-node", str(self.n_ranks), "--no-python", "--"]
        words += ["sh", "-c", 'NCCL_HOSTID=rank-$RANK exec "$0" "$@"'] if self.placement == "hosts" else []
        return [*words, *program]

    def zero3(self, steps: int, log: Path, emulated_model: Sequence[str] = ()) -> list[str]:
        """The command of our ZeRO-3 job, each of whose steps is a line of ``log``."""
        extra = [*(emulated_model if self.emulated else GPU_MODEL), "--log-every", "1", "--quiet"]
        return self.ranks(workload(3, steps, self.n_ranks, log, backend=self.backend, extra=extra))


class Check:
    """One run of both parts, in a folder of its own below ``out``. ``say`` hears what goes on."""

    def __init__(self, machine: Machine, out: Path, say: Callable[[str], object]) -> None:
        self.machine, self.say = machine, say
        versions = [f"{name}-{machine.versions[name]}" for name in ("nccl", "torch") if name in machine.versions]
        words = [date.today().isoformat(), *machine.device.lower().replace("/", "-").split(), *versions]
        self.folder = out / "_".join(words)
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self, budget_s: float) -> dict[str, Any]:
        """Both parts; the result, which also lies in ``check.json``. One that fails does not end the other."""
        found: dict[str, Any] = {}
        for name, part in (("sweep", self._sweep), ("zero3", self._zero3)):
            self.say(f"{name} with ranks {self.machine.placement}, at most {budget_s / 2:.0f} s")
            try:
                found[name] = part(budget_s / 2)
            except (OSError, ValueError, RuntimeError) as error:
                self.say(f"  failed: {error}")
                found[name] = {"ok": False, "error": str(error)}
        result = {
            "date": date.today().isoformat(),
            "label": "emulated: no figure here is a GPU's" if self.machine.emulated else "measured",
            **asdict(self.machine),
            "parts": found,
            "ok": all(part["ok"] for part in found.values()),
        }
        (self.folder / "check.json").write_text(json.dumps(result, indent=1) + "\n")
        return result

    def _sweep(self, limit_s: float) -> dict[str, Any]:
        """What a sweep that was cut off has found counts, and that it was cut off is said."""
        path, backend = self.folder / "sweep.jsonl", self.machine.backend
        path.unlink(missing_ok=True)
        told = {"backend": backend, "out": str(path), "sizes": SIZES[backend], "budget_s": 0.7 * limit_s}
        rank = [sys.executable, "-m", "dynamiccl.agent.checks.gpu_sweep", json.dumps(told)]
        env = self.machine.env() | ({"DYNAMICCL_BYTES_SCALE": "1"} if self.machine.emulated else {})
        with contextlib.closing(RunFolder.create()) as run:
            ended = self._job(self.machine.ranks(rank), env | job_env(run.path), limit_s)
        lines = path.read_text().splitlines() if path.exists() else []
        head, *rows = map(json.loads, lines or ['{"loaded": false}'])
        counts = {"configs": sum(row["decision"] != "auto" for row in rows)}
        for name, wrong in (("obeyed", "not obeyed"), ("ranks_agree", "ranks differ"), ("right", "wrong results")):
            counts[wrong] = sum(not row[name] for row in rows)
        said = ", ".join(f"{what}: {n}" for what, n in counts.items())
        self.say(f"  plugin {'loaded' if head['loaded'] else 'NOT LOADED'}, {said}; {ended or 'done'}")
        ok = head["loaded"] and not ended and counts["configs"] > 0 and sum(counts.values()) == counts["configs"]
        return {**head, **counts, "ok": ok, "ended": ended, "best": best(rows)}

    def _zero3(self, limit_s: float) -> dict[str, Any]:
        """``dynamiccl tune`` on our ZeRO-3 job: default against tuned, and default against itself."""
        out, emulated = self.folder / "zero3", self.machine.emulated
        shutil.rmtree(out, ignore_errors=True)  # nothing of an earlier run may pass for this one's
        # Forced: what the doctor would refuse is what is to be measured here.
        tune = [sys.executable, "-m", "dynamiccl.agent.cli", "tune", "--out", str(out), "--no-memory", "--force"]
        tune += ["--cluster", emulated.cluster] if emulated else []
        job = self.machine.zero3(STEPS, out / "job.jsonl")
        ended = self._job([*tune, "--", *job], self.machine.env(), limit_s)
        summary = RunSummary.read(out)
        if not summary.is_decided:
            raise RuntimeError(f"no verdict ({ended or summary.ended}); see {out}")
        self.say(f"  {verdict(summary)}")
        # Cut off after the verdict is as good as not cut off.
        return {"ok": summary.consistency["mismatches"] == 0, "cut_off": ended, "summary": vars(summary)}

    def _job(self, command: Sequence[str], env: Mapping[str, str], limit_s: float) -> str:
        """Run a job until it ends or its time is over; '' if that was well and in time, else what happened."""
        # At SIGINT `tune` sums up what it saw, and torchrun ends its ranks.
        limit = ["timeout", "--foreground", "--signal", "INT", "--kill-after", "60", str(limit_s)]
        with open(self.folder / "jobs.log", "ab") as log:
            done = subprocess.run([*limit, *command], env={**os.environ, **env}, stdout=log, stderr=log, check=False)
        if done.returncode in (124, 137):
            return f"cut off after {limit_s:.0f} s"
        return f"ended with status {done.returncode}, see {self.folder / 'jobs.log'}" if done.returncode else ""


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each collective and size: both measurements of NCCL's own way, and the fastest config."""
    frame = pd.DataFrame(rows, columns=["func", "n_bytes", "decision", "kernel_us", "wall_us"])
    timed = "kernel_us" if frame["kernel_us"].notna().all() else "wall_us"
    found = []
    for _, cell in frame.groupby(["func", "n_bytes"]):
        default = cell.loc[cell["decision"] == "auto", timed]
        fastest = cell.sort_values(timed).iloc[0]
        row = {"func": fastest["func"], "n_bytes": int(fastest["n_bytes"]), "timed": timed}
        row |= {"default_us": float(default.iloc[0]), "again_us": float(default.iloc[1]) if len(default) > 1 else None}
        found.append({**row, "fastest_us": float(fastest[timed]), "fastest": fastest["decision"]})
    return found
