"""``dynamiccl apply``: run a job under a fixed table, without a daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from . import (
    Argument,
    BytesScale,
    ComputeScale,
    EmulatedCluster,
    Force,
    Headroom,
    Option,
    emulation,
    fail,
    refuse_traps,
    refusing,
    results,
)

if TYPE_CHECKING:
    from ...envs.nccl.shm import RunFolder
    from ...traces.records import Table


def apply(
    table: Annotated[Path, Argument(help="A table, or the folder of a run that left one.")],
    command: Annotated[
        list[str] | None, Argument(help="The job, after --. Any program that uses NCCL.")
    ] = None,
    gate: Annotated[bool, Option(help="Without it: not for PyTorch's training loops, see above.")] = True,
    headroom: Headroom = None,
    force: Force = False,
    cluster: EmulatedCluster = None,
    bytes_scale: BytesScale = None,
    compute_scale: ComputeScale = None,
) -> None:
    """Run COMMAND with every collective that TABLE names done as it says; NCCL decides the rest.

    Nothing is tuned. As under `tune` all ranks take the table at the same call, once each has shown that NCCL has
    loaded the plugin, or none of them does; the last line says in how many calls it was used, or why in none. Start the
    same command on every node, or hand all variables that begin with NCCL_ and DYNAMICCL_ to the others (mpirun -x,
    srun --export=ALL).

    With --no-gate only the environment is set: the job may be JAX, nccl-tests or an inference server. A process has the
    table as soon as it loads the plugin, and nobody sees whether all do: one that does not hangs with its peers.

    \b
    dynamiccl apply runs/tune/latest -- torchrun --nproc-per-node 8 train.py
    dynamiccl apply table.json --no-gate -- mpirun ... all_gather_perf
    """
    import os
    import shutil

    from ...envs.nccl.plugin.build import PluginBuildError, nccl_env, plugin_path
    from ...envs.nccl.shm import MAX_RULES, encode_table
    from ...envs.nccl.tables import load_table
    from ..daemon.launcher import say

    with refusing(OSError, ValueError, PluginBuildError):
        loaded = load_table(results(table))
        most = MAX_RULES if gate else 1024
        if len(loaded.rules) > most:
            cure = "; up to 1024 with --no-gate" if gate else ""
            fail(f"{table}: {len(loaded.rules)} rules, at most {most} can be applied{cure}")
        path, message = plugin_path(), encode_table(loaded)
    if not command:
        fail("say what to run, after --")
    program = shutil.which(command[0])
    if program is None:
        fail(f"{command[0]} is not a program that can be run")
    if cluster:
        os.environ.update(emulation(cluster, bytes_scale, compute_scale)[0].env())
    if gate:
        refuse_traps(command, force, table=loaded, emulated="DYNAMICCL_CLUSTER" in os.environ)
        raise SystemExit(_together(loaded, command, headroom))
    os.environ.pop("DYNAMICCL_RUN", None)
    say(
        "without the gate nobody counts in how many calls the table is used; NCCL_DEBUG=INFO names our tuner if it is"
    )
    # Nothing is watched: no probe, no profiler, no ring.
    refuse_traps(
        command,
        force,
        table=loaded,
        but=("autoload", "no profiler", "plugin path", "shared memory", "launch blocking"),
    )
    environment = {**nccl_env(path, headroom=headroom), "DYNAMICCL_TABLE": f"hex:{message.hex()}"}
    os.execve(program, command, {**os.environ, **environment})


def _together(table: Table, command: list[str], headroom: int | None) -> int:
    """Run the job with the table confirmed in its run folder: its ranks take it as they do a tuner's. The job's status.

    Where the probe is, it has the gate; a plugin that NCCL has not loaded on some rank keeps it shut.
    """
    import os

    from ...envs.nccl.plugin.build import job_env
    from ...envs.nccl.shm import RunFolder
    from ..daemon.launcher import Launcher, Plan, say

    with refusing(ValueError, OSError):
        run = RunFolder.create()
        run.table.publish(table)
        environment = {
            **job_env(run.path, headroom),
            "DYNAMICCL_SAMPLE_EVERY": "0",
        }  # nobody reads kernel times
    os.environ.pop("DYNAMICCL_TABLE", None)
    status = Launcher(Plan(command, [], str(run.path), os.devnull, environment), say).run()
    say(_outcome(run) if table.rules else "the table has no rules: NCCL decided every call")
    run.close()
    return status


def _outcome(run: RunFolder) -> str:
    """In how many calls of the processes on this node the table was used, or why in none."""
    from ...envs.nccl.run_folder import WORD
    from ...traces.reasons import NotTuning

    calls = [ring.calls() for ring in run.rings()]
    asked, used = (sum(numbers) for numbers in zip(*calls, strict=True)) if calls else (0, 0)
    told = f"the table was used in {used:,} of {asked:,} calls"
    if used:
        return told
    try:
        why = (run.path / WORD).read_text()  # the ranks' last word, on the node of rank 0
    except OSError:
        why = "no step of a PyTorch optimizer was seen here; --no-gate is for other programs" if asked else ""
    return f"{told}: {why or NotTuning.NOT_LOADED()}"
