"""Where is there anything to win? Measured with NCCL's library between two hosts whose cable is chosen.

  cables_nccl.py choice --launcher PATH --out FOLDER       NCCL's own choice, and the channels of each cell as run
  cables_nccl.py sweep  --launcher PATH --out FOLDER --cable CABLE --launches 0:4
  cables_nccl.py best   --out FOLDER --cable CABLE         the best cells of the sweep, for `gains`
  cables_nccl.py calls  --launcher PATH --out FOLDER       the calls of the job, for `gains`
  cables_nccl.py gains  --launcher PATH --out FOLDER --cable CABLE --kind fsdp2 --arms A,B,... --launches 0:4
  cables_nccl.py plant  --launcher PATH --out FOLDER --what-runs tune --launches 0:4
  cables_nccl.py file   --out FOLDER                       raw rows into tests/data/nccl_on_cpu
  cables_nccl.py tables                                    the tables of docs/evidence.md, from the rows

The launcher runs a command on two hosts: `run -o OUT CMD..` (torchrun's variables are set, one process a host),
`tune -o OUT -t OPTIONS SCRIPT..` (`dynamiccl tune OPTIONS -- torchrun .. SCRIPT` on both), `net rate RATE` and
`net flow CABLE FLOW`. Its hosts have to be there. Nothing else may run meanwhile: the load average is in each row.
"""

import argparse
import csv
import datetime
import itertools
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
from golden_nccl import end

