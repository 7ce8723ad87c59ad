"""Checkpoints to go on from: each rank writes what it owns, and reads it where the job is cut in the same way."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..zero import Engine

STEPS = "step-" + "[0-9]" * 8


def _about(engine: Engine) -> dict[str, Any]:
    """What must be equal where a checkpoint is read: what it is, in the words of a refusal -> of this job."""
    return {
        "model": [[name, list(shape)] for name, shape in zip(engine.names, engine.shapes, strict=True)],
        "optimizer": type(engine.optimizer).__name__,
        "stage": engine.settings.stage,
        "number of ranks that shard": engine.comm.size,
        "cut into buckets": [list(part.piece) for part in engine.owned],
    }


def _tensors(engine: Engine) -> list[torch.Tensor]:
    """The values that this rank holds: of its parts of the trainable parameters, of its frozen ones, and buffers."""
    frozen = [b.shard for b in engine.replicated.frozen + engine.sharded.buckets if b.master is None]
    return [*(part.param.detach() for part in engine.owned), *frozen, *engine.model.buffers()]


def save(engine: Engine, folder: Path, step: int, *, keep: int = 2) -> Path:
    """Write ``folder/step-NNNNNNNN`` on all ranks together; the ``keep`` newest stay.

    It is written under another name and renamed when whole: killed in the middle, the previous one is untouched.

    Raises:
        OSError, RuntimeError: this rank could not write; the others wait for it until the job is ended.
        ValueError: on every rank: the folder holds a later step, of another run.
    """
    require_newest(folder, step)
    engine.synchronize()
    done, partial, replicas = folder / f"step-{step:08d}", folder / f"step-{step:08d}.partial", engine.comm.replicas
    writes = not (replicas and replicas.rank)  # the first replica
    first = writes and engine.comm.rank == 0
    if first:
        for old in folder.glob(f"{STEPS}.partial"):  # of a save that failed
            shutil.rmtree(old)
        partial.mkdir(parents=True)
    dist.barrier()
    if writes:
        copies = [tensor.to("cpu", copy=True) for tensor in _tensors(engine)]  # a view would bring its whole storage
        found = {"about": _about(engine), "step": step, "tensors": copies}
        torch.save(found | {"optimizer": engine.optimizer.state_dict()}, partial / f"rank-{engine.comm.rank}.pt")
    dist.barrier()
    if first:
        shutil.rmtree(done, ignore_errors=True)
        partial.rename(done)
        for old in sorted(folder.glob(STEPS))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return done


def require_newest(folder: Path, step: int) -> None:
    """Raise ValueError when ``folder`` holds a checkpoint of a later step than ``step``, which would count as newer."""
    newest = max(folder.glob(STEPS), default=None)
    if newest is not None and int(newest.name.removeprefix("step-")) > step:
        raise ValueError(f"{newest} is of another run, and later than step {step}: resume from it, or save elsewhere")


def load(engine: Engine, folder: Path) -> int:
    """Read the newest whole checkpoint in ``folder`` into ``engine``, whose job is cut as the one that wrote it.

    Returns:
        The step it was taken after.

    Raises:
        ValueError: there is none, it cannot be read on this rank, or it is of another job.
    """
    newest = max(folder.glob(STEPS), default=None)
    if newest is None:
        raise ValueError(f"no checkpoint in {folder}")
    try:
        saved = torch.load(newest / f"rank-{engine.comm.rank}.pt", map_location="cpu", weights_only=True)
        other = [name for name, here in _about(engine).items() if saved["about"][name] != here]
    except (OSError, RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{newest} cannot be read on rank {dist.get_rank()}: {error}") from None
    if other:
        raise ValueError(f"{newest} is of another job: its {other[0]} is not this one's")
    engine.synchronize()
    for tensor, values in zip(_tensors(engine), saved["tensors"], strict=True):
        tensor.copy_(values)
    engine.optimizer.load_state_dict(saved["optimizer"])
    engine.steps = int(saved["step"])
    engine.publish()
    engine.synchronize()
    return engine.steps
