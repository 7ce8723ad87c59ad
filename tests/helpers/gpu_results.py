"""Folders of ``gpu-check`` with known truth, and the noise of real nodes, for tests of their analysis."""

import json
import math

import numpy as np
from dynamiccl.agent.checks.results.files import SCHEMA, append

#: Steps as NVIDIA's DGX nodes have them in the median (tests/data/step_noise.csv): robust standard deviation of a
#: step, correlation of one with the next.
MEDIAN_SD, MEDIAN_LAG1 = 0.009, 0.35
#: How long the slow part of the noise lasts: its correlation from one step to the next.
SLOW = 0.93
#: A checkpoint or a collection of garbage, every so many steps, takes this much longer.
LONG_EVERY, LONG = 75, 0.12


def node_noise(rng, steps, sd=MEDIAN_SD, lag1=MEDIAN_LAG1):
    """Log step times (steps,): a slow part that makes the correlation, a fast part, and periodic long steps."""
    share = min(max(1.15 * lag1, 0.0) / SLOW, 1.0)  # long steps hide some of it
    slow = np.empty(steps)
    slow[0] = rng.normal()
    for step in range(1, steps):
        slow[step] = SLOW * slow[step - 1] + np.sqrt(1 - SLOW**2) * rng.normal()
    logs = sd * (np.sqrt(share) * slow + np.sqrt(1 - share) * rng.normal(size=steps))
    logs[rng.integers(LONG_EVERY) :: LONG_EVERY] += np.log1p(LONG)
    return logs


def second_arm(steps):
    """Which steps of A B B A A B B A ... are B's."""
    place = np.arange(steps) % 4
    return (place == 1) | (place == 2)


def folder(path, rng, gain=0.0, steps=450, table="all_gather:8388608:ring/simple/4", **run):
    """A folder as a check of an H100 would leave it; ``gain``: part of the step that the table truly saves."""
    path.mkdir(parents=True)
    told = {
        "schema": SCHEMA,
        "began": "2026-11-26T12:00:00Z",
        "device": "NVIDIA H100 80GB HBM3",
        "gpus_per_node": 1,
        "nodes": 1,
        "ranks": 2,
        "placement": "hosts",
        "network": "ethernet",
        "emulated": None,
        "versions": {"dynamiccl": "0.2.0", "torch": "2.11.0", "nccl": "2.28.9", "driver": "580.159.04"},
        "commit": "0bb17c4babb9",
        "plugin": "0123456789abcdef",
        "environment": {"NCCL_IB_DISABLE": "1"},
        "parts": {"sweep": {"status": "done", "took_s": 90.0, "planned_s": 95.0, "ok": True}},
    }
    (path / "run.json").write_text(json.dumps(told | run))
    append(path, "sweep", sweep_rows(rng))
    for arm, comm, rows in (("untouched", "nccl", ""), ("table", "nccl", table)):
        append(path, "truth", [{"race": "best table", "arm": arm, "comm": comm, "table": rows, "share": 0.4}])
    us = 3e4 * np.exp(node_noise(rng, steps))
    is_second = second_arm(steps)
    us[is_second] *= 1 - gain
    names = np.where(is_second, "table", "untouched")
    add_steps(path, "best table", names, us)
    add_steps(path, "bound by compute", ["default"] * steps, 3e4 * np.exp(node_noise(rng, steps)))
    return path


def add_steps(path, race, arms, us):
    """Rows of steps.csv."""
    rows = [
        {"race": race, "arm": arm, "at": at, "us": f"{value:.2f}"}
        for at, (arm, value) in enumerate(zip(arms, us, strict=True))
    ]
    append(path, "steps", rows)


def sweep_rows(rng):
    """A sweep in which four channels are the fastest, and NCCL makes two."""
    for n_bytes in (2**20, 2**23):
        for func in ("all_gather", "reduce_scatter"):
            for asked, ran, slower in (
                ("auto", "ring/simple/2", 1.0),
                ("ring/simple/4", "ring/simple/4", 0.8),
                ("ring/simple/8", "ring/simple/8", 1.1),
            ):
                us = slower * (50 + n_bytes / 4000) * np.exp(rng.normal(0, 0.002))
                yield {
                    "comm": "nccl",
                    "func": func,
                    "n_bytes": n_bytes,
                    "asked": asked,
                    "ran": ran,
                    "calls": 20,
                    "first_us": round(3 * us, 2),
                    "p10_us": round(0.97 * us, 2),
                    "p50_us": round(us, 2),
                    "p90_us": round(1.06 * us, 2),
                    "right": True,
                    "obeyed": True,
                    "agreed": True,
                }


def most_by_luck(n, level, sure=0.95):
    """How many of ``n`` events with this chance there are at most, with probability ``sure``."""
    total = 0.0
    for count in range(n + 1):
        total += math.comb(n, count) * level**count * (1 - level) ** (n - count)
        if total >= sure:
            return count
    return n
