"""``dynamiccl env``: print the environment of a job that a tuner can join later."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from pathlib import Path

import click

from . import (
    ALL_REDUCE,
    BYTES_SCALE,
    CLUSTER,
    COMPUTE_SCALE,
    FORCE,
    HEADROOM,
    JSON,
    UNTOUCHED,
    command,
    emulation_here,
    fail,
    off_here,
    option,
    refuse_scales,
    refuse_traps,
    refusing,
    untouched_from,
)


@command
@option("--name", help="Name of the run folder. Default: a new one.")
@HEADROOM
@UNTOUCHED
@ALL_REDUCE
@CLUSTER
@BYTES_SCALE
@COMPUTE_SCALE
@option("--seed", type=click.IntRange(0), default=0, help="Seed of the emulation.")
@FORCE
@JSON
def env(
    name: str | None,
    headroom: int | None,
    untouched: Path | None,
    all_reduce: str | None,
    cluster: str | None,
    bytes_scale: float | None,
    compute_scale: float | None,
    seed: int,
    force: bool,
    json: bool,
) -> None:
    """Print the variables of a job that a tuner can join later, leave, and join again.

    Set them before the job starts, on all nodes. Without a tuner the job runs under NCCL's default, with --headroom on
    all channels.

    \b
    eval "$(dynamiccl env --name big)"
    torchrun --nproc-per-node 8 train.py &
    dynamiccl tune --attach "$DYNAMICCL_RUN"
    """
    from ...envs.nccl.plugin.build import PluginBuildError, channels_env, job_env
    from ...envs.nccl.run_folder import leave_option, make_folder
    from ..daemon.request import Request

    if name is not None and Path(name).name != name:
        fail(f"--name is a folder's name without slashes, not {name!r}")
    if off := off_here():
        kept = channels_env(headroom)  # other nodes may be tuned: all ranks need the same channels
        print(f"dynamiccl: {off}: {'only --headroom' if kept else 'no variables'}", file=sys.stderr)
        _print(kept, json)
        return
    refuse_scales(cluster, bytes_scale, compute_scale)
    emulated, facts = emulation_here(cluster, bytes_scale, compute_scale, seed)
    refuse_traps(None, force, emulated=emulated is not None, all_reduce=all_reduce or "")
    own_channels = untouched_from(headroom, untouched)
    with refusing(PluginBuildError, ValueError, OSError):
        try:
            run = make_folder(name)
        except FileExistsError:
            fail(f"a run {name} is there, whose job lives or has still to start: give another --name")
        if own_channels:
            own_channels.write(run)
        leave_option(run, all_reduce)
        variables = job_env(run, headroom, all_reduce)
        if emulated:
            variables |= emulated.env()
            Request(emulated=emulated, facts=facts).write(run)  # so that the tuner that joins says it too
    _print(variables, json)


def _print(variables: dict[str, str], json: bool) -> None:
    if json:
        print(json_module.dumps(variables))
        return
    for key, value in variables.items():
        print(f"export {key}={shlex.quote(value)}")
