"""``dynamiccl sweep``: measure a grid of settings on this machine, and write a table for ``apply``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ...traces.here import program
from . import (
    ALL_REDUCE,
    CLUSTER,
    EMULATION,
    JSON,
    OUTPUT,
    PATH,
    command,
    emulation,
    fail,
    option,
    refusing,
    results,
)

if TYPE_CHECKING:
    from ..checks.sweep.rank import Cell
    from ..checks.sweep.room import Result

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
#: The largest message: its buffers lie in each rank's memory twice.
_MOST = 1 << 32


@command
@option(
    "--trace",
    type=PATH,
    metavar="RUN",
    help="Take the messages from this run, results of tune. Start as many ranks as its communicators have: a "
    "table holds for communicators of the size that was measured.",
)
@option(
    "--bytes",
    metavar="FROM:TO",
    help="Take all powers of two in this range, such as 64KiB:64MiB. That is the default.",
)
@option(
    "--rounds", type=click.IntRange(4, 1000), default=8, help="Visits of each setting; half of them choose."
)
@option("--ranks", type=click.IntRange(1, 64), help="Ranks that it starts. Default: one a GPU; emulated: 2.")
@option(
    "--headroom",
    type=click.IntRange(1, 64),
    help="Make NCCL prepare this many channels, and try as many. The baseline is still NCCL untouched: it is "
    "asked first, in processes without this option.",
)
@ALL_REDUCE
@option("--out", type=PATH, group=OUTPUT, help="New folder for the results. Default: runs/sweep/DATE.")
@option(
    "--judge",
    type=PATH,
    metavar="FOLDER",
    group=OUTPUT,
    help="Measure nothing: judge the rows of this folder.",
)
@CLUSTER
@option(
    "--backend", group=EMULATION, help="Another backend of torch.distributed that calls NCCL for CPU tensors."
)
@option(
    "--backend-module",
    group=EMULATION,
    help="With --backend: the module that registers it. It is imported: it is trusted.",
)
@JSON
def sweep(
    trace: Path | None,
    bytes: str | None,
    rounds: int,
    ranks: int | None,
    headroom: int | None,
    all_reduce: str | None,
    out: Path | None,
    judge: Path | None,
    cluster: str | None,
    backend: str | None,
    backend_module: str | None,
    json: bool,
) -> None:
    """Measure all-gather and reduce-scatter under each algorithm, protocol and channel count, and write a table.

    The best call is not always the best step: confirm the table with your job. Half of the rounds choose, the others
    score. On several nodes start it by torchrun.

    \b
    dynamiccl sweep --bytes 1MiB:64MiB
    torchrun --nnodes 2 --nproc-per-node 8 ... --no-python dynamiccl sweep
    dynamiccl sweep --judge runs/sweep/2026-11-29T101500
    """
    from ..checks.sweep.room import result_of

    if judge is not None:
        with refusing(ValueError, OSError):
            found = result_of(judge)
        _tell(found, json)
        return
    _check_options(trace, bytes, cluster, backend, backend_module)
    way = all_reduce or ""
    if "WORLD_SIZE" not in os.environ:
        _check_messages(trace, bytes, way)
        _start_ranks(ranks, backend, cluster)
    _set_environment(cluster, way)
    folder = out or Path("runs/sweep", f"{datetime.now(UTC):%Y-%m-%dT%H%M%S}")
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        _make(folder)
    with refusing(ValueError, OSError):
        cells = _cells(trace, bytes, int(os.environ["WORLD_SIZE"]), way)
    name = backend or ("emulated" if cluster else "nccl")
    what = {
        "cells": cells,
        "rounds": rounds,
        "backend": name,
        "module": backend_module or "",
        "all_reduce": way,
    }
    _as_rank(what, headroom, folder, cluster)
    if is_first:
        with refusing(ValueError, OSError):
            found = result_of(folder)
        _tell(found, json)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads can abort a process that tears down


def _check_options(
    trace: Path | None, bytes: str | None, cluster: str | None, backend: str | None, module: str | None
) -> None:
    """Refuse options that exclude each other, an unknown cluster, and a Python without torch."""
    if trace is not None and bytes is not None:
        fail("--trace and --bytes both say which messages: give one of them")
    if backend is not None and cluster is not None:
        fail("--cluster emulates NCCL, --backend calls it: give one of them")
    if module and backend is None:
        fail("--backend-module registers a backend: give its name with --backend")
    if cluster:
        emulation(cluster)
    _require_torch()


def _make(folder: Path) -> None:
    """Make the folder of the results. It must not hold others."""
    with refusing(OSError):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            fail(f"{folder} is not empty: give another folder")
        folder.mkdir(parents=True, exist_ok=True)


def _require_torch() -> None:
    from importlib.util import find_spec

    from ...traces.here import pip_install

    if find_spec("torch") is None:
        fail(f"a sweep needs torch: {pip_install('train')}")


def _start_ranks(ranks: int | None, backend: str | None, cluster: str | None) -> None:
    """Become torchrun with this very command as its ranks."""
    from ...envs.nccl.steps.nvml import visible_gpus

    if cluster is None and backend is None:
        gpus = len(visible_gpus())
        if gpus == 0:
            fail(
                "no GPU is visible here: --cluster NAME measures an emulated cluster, as in --cluster dgx-h100-2x8"
            )
        ranks = ranks or gpus
        if ranks > gpus:
            fail(f"{ranks} ranks, and {gpus} GPUs are visible here: NCCL wants a GPU a rank")
    ranks = ranks or 2
    if ranks < 2:
        fail("one rank has nobody to talk to: start the command on several nodes by torchrun, see --help")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    words = [
        *program("torch.distributed.run"),
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--no-python",
        "--",
    ]
    os.execv(sys.executable, [*words, *program(), *sys.argv[1:]])


def _set_environment(cluster: str | None, all_reduce: str) -> None:
    """Of NCCL and of the emulated cluster, before torch is imported, which reads the latter."""
    from ...envs.nccl.plugin.build import ALL_REDUCE_VARIABLE, PluginBuildError, nccl_env, plugin_path
    from ...envs.sim.emulated.settings import Emulated

    with refusing(PluginBuildError, OSError):
        os.environ.update(nccl_env(plugin_path()))
    os.environ[ALL_REDUCE_VARIABLE] = all_reduce  # "": an earlier one must not count
    if cluster:
        os.environ.update(Emulated(cluster, bytes_scale=1, compute_scale=1).env())
    os.environ.pop("DYNAMICCL_RUN", None)  # a run around this command has no part in it


def _as_rank(what: dict[str, Any], headroom: int | None, folder: Path, cluster: str | None) -> None:
    """Measure, as one of the ranks. ``what``: the plan without headroom."""
    from ...envs.nccl.plugin.build import channels_env
    from ..checks.sweep.manifest import write_manifest
    from ..checks.sweep.rank import Plan, Rank, Sweep, nccl_version, untouched
    from ..daemon.launcher import say

    plan = Plan(**what, headroom=headroom)
    with refusing(ValueError, OSError, RuntimeError):
        own = untouched(plan) if headroom is not None else None
        os.environ.update(channels_env(headroom))
        rank = Rank(plan)
        try:
            measured = Sweep(rank, folder, say)
            if rank.number == 0:
                write_manifest(folder, plan, cluster, nccl_version(), own, {})
            found = measured.run(own)
            if rank.number == 0:
                write_manifest(folder, plan, cluster, nccl_version(), own, found)
        finally:
            rank.close()


def _cells(trace: Path | None, text: str | None, world: int, all_reduce: str) -> tuple[Cell, ...]:
    """The messages, each a whole number of float32 a rank. Raises ValueError."""
    from ...traces.names import tuned_funcs
    from ..checks.sweep.rank import Cell

    funcs = tuned_funcs(all_reduce)
    wanted = (
        _of_trace(trace, funcs)
        if trace
        else [(func, n) for func in funcs for n in _range(text or "64KiB:64MiB")]
    )
    unit = 4 * world
    return tuple(dict.fromkeys(Cell(func, max(n // unit, 1) * unit) for func, n in wanted))


def _range(text: str) -> list[int]:
    """``64KiB:64MiB`` -> the powers of two in it. Raises ValueError."""
    first, colon, last = text.partition(":")
    low, high = _bytes(first), _bytes(last if colon else first)
    found = [1 << k for k in range(33) if low <= 1 << k <= high]
    if not found or high > _MOST:
        raise ValueError(f"--bytes {text} holds no power of two up to 4GiB: give a range such as 64KiB:64MiB")
    return found


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,12})(KiB|MiB|GiB)?", text.strip())
    if not found:
        raise ValueError(f"--bytes: {text!r} is no size: write it like 65536, 64KiB or 4MiB")
    return int(found[1]) * _UNITS[found[2] or ""]


def _of_trace(run: Path, funcs: Sequence[str]) -> list[tuple[str, int]]:
    """Of each collective and size class of a run the message that most bytes go to. Raises ValueError."""
    from ...traces.files import Trace
    from ...traces.queries.slots import with_sizes

    path = results(run)
    events = Trace.read(path / "trace" if (path / "trace").is_dir() else path).events
    events = events[events["func"].isin(funcs)]
    events = with_sizes(events) if len(events) else events
    if not len(events) or not (events["asked"] > 0).any():
        raise ValueError(f"{path} shows no {' or '.join(funcs)} that NCCL asked a tuner about: give --bytes")
    events = events[events["asked"] > 0]
    found: list[tuple[str, int]] = []
    slots: Any = events.groupby(["func", "size_class"])
    for (func, _), rows in slots:
        moved = rows.groupby("asked")["n_bytes"].sum()
        found.append((str(func), cast(int, moved.idxmax())))
    return found


def _check_messages(trace: Path | None, text: str | None, all_reduce: str) -> None:
    """Tell of a mistake before ranks are started."""
    from ...traces.files import TraceError
    from ...traces.names import tuned_funcs

    with refusing(ValueError, OSError, TraceError):
        _of_trace(trace, tuned_funcs(all_reduce)) if trace else _range(text or "64KiB:64MiB")


def _tell(found: Result, json: bool) -> None:
    """Print what a folder says."""
    if json:
        print(found.as_json())
        return
    from rich.table import Table

    from ...traces.records import format_range
    from ..report.terminal import wide_terminal

    console = wide_terminal()
    of = (
        f"emulated cluster {found.manifest['emulated']}, emulated times: "
        if found.manifest["emulated"]
        else ""
    )
    shape = found.manifest["communicator"]
    head = f"{of}{shape['n_ranks']} ranks on {shape['n_nodes']} nodes, {found.manifest['hardware']}"
    console.print(f"{head}, NCCL {found.manifest['nccl'] or 'not loaded'}", markup=False)
    table = Table(
        "collective", "bytes", "NCCL untouched", "untouched again", "best", "saves, with its interval"
    )
    for cell in found.cells:
        mark = "" if cell.is_sure else ", not sure"
        size = format_range(cell.n_bytes, cell.n_bytes)
        best = "untouched" if cell.best == "untouched" else cell.best
        table.add_row(cell.func, size, cell.untouched, str(cell.again), best, f"{cell.saved}{mark}")
    console.print(table)
    console.print(found.line, markup=False, soft_wrap=True)
    if found.table is None:
        console.print(f"no table: {found.why}", markup=False, soft_wrap=True)
        return
    headroom = found.manifest["headroom"]
    option = f" --headroom {headroom}" if headroom is not None else ""
    option += f" --cluster {found.manifest['emulated']}" if found.manifest["emulated"] else ""
    console.print(
        f"confirm it with your job: dynamiccl apply{option} {found.table} -- COMMAND",
        markup=False,
        soft_wrap=True,
    )
