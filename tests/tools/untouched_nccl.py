"""Is NCCL untouched under ``--headroom``? Whole runs on NCCL's library, with and without more channels.

  python tests/tools/untouched_nccl.py channels FOLDER --launcher L --module nccl_cpu --backend ncclcpu
  python tests/tools/untouched_nccl.py times FOLDER --launcher L ... [--arms ...] [--runs 6] [--seconds 230]
  python tests/tools/untouched_nccl.py tune FOLDER --launcher L ... [--runs 2]
  python tests/tools/untouched_nccl.py show FOLDER

L is a program of yours that runs a job on two hosts: ``L run [-r RANKS_A_HOST] [-o OUT] CMD`` with the variables of
torchrun, and ``L tune [-r RANKS_A_HOST] [-o OUT] [-t OPTIONS] -- SCRIPT``. That is ``dynamiccl tune OPTIONS --
torchrun SCRIPT`` on both, with the results of the first in OUT/h0. The module registers the backend.

``channels`` writes what ran of each size: FOLDER/untouched_N.csv of a run without more channels, raised_N.csv of one
with --headroom once its table holds, before_N.csv of the steps before that. N is the count that NCCL takes by itself
(NCCL_MIN_NCHANNELS in the environment makes it larger).

``times`` adds rows to FOLDER/times.csv, in a new random order in each round, until each arm has so many runs or the
seconds are over; call it again for more. Its arms:

  plain, again   NCCL without dynamiccl, twice: the A/A interval
  raised         as many channels as --headroom makes, under the untouched table alone (`dynamiccl apply --no-gate`)
  default        NCCL without dynamiccl on as many channels as --headroom makes: the option without its table
"""

import argparse
import csv
import json
import os
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import pandas as pd
from dynamiccl.envs.live.untouched import is_alone, of_run
from dynamiccl.envs.nccl.tables import to_json
from dynamiccl.traces.files import Trace
from dynamiccl.traces.records import Table

HERE = Path(__file__).parent
JOB = HERE / "untouched_job.py"
ARMS = ("plain", "again", "raised", "default")
FIRST = 16  # steps of a run that do not count: connections are made, memory is touched
KEYS = ["func", "n_bytes", "algo", "proto", "n_channels"]


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("channels", "times", "tune", "show"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--launcher", default="")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--module", default="")
    parser.add_argument("--headroom", type=int, default=8)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    return parser.parse_args()


class Runs:
    """Whole runs of the job, one after the other."""

    def __init__(self, options):
        self.options = options
        self.folder = options.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)

    def words(self, kind, steps):
        o = self.options
        module = ["--backend-module", o.module] if o.module else []
        return [str(JOB), "--kind", kind, "--steps", str(steps), "--backend", o.backend, *module]

    def start(self, what, out, words, settings=(), env=None):
        """Run to the end. Raises CalledProcessError."""
        options = ["-t", " ".join(settings)] if settings else []
        command = [
            self.options.launcher,
            what,
            "-o",
            str(out),
            *options,
            *(["--"] if what == "tune" else []),
            *words,
        ]
        subprocess.run(
            command, check=True, env={**os.environ, **(env or {})}, timeout=600, stdout=subprocess.DEVNULL
        )

    def watch(self, kind, steps):
        """Results of a run without more channels, made once."""
        out = self.folder / f"untouched_{kind}"
        if not (out / "h0" / "summary.json").exists():
            self.start("tune", out, self.words(kind, steps), ["--budget", "0", "--no-memory"])
        return out / "h0"

    def raise_to(self, kind):
        """Options of a run with more channels."""
        return [
            "--headroom",
            str(self.options.headroom),
            "--untouched",
            str(self.watch(kind, self.options.steps)),
        ]


def ran(events):
    """What ran of each size, with the number of calls."""
    return events[is_alone(events)].groupby(KEYS).size().reset_index(name="calls")


def channels(runs):
    plain = Trace.read(runs.watch("sizes", 30) / "trace").events
    out = runs.folder / "raised_sizes"
    runs.start(
        "tune", out, runs.words("sizes", 30), ["--budget", "0", "--no-memory", *runs.raise_to("sizes")]
    )
    raised = Trace.read(out / "h0" / "trace").events
    holds = raised["table_generation"] > 0
    count = plain["n_channels"].max()
    for name, events in (("untouched", plain), ("raised", raised[holds]), ("before", raised[~holds])):
        ran(events).to_csv(runs.folder / f"{name}_{count}.csv", index=False)
    both = ran(plain).merge(ran(raised[holds]), on=["func", "n_bytes"], how="outer", suffixes=("", "_raised"))
    differs = sum((both[name] != both[f"{name}_raised"]) for name in KEYS[2:]) > 0
    print(f"{len(both)} sizes and functions, {differs.sum()} differ")


