"""``dynamiccl learn``: recorded jobs into the memory."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from . import Recording, fail
from .clusters import Json, Where


def learn(
    recordings: Recording,
    hardware: Annotated[
        str | None, typer.Option(help="The GPUs, as `dynamiccl clusters` names them, e.g. '8 x NVIDIA H100 80GB HBM3'.")
    ] = None,
    nccl: Annotated[str | None, typer.Option(help="NCCL's release where the recording does not say.")] = None,
    memory: Where = None,
    json: Json = False,
) -> None:
    """Add recorded jobs to what is known of their cluster, so that the next job there begins from them.

    Takes runs of `dynamiccl tune` and traces: durations of the collectives under each config that the recording holds,
    step times under whole tables against the default's beside them, and the table that was confirmed. A recording that
    was learned before is not counted twice.

    \b
    dynamiccl learn runs/tune/*
    dynamiccl learn old-run --hardware '8 x NVIDIA H100 80GB HBM3' --nccl 2.28.9
    """
    from ...traces.files import Trace, TraceError
    from ..learning import record_of_trace
    from .clusters import _store, _try

    store = _store(memory)
    done: list[dict[str, Any]] = []
    for path in recordings:
        try:
            record = record_of_trace(Trace.read(path), hardware, nccl)
        except (TraceError, ValueError) as error:
            fail(f"{path}: {error}")
        name = _try(lambda record=record: store.add(record))
        facts, timed = record["cluster"], sum(len(slot["durations"]) for slot in record["slots"])
        done.append({"recording": str(path), **facts, "slots": len(record["slots"]), "timed": timed, "record": name})
        if not json:
            typer.echo(
                f"{path}: {len(record['slots'])} slots, {timed} configs timed; {facts['hardware']}, "
                f"{facts['layout']}, NCCL {facts['nccl']}"
            )
    if json:
        typer.echo(json_module.dumps({"memory": store.url, "learned": done}, indent=1))
