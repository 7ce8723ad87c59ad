"""Sharded checkpoints through ``torch.distributed.checkpoint``: each rank writes the elements that it owns.

On disk a parameter, and each optimizer state of it, is one flat tensor under the parameter's name, whatever stage and
number of ranks wrote it; so any other stage and number can read it. With tensor parallelism, what is saved is what the
data-parallel group shares: give each tensor-parallel rank a folder of its own.
"""

import json
import shutil
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

STEPS = "step-" + "[0-9]" * 8


class _Pieces(torch.Tensor):
    """What this rank has of one flat tensor [numel]: start -> elements, by DCP's protocol for sharded tensors."""

    parts: dict[int, torch.Tensor]

    @staticmethod
    def of(numel: int) -> "_Pieces":
        """A tensor of that size without memory behind it."""
        pieces = torch.Tensor._make_subclass(_Pieces, torch.empty(1).expand(numel))
        pieces.parts = {}
        return pieces

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([at]), part.shape) for at, part in self.parts.items()]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        items = []
        for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.size())
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[index.offset[0]]


def _state(engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Views of everything that a checkpoint holds, by name; and the optimizer's scalars."""
    found: dict[str, Any] = {f"buffer/{name}": buffer for name, buffer in engine.model.named_buffers()}
    scalars: dict[str, Any] = {}

    def add(kind: str, bucket: Bucket, begin: int, tensor: torch.Tensor) -> None:
        flat = tensor.detach().view(-1)
        for index, start, part in bucket.covered(begin, flat.numel()):
            pieces = found.setdefault(f"{kind}/{engine.names[index]}", _Pieces.of(engine.shapes[index].numel()))
            pieces.parts[start] = flat[part]

    for bucket, part, param in engine.owned:
        add("parameter", bucket, part.start, param)
        for name, value in engine.optimizer.state[param].items():
            if isinstance(value, torch.Tensor) and value.dim():
                add(name, bucket, part.start, value)
            else:
                scalars[name] = [type(value).__name__, float(value)]
    for bucket in engine.replicated.frozen + engine.sharded.buckets:
        if bucket.master is None:
            add("parameter", bucket, 0, bucket.shard)
    return found, scalars


def save(engine: Engine, folder: Path, step: int, *, keep: int = 2) -> Path:
    """Write ``folder/step-NNNNNNNN`` on all ranks together; the ``keep`` newest stay.

    It is written under another name and renamed when whole: killed in the middle, the previous one is untouched.

    Raises:
        OSError: the folder cannot be written.
    """
    engine.synchronize()
    done, partial = folder / f"step-{step:08d}", folder / f"step-{step:08d}.partial"
    if engine.comm.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(engine.comm.group)
    state, scalars = _state(engine)
    state_dict_saver.save(state, checkpoint_id=partial, process_group=engine.comm.group)
    if engine.comm.rank == 0:
        meta = {"step": step, "shapes": dict(zip(engine.names, engine.shapes, strict=True)), "scalars": scalars}
        meta |= {"loss_scale": engine.loss_scale, "good_steps": engine.good_steps}
        meta["optimizer"] = type(engine.optimizer).__name__
        (partial / "meta.json").write_text(json.dumps(meta))
        shutil.rmtree(done, ignore_errors=True)
        partial.rename(done)
        for old in sorted(folder.glob(STEPS))[:-keep]:
            shutil.rmtree(old)
    dist.barrier(engine.comm.group)
    return done


def load(engine: Engine, folder: Path) -> int:
    """Read the newest whole checkpoint in ``folder`` into ``engine``, of whatever stage and number of ranks.

    Returns:
        The step it was taken after.

    Raises:
        ValueError: on every rank: there is none, or it is of another model or optimizer.
    """
    newest = max(folder.glob(STEPS), default=None)
    if newest is None:
        raise ValueError(f"no checkpoint in {folder}")
    meta = json.loads((newest / "meta.json").read_text())
    there, here = meta["shapes"], dict(zip(engine.names, map(list, engine.shapes), strict=True))
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            raise ValueError(f"{newest} is of another model: {name} is {there.get(name)}, not {here.get(name)}")
    if meta.get("optimizer") != type(engine.optimizer).__name__:
        raise ValueError(f"{newest} is of another optimizer: {meta.get('optimizer')}")
    known: dict[str, Any] = filesystem.FileSystemReader(newest).read_metadata().state_dict_metadata
    kinds = {key.split("/", 1)[0] for key in known} - {"parameter", "buffer"}
    engine.synchronize()
    for bucket, part, param in engine.owned:  # the optimizer's states do not exist yet: make them, to be read into
        held = [engine.names[index] for index, _, _ in bucket.covered(part.start, param.numel())][:1]
        entries = {kind: known[f"{kind}/{name}"] for kind in kinds for name in held if f"{kind}/{name}" in known}
        engine.optimizer.state[param] = {
            **{kind: torch.zeros_like(param.detach(), dtype=e.properties.dtype) for kind, e in entries.items()},
            **{name: torch.tensor(n) if kind == "Tensor" else int(n) for name, (kind, n) in meta["scalars"].items()},
        }
    try:
        state_dict_loader.load(_state(engine)[0], checkpoint_id=newest, process_group=engine.comm.group)
    except CheckpointException as error:
        raise ValueError(f"{newest} cannot be read: {next(iter(error.failures.values()))[0]}") from error
    if engine.loss_scale is not None and meta["loss_scale"] is not None:
        engine.loss_scale, engine.good_steps = meta["loss_scale"], meta["good_steps"]
    engine.publish()
    engine.synchronize()
    return int(meta["step"])
