"""``dynamiccl apply``: run a job under a fixed table, without a daemon."""

from pathlib import Path
from typing import Annotated

import typer

from . import Force, Headroom, fail, refuse_traps


def apply(
    table: Annotated[
        Path,
        typer.Argument(
            help="A table: our JSON, the CSV of NVIDIA's tuner plugin, NCCL_ALGO= lines, or a run's folder."
        ),
    ],
    command: Annotated[
        list[str] | None, typer.Argument(help="The job, after --. Any program that uses NCCL.", show_default=False)
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of its communicators, where lines need it.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of them, where lines need it.")] = None,
    convert: Annotated[
        str | None,
        typer.Option(help="Only print the table: json, csv (NVIDIA's) or env (NCCL_ALGO).", show_default=False),
    ] = None,
    headroom: Headroom = None,
    force: Force = False,
) -> None:
    """Run COMMAND with every collective that TABLE names done as it says; NCCL decides the rest.

    Only the environment is set: the job may be PyTorch, JAX or nccl-tests. The table travels in the environment, so
    hand all variables that begin with NCCL_ and DYNAMICCL_ to the other nodes (mpirun -x, srun --export=ALL); every
    rank then has the same bytes, which the plugin checks.

    \b
    dynamiccl apply runs/tune/latest -- torchrun --nproc-per-node 8 train.py
    dynamiccl apply table.json -- torchrun --nproc-per-node 8 train.py
    dynamiccl apply nccl_tuner.conf --ranks 16 --nodes 2 --convert json
    """
    import os
    import shutil

    from ...envs.nccl.build import PluginBuildError, nccl_env, plugin_path
    from ...envs.nccl.shm import encode_table
    from ...envs.nccl.table_env import to_env
    from ...envs.nccl.tables import load_table, to_csv, to_json

    try:
        loaded = load_table(table, n_ranks=ranks, n_nodes=nodes)
        if convert is not None:
            if convert not in ("json", "csv", "env"):
                fail(f"--convert is json, csv or env, not {convert}")
            if convert == "env":
                variables, lost = to_env(loaded)
                print("".join(f"# lost: {text}\n" for text in lost), end="")
                print("".join(f"{key}='{value}'\n" for key, value in variables.items()), end="")
            else:
                print(to_json(loaded) if convert == "json" else to_csv(loaded), end="")
            return
        if len(loaded.rules) > 1024:
            fail(f"{table}: {len(loaded.rules)} rules, the plugin holds 1024")
        environment = {
            **nccl_env(plugin_path(), headroom=headroom),
            "DYNAMICCL_TABLE": f"hex:{encode_table(loaded).hex()}",
        }
    except (ValueError, PluginBuildError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{table} cannot be read: {error.strerror}")
    if not command:
        fail("say what to run, after --, or --convert json to look at the table")
    program = shutil.which(command[0])
    if program is None:
        fail(f"{command[0]} is not a program that can be run")
    os.environ.pop("DYNAMICCL_RUN", None)
    # Nothing is watched: no probe, no profiler, no ring.
    refuse_traps(command, force, table=loaded, but=("autoload", "no profiler", "plugin path", "shared memory"))
    os.execve(program, command, {**os.environ, **environment})
