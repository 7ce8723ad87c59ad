"""Sharded checkpoints through ``torch.distributed.checkpoint``: each rank writes the elements that it owns.

On disk a parameter, and each optimizer state of it, is one flat tensor under the parameter's name, whatever stage and
number of ranks wrote it; so any other stage and number can read it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .layout import Bucket
from .zero import Engine


class _Pieces(torch.Tensor):
    """What this rank has of one flat tensor [numel]: start -> elements, by DCP's protocol for sharded tensors."""

    parts: dict[int, torch.Tensor]

    @staticmethod
    def of(numel: int) -> _Pieces:
        """A tensor of that size without memory behind it."""
        pieces = torch.Tensor._make_subclass(_Pieces, torch.empty(1).expand(numel))
        pieces.parts = {}
        return pieces

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([at]), part.shape) for at, part in self.parts.items()]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(self.parts[chunk.offsets[0]]), self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[index.offset[0]]


def _cut(bucket: Bucket, begin: int, flat: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Parameter, start in it and elements, of the pieces of ``bucket`` that ``flat`` (lying at ``begin``) covers."""
    for piece in bucket.pieces:
        low, high = max(piece.offset, begin), min(piece.offset + piece.numel, begin + flat.numel())
        if low < high:
            yield piece.param, piece.start + low - piece.offset, flat[low - begin : high - begin]


def _state(engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Views of everything that a checkpoint holds, by name; and the optimizer's scalars."""
    sizes: list[int] = [0] * len(engine.params)
    for bucket in engine.replicated.buckets + engine.sharded.buckets:
        for piece in bucket.pieces:
            sizes[piece.param] = max(sizes[piece.param], piece.start + piece.numel)
    found: dict[str, Any] = {}
    scalars: dict[str, Any] = {}

    def add(kind: str, bucket: Bucket, begin: int, tensor: torch.Tensor) -> None:
        for index, start, part in _cut(bucket, begin, tensor.detach().view(-1)):
            key = f"{kind}/{engine.names[index]}"
            found.setdefault(key, _Pieces.of(sizes[index])).parts[start] = part

    for bucket, part, param in engine._owned:
        begin = bucket.owned(engine.comm.rank, engine.comm.size).start + (part.start or 0)
        add("parameter", bucket, begin, param)
        for name, value in engine.optimizer.state[param].items():
            if isinstance(value, torch.Tensor) and value.dim():
                add(name, bucket, begin, value)
            else:
                scalars[name] = [type(value).__name__, float(value)]
    for bucket in engine.sharded.buckets:
        if bucket.master is None:
            add("parameter", bucket, bucket.owned(engine.comm.rank, engine.comm.size).start, bucket.shard)
    for index, param in enumerate(engine.params):
        if not sizes[index]:  # frozen and replicated
            pieces = found[f"parameter/{engine.names[index]}"] = _Pieces.of(param.numel())
            pieces.parts[0] = param.detach().view(-1)
    found.update({f"buffer/{name}": buffer for name, buffer in engine.model.named_buffers()})
    return found, scalars


def _shapes(engine: Engine) -> dict[str, list[int]]:
    shapes = engine.sharded._shapes
    return {name: list(shape) for name, shape in zip(engine.names, shapes, strict=True)}


def save(engine: Engine, folder: Path, step: int, *, keep: int = 2) -> Path:
    """Write ``folder/step-NNNNNNNN`` on all ranks together; the ``keep`` newest stay.

    It is written under another name and renamed when whole: killed in the middle, the previous one is untouched.

    Raises:
        OSError: the folder cannot be written.
    """
    engine.synchronize()
    name = f"step-{step:08d}"
    partial = folder / f"{name}.partial"
    if engine.comm.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(engine.comm.group)
    state, scalars = _state(engine)
    state_dict_saver.save(state, checkpoint_id=partial, process_group=engine.comm.group)
    if engine.comm.rank == 0:
        meta = {"step": step, "shapes": _shapes(engine), "scalars": scalars, "loss_scale": engine.loss_scale}
        meta["good_steps"] = engine._good_steps
        (partial / "meta.json").write_text(json.dumps(meta))
        shutil.rmtree(folder / name, ignore_errors=True)
        partial.rename(folder / name)
        for old in sorted(folder.glob("step-" + "[0-9]" * 8))[:-keep]:
            shutil.rmtree(old)
    dist.barrier(engine.comm.group)
    return folder / name


def load(engine: Engine, folder: Path) -> int:
    """Read the newest whole checkpoint in ``folder`` into ``engine``, of whatever stage and number of ranks.

    Returns:
        The step it was taken after.

    Raises:
        ValueError: on every rank: there is none, or it is of another model or optimizer.
    """
    whole = sorted(folder.glob("step-" + "[0-9]" * 8))
    if not whole:
        raise ValueError(f"no checkpoint in {folder}")
    meta = json.loads((whole[-1] / "meta.json").read_text())
    if meta["shapes"] != _shapes(engine):
        there, here = meta["shapes"], _shapes(engine)
        odd = next(n for n in sorted({*there, *here}) if there.get(n) != here.get(n))
        raise ValueError(f"{whole[-1]} is of another model: {odd} is {there.get(odd)} there, {here.get(odd)} here")
    known: dict[str, Any] = filesystem.FileSystemReader(whole[-1]).read_metadata().state_dict_metadata
    kinds = {key.split("/", 1)[0] for key in known} - {"parameter", "buffer"}
    engine.synchronize()
    for bucket, part, param in engine._owned:
        begin = bucket.owned(engine.comm.rank, engine.comm.size).start + (part.start or 0)
        held = [engine.names[index] for index, _, _ in _cut(bucket, begin, param.detach().view(-1))]
        entries = {kind: known[f"{kind}/{held[0]}"] for kind in kinds if held and f"{kind}/{held[0]}" in known}
        fresh: dict[str, Any] = {
            k: torch.zeros_like(param.detach(), dtype=e.properties.dtype) for k, e in entries.items()
        }
        for name, (kind, value) in meta["scalars"].items():
            fresh[name] = torch.tensor(value) if kind == "Tensor" else int(value)
        engine.optimizer.state[param] = fresh
    state, _ = _state(engine)
    try:
        state_dict_loader.load(state, checkpoint_id=whole[-1], process_group=engine.comm.group)
    except CheckpointException as error:
        raise ValueError(f"{whole[-1]} cannot be read: {next(iter(error.failures.values()))[0]}") from error
    if engine.loss_scale is not None and meta["loss_scale"] is not None:
        engine.loss_scale, engine._good_steps = meta["loss_scale"], meta["good_steps"]
    engine.replicated.publish()
    engine.sharded.publish()
    engine.synchronize()
    return int(meta["step"])
