"""``dynamiccl env``: the environment that lets a job be joined later."""

from __future__ import annotations

import json as json_module
import shlex
from typing import Annotated

import typer

from . import Force, Headroom, fail, refuse_traps


def env(
    name: Annotated[str | None, typer.Option(help="Name of the run folder; default: a new one.")] = None,
    headroom: Headroom = None,
    force: Force = False,
    json: Annotated[bool, typer.Option("--json", help="Print the variables as JSON.")] = False,
) -> None:
    """Print the environment of a job that a tuner joins later, or leaves and joins again.

    \b
    eval "$(dynamiccl env --name big)"
    torchrun --nproc-per-node 8 train.py &
    dynamiccl tune --attach "$DYNAMICCL_RUN"
    """
    from ...envs.nccl.build import PluginBuildError
    from ...envs.nccl.shm import RunFolder

    refuse_traps(None, force)
    try:
        variables = RunFolder.create(name).env(headroom)
    except (PluginBuildError, ValueError, OSError) as error:
        fail(str(error))
    if json:
        print(json_module.dumps(variables))
    else:
        print("\n".join(f"export {key}={shlex.quote(value)}" for key, value in variables.items()))