def time_arm(runs, arm, number):
    """A row of one run: its median step in ms, what rank 0's process holds, and the load of the machine before it."""
    file = runs.folder / f"{arm}_{number}.json"
    load = os.getloadavg()[0]
    words = [*runs.words("fsdp2", runs.options.steps), "--times", str(file)]
    out = runs.folder / f"{arm}_{number}"
    headroom = runs.options.headroom
    if arm == "raised":
        table = runs.folder / "untouched.json"
        table.write_text(to_json(of_run(runs.watch("fsdp2", runs.options.steps), headroom).over(Table(1))))
        apply = ["dynamiccl", "apply", str(table), "--no-gate", "--headroom", str(headroom), "--"]
        runs.start("run", out, [*apply, "python", *words])
    else:
        env = {"NCCL_MIN_NCHANNELS": str(headroom)} if arm == "default" else None
        runs.start("run", out, ["python", *words], env=env)
    told = json.loads(file.read_text())
    steps = told.pop("ms")
    return {
        "arm": arm,
        "run": number,
        "step_ms": round(float(np.median(steps[FIRST:])), 2),
        "load": load,
        **told,
    }


def times(runs):
    path, options = runs.folder / "times.csv", runs.options
    end = time.monotonic() + options.seconds
    runs.watch("fsdp2", options.steps)
    rows = list(csv.DictReader(path.open())) if path.exists() else []
    order = random.Random(options.seed)
    longest = 0.0
    while True:
        counts = {arm: sum(row["arm"] == arm for row in rows) for arm in options.arms.split(",")}
        least = min(counts.values())
        left = [arm for arm in counts if counts[arm] == least]  # the rest of a round
        if least >= options.runs:
            break
        for arm in order.sample(left, len(left)):
            began = time.monotonic()
            if began + longest > end:
                return
            rows.append(time_arm(runs, arm, counts[arm]))
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[-1].keys())
                writer.writeheader()
                writer.writerows(rows)
            longest = max(longest, time.monotonic() - began)
            print(rows[-1], flush=True)


def tune(runs):
    settings = ["--no-memory", *runs.raise_to("fsdp2")]
    for number in range(runs.options.runs):
        out = runs.folder / f"tuned_{number}"
        if not (out / "h0" / "summary.json").exists():
            runs.start("tune", out, runs.words("fsdp2", runs.options.steps), settings)


def interval(one, other):
    """Ratio of the medians of two samples, and its 95 % bootstrap interval."""
    random_numbers = np.random.default_rng(0)
    draws = [np.median(random_numbers.choice(x, (10_000, len(x))), axis=1) for x in (one, other)]
    low, high = np.percentile(draws[0] / draws[1], (2.5, 97.5))
    return f"{np.median(one) / np.median(other):.3f} [{low:.3f}, {high:.3f}]"


def show(runs):
    path = runs.folder / "times.csv"
    if path.exists():
        rows = pd.read_csv(path)
        by_arm = {
            arm: rows.loc[rows["arm"] == arm, "step_ms"].to_numpy() for arm in ARMS if arm in set(rows["arm"])
        }
        for arm, ms in by_arm.items():
            print(f"{arm:8} {len(ms)} runs, median {np.median(ms):.1f} ms:", *(f"{x:.0f}" for x in ms))
        untouched = np.concatenate([by_arm["plain"], by_arm["again"]])
        print("A/A: plain over again", interval(by_arm["plain"], by_arm["again"]))
        print("raised over untouched", interval(by_arm["raised"], untouched))
        if "default" in by_arm:
            print("default over untouched", interval(by_arm["default"], untouched))
        print(rows.groupby("arm")[["rss_kib", "shared_kib", "threads", "sockets"]].median().to_string())
    for file in sorted(runs.folder.glob("tuned_*/h0/summary.json")):
        print(
            file.parent.parent.name,
            {k: json.loads(file.read_text())[k] for k in ("speedup", "speedup_ci95", "kept")},
        )


if __name__ == "__main__":
    asked = parsed()
    {"channels": channels, "times": times, "tune": tune, "show": show}[asked.what](Runs(asked))