STARTED = time.monotonic()
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
    started = {
        "start_new_session": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    with subprocess.Popen(command, env=environment, **started) as done:
        try:
            printed, _ = done.communicate(timeout=seconds)
        finally:
            end(done)  # what it has started would disturb the next run
    log = out / ("rank0.log" if tune is None else "host0.log")
    said = log.read_text(errors="replace") if log.exists() else ""
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{printed}{said[-3000:]}")
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
CHOICE = re.compile(
    r"(AllGather|ReduceScatter): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}"
)
NAMES_OF_FUNCS = ("all_gather", "reduce_scatter")
NAMES = {
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "LL": "LL",
    "LL128": "LL128",
    "SIMPLE": "Simple",
}


def choice(options):
    """What NCCL does untouched at each size, and the channels of each cell as run. Data are checked meanwhile."""
    plan = {
        "bytes": BYTES,
        "rounds": 1,
        "repeats": 1,
        "seed": 0,
        "told": True,
        "tuner": False,
        "untouched": [],
    }
    rows = told(options, {**plan, "cells": [("untouched", "", 0)]}, TUNING, "choice-untouched")
    pinned = [(func, n, proto, channels) for func, n, _, proto, channels, _ in rows]
    plan |= {"tuner": True, "untouched": pinned, "cells": [*CELLS, PINNED[0]]}
    rows = [("", *row) for row in rows]
    rows += [
        ("raised", *row)
        for row in told(options, plan, {**TUNING, **RAISED, **plugin(options)}, "choice-raised")
    ]
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
            rows.add(
                (
                    func,
                    int(n_bytes),
                    cell,
                    NAMES[chosen[4]],
                    int(chosen[6]) - int(chosen[5]) + 1,
                    int(line.split()[1]),
                )
            )
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
        if (folder / "rows.csv").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        raised = {"tuner": True, "repeats": 1, "cells": [*CELLS, *PINNED], "seed": launch}
        alone = {"tuner": False, "repeats": 2, "cells": [("untouched communicator", "", 0)], "seed": launch}
        date = now()
        rows = []
        for kind, part, extra in (
            ("raised", raised, {**RAISED, **plugin(options)}),
            ("untouched", alone, {}),
        ):
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


COLUMNS = ["cable", "date", "launch", "round", "func", "bytes", "cell", "us", "load"]


def swept(options):
    """All rows of the sweep that lie in the folder of results."""
    files = sorted(options.out.glob("sweep-*/rows.csv"))
    return pd.concat([pd.read_csv(file, header=None, names=COLUMNS) for file in files])


def as_run(rows, chosen):
    """The rows with each forced cell named after the channels that it runs: NCCL gives small calls fewer."""
    raised = chosen[chosen["communicator"] == "raised"]
    names = {(f, n, c): f"{p}-{k}" for _, f, n, c, p, k, _ in raised.itertuples(index=False)}
    forced = ~rows["cell"].str.startswith("untouched")
    keys = zip(rows["func"], rows["bytes"], rows["cell"], strict=True)
    return rows.assign(
        cell=[names[key] if is_forced else key[2] for key, is_forced in zip(keys, forced, strict=True)]
    )


def ratios(rows):
    """((cable, func, bytes), frame) of each: the log of pinned untouched over each cell, cells by launches.

    Of each launch the medians of its calls count. Cells without calls are left out.
    """
    logs = np.log(rows.groupby(["cable", "func", "bytes", "cell", "launch"])["us"].median()).unstack("cell")
    for key, of_size in logs.groupby(["cable", "func", "bytes"]):
        at = of_size.droplevel(["cable", "func", "bytes"]).dropna(axis=1)
        yield key, at.rsub(at["untouched"], axis=0)


def allowed(cells, own_proto, offer):
    """Of the forced cells those that NCCL offers here ("nccl"), or that our tables may use over hosts too ("ours")."""
    if offer == "all":
        return list(cells)
    kept = [cell for cell in cells if not cell.startswith("LL128")]  # not in NCCL's offer on this topology
    if offer == "nccl":
        return kept
    # Over hosts no table forces LL, nor Simple where NCCL itself runs LL (NVIDIA/nccl#2389).
    return [cell for cell in kept if cell.startswith("Simple") and own_proto == "Simple"]


def chosen_best(at, cells):
    """The cell with the best mean over launches; "untouched" if none gains."""
    means = at[cells].mean()
    return "untouched" if means.empty or means.max() <= 0 else means.idxmax()


def held_out(at, cells):
    """Per launch the gain (log) of the cell that the launches of the other half chose."""
    found = []
    for half in (0, 1):
        mine, others = (at[at.index % 2 == part] for part in (half, 1 - half))
        best = chosen_best(others, cells)
        found.append(mine[best] if best != "untouched" else mine["untouched"] * 0)
    return pd.concat(found).sort_index()


#: Of fewer runs no interval is told.
FEWEST = 3


def shorter(logs, seed=0):
    """Percent by which times are shorter, with a 95 % bootstrap interval, of independent log ratios."""
    logs = np.asarray(logs, float)
    if len(logs) < FEWEST:
        return [round(float(100 * (1 - np.exp(-logs.mean()))), 1), np.nan, np.nan]
    drawn = np.random.default_rng(seed).integers(len(logs), size=(4000, len(logs)))
    ends = np.quantile(logs[drawn].mean(axis=1), [0.025, 0.975])
    return [round(float(100 * (1 - np.exp(-value))), 1) for value in (logs.mean(), *ends)]


#: Sizes of the sweep that are told together.
BANDS = {"16 to 512 KiB": (0, 2**19), "1 to 16 MiB": (2**20, 2**40)}


def won(rows, chosen):
    """By (cable, band): percent shorter than NCCL untouched, held out, for what may be chosen; A/A beside it.

    Each value is the mean over functions and sizes of one launch, then over launches: a launch has ports of its own.
    """
    own = {(f, n): p for c, f, n, _, p, *_ in chosen.itertuples(index=False) if c == "untouched"}
    gathered = {}
    for (cable, func, n_bytes), at in ratios(as_run(rows, chosen)):
        cells = [cell for cell in at if not cell.startswith("untouched")]
        of = {
            offer: held_out(at, allowed(cells, own[func, n_bytes], offer))
            for offer in ("all", "nccl", "ours")
        }
        of |= {"again": at["untouched again"], "communicator": at["untouched communicator"]}
        band = next(name for name, (first, last) in BANDS.items() if first <= n_bytes <= last)
        for name, logs in of.items():
            gathered.setdefault((cable, band, name), []).append(logs)
    return {key: shorter(pd.concat(parts, axis=1).mean(axis=1)) for key, parts in gathered.items()}


def best(options):
    """Write best-CABLE.json: for each function and size the best cell, of all cells and of our offer."""
    chosen = pd.read_csv(options.out / "choice.csv")
    own = {(f, n): p for c, f, n, _, p, *_ in chosen.itertuples(index=False) if c == "untouched"}
    of_cable = as_run(swept(options), chosen).query("cable == @options.cable")
    written = {"best": {}, "best of our offer": {}}
    for (_, func, n_bytes), at in ratios(of_cable):
        cells = [cell for cell in at if not cell.startswith("untouched")]
        for name, offer in (("best", "all"), ("best of our offer", "ours")):
            cell = chosen_best(at, allowed(cells, own[func, n_bytes], offer))
            written[name].setdefault(func, {})[str(n_bytes)] = cell
    (options.out / f"best-{options.cable}.json").write_text(json.dumps(written, indent=1))
    print(json.dumps(written, indent=1))


#: Arms of whole runs, and their variables. In `raised` the tables of TURNS take turns; `tuned` runs under `tune`.
ARMS = {
    "untouched": {},
    "untouched again": {},
    # NCCL multiplies it by its number of helper threads, which is 0 unless it is set: alone it changes nothing.
    "sockets 4 alone": {"NCCL_NSOCKS_PERTHREAD": "4"},
    "sockets 1 x 4": {"NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": "4"},
    "sockets 4 x 4": {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
    "raised": RAISED,
    "tuned": {},
}
TUNED = "--no-memory --no-job-log"
#: Jobs of all-reduces: tuned with the option.
SUMS = ("ddp", "classic")


def gains(options):
    """Whole runs of the arms in an order drawn anew in each round; one JSON file a run."""
    shape(options)
    arms = options.arms.split(",")
    words = ["train", "--kind", options.kind, "--steps", str(options.steps)]
    words += ["--width", str(options.width), "--layers", str(options.layers)]
    for run in span(options.launches):
        order = list(arms)
        random.Random(f"{options.cable} {options.kind} {run}").shuffle(order)
        for place, arm in enumerate(order):
            folder = (
                options.out
                / f"gains-{options.cable}-{options.kind}-{options.width}x{options.layers}"
                / f"{run:02}-{arm.replace(' ', '_')}"
            )
            if done(folder, options):
                continue
            row = {
                "cable": options.cable,
                "kind": options.kind,
                "arm": arm,
                "run": run,
                "place": place,
                "date": now(),
            }
            one_run(options, folder, arm, words, run)
            steps = json.loads((folder / "steps-0.json").read_text())
            (folder / "run.json").write_text(json.dumps(row | steps))
            late = sorted(steps["ms"][len(steps["ms"]) // 4 :])
            print(row["date"], arm, run, late[len(late) // 2], steps["load"][0], steps["digest"], flush=True)


def done(folder, options):
    """Whether the run is on file already. Ends the program where too little of its time is left for another run."""
    if (folder / "run.json").exists():
        return True
    if time.monotonic() > STARTED + options.seconds:
        raise SystemExit("the time is up")
    return False


def one_run(options, folder, arm, words, seed):
    folder.mkdir(parents=True, exist_ok=True)
    if arm == "tuned":
        steps = ["--steps", str(options.tuned_steps)]
        # The results of a short run: `launcher tune -o OUT/untouched-KIND-WIDTHxLAYERS -t "--budget 0" SCRIPT ..`.
        earlier = options.out / f"untouched-{options.kind}-{options.width}x{options.layers}" / "h0"
        asked = f"--headroom {MOST} --untouched {earlier} {TUNED}" + " --all-reduce" * (options.kind in SUMS)
        launched(options, folder, [*words, *steps], ARMS[arm], tune=asked, seconds=300)
    elif arm == "raised":
        tables = folder / "tables.json"
        tables.write_text(json.dumps([rows for _, rows in job_tables(options)]))
        chosen = ["--tables", str(tables), "--turn", "2", "--seed", str(seed)]
        steps = ["--steps", str(options.raised_steps)]
        launched(options, folder, [*words, *steps, *chosen], {**ARMS[arm], **plugin(options)})
    else:
        launched(options, folder, words, ARMS[arm])


#: A job whose own tuner plugin pins one channel, on a cable of 2 Gbit/s that gives one flow so much of it.
PLANTS = {"0": "2gbit", "2": "1950mbit", "5": "1870mbit", "20": "1540mbit"}
PLANTED = {"NCCL_MIN_CTAS": "4"}


def plant(options):
    """The true gain by turns of two tables in long runs, or `tune` runs, in an order drawn anew in each round."""
    job = ["train", "--kind", "fsdp2", "--width", str(options.width), "--layers", str(options.layers)]
    for run in span(options.launches):
        order = list(options.plants.split(","))
        random.Random(f"plants {run}").shuffle(order)
        for name in order:
            subprocess.run([options.launcher, "net", "flow", "2gbit", PLANTS[name]], check=True)
            kind = f"{options.what_runs}-{options.width}x{options.layers}"
            folder = options.out / f"plants-{kind}-{name}" / f"{run:02}"
            if done(folder, options):
                continue
            folder.mkdir(parents=True, exist_ok=True)
            row = {"plant": name, "flow": PLANTS[name], "run": run, "date": now()}
            tables = folder / "tables.json"
            every = (0, 2**40)
            one = [
                [(func, *every, "Simple", channels) for func in NAMES_OF_FUNCS] for channels in (1, 2, 4, 1)
            ]
            tables.write_text(json.dumps(one if options.what_runs == "turns" else one[:1]))
            words = [*job, "--tables", str(tables), "--turn", "2", "--seed", str(run), "--steps"]
            extra = {**PLANTED, **plugin(options)}
            if options.what_runs == "turns":
                launched(options, folder, [*words, str(options.raised_steps)], extra)
            else:
                asked = TUNED
                if options.what_runs == "headroom":
                    # Each call runs 1 of the 4 channels. So the option tells `tune` how many there are, and a short
                    # run tells it what the job does without a table.
                    earlier = options.out / f"untouched-plants-{options.width}x{options.layers}"
                    if not earlier.exists():
                        launched(options, earlier, [*words, "60"], extra, tune=f"--budget 0 {TUNED}")
                    asked += f" --headroom 4 --untouched {earlier / 'h0'}"
                launched(options, folder, [*words, str(options.tuned_steps)], extra, tune=asked, seconds=300)
            steps = json.loads((folder / "steps-0.json").read_text())
            (folder / "run.json").write_text(json.dumps(row | steps))
            print(row, len(steps["ms"]), steps["load"][0], verdict(folder), flush=True)


def verdict(folder):
    """Of a tuned run: its state and what it ended under, in a line."""
    summary = folder / "h0" / "summary.json"
    if not summary.exists():
        return ""
    told = json.loads(summary.read_text())
    return json.dumps({key: told.get(key) for key in VERDICT})


VERDICT = (
    "ended",
    "kept",
    "in_force",
    "speedup",
    "speedup_ci95",
    "steps",
    "steps_to_verdict",
    "cost_s",
    "no_table",
)


#: Tables that take turns on a raised communicator.
TURNS = ("pinned", "pinned again", "free", "best", "best of our offer")


def job_tables(options):
    """The tables of TURNS for the job's calls: see :func:`calls`."""
    called = json.loads(
        (options.out / f"calls-{options.kind}-{options.width}-{options.layers}.json").read_text()
    )
    best = json.loads((options.out / f"best-{options.cable}.json").read_text())
    tables = {name: [] for name in TURNS}
    for func, n_bytes, proto, channels in called:
        swept = min(BYTES, key=lambda n: abs(n / n_bytes - 1))
        for name in ("pinned", "pinned again"):
            tables[name].append((func, n_bytes, n_bytes, proto, channels))
        for name in ("best", "best of our offer"):
            cell = best[name][func][str(swept)]
            asked = (proto, channels) if cell.startswith("untouched") else cell.split("-")
            tables[name].append((func, n_bytes, n_bytes, asked[0], int(asked[1])))
    return list(tables.items())


def calls(options):
    """The calls of the job as NCCL runs them untouched: function, bytes, protocol, channels."""
    folder = options.out / f"calls-{options.kind}"
    words = ["train", "--kind", options.kind, "--steps", "3"]
    words += ["--width", str(options.width), "--layers", str(options.layers)]
    log = launched(options, folder, words, TUNING)
    rows = {
        (NAMES[f[1]], 2 * int(f[2]), NAMES[f[4]], int(f[6]) - int(f[5]) + 1) for f in CHOICE.finditer(log)
    }
    path = options.out / f"calls-{options.kind}-{options.width}-{options.layers}.json"
    path.write_text(json.dumps(sorted(rows)))
    print(path.read_text())


FIRST = 0.25  # of a run's steps that no figure counts


def file_rows(options):
    """Write the raw rows of the folder of results into tests/data/nccl_on_cpu."""
    for cable, rows in swept(options).groupby("cable") if list(options.out.glob("sweep-*/rows.csv")) else ():
        write(DATA / "sweep" / f"{cable}.csv.gz", rows.drop(columns="cable"))
    pd.read_csv(options.out / "choice.csv").to_csv(DATA / "sweep" / "choice.csv", index=False)
    for folder in sorted([*options.out.glob("gains-*"), *options.out.glob("plants-*")]):
        runs, verdicts = [], []
        for path in sorted(folder.glob("*/run.json")):
            run = json.loads(path.read_text())
            head = {key: value for key, value in run.items() if not isinstance(value, list)}
            steps = pd.DataFrame(
                {"step": range(len(run["ms"])), "table": run["table"], "load": run["load"], "ms": run["ms"]}
            )
            runs.append(steps.assign(**head))
            if said := verdict(path.parent):
                verdicts.append(head | flat(json.loads(said)))
        if runs:
            write(DATA / "gains" / f"{folder.name}.csv.gz", pd.concat(runs))
        if verdicts:
            pd.DataFrame(verdicts).to_csv(DATA / "gains" / f"{folder.name}-verdicts.csv", index=False)
    manifest(options)


def manifest(options):
    """Of each file of rows its cable, dates, loads and size; the versions of what was measured."""
    said = next(options.out.glob("sweep-*/raised/rank0.log")).read_text(errors="replace")
    nccl = re.search(r"NCCL version (\S+)", said)[1]
    here = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "kernel": platform.release().partition("-")[0],
    }
    files = {}
    for path in sorted(DATA.glob("[sg]*/*.csv.gz")):
        rows = pd.read_csv(path)
        cable = next((name for name in sorted(CABLES, key=len, reverse=True) if name in path.name), "")
        limits = " ".join(CABLES[cable]) if cable else "flow 2gbit, see the column"
        dates, loads = rows["date"], rows["load"]
        files[f"{path.parent.name}/{path.name}"] = {
            "limits": limits,
            "rows": len(rows),
            "dates": [dates.min(), dates.max()],
            "load": [round(float(load), 1) for load in (loads.min(), loads.median(), loads.max())],
        }
    told = {"nccl": nccl, **here, "processors": os.cpu_count(), "files": files}
    (DATA / "manifest.json").write_text(json.dumps(told, indent=1) + "\n")


def flat(told):
    low, high = told.pop("speedup_ci95") or (None, None)
    words = {name: told[name] and told[name]["text"] for name in ("ended", "no_table")}
    return told | words | {"speedup_low": low, "speedup_high": high}


def write(path, rows):
    """As compressed CSV, whose bytes depend on the rows alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows.to_csv(path, index=False, compression={"method": "gzip", "mtime": 0})


def medians(rows):
    """Median step in ms of each run and arm; a table that took turns is an arm of its own."""
    first = rows["arm"].eq("tuned").map({True: 0.5, False: FIRST})  # a search takes a part of a tuned run
    late = rows[rows["step"] >= first * rows.groupby(["arm", "run"])["step"].transform("max")]
    names = late["arm"].where(late["table"] < 0, late["table"].map(dict(enumerate(TURNS))))
    return late.assign(arm=names).groupby(["arm", "run"])["ms"].median().unstack("run")


def against(by_run, arm, base, seed=0):
    """Percent shorter than the base, with a 95 % bootstrap interval over whole runs; pairs if both took turns."""
    ours, theirs = np.log(by_run.loc[arm].dropna().to_numpy()), np.log(by_run.loc[base].dropna().to_numpy())
    if arm in TURNS and base in TURNS:
        return shorter(theirs - ours, seed)
    if min(len(ours), len(theirs)) < FEWEST:
        return shorter([theirs.mean() - ours.mean()])
    rng = np.random.default_rng(seed)
    drawn = [x[rng.integers(len(x), size=(4000, len(x)))].mean(axis=1) for x in (theirs, ours)]
    ends = np.quantile(drawn[0] - drawn[1], [0.025, 0.975])
    return [round(float(100 * (1 - np.exp(-value))), 1) for value in (theirs.mean() - ours.mean(), *ends)]


def words(figures):
    """A gain and its interval, as the page has them."""
    if np.isnan(figures[1]):
        return "too few runs"
    return "{:.1f} % [{:.1f}, {:.1f}]".format(*figures)


CABLE_WORDS = {
    "2gbit": "2 Gbit/s",
    "4gbit-flow-1gbit": "4 Gbit/s, 1 Gbit/s a TCP flow",
    "10gbit": "10 Gbit/s",
}
CABLE_SHORT = {"2gbit": "2", "4gbit-flow-1gbit": "4, flow 1", "10gbit": "10"}
JOB_WORDS = {
    "fsdp2-512x1": "FSDP2, 8 MiB",
    "zero-512x1": "`zero()` stage 3, 8 MiB",
    "fsdp2-256x4": "FSDP2, 4 x 2 MiB",
    "ddp-512x1": "DDP, 8 MiB",
    "classic-512x1": "`zero()` stage 1 by all-reduce, 8 MiB",
}
ARM_WORDS = {
    "untouched": "NCCL untouched",
    "untouched again": "NCCL untouched, again (A/A)",
    "sockets 4 alone": "`NCCL_NSOCKS_PERTHREAD=4` alone",
    "sockets 1 x 4": "socket cure: `NCCL_SOCKET_NTHREADS=1`, `NCCL_NSOCKS_PERTHREAD=4`",
    "sockets 4 x 4": "the same with 4 threads",
    "pinned": "raised, the untouched table",
    "free": "raised, NCCL's own choice",
    "best": "raised, the sweep's best",
    "best of our offer": "raised, the best that our tables allow",
    "tuned": "`tune --headroom 8`, last half of the run",
}


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def filed_sweep():
    parts = [pd.read_csv(DATA / "sweep" / f"{cable}.csv.gz").assign(cable=cable) for cable in CABLES]
    return pd.concat(parts), pd.read_csv(DATA / "sweep" / "choice.csv")


def sweep_table():
    """What is there to win, by cable and size of the call."""
    found = won(*filed_sweep())
    heads = [
        "cable that we chose",
        "bytes",
        "A/A",
        "best of all 24",
        "best that NCCL offers",
        "best that our tables allow",
    ]
    rows = []
    for cable in CABLES:
        for band in BANDS:
            figures = [words(found[cable, band, name]) for name in ("again", "all", "nccl", "ours")]
            rows.append([CABLE_WORDS[cable], band, *figures])
    return table(heads, rows)


def gains_table():
    """How much shorter a step is than under NCCL untouched: a row for each arm, a column for each job on a cable."""
    columns = {}
    for cable, job in itertools.product(CABLES, JOB_WORDS):
        path = DATA / "gains" / f"gains-{cable}-{job}.csv.gz"
        if path.exists():
            columns[f"{CABLE_SHORT[cable]}: {JOB_WORDS[job]}"] = medians(pd.read_csv(path))
    rows = []
    for arm, arm_words in ARM_WORDS.items():
        cells = [""] * len(columns)
        for place, by_run in enumerate(columns.values()):
            if arm in by_run.index:
                n_runs = len(by_run.loc[arm].dropna())
                gained = "" if arm == "untouched" else f"{words(against(by_run, arm, 'untouched'))} "
                cells[place] = f"{gained}({n_runs})"
        rows.append([arm_words, *cells])
    return table(["arm (runs)", *columns], rows)


def by_turns(rows, base):
    """Percent by which each table is shorter than ``base``, all of which took turns in these runs.

    Of each round of turns (each table has two steps) the mean of the logs counts; the first rounds do not.
    """
    tables = rows["table"].max() + 1
    late = rows[rows["step"] >= FIRST * rows.groupby("run")["step"].transform("max")]
    rounds = late["step"] // (2 * tables)
    logs = np.log(late["ms"]).groupby([late["run"], rounds, late["table"]]).mean().unstack("table").dropna()
    return {table: shorter(logs[base] - logs[table]) for table in range(tables)}


def turns_table():
    """Gains of tables that took turns in one run: the ports are the same."""
    heads = ["cable that we chose", "job", "runs", "untouched table, again (A/A)", "NCCL's own choice"]
    heads += ["the sweep's best", "the best that our tables allow"]
    rows = []
    for cable, job in itertools.product(CABLES, JOB_WORDS):
        path = DATA / "gains" / f"gains-{cable}-{job}.csv.gz"
        raised = pd.read_csv(path).query("arm == 'raised'") if path.exists() else ()
        if len(raised):
            gained = by_turns(raised, TURNS.index("pinned"))
            figures = [words(gained[table]) for table in range(1, len(TURNS))]
            rows.append([CABLE_WORDS[cable], JOB_WORDS[job], raised["run"].nunique(), *figures])
    return table(heads, rows)


#: Files of the runs of `tune` on planted gains: of 350 to 800 steps, and of 2,000.
PLANTED_RUNS = ("plants-tune", "plants-headroom-512x1", "plants-headroom-256x1")
LONG_RUNS = ("plants-long-512x1", "plants-long-later-512x1")


def plants_table():
    """What was planted in a job with one block of 8 MiB, and what `tune` made of it."""
    heads = ["planted", "one flow gets", "2 channels, by turns", "4 channels", "1 again (A/A)"]
    rows = []
    for name, flow in PLANTS.items():
        turns = by_turns(pd.read_csv(DATA / "gains" / f"plants-turns-{name}.csv.gz"), 0)
        gained = [words(one) for one in list(turns.values())[1:]]
        for kinds, length in ((PLANTED_RUNS, ""), (LONG_RUNS, ", 2,000 steps")):
            paths = [DATA / "gains" / f"{runs}-{name}-verdicts.csv" for runs in kinds]
            if not (found := [pd.read_csv(path) for path in paths if path.exists()]):
                continue
            told = pd.concat(found)
            lost = " to ".join(f"{cost:.1f}" for cost in sorted(told["cost_s"].quantile([0.1, 0.9])))
            kept = int(told["kept"].sum())
            rows.append([f"{name} %{length}", flow, *gained, len(told), kept, f"{lost} s"])
    return table([*heads, "runs of `tune`", "kept", "the search lost, 8 of 10 runs"], rows)


def tuned_table():
    """The runs of `tune --headroom 8` by cable, and the gains in their own words."""
    rows = []
    for cable in CABLES:
        paths = [p for job in JOB_WORDS for p in (DATA / "gains").glob(f"gains-{cable}-{job}*-verdicts.csv")]
        told = pd.concat([pd.read_csv(path) for path in sorted(paths)]).sort_values("date")
        kept = told[told["kept"]]
        ends = kept[["speedup", "speedup_low", "speedup_high"]].to_numpy()
        says = "; ".join(words([100 * (1 - 1 / x) for x in one]) for one in ends)
        rows.append([CABLE_WORDS[cable], len(told), len(kept), says])
    return table(["cable that we chose", "runs", "kept", "shorter than NCCL untouched, by the report"], rows)


def page_tables():
    """The tables of docs/evidence.md by name."""
    found = {"sweep": sweep_table(), "gains": gains_table(), "turns": turns_table(), "plants": plants_table()}
    return found | {"tuned": tuned_table()}


def tables(options):
    """Put the tables into the page."""
    page = HERE.parents[1] / "docs" / "evidence.md"
    text = page.read_text(encoding="utf-8")
    for name, lines in page_tables().items():
        head, _, rest = text.partition(f"<!-- rows: {name} -->\n")
        text = f"{head}<!-- rows: {name} -->\n{lines}\n<!-- /rows -->" + rest.partition("<!-- /rows -->")[2]
    page.write_text(text, encoding="utf-8")


def span(text):
    first, _, end = text.partition(":")
    return range(int(first), int(end or int(first) + 1))


def now():
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


#: The commands by name.
PARTS = {"choice": choice, "sweep": sweep, "best": best, "calls": calls, "gains": gains, "plant": plant}
PARTS |= {"file": file_rows, "tables": tables}


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the launcher is ended too
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=PARTS)
    parser.add_argument("--launcher")
    parser.add_argument("--backend", default="gloo", help="of torch.distributed, whose collectives NCCL does")
    parser.add_argument(
        "--backend-module", default="", help="imported first by each rank: it registers the backend"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cable", choices=CABLES)
    parser.add_argument("--launches", default="0:8", help="or runs: first:end")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="begin no run after so long; what is done is not done again",
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kind", choices=("fsdp2", "zero", *SUMS), default="fsdp2")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--raised-steps", type=int, default=150)
    parser.add_argument("--tuned-steps", type=int, default=400)
    parser.add_argument("--plants", default=",".join(PLANTS))
    parser.add_argument("--what-runs", choices=("turns", "tune", "headroom"), default="turns")
    options = parser.parse_args()
    PARTS[options.what](options)


if __name__ == "__main__":
    main()
