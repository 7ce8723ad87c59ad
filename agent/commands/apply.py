"""``dynamiccl apply``: run a job under a fixed table, without a daemon."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from . import (
    BYTES_SCALE,
    CLUSTER,
    COMPUTE_SCALE,
    FORCE,
    HEADROOM,
    OR_UNTUNED,
    PATH,
    argument,
    cannot_start,
    command,
    emulation_here,
    fail,
    job,
    option,
    refuse_scales,
    refuse_traps,
    refusing,
    results,
    run_alone_if_off,
    untuned_if_refused,
)

if TYPE_CHECKING:
    from ...envs.nccl.shm import RunFolder
    from ...traces.records import Table


@command
@argument("table", type=PATH, help="File with a table, or the folder of a run that kept one.")
@job("The job, after --. Any program that uses NCCL.")
@option("--gate/--no-gate", default=True, help="Wait until all ranks agree. --no-gate: see above.")
@HEADROOM
@FORCE
@OR_UNTUNED
@CLUSTER
@BYTES_SCALE
@COMPUTE_SCALE
def apply(
    table: Path,
    command: list[str] | None,
    gate: bool,
    headroom: int | None,
    force: bool,
    or_untuned: bool,
    cluster: str | None,
    bytes_scale: float | None,
    compute_scale: float | None,
) -> None:
    """Run COMMAND under a fixed TABLE. NCCL decides all collectives that the table does not name.

    On each communicator all ranks use the table or none does; with --no-gate a process without the plugin hangs with
    its peers. Start it on every node, with one table and its run's --headroom.

    \b
    dynamiccl apply runs/tune/latest -- torchrun train.py
    dynamiccl apply table.json --no-gate -- mpirun ...
    """
    from ...envs.nccl.plugin.build import PluginBuildError
    from ...envs.nccl.tables import load_table, why_dropped
    from ..daemon.launcher import say

    run_alone_if_off(command, headroom)
    refuse_scales(cluster, bytes_scale, compute_scale)
    if not command:
        fail("say what to run, after --")
    program = shutil.which(command[0])
    if program is None:
        fail(f"{command[0]} is not a program that can be run")
    prepare = _prepare_together if gate else _prepare_alone
    untuned = untuned_if_refused(command if or_untuned else None, headroom)
    with untuned, refusing(OSError, ValueError, PluginBuildError):
        emulated, _ = emulation_here(cluster, bytes_scale, compute_scale)
        if emulated:
            os.environ.update(emulated.env())
        table = results(table)
        loaded = load_table(table)
        if why := why_dropped(table):
            say(f"the run of this table dropped it: {why}")
        environment, run = prepare(loaded, command, headroom, force)
    os.environ.pop("DYNAMICCL_TABLE", None)
    if run is not None:
        raise SystemExit(_together(loaded, command, environment, run))
    os.environ.pop("DYNAMICCL_RUN", None)
    say("with --no-gate no calls are counted; NCCL_DEBUG=INFO names our tuner if NCCL has loaded it")
    try:
        os.execve(program, command, {**os.environ, **environment})
    except OSError as error:  # a script without its first line
        cannot_start(command, error)


def _prepare_together(
    table: Table, command: list[str], headroom: int | None, force: bool
) -> tuple[dict[str, str], RunFolder]:
    """The job's environment, and a run folder with the table, which the ranks use like a tuner's."""
    from ...envs.nccl.plugin.build import job_env
    from ...envs.nccl.shm import MAX_RULES, RunFolder

    _check_size(table, MAX_RULES, "; up to 1024 with --no-gate")
    refuse_traps(command, force, table=table, emulated=bool(os.environ.get("DYNAMICCL_CLUSTER")))
    run = RunFolder.create()
    run.table.publish(table)
    nobody_reads_kernel_times = {"DYNAMICCL_SAMPLE_EVERY": "0"}
    return job_env(run.path, headroom, table.all_reduce) | nobody_reads_kernel_times, run


def _prepare_alone(
    table: Table, command: list[str], headroom: int | None, force: bool
) -> tuple[dict[str, str], None]:
    """The job's environment with the table in it. Nothing is watched: no probe, no profiler, no ring."""
    from ...envs.nccl.plugin.build import ALL_REDUCE_VARIABLE, nccl_env, plugin_path
    from ...envs.nccl.shm import encode_table

    _check_size(table, 1024, "")
    without_watching = ("autoload", "no profiler", "plugin path", "shared memory", "launch blocking")
    refuse_traps(command, force, table=table, but=without_watching)
    ours = {"DYNAMICCL_TABLE": f"hex:{encode_table(table).hex()}", ALL_REDUCE_VARIABLE: table.all_reduce}
    return {**nccl_env(plugin_path(), headroom=headroom), **ours}, None


def _check_size(table: Table, most: int, cure: str) -> None:
    if len(table.rules) > most:
        fail(f"the table has {len(table.rules)} rules, at most {most} can be applied{cure}")


def _together(table: Table, command: list[str], environment: dict[str, str], run: RunFolder) -> int:
    """Run the job until it ends. Returns its status.

    The ranks wait for each other through the probe. If NCCL on one rank has not loaded the plugin, none uses the table.
    """
    from ..daemon.applied import Watch
    from ..daemon.launcher import Launcher, Plan, say

    emulated = "; emulated times: counted, not waited" if os.environ.get("DYNAMICCL_CLUSTER") else ""
    watch = Watch(run, table, emulated, say)
    plan = Plan(command, [], str(run.path), os.devnull, environment)
    status = Launcher(plan, say, watch.run if table.rules else None).run()
    watch.end()
    try:
        told = "; ".join(filter(None, [_outcome(run), watch.told]))
        run.close()
    except OSError as error:  # somebody has cleaned up /dev/shm: the job's status does not depend on it
        told = f"the calls that used the table cannot be counted: {error}"
    say(told if table.rules else "the table has no rules: NCCL decided every call")
    return status


def _outcome(run: RunFolder) -> str:
    """Returns how many calls on this node used the table, or why none did."""
    from ...envs.nccl.run_folder import WORD
    from ...traces.reasons import NotTuning, Why

    calls = [ring.calls() for ring in run.rings()]
    asked, used = (sum(numbers) for numbers in zip(*calls, strict=True)) if calls else (0, 0)
    told = f"the table was used in {used:,} of {asked:,} calls"
    if used:
        return told
    why = None
    try:
        why = Why.unpacked((run.path / WORD).read_text())  # the ranks' last word, on the node of rank 0
    except OSError:
        if asked:
            why = NotTuning.NO_STEP_TO_APPLY()
    return f"{told}: {why or NotTuning.NOT_LOADED()}"
