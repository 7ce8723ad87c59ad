"""Does the table of ``dynamiccl sweep`` gain in a job? With NCCL's library between two hosts, see ``cables_nccl.py``.

  sweep_nccl.py apply --launcher PATH --sweep FOLDER --out FOLDER --runs 0:4     whole runs, in an order drawn anew
  sweep_nccl.py file  --sweep FOLDER --one-message FOLDER --out FOLDER           rows into tests/data/nccl_on_cpu

The sweeps: `LAUNCHER run -o LOGS dynamiccl sweep --headroom 8 --backend B --backend-module M --out FOLDER`, first with
`--bytes 1MiB:16MiB`, then with `--rounds 16 --trace RUN`: results of `LAUNCHER tune -t "--budget 0"` on an FSDP2 job.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from cables_nccl import JOB, now, shorter, span, write

DATA = Path(__file__).parents[1] / "data" / "nccl_on_cpu" / "sweep_command"
UNTOUCHED, AGAIN, APPLIED = "untouched", "untouched again", "applied"
WORDS = ["--kind", "fsdp2", "--width", "480", "--layers", "1"]


def apply(options):
    """Whole runs of the FSDP2 job: untouched, again, and under the sweep's table."""
    headroom = json.loads((options.sweep / "manifest.json").read_text())["headroom"]
    table = [Path(sys.executable).with_name("dynamiccl"), "apply", "--headroom", headroom]
    table += [options.sweep / "table.json", "--"]
    for run in span(options.runs):
        arms = [UNTOUCHED, AGAIN, APPLIED]
        random.Random(f"sweep {run}").shuffle(arms)
        for arm in arms:
            folder = options.out / f"{run:02}-{arm.replace(' ', '_')}"
            if (folder / "steps-0.json").exists():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "date").write_text(now())
            job = [sys.executable, JOB, "train", *WORDS, "--steps", options.steps, "--out", folder]
            job += ["--backend", options.backend, "--backend-module", options.backend_module]
            words = [options.launcher, "run", "-o", folder, *(table if arm == APPLIED else []), *job]
            done = subprocess.run([*map(str, words)], timeout=60, capture_output=True, text=True)
            if done.returncode:
                log = (folder / "rank0.log").read_text(errors="replace")
                raise SystemExit(f"{done.stdout}{done.stderr}{log[-3000:]}")
            print(arm, (folder / "rank0.log").read_text(errors="replace").splitlines()[-2:], flush=True)


def rows(out):
    """One row a step of rank 0."""
    found = []
    for path in sorted(out.glob("*/steps-0.json")):
        told = json.loads(path.read_text())
        run, _, arm = path.parent.name.partition("-")
        steps = pd.DataFrame({"step": range(len(told["ms"])), "ms": told["ms"], "load": told["load"]})
        date = (path.parent / "date").read_text()
        log = (path.parent / "rank0.log").read_text(errors="replace")
        used = (
            int(re.search(r"table was used in ([\d,]+) of", log)[1].replace(",", "")) if arm == APPLIED else 0
        )
        found.append(
            steps.assign(run=int(run), arm=arm.replace("_", " "), date=date, digest=told["digest"], used=used)
        )
    return pd.concat(found)


def gained(steps):
    """Percent by which runs of each arm are shorter than untouched ones, with their interval; and step, ms, by run.

    The step of a run is the median of its second half: the table is in force some seconds after the start.
    """
    late = steps[steps["step"] >= steps["step"].max() / 2]
    ms = late.groupby(["arm", "run"])["ms"].median().unstack("run")
    logs = np.log(ms)
    return {arm: shorter((logs.loc[UNTOUCHED] - logs.loc[arm]).dropna()) for arm in (AGAIN, APPLIED)}, ms


def file_rows(options):
    """Both sweeps as they are, and the steps of the runs."""
    for name, folder in (("range", options.sweep), ("one_message", options.one_message)):
        (DATA / name).mkdir(parents=True, exist_ok=True)
        for file in ("manifest.json", "table.json", "rows.csv"):
            if (folder / file).exists():  # the second sweep has no table
                shutil.copyfile(folder / file, DATA / name / file)
    write(DATA / "steps.csv.gz", rows(options.out))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("apply", "file"))
    parser.add_argument("--launcher")
    parser.add_argument("--sweep", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one-message", type=Path)
    parser.add_argument("--runs", default="0:4")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--backend-module", default="")
    options = parser.parse_args()
    os.environ["PYTHONUNBUFFERED"] = "1"
    apply(options) if options.what == "apply" else file_rows(options)


if __name__ == "__main__":
    main()
