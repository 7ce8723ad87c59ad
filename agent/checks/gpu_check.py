"""What a machine with GPUs is asked: is the plugin loaded and obeyed, are results right, and does tuning shorten a
ZeRO-3 step? Without a GPU the same runs on the emulated cluster.

NCCL refuses two ranks on one GPU unless it is told otherwise, in one of two ways:

* ``shared``: NCCL_MULTI_RANK_GPU_ENABLE, NCCL 2.30.3 and newer; the ranks talk through the GPU's memory.
* ``hosts``: each rank claims to be a host of its own (NCCL_HOSTID), and the ranks talk through sockets. Every release.

Ranks that share a GPU take turns on it, unless MPS runs (``nvidia-cuda-mps-control -d``): their times say little of a
cluster. Both placements raise the number of channels to 16, as NCCL would make one or two and leave nothing to choose.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...envs.nccl.plugin.bindings import Plugin
from ...envs.nccl.plugin.build import job_env, nccl_release
from ...envs.nccl.rings import Ring
from ...envs.nccl.shm import RunFolder, encode_table
from ...envs.nccl.steps.nvml import driver, gpus
from ...envs.sim.emulated.settings import Emulated
from ...traces import records as rec
from ...traces.records import ALGOS, AUTO, CHANNELS, FUNCS, PROTOS, TUNED_FUNCS, Decision
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
SIZES = {"nccl": [2**k for k in range(16, 29, 4)], "emulated": [2**16, 2**19, 2**22]}
#: Seconds to wait for a record.
PATIENCE_S = 2.0
#: PyTorch 2.13 gave them other names.
_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
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
    def here(cls, cluster: str | None = None) -> Machine:
        """Its GPUs, or an emulated cluster: ``cluster``, or where it has no GPU. Raises ValueError, OSError."""
        versions = {name: version(name) for name in ("dynamiccl", "torch")} | {
            "python": platform.python_version()
        }
        names = gpus()
        if cluster or not names:
            emulated = Emulated(cluster) if cluster else Emulated()
            return cls(f"emulated {emulated.cluster}", 2, "apart", versions, emulated)
        if not torch.distributed.is_nccl_available():
            raise ValueError(f"{len(names)} GPUs, but this PyTorch ({torch.__version__}) has no NCCL")
        nccl = nccl_release() or torch.cuda.nccl.version()  # PyTorch names what it was built with
        versions |= {"nccl": ".".join(map(str, nccl)), "driver": driver(), "cuda": str(torch.version.cuda)}
        mps = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()
        device = names[0] + " under MPS" * mps
        return cls(device, max(len(names), 2), placement(len(names), nccl), versions)

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

    def zero3(self, steps: int, log: Path) -> list[str]:
        """The command of our ZeRO-3 job, each of whose steps is a line of ``log``."""
        extra = [*(() if self.emulated else GPU_MODEL), "--log-every", "1", "--quiet"]
        return self.ranks(workload(3, steps, self.n_ranks, log, backend=self.backend, extra=extra))


class Check:
    """One run of both parts, in a folder of its own below ``out``. ``say`` hears what goes on."""

    def __init__(self, machine: Machine, out: Path, say: Callable[[str], object]) -> None:
        self.machine, self.say = machine, say
        versions = [
            f"{name}-{machine.versions[name]}" for name in ("nccl", "torch") if name in machine.versions
        ]
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
        told = {"backend": backend, "out": str(path), "sizes": SIZES[backend]}
        rank = [sys.executable, "-m", "dynamiccl.agent.checks.gpu_check", json.dumps(told)]
        env = self.machine.env() | ({"DYNAMICCL_BYTES_SCALE": "1"} if self.machine.emulated else {})
        with contextlib.closing(RunFolder.create()) as run:
            ended = self._job(self.machine.ranks(rank), env | job_env(run.path), limit_s)
        lines = path.read_text().splitlines() if path.exists() else []
        head, *rows = map(json.loads, lines or ['{"loaded": false, "kernel_times": false}'])
        counts = {"configs": sum(row["decision"] != "auto" for row in rows)}
        for name, wrong in (
            ("obeyed", "not obeyed"),
            ("ranks_agree", "ranks differ"),
            ("right", "wrong results"),
        ):
            counts[wrong] = sum(not row[name] for row in rows)
        said = "" if head["kernel_times"] else "NO KERNEL TIMES, "
        said += ", ".join(f"{what}: {n}" for what, n in counts.items())
        self.say(f"  plugin {'loaded' if head['loaded'] else 'NOT LOADED'}, {said}; {ended or 'done'}")
        ok = (
            head["loaded"]
            and head["kernel_times"]
            and not ended
            and counts["configs"] > 0
            and sum(counts.values()) == counts["configs"]
        )
        return {**head, **counts, "ok": ok, "ended": ended}

    def _zero3(self, limit_s: float) -> dict[str, Any]:
        """``dynamiccl tune`` on our ZeRO-3 job: default against tuned, and default against itself."""
        out, emulated = self.folder / "zero3", self.machine.emulated
        shutil.rmtree(out, ignore_errors=True)  # nothing of an earlier run may pass for this one's
        # Forced: what the doctor would refuse is what is to be measured here.
        tune = [
            sys.executable,
            "-m",
            "dynamiccl.agent.cli",
            "tune",
            "--out",
            str(out),
            "--no-memory",
            "--force",
        ]
        tune += ["--cluster", emulated.cluster] if emulated else []
        job = self.machine.zero3(STEPS, out / "job.jsonl")
        ended = self._job([*tune, "--", *job], self.machine.env(), limit_s)
        summary = RunSummary.read(out)
        if not summary.comparisons and not summary.is_decided:
            raise RuntimeError(f"nothing compared ({ended or summary.ended}); see {out}")
        self.say(f"  {verdict(summary)}")
        # Where steps differ much among themselves 1000 may be too few for a verdict, and that is what they tell.
        return {"ok": summary.consistency["mismatches"] == 0, "cut_off": ended, "summary": vars(summary)}

    def _job(self, command: Sequence[str], env: Mapping[str, str], limit_s: float) -> str:
        """Run a job until it ends or its time is over; '' if that was well and in time, else what happened."""
        # At SIGINT `tune` sums up what it saw, and torchrun ends its ranks.
        limit = ["timeout", "--foreground", "--signal", "INT", "--kill-after", "60", str(limit_s)]
        with open(self.folder / "jobs.log", "ab") as log:
            done = subprocess.run(
                [*limit, *command], env={**os.environ, **env}, stdout=log, stderr=log, check=False
            )
        if done.returncode in (124, 137):
            return f"cut off after {limit_s:.0f} s"
        return (
            f"ended with status {done.returncode}, see {self.folder / 'jobs.log'}" if done.returncode else ""
        )


class Buffers:
    """Input, output and the right output for one collective and size.

    The data are small whole numbers in float32, so that the order of additions cannot matter.
    """

    def __init__(self, func: str, n_bytes: int, device: torch.device) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        shard = n_bytes // 4 // size
        self.func, self.n_bytes = func, shard * size * 4
        generator = torch.Generator().manual_seed(n_bytes)  # all ranks draw the same
        whole = torch.randint(-4, 5, (shard * size,), generator=generator).float().to(device)
        mine = whole[rank * shard : (rank + 1) * shard]
        self.input, self.right = mine.clone(), whole
        if func == "reduce_scatter":
            self.input, self.right = whole * (rank + 1), mine * (size * (size + 1) // 2)
        self.output = torch.empty_like(self.right)

    def call(self) -> None:
        """The collective, enqueued (cuda) or done (cpu)."""
        (_GATHER if self.func == "all_gather" else _SCATTER)(self.output, self.input)

    def of(self, records: Any, kind: int) -> Any:
        """The records of one kind that are of this collective and size."""
        func, n_bytes = FUNCS.index(self.func), self.n_bytes
        return records[
            (records["kind"] == kind) & (records["func"] == func) & (records["n_bytes"] == n_bytes)
        ]


class Sweep:
    """One rank of a sweep: each (algorithm, protocol) that NCCL offers x channel counts x ``sizes`` (bytes of the whole
    buffer), each forced by a table, after NCCL's own way. Every rank checks its results, and that the events say what
    the table said; rank 0 writes one JSON line a config to ``out``. No times are taken: what a config is worth the
    tuner measures, in steps.
    """

    def __init__(self, backend: str, out: str, sizes: Sequence[int]) -> None:
        self.sizes, self.out = sizes, Path(out)
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        dist.init_process_group(backend)
        self.control = dist.new_group(backend="gloo")  # not NCCL's: what is said here must not be swept
        self.plugin, self.generation = Plugin.load(), 0
        self.ring: Ring | None = None

    def run(self) -> bool:
        """False: the plugin is not loaded."""
        if not self._loaded():
            return False
        for n_bytes in self.sizes:
            for func in TUNED_FUNCS:
                self._cell(Buffers(func, n_bytes, self.device))
        return True

    def _loaded(self) -> bool:
        """Small collectives: has NCCL loaded the tuner and the profiler, on every rank, and do kernel times come?"""
        small = Buffers("all_gather", 1 << 14, self.device)
        small.call()
        self._finish()
        if has_ring := self.plugin.open():
            self.ring = Ring.of_this_process(Path(os.environ["DYNAMICCL_RUN"]))
        self.plugin.sample(True)
        small.call()
        self._finish()
        tuner, profiler = self.plugin.abi
        mine = {"ring": has_ring, "tuner": tuner, "profiler": profiler, "asked": self.plugin.asked()}
        ranks = self._gather(mine)
        loaded = all(all(rank.values()) for rank in ranks)
        has_times = loaded and len(small.of(self._records(small, rec.KERNEL), rec.KERNEL)) > 0
        self._write({"loaded": loaded, "kernel_times": all(self._gather(has_times)), "ranks": ranks})
        self._meet()  # the first rank that fails ends the others: what was found must be written
        return loaded

    def _cell(self, buffers: Buffers) -> None:
        own, records = self._try(buffers, AUTO)
        offer = buffers.of(records, rec.OFFER).view(rec.OFFER_DTYPE)[-1]
        own["obeyed"] = own["ran"][:2] == (
            ALGOS[offer["algo"]],
            PROTOS[offer["proto"]],
        )  # NCCL's plan is left as it is
        self._write(own)
        offered = [
            pair for pair, cost in zip(rec.PAIRS, rec.pair_costs(offer["cost_us"]), strict=True) if cost >= 0
        ]
        for pair in offered:
            for n_channels in CHANNELS:
                self._write(self._try(buffers, Decision(*pair, n_channels))[0])

    def _try(self, buffers: Buffers, decision: Decision) -> tuple[dict[str, Any], Any]:
        """One config on all ranks: (its row, this rank's records)."""
        func, n_bytes = buffers.func, buffers.n_bytes
        self.generation += 1
        rules = () if decision.is_auto else (rec.Rule(0, 0, func, n_bytes, n_bytes, decision),)
        self.plugin.activate(encode_table(rec.Table(self.generation, rules)))
        buffers.output.fill_(float("nan"))  # so that a collective that writes nothing is found out
        self._meet()
        buffers.call()
        right = torch.equal(buffers.output, buffers.right)
        self._meet()
        records = self._records(buffers, rec.COLL)
        events = buffers.of(records, rec.COLL)
        ran = sorted({(ALGOS[e["algo"]], PROTOS[e["proto"]], int(e["n_channels"])) for e in events})
        obeyed = {(algo, proto) for algo, proto, _ in ran} == {(decision.algo, decision.proto)}
        obeyed = obeyed and (decision.n_channels == 0 or all(n <= decision.n_channels for *_, n in ran))
        ranks = self._gather({"right": right, "obeyed": obeyed, "ran": ran})
        row = {
            "func": func,
            "n_bytes": n_bytes,
            "decision": str(decision),
            "ran": ran[0] if ran else ("", "", 0),
        }
        row |= {key: all(rank[key] for rank in ranks) for key in ("right", "obeyed")}
        return row | {"ranks_agree": len(ran) == 1 and all(rank["ran"] == ran for rank in ranks)}, records

    def _records(self, buffers: Buffers, kind: int) -> Any:
        """What the ring has got since the last time, one of this kind included, which may come late."""
        assert self.ring is not None
        records, end = self.ring.drain(), time.monotonic() + PATIENCE_S
        while not len(buffers.of(records, kind)) and time.monotonic() < end:
            time.sleep(0.002)
            records = np.concatenate([records, self.ring.drain()])
        return records

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _meet(self) -> None:
        self._finish()
        dist.barrier(self.control)

    def _gather(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self.control)
        return found

    def _write(self, row: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def main() -> None:
    """One rank: ``torchrun -m dynamiccl.agent.checks.gpu_check JSON``, with a run folder's environment; the JSON is
    what :class:`Sweep` takes."""
    loaded = Sweep(**json.loads(sys.argv[1])).run()
    if not loaded:
        print("the plugin was not loaded on every rank", file=sys.stderr, flush=True)
    dist.destroy_process_group()
    os._exit(0 if loaded else 1)  # gloo's threads can abort a process that tears down


if __name__ == "__main__":
    main()
