"""Golden runs: does a job train to the bit as it does untuned while its tables change, on NCCL's own library?

  python tests/tools/golden_nccl.py --launcher LAUNCHER --out FOLDER [--quick] [--controls [WORKLOAD]] [--bin FOLDER]

LAUNCHER is a program that runs a command on two hosts on which NCCL's library works. Its interface:

  run  [-r RANKS] [-o OUT] CMD             CMD once a rank on both hosts, with torchrun's variables
  tune [-r RANKS] [-o OUT] [-t OPTIONS] SCRIPT   `dynamiccl tune OPTIONS -- torchrun SCRIPT` on both hosts, with its
                                           results in OUT/h0 and OUT/h1

RANKS is per host. It takes dynamiccl, torchrun and python from the folder in the environment variable DYNAMICCL,
which this script sets to ``--bin``: so any installed tree can be tested, also one without these scripts. The hosts
have to be there already. It may have its own backend for torch.distributed (``--backend``, ``--backend-module``).

Jobs are named HOW-WORKLOAD-RANKS. WORKLOAD is fsdp2, zero1, zero2 or zero3; RANKS 2 (one a host) or 4 (two a host).
Sums of two numbers cannot differ by order, so equal losses count at 4. With ddp, classic (stage 1 of zero() by all-
reduce) and hsdp (2 replicas of 2 shards) all-reduces are tuned too (``--all-reduce``). hsdp adds two numbers at a
time. Other settings add the numbers of more than two ranks in another order: of ddp and classic at 4 ranks the losses
have to be equal up to the step in which the first all-reduce ran under another setting, and near after it. HOW is

  tune    `tune --policy random`: the whole product; its summary.json is kept
  turns   tables of our own are published (``golden_rank.py``): they take turns with the default, A B B A and B A A B
  few     the same: tables that hold at a few calls, for some steps, or until the next one

Each job's losses of every step on every rank are compared with those of the same job untuned, and every collective
over all ranks that recorded it. A run in which no table took hold proves nothing, and fails. ``--controls`` plants
three faults (see ``golden_job.py``) and tells how each is caught; without them zero mismatches prove nothing.

FOLDER gets one JSON file a job and ``table.json``. What is there already is not run again, so a script that was
stopped goes on where it was. Times mean nothing: the hosts may be namespaces of one busy machine. The exit status is
0 if everything that was asked for holds.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

HERE = Path(__file__).resolve().parent
WORKLOADS = ("fsdp2", "zero1", "zero2", "zero3", "ddp", "hsdp", "classic")
#: All-reduces are tuned too, with so many ranks.
SUMS = {"ddp": (2, 4), "hsdp": (4,), "classic": (2, 4)}
#: More than two ranks add: other settings change the order, and with it the last bits.
REORDERED = {(workload, 4) for workload in ("ddp", "classic")}
#: By so much of themselves such losses may differ.
NEAR = 1e-3
HOWS = {"tune": "", "turns": "abba,baab", "few": "few,whole,stay"}
ALL = [
    f"{how}-{workload}-{ranks}"
    for how in HOWS
    for workload in WORKLOADS
    for ranks in (2, 4)
    if ranks in SUMS.get(workload, (ranks,))
]
QUICK = ["tune-fsdp2-2", "tune-zero3-4", "turns-fsdp2-4", "few-fsdp2-2", "turns-zero1-4", "few-zero2-4"]
#: The name of each fault, and the job in which it is planted. "" is the untuned one.
CONTROLS = {"protocols": "", "late": "turns", "bit": ""}
#: Channels that a table may name, by ranks: each is a thread that spins, and two cores have them all.
HEADROOM = {2: 4, 4: 2}
#: Optimizer steps by ranks: two busy cores take a second for a step of four ranks.
STEPS = {2: {"tune": 500, "turns": 400, "few": 400}, 4: {"tune": 120, "turns": 120, "few": 120}}
#: What has to be equal on all ranks of a collective.
AGREE = ("algo", "proto", "n_channels", "n_bytes", "table_generation")
CALL = ["comm_id", "func", "seq"]
#: An all-reduce as a trace and as a ring names it.
SUM = ("all_reduce", "4")
#: Seconds that a job may take, and those that the launcher has to end its processes.
LIMIT_S, GRACE_S = 400, 20
#: A control hangs if it took so many times as long as the sound job, and so many seconds more.
TIMES, MORE_S = 2, 20


class Runner:
    """Runs the launcher with time limits."""

    def __init__(self, options):
        self.options = options
        self.work = options.out / "work"
        self.environment = {**os.environ, "DYNAMICCL": str(options.bin)}

    def launch(self, out, *arguments, limit_s=LIMIT_S):
        """(exit status, None after the limit; seconds). What has run already, by OUT/run.json, is not run again."""
        told = out / "run.json"
        if told.exists():
            found = json.loads(told.read_text())
            return found["exit_status"], found["seconds"]
        shutil.rmtree(out, ignore_errors=True)  # of a run that was cut off
        code, seconds = self._launch(arguments, limit_s)
        _write(told, {"exit_status": code, "seconds": seconds})
        return code, seconds

    def _launch(self, arguments, limit_s):
        began = time.monotonic()
        command = [str(self.options.launcher), *map(str, arguments)]
        process = subprocess.Popen(
            command,
            env=self.environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=sys.stderr,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        return code, round(time.monotonic() - began, 1)

    def job(self, workload, steps, losses, *more):
        """The arguments after ``python`` of a job."""
        kind, stage = ("zero", workload[-1]) if workload.startswith("zero") else (workload, "3")
        backend = ["--backend", self.options.backend, "--backend-module", self.options.backend_module]
        shape = ["--kind", kind, "--stage", stage, "--steps", steps, "--losses", losses]
        return [HERE / "golden_job.py", *shape, *backend, *more]

    def untuned(self, workload, ranks, out, limit_s=LIMIT_S, *more):
        """Run a job as it is."""
        self.environment.pop("NCCL_MIN_NCHANNELS", None)
        job = self.job(workload, STEPS[ranks]["tune"], out / "losses", *more)
        return self.launch(out, "run", "-r", ranks // 2, "-o", out, "python", "-u", *job, limit_s=limit_s)

    def tuned(self, how, workload, ranks, out, limit_s=LIMIT_S, *more):
        """Run a job whose tables change."""
        job = self.job(workload, STEPS[ranks][how], out / "losses", *more)
        self.environment.pop("NCCL_MIN_NCHANNELS", None)
        if how == "tune":
            seed = WORKLOADS.index(workload) + ranks
            # The channels are raised by the job's own environment: the option needs an earlier run without it.
            self.environment["NCCL_MIN_NCHANNELS"] = str(HEADROOM[ranks])
            asked = f"--policy random --seed {seed} --budget 0.9 --no-memory"
            asked += " --all-reduce=protocol" * (workload in SUMS)
            return self.launch(
                out, "tune", "-r", ranks // 2, "-o", out, "-t", asked, "--", *job, limit_s=limit_s
            )
        shape = ["--kinds", HOWS[how], "--headroom", HEADROOM[ranks], "--out", out / "calls"]
        shape += ["--all-reduce", "protocol"] * (workload in SUMS)
        publisher = ["python", HERE / "golden_rank.py", *shape, "--", "python", "-u"]
        return self.launch(out, "run", "-r", ranks // 2, "-o", out, *publisher, *job, limit_s=limit_s)


def end(process):
    """End the launcher and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def losses_of(folder):
    """The losses of all steps by rank, as text that tells each bit."""
    found = sorted(folder.glob("losses-*.json"), key=lambda path: int(path.stem.split("-")[1]))
    return [json.loads(path.read_text()) for path in found]


