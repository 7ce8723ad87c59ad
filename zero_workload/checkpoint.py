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

from .parts import Part
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


def _state(engine: Engine) -> dict[str, Any]:
    """Views of everything that a checkpoint holds, by ``kind/name of the parameter``.

    Scalars of the optimizer are copied; their kind is ``type:name``, so that they can be made again from it.
    """
    found: dict[str, Any] = {f"buffer/{name}": buffer for name, buffer in engine.model.named_buffers()}

    def add(kind: str, index: int, start: int, tensor: torch.Tensor) -> None:
        pieces = found.setdefault(f"{kind}/{engine.names[index]}", _Pieces.of(engine.shapes[index].numel()))
        pieces.parts[start] = tensor.detach().view(-1)

    for part in engine.owned:
        add("parameter", part.number, part.start, part.param)
        for name, value in engine.optimizer.state[part.param].items():
            if isinstance(value, torch.Tensor) and value.dim():
                add(name, part.number, part.start, value)
            else:
                kind = f"{type(value).__name__}:{name}"
                found[f"{kind}/{engine.names[part.number]}"] = torch.tensor(float(value), dtype=torch.float64)
    for bucket in engine.replicated.frozen + engine.sharded.buckets:
        if bucket.master is None:
            for index, start, where in bucket.covered(0, bucket.shard.numel()):
                add("parameter", index, start, bucket.shard[where])
    return found


def _scalar(kind: str, value: float, part: Part, group: dict[str, Any]) -> Any:
    if kind != "Tensor":
        return float(value) if kind == "float" else int(value)
    there = group.get("fused") or group.get("capturable")  # where torch's own optimizers keep their step
    return torch.tensor(value, dtype=torch.float32, device=part.param.device if there else "cpu")


def save(engine: Engine, folder: Path, step: int, *, keep: int = 2) -> Path:
    """Write ``folder/step-NNNNNNNN`` on all ranks together; the ``keep`` newest stay.

    It is written under another name and renamed when whole: killed in the middle, the previous one is untouched.

    Raises:
        OSError: the folder cannot be written.
    """
    engine.synchronize()
    done, partial, replicas = folder / f"step-{step:08d}", folder / f"step-{step:08d}.partial", engine.comm.replicas
    if replicas and replicas.rank > 0:  # the first replica writes
        dist.barrier(replicas.group)
        return done
    if engine.comm.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(engine.comm.group)
    state_dict_saver.save(_state(engine), checkpoint_id=partial, process_group=engine.comm.group)
    if engine.comm.rank == 0:
        meta = {"step": step, "shapes": dict(zip(engine.names, engine.shapes, strict=True))}
        meta |= {"loss_scale": engine.loss_scale, "good_steps": engine.good_steps}
        meta["optimizer"] = type(engine.optimizer).__name__
        (partial / "meta.json").write_text(json.dumps(meta))
        shutil.rmtree(done, ignore_errors=True)
        partial.rename(done)
        for old in sorted(folder.glob(STEPS))[:-keep]:
            shutil.rmtree(old)
    dist.barrier(engine.comm.group)
    if replicas:
        dist.barrier(replicas.group)
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
    groups = {p: group for group in engine.optimizer.param_groups for p in group["params"]}
    engine.synchronize()
    for part in engine.owned:  # the optimizer's states do not exist yet: make them, to be read into
        made = engine.optimizer.state[part.param] = {}
        for kind in kinds:
            if entry := known.get(f"{kind}/{engine.names[part.number]}"):
                of, _, name = kind.rpartition(":")
                exact = torch.zeros_like(part.param.detach(), dtype=entry.properties.dtype)
                made[name] = _scalar(of, 0, part, groups[part.param]) if of else exact
    state = _state(engine)
    try:
        state_dict_loader.load(state, checkpoint_id=newest, process_group=engine.comm.group)
    except CheckpointException as error:
        raise ValueError(f"{newest} cannot be read: {next(iter(error.failures.values()))[0]}") from error
    for part in engine.owned:
        for kind in (kind for kind in kinds if ":" in kind):
            if (value := state.get(f"{kind}/{engine.names[part.number]}")) is not None:
                of, _, name = kind.rpartition(":")
                engine.optimizer.state[part.param][name] = _scalar(of, value.item(), part, groups[part.param])
    if engine.loss_scale is not None and meta["loss_scale"] is not None:
        engine.loss_scale, engine.good_steps = meta["loss_scale"], meta["good_steps"]
    engine.steps = int(meta["step"])
    engine.publish()
    engine.synchronize()
    return engine.steps
