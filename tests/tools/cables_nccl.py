"""Where is there anything to win? Measured with NCCL's library between two hosts whose cable is chosen.

  cables_nccl.py choice --launcher PATH --out FOLDER                      NCCL's own choice, and each cell's channels
  cables_nccl.py sweep  --launcher PATH --out FOLDER --cable CABLE --launches 0:4
  cables_nccl.py gains  --launcher PATH --out FOLDER --cable CABLE --kind fsdp2 --arms A,B,... --runs 0:4
  cables_nccl.py file   --out FOLDER                                      raw rows into tests/data/nccl_on_cpu
  cables_nccl.py tables                                                   the tables of docs/evidence.md, from the rows

The launcher runs a command on two hosts: `run -o OUT CMD..` (torchrun's variables are set, one process a host),
`tune -o OUT -t OPTIONS SCRIPT..` (`dynamiccl tune OPTIONS -- torchrun .. SCRIPT` on both), `net rate RATE` and
`net flow CABLE FLOW`. Its hosts have to be there. Nothing else may run meanwhile: the load average is in each row.
"""

import argparse
import csv
import datetime
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DATA = HERE.parent / "data" / "nccl_on_cpu"
JOB = HERE / "cables_job.py"
#: We chose these cables.
CABLES = {
    "2gbit": ("rate", "2gbit"),
    "4gbit-flow-1gbit": ("flow", "4gbit", "1gbit"),
    "10gbit": ("rate", "10gbit"),
}
MOST = 8
RAISED = {"NCCL_MIN_CTAS": str(MOST)}
BYTES = [2**k for k in range(14, 25)]
CELLS = [(f"{proto}-{n}", proto, n) for proto in ("LL", "LL128", "Simple") for n in range(1, MOST + 1)]
#: A/A: what NCCL does untouched, pinned, twice.
PINNED = [("untouched", "", 0), ("untouched again", "", 0)]


def launched(options, out, words, extra, tune=None, seconds=120):
    """Run the words on both hosts; rank 0's log."""
    out.mkdir(parents=True, exist_ok=True)
    verb = ["run"] if tune is None else ["tune", "-t", tune]
    script = [sys.executable, str(JOB)] if tune is None else [str(JOB)]
    backend = ["--backend", options.backend, "--backend-module", options.backend_module]
    command = [options.launcher, *verb, "-o", str(out), *script, *words, "--out", str(out), *backend]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **extra}
    done = subprocess.run(command, env=environment, timeout=seconds, capture_output=True, text=True)
    log = out / ("rank0.log" if tune is None else "host0.log")
    said = log.read_text(errors="replace") if log.exists() else ""
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}{said[-3000:]}")
    return said


def plugin(options):
    """The compiled tuner plugin."""
    built = options.out / "cables_tuner.so"
    if not built.exists():
        options.out.mkdir(parents=True, exist_ok=True)
        source = HERE / "cables_tuner.c"
        subprocess.run(["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", built, source], check=True)
    return {"NCCL_TUNER_PLUGIN": str(built)}


def shape(options):
    subprocess.run([options.launcher, "net", *CABLES[options.cable]], check=True)