def digest(losses):
    return hashlib.sha256(json.dumps(losses).encode()).hexdigest()[:16]


def first_difference(losses, untuned):
    """The first step at which some rank has another loss than untuned; None: all are equal."""
    pairs = zip(losses, untuned, strict=True)
    return min(
        (i for a, b in pairs for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), default=None
    )


def furthest(losses, untuned):
    """The largest difference of a loss from that untuned, as a part of it."""
    pairs = [(a, b) for one, two in zip(losses, untuned, strict=True) for a, b in zip(one, two, strict=False)]
    return max(abs(float.fromhex(a) / float.fromhex(b) - 1) for a, b in pairs)


def first_tuned_sum(out, events, steps):
    """The first step, from 0, in which an all-reduce ran under a table with a row; None: none did.

    By the place of the call among the all-reduces of rank 0, which are as many in each step.
    """
    sums = events[(events["rank"] == 0) & (events["func"].astype(str).isin(SUM))].sort_values("seq")
    places = np.flatnonzero(sums["table_generation"].isin(list(tables_of(out))))
    return int(places[0] * steps // len(sums)) if len(places) else None


def events_of(out):
    """The collectives that were recorded on all ranks."""
    traces = sorted(out.glob("h*/trace/events-*.parquet"))
    if traces:
        frames = [pd.read_parquet(path) for path in traces]
    else:
        frames = [pd.DataFrame(dict(np.load(path))) for path in sorted(out.glob("calls/calls-*.npz"))]
    frames = [frame.rename(columns={"generation": "table_generation"}) for frame in frames if len(frame)]
    if not frames:
        return pd.DataFrame(columns=[*CALL, *AGREE, "rank"])
    return pd.concat(frames, ignore_index=True)[[*CALL, *AGREE, "rank"]]


def compare(events):
    """(collectives that two ranks or more have recorded, those of them that differ, the first such in words)."""
    calls = events.groupby(CALL)
    shared = events[calls["rank"].transform("nunique") > 1]
    if shared.empty:
        return 0, 0, ""
    calls = shared.groupby(CALL)
    differs = (calls[list(AGREE)].nunique() > 1).any(axis=1)
    bad = differs[differs].index
    example = ""
    if len(bad):
        rows = shared.set_index(CALL).loc[[bad[0]]].reset_index()
        views = (
            f"rank {r['rank']}: " + ", ".join(f"{n} {r[n]}" for n in AGREE) for r in rows.to_dict("records")
        )
        example = "; ".join(views)
    return calls.ngroups, len(bad), example


def kind_of(table):
    if table.get("turn_steps"):
        return "baab" if table.get("swap") else "abba"
    if table.get("one_of"):
        return "few"
    return "whole" if table.get("trial_steps") else "stay"


def tables_of(out):
    """The kind of each table with a row that was published, by generation."""
    published = out / "calls" / "published.json"
    if published.exists():
        return {one["generation"]: one["kind"] for one in json.loads(published.read_text())["tables"]}
    log = out / "h0" / "trace" / "windows.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    tables = [line["table"] for line in lines if line["kind"] == "table"]
    return {table["generation"]: kind_of(table) for table in tables if table.get("rules")}


def switches(out, events):
    """How many tables with a row took hold, by kind."""
    ran = set(events["table_generation"].tolist())
    kinds = [kind for generation, kind in tables_of(out).items() if generation in ran]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def audited(runner, out):
    """What `dynamiccl doctor` says of the traces of both hosts."""
    command = [
        runner.options.bin / "dynamiccl",
        "doctor",
        "--json",
        "--trace",
        out / "h0",
        "--trace",
        out / "h1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    try:
        return json.loads(done.stdout)["checked"]["settings"]
    except (ValueError, KeyError):
        return f"no answer (status {done.returncode}): {done.stderr.strip()[-200:]}"


def summary_of(out):
    """The summary of rank 0's host, whole; the folder of this run is named OUT."""
    path = out / "h0" / "summary.json"
    return json.loads(path.read_text().replace(str(out), "OUT")) if path.exists() else None


def untuned(runner, workload, ranks):
    """The losses of a job untuned, run once."""
    path = runner.options.out / f"untuned-{workload}-{ranks}.json"
    folder = runner.work / path.stem
    if not path.exists() or not losses_of(folder / "losses"):
        code, seconds = runner.untuned(workload, ranks, folder)
        losses = losses_of(folder / "losses")
        if code or len(losses) != ranks:
            sys.exit(f"{path.stem}: the untuned job ended with status {code}; its output is in {folder}")
        found = {"workload": workload, "ranks": ranks, "steps": len(losses[0]), "seconds": seconds}
        _write(path, found | {"digest": digest(losses), "last_loss": float.fromhex(losses[0][-1])})
    return losses_of(folder / "losses"), json.loads(path.read_text())


def golden(runner, name):
    """Run one job and compare it."""
    how, workload, ranks = name.split("-")
    ranks = int(ranks)
    expected, reference = untuned(runner, workload, ranks)
    out = runner.work / name
    code, seconds = runner.tuned(how, workload, ranks, out)
    losses = losses_of(out / "losses")
    steps = STEPS[ranks][how]
    expected = [one[:steps] for one in expected]
    events = events_of(out)
    compared, mismatches, example = compare(events)
    kinds = switches(out, events)
    found = {
        "job": name,
        "how": how,
        "workload": workload,
        "ranks": ranks,
        "steps": steps,
        "exit_status": code,
    }
    found |= {"compared": compared, "mismatches": mismatches, "example": example}
    found |= {"switches": sum(kinds.values()), "kinds": kinds}
    found["channels_run"] = sorted(map(int, events["n_channels"].unique()))
    found |= {"losses": sum(map(len, losses)), "losses_equal": losses == expected, "digest": digest(losses)}
    found |= {"untuned_digest": digest(expected), "seconds": seconds, "untuned_seconds": reference["seconds"]}
    if (workload, ranks) in REORDERED and len(losses) == ranks:
        found["first_difference"] = first_difference(losses, expected)
        found |= {
            "first_tuned_sum": first_tuned_sum(out, events, steps),
            "furthest": furthest(losses, expected),
        }
    if how == "tune":
        found |= {"doctor": audited(runner, out), "summary": summary_of(out)}
    found["holds"] = code == 0 and holds(found)
    return found


def holds(found):
    """Whether a job's counts show that tuning changes nothing, and that there was tuning."""
    is_whole = found["losses"] == found["ranks"] * found["steps"]
    was_tuned = found["switches"] > 0 and found["compared"] > 0
    return bool(trains_alike(found) and is_whole and was_tuned and not found["mismatches"])


def trains_alike(found):
    """Whether the losses are those untuned: to the bit, or near from the first sum in another order on."""
    if found["losses_equal"] or "first_difference" not in found:
        return found["losses_equal"]
    first = found["first_tuned_sum"]
    return first is not None and found["first_difference"] > first and found["furthest"] < NEAR


def control(runner, fault):
    """Plant a fault; how it is caught, if it is."""
    workload = runner.options.controls
    expected, reference = untuned(runner, workload, 2)
    out = runner.work / f"control-{fault}-{workload}"
    more = ["--fault", fault]
    limit_s = TIMES * reference["seconds"] + MORE_S
    if fault == "late":
        more += ["--late-tuner", _late_tuner(runner)]
    if CONTROLS[fault]:
        code, seconds = runner.tuned(CONTROLS[fault], workload, 2, out, limit_s, *more)
    else:
        code, seconds = runner.untuned(workload, 2, out, limit_s, *more)
    losses = losses_of(out / "losses")
    steps = STEPS[2][CONTROLS[fault] or "tune"]
    compared, mismatches, example = compare(events_of(out))
    caught = []
    if code is None and not losses:
        caught.append(
            f"the job hangs: not over after {limit_s:.0f} s, untuned it takes {reference['seconds']:.0f} s"
        )
    elif code:
        caught.append(f"the job fails with status {code}")
    elif (step := first_difference(losses, [one[:steps] for one in expected])) is not None:
        caught.append(f"the losses differ from step {step} on")
    if mismatches:
        caught.append(f"{mismatches} of {compared} collectives with different settings: {example}")
    found = {
        "control": fault,
        "workload": workload,
        "caught": caught,
        "exit_status": code,
        "seconds": seconds,
    }
    return found | {"compared": compared, "mismatches": mismatches}


def _late_tuner(runner):
    """Build the plugin of the control with one rank late; its path."""
    library = runner.work / "golden_late.so"
    runner.work.mkdir(parents=True, exist_ok=True)
    include = HERE.parent.parent / "envs" / "nccl" / "plugin"
    compiler = ["cc", "-std=c11", "-shared", "-fPIC", "-O1", f"-I{include}"]
    subprocess.run([*compiler, "-o", library, HERE / "golden_late.c", "-ldl"], check=True)
    return library


def _write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def kept(path, run):
    """The result in a file, or that of ``run``, which is then kept there."""
    if not path.exists():
        _write(path, run())
    return json.loads(path.read_text())


def tell(found):
    equal = "equal" if found["losses_equal"] else "DIFFERENT"
    if "first_difference" in found and not found["losses_equal"]:
        equal = (
            f"equal up to step {found['first_difference']} (first all-reduce under a table: step "
            f"{found['first_tuned_sum']}), then within {found['furthest']:.1g} of themselves, not"
        )
    kinds = ", ".join(f"{n} {kind}" for kind, n in found["kinds"].items())
    print(
        f"{found['job']:<15}{found['compared']:>7,} collectives compared, {found['mismatches']} mismatches, "
        f"{found['switches']} switches ({kinds}), {found['losses']:,} losses {equal} to the bit"
        + ("" if found["holds"] else f"  FAILS (status {found['exit_status']})"),
        flush=True,
    )


def parsed():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launcher", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--bin", type=Path, default=Path(sys.executable).parent, help="folder of the tree to test"
    )
    parser.add_argument("--backend", default="ncclcpu")
    parser.add_argument("--backend-module", default="nccl_cpu")
    parser.add_argument("--quick", action="store_true", help="six jobs")
    parser.add_argument(
        "--controls",
        nargs="?",
        const="fsdp2",
        choices=WORKLOADS,
        help="the positive controls too, in this workload",
    )
    parser.add_argument("--jobs", default="", help="these only, after commas; none: no job")
    options = parser.parse_args()
    options.out = options.out.absolute()
    options.bin = options.bin.absolute()
    names = options.jobs.split(",") if options.jobs else QUICK if options.quick else ALL
    options.names = [] if names == ["none"] else names
    if unknown := [name for name in options.names if name not in ALL]:
        parser.error(f"there is no job {unknown[0]}: know {', '.join(ALL)}")
    return options


def main():
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the launcher is ended too
    runner = Runner(options)
    jobs, controls = [], []
    for fault in CONTROLS if options.controls else ():
        controls.append(
            kept(
                options.out / f"control-{fault}-{options.controls}.json",
                lambda fault=fault: control(runner, fault),
            )
        )
        told = "; ".join(controls[-1]["caught"])
        print(f"control {fault}: " + (f"caught: {told}" if told else "NOT CAUGHT"), flush=True)
    for name in options.names:
        jobs.append(kept(options.out / f"{name}.json", lambda name=name: golden(runner, name)))
        tell(jobs[-1])
    rows = [{key: value for key, value in job.items() if key != "summary"} for job in jobs]
    _write(options.out / "table.json", {"jobs": rows, "controls": controls})
    total = sum(job["compared"] for job in jobs)
    print(
        f"{len(jobs)} jobs, {total:,} collectives compared, {sum(j['mismatches'] for j in jobs)} mismatches, "
        f"{sum(j['switches'] for j in jobs)} switches, {sum(j['losses_equal'] for j in jobs)} with equal losses; "
        f"{sum(bool(c['caught']) for c in controls)} of {len(controls)} controls caught"
    )
    sys.exit(not (all(job["holds"] for job in jobs) and all(one["caught"] for one in controls)))


if __name__ == "__main__":
    main()
