"""Sweeps the demo's own job for the record: ``python tests/tools/make_oracle.py``, some 6 minutes on a quiet machine.

The job is the one that ``make demo`` runs. Some default steps of it are kept as a recording (``demo/``), which is all
that advice may see; then every config of the slots that matter is measured between windows of the default, the best
of each again, and the whole tables, that of the sweep and that of the advice, each beside the default in turn.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from dynamiccl.agent.advice.advise import Advice
from dynamiccl.agent.daemon.request import workload
from dynamiccl.envs.live.job import Job
from dynamiccl.envs.live.windows import LiveWindows
from dynamiccl.envs.nccl.plugin.build import job_env
from dynamiccl.envs.nccl.shm import RunFolder
from dynamiccl.envs.search.interfaces import SEARCH, Plan
from dynamiccl.envs.search.step_times import trimmed_mean
from dynamiccl.envs.sim.emulated.settings import Emulated
from dynamiccl.traces.files import Trace
from dynamiccl.traces.header import new_header
from dynamiccl.traces.spaces import decision_of
from dynamiccl.traces.writer import TraceWriter
from overhead import compare

ROOT = Path(__file__).resolve().parents[2]
RECORDING = ROOT / "tests" / "data" / "recordings" / "demo"
#: Default steps in the recording; slots below this share of the step are left out of the sweep.
RECORDED, SHARE = 24, 0.05
#: Steps of a window, and those before it that do not count.
STEPS, DISCARD = 4, 2
#: How many of a slot's best are measured again, and how often; pairs of windows of the whole tables.
AGAIN, PAIRS = ((3, 6), (2, 18)), 6


def main():
    emulated = Emulated()
    run = RunFolder.create()
    command = workload(3, 30_000, 2, Path(run.path) / "job.jsonl", backend="emulated", extra=["--quiet"])
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **job_env(run.path), **emulated.env()}
    )
    job = Job(run, process)
    try:
        sweep(job, emulated)
    finally:
        job.release()
        process.terminate()
        process.wait()
        run.close()


def sweep(job, emulated):
    header = {"emulated": True, **asdict(emulated), "stage": 3, "n_processes": 2, "policy": "default"}
    with TraceWriter(RECORDING, header, existing="replace") as writer:
        job.begin_trace(writer)
        windows = LiveWindows(job)
        told, _ = windows.begin()
        job.window({}, RECORDED, 0)
        job.take_events()
        job.writer = None
    recording = Trace.read(RECORDING)
    advice = Advice(recording)
    none = np.zeros(len(windows.profiles), np.int64)
    rate = Rate(windows, none)
    tried, best = {}, none.copy()
    for i, profile in enumerate(windows.profiles):
        if profile.share < SHARE:
            continue
        arms = [int(c) for c in np.flatnonzero(told.mask[i]) if c]
        rows = {c: rate.pairs(at(none, i, c), 1, f"{profile.slot} {decision_of(c)}") for c in arms}
        for most, n in AGAIN:
            for c in sorted(arms, key=lambda c: -gained(rows[c])[0])[:most]:
                rows[c] += rate.pairs(at(none, i, c), n, f"{profile.slot} {decision_of(c)} again")
        tried[str(profile.slot)] = [said(c, rows[c]) for c in sorted(arms, key=lambda c: -gained(rows[c])[0])]
        top = max(arms, key=lambda c: gained(rows[c])[0])
        best[i] = top if gained(rows[top])[0] > 0 else 0
    advised = np.array([int(c) for c in table_of(advice, windows.profiles)])
    pairs = rate.pairs(best, 2 * PAIRS, "the sweep's table")
    mine = pairs if np.array_equal(best, advised) else rate.pairs(advised, 2 * PAIRS, "the advised table")
    same = rate.pairs(none, PAIRS, "the default against itself")
    tuned, followed, aa = (compare(*np.array(p)[:, ::-1].T) for p in (pairs, mine, same))
    job.take(everything=True)
    result = {
        "made_by": "python tests/tools/make_oracle.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": new_header().get("commit"),
        "note": "emulated cluster: these are not GPU times",
        **{k: v for k, v in header.items() if k != "policy"},
        "policy": "exhaustive",
        "steps": job.last_step,
        "default_step_ms": round(float(np.median([d for _, d in pairs])), 3),
        "tuned_step_ms": round(float(np.median([ms for ms, _ in pairs])), 3),
        "speedup": tuned.speedup,
        "speedup_ci95": [tuned.low, tuned.high],
        "aa_speedup_ci95": [aa.low, aa.high],
        "decisions": say(windows.profiles, best),
        "advised": {"decisions": say(windows.profiles, advised), "speedup": followed.speedup,
                    "speedup_ci95": [followed.low, followed.high]},
        "consistency": {"calls_checked": job.audit.calls_checked, "mismatches": job.audit.mismatches},
        "tried": tried,
    }  # fmt: skip
    (ROOT / "envs" / "results" / "oracle_demo.json").write_text(json.dumps(result, indent=1) + "\n")


class Rate:
    """Windows of a table, each beside one of the default."""

    def __init__(self, windows, none):
        self.windows, self.none, self.began = windows, none, time.monotonic()

    def pairs(self, configs, n, what):
        """n times (step of the table, step of the default), ms; which comes first alternates."""
        found = []
        for k in range(n):
            order = (configs, self.none) if k % 2 else (self.none, configs)
            seen = [
                trimmed_mean(self.windows.measure(Plan(SEARCH, c, STEPS, DISCARD)).step_ms) for c in order
            ]
            found.append(tuple(seen if k % 2 else seen[::-1]))
        saved = 1 - np.exp(np.mean([np.log(ms / d) for ms, d in found]))
        print(f"{time.monotonic() - self.began:6.0f} s  {what}: {saved:+.1%}", file=sys.stderr)
        return found


def gained(rows):
    """Mean log of default / config over the pairs, and its standard error, nan for one pair."""
    logs = np.log([default / ms for ms, default in rows])
    return logs.mean(), logs.std(ddof=1) / np.sqrt(len(logs)) if len(logs) > 1 else np.nan


def said(config, rows):
    mean, error = gained(rows)
    row = {"config": str(decision_of(config)), "saved": round(1 - np.exp(-mean), 4), "pairs": len(rows)}
    return row if np.isnan(error) else {**row, "error": round(error * np.exp(-mean), 4)}


def at(configs, i, config):
    out = configs.copy()
    out[i] = config
    return out


def table_of(advice, profiles):
    """The advised configs by the profiles of the running job; slots that the recording does not hold are left."""
    known = dict(zip(advice.tasks.slots, advice.configs, strict=True))
    return [known.get(p.slot, 0) for p in profiles]


def say(profiles, configs):
    rows = []
    for p, c in zip(profiles, configs, strict=True):
        d = decision_of(c)
        rows.append({"func": p.slot.func, "min_bytes": p.slot.min_bytes, "max_bytes": p.slot.max_bytes,
                     "algo": d.algo, "proto": d.proto, "n_channels": d.n_channels or None})  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