TUNING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"}
CHOICE = re.compile(r"(AllGather|ReduceScatter): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
NAMES = {"AllGather": "all_gather", "ReduceScatter": "reduce_scatter", "LL": "LL", "LL128": "LL128", "SIMPLE": "Simple"}


def choice(options):
    """What NCCL does untouched at each size, and the channels of each cell as run. Data are checked meanwhile."""
    plan = {"bytes": BYTES, "rounds": 1, "repeats": 1, "seed": 0, "told": True, "tuner": False, "untouched": []}
    rows = told(options, {**plan, "cells": [("untouched", "", 0)]}, TUNING, "choice-untouched")
    pinned = [(func, n, proto, channels) for func, n, _, proto, channels, _ in rows]
    plan |= {"tuner": True, "untouched": pinned, "cells": [*CELLS, PINNED[0]]}
    rows = [("", *row) for row in rows]
    rows += [("raised", *row) for row in told(options, plan, {**TUNING, **RAISED, **plugin(options)}, "choice-raised")]
    with (options.out / "choice.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["communicator", "func", "bytes", "cell", "proto", "channels_as_run", "offered"])
        out.writerows(("raised" if kind else "untouched", *row) for kind, *row in rows)


def told(options, plan, extra, name):
    """Sorted rows (func, bytes, cell, protocol, channels as run, offered) of a run with NCCL's log."""
    folder = options.out / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    log = launched(options, folder, ["sweep", "--plan", str(folder / "plan.json")], extra)
    cell, chosen, rows = None, None, set()
    for line in log.splitlines():
        if line.startswith("cell "):
            _, func, n_bytes, cell = line.split(" ", 3)
        elif found := CHOICE.search(line):
            chosen = found
        elif line.startswith("offered ") and chosen and cell:
            # The log has the bytes of one rank, of two.
            assert (NAMES[chosen[1]], 2 * int(chosen[2]), chosen[3]) == (func, int(n_bytes), "RING"), chosen
            rows.add((func, int(n_bytes), cell, NAMES[chosen[4]], int(chosen[6]) - int(chosen[5]) + 1, int(line.split()[1])))
    return sorted(rows)


def untouched_choice(options):
    with (options.out / "choice.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["communicator"] == "untouched"]
    return [(row["func"], int(row["bytes"]), row["proto"], int(row["channels_as_run"])) for row in rows]


def sweep(options):
    """Launch after launch: a raised communicator with all cells, then one of NCCL untouched. Ports are new in each."""
    shape(options)
    plan = {"bytes": BYTES, "told": False, "untouched": untouched_choice(options), "rounds": options.rounds}
    for launch in span(options.launches):
        folder = options.out / f"sweep-{options.cable}-{launch:02}"
        folder.mkdir(parents=True, exist_ok=True)
        raised = {"tuner": True, "repeats": 1, "cells": [*CELLS, *PINNED], "seed": launch}
        alone = {"tuner": False, "repeats": 2, "cells": [("untouched communicator", "", 0)], "seed": launch}
        date = now()
        rows = []
        for kind, part, extra in (("raised", raised, {**RAISED, **plugin(options)}), ("untouched", alone, {})):
            path = folder / f"{kind}.json"
            path.write_text(json.dumps({**plan, **part}))
            launched(options, folder / kind, ["sweep", "--plan", str(path)], extra)
            rows += merged(folder / kind)
        with (folder / "rows.csv").open("w", newline="") as file:
            csv.writer(file).writerows([options.cable, date, launch, *row] for row in rows)
        print(date, folder, len(rows), flush=True)


def merged(folder):
    """One row a call of both ranks' rows: the time from the mean start to the later end, in microseconds."""
    ranks = []
    for rank in range(2):
        with (folder / f"sweep-{rank}.csv").open() as file:
            ranks.append(list(csv.reader(file)))
    rows = []
    for one, other in zip(*ranks, strict=True):
        assert one[:4] == other[:4], (one, other)
        start, end = (int(one[4]) + int(other[4])) / 2, max(int(one[5]), int(other[5]))
        rows.append([*one[:4], round((end - start) / 1e3), one[6]])
    return rows


def span(text):
    first, _, end = text.partition(":")
    return range(int(first), int(end or int(first) + 1))


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choice", "sweep"))
    parser.add_argument("--launcher")
    parser.add_argument("--backend", default="ncclcpu")
    parser.add_argument("--backend-module", default="nccl_cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cable", choices=CABLES)
    parser.add_argument("--launches", default="0:8")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    {"choice": choice, "sweep": sweep}[options.what](options)


if __name__ == "__main__":
    main()
