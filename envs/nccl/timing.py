"""Times the plugin in a C loop (bench.c): what a call costs the thread that enqueues a collective.

A core is often shared with a neighbour's thread, which doubles every figure while it computes. So the measurements are
taken in rounds, and of these the quarter counts in which reading the clock, which is no code of ours, took least.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...traces.records import PAIRS, Decision, Rule, Table
from .build import FLAGS, compile_once, plugin_path
from .shm import RunFolder, encode_table

_CLASS = 8, 1  # ranks and nodes of bench.c's communicator


@dataclass(frozen=True)
class Timing:
    """One call's cost. Batches of 128 calls each were timed; a percentile is one over batches."""

    name: str
    percentiles: dict[str, float]  # p50, p90, p99, p99.9 in nanoseconds


def table_of(n_rows: int) -> Table:
    """A table with a row for each message of the benchmark and further rows of other classes around them."""
    rules: list[Rule] = []
    for sizes in [_CLASS, *((i, 1) for i in range(1, n_rows) if i != _CLASS[0])]:
        for size in range(32):
            for func in ("all_gather", "reduce_scatter"):
                decision = Decision(*PAIRS[size % 3], 8)
                rules.append(Rule(*sizes, func, 2 ** (size - 1) + 1 if size else 0, 2**size, decision))
    return Table(1, tuple(rules[:n_rows]))


def time_plugin() -> list[Timing]:
    """Run the benchmark. Each question needs a cost table, filled by NCCL: rows "itself" are less the median of that.

    Raises PluginBuildError when it cannot be compiled, OSError when it cannot run.
    """
    program = compile_once("bench", ("bench.c",), FLAGS)
    run = RunFolder.create()
    names = {
        "clock": "clock_gettime alone",
        "nothing": "filling a cost table alone",
        "getCollInfo/0": "getCollInfo, 64 rows",
        "getCollInfo/1": "getCollInfo, 1000 rows",
        "ring": "ring write, no clock",
        "event": "profiler start + stop, with clock",
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            tables = []
            for n_rows in (64, 1000):
                tables.append(Path(folder) / f"table-{n_rows}")
                tables[-1].write_bytes(encode_table(table_of(n_rows)))
            command = [str(program), str(plugin_path()), *map(str, tables)]
            done = subprocess.run(
                command, env={**os.environ, "DYNAMICCL_RUN": str(run.path)}, capture_output=True, text=True, check=False
            )
    finally:
        run.close()
    if done.returncode:
        raise OSError(f"the benchmark failed: {done.stderr.strip() or done.returncode}")
    batches: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for line in done.stdout.splitlines():
        name, *values = line.split()
        batches[name].append(np.array(values, float))
    clock = np.median(batches["clock"], axis=1)
    quiet = np.argsort(clock)[: len(clock) // 4]
    rows = {name: _timing(names[name], np.array(rounds)[quiet].ravel()) for name, rounds in batches.items()}
    filling = rows["nothing"].percentiles["p50"]
    net = [
        Timing(f"{row.name}, itself", {name: value - filling for name, value in row.percentiles.items()})
        for key, row in rows.items()
        if key.startswith("getCollInfo/")
    ]
    return [*rows.values(), *net]


def _timing(name: str, samples: np.ndarray) -> Timing:
    values = np.percentile(samples, [50, 90, 99, 99.9])
    return Timing(name, dict(zip(("p50", "p90", "p99", "p99.9"), map(float, values), strict=True)))
