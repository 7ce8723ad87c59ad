"""The engine's state: whole on one rank, or written by all ranks through ``torch.distributed.checkpoint``.

On disk a parameter, and each optimizer state of it, is one flat tensor under the parameter's name, whatever stage and
number of ranks wrote it; so any other stage and number can read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..buffers.layout import Piece

Engine = Any  # engine.Engine, which imports this file


def masters(engine: Engine) -> dict[int, torch.Tensor]:
    """Index of each parameter -> its whole exact value on the CPU, on the first rank of the group; elsewhere nothing.

    Gathered bucket by bucket, by all ranks together.
    """
    comm, found = engine.comm, dict[int, torch.Tensor]()
    for bucket in engine.all_buckets:
        own = bucket.shard if bucket.master is None else bucket.master.detach()
        own = own.to(bucket.shard.device)
        whole = own
        if own.numel() < bucket.numel:
            whole = own.new_empty(bucket.numel)
            comm.all_gather(whole, own).wait()
        for piece in bucket.pieces if comm.rank == 0 else ():
            shape = engine.shapes[piece.param]
            if piece.param not in found:
                found[piece.param] = torch.empty(shape, dtype=own.dtype)
            into = found[piece.param].view(-1)[piece.start : piece.start + piece.numel]
            into.copy_(whole[piece.where])
    return found


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
        items = []
        for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True):
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part), self.size())
            index = MetadataIndex(fqn, chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[index.offset[0]]


def _number(value: float) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _State(dict[str, Any]):
    """Views of everything that a checkpoint holds, by ``kind/name of the parameter``; numbers are copied.

    The kind of a number is ``type:name``, so that it can be made again from it.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        for name, buffer in engine.model.named_buffers():
            self[f"buffer/{name}"] = buffer
        for _, piece, param in engine.owned:
            self._add("parameter", piece, param)
            for name, value in engine.optimizer.state.get(param, {}).items():
                self._add_state(name, piece, value)
        for bucket in engine.all_buckets:
            for piece in bucket.mine() if bucket.master is None else ():
                self._add("parameter", piece, bucket.shard[piece.where])
        for number, group in enumerate(engine.optimizer.param_groups):
            for name, value in group.items():
                if _is_number(value):
                    self[f"group/{number}/{name}"] = _number(value)
        for name, value in (("steps", engine.steps), ("skipped", engine.scale.skipped)):
            self[f"engine/{name}"] = _number(value)
        self["engine/scale"] = _number(engine.scale.value)

    def _add(self, kind: str, piece: Piece, tensor: torch.Tensor) -> None:
        name = self.engine.names[piece.param]
        numel = self.engine.shapes[piece.param].numel()
        pieces = self.setdefault(f"{kind}/{name}", _Pieces.of(numel))
        pieces.parts[piece.start] = tensor.detach().view(-1)

    def _add_state(self, name: str, piece: Piece, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.dim():
            self._add(name, piece, value)
        elif isinstance(value, torch.Tensor) or _is_number(value):
            kind = f"{type(value).__name__}:{name}"
            self[f"{kind}/{self.engine.names[piece.param]}"] = _number(float(value))


def _folder(engine: Engine, folder: Path) -> Path:
    """Where this rank's part of the model is kept: tensor and pipeline ranks have different parameters."""
    model = engine.comm.model
    return folder / f"part-{model.rank}" if model else folder


def save(engine: Engine, folder: Path) -> None:
    """Write the state on all ranks together. Raises OSError where a rank cannot write."""
    engine.synchronize()
    replicas = engine.comm.replicas
    failed = torch.zeros(1, device=engine.params[0].device)
    error: BaseException | None = None
    if not replicas or replicas.rank == 0:
        try:
            path = _folder(engine, folder)
            state_dict_saver.save(_State(engine), checkpoint_id=path, process_group=engine.comm.group)
        except (OSError, CheckpointException) as caught:
            failed, error = failed + 1, caught
    engine.comm.agree(failed)
    if failed.item():
        raise OSError(f"{folder} could not be written: {error or 'another rank failed'}") from error


def load(engine: Engine, folder: Path) -> None:
    """Read the state, of whatever stage and number of ranks, on all ranks together.

    Raises:
        ValueError: there is no whole checkpoint, or it is of another model or optimizer.
    """
    path = _folder(engine, folder)
    if not (path / ".metadata").is_file():
        raise ValueError(f"{folder} holds no whole checkpoint: give the folder that engine.save() wrote")
    engine.synchronize()
    known: dict[str, Any] = filesystem.FileSystemReader(path).read_metadata().state_dict_metadata
    _require_alike(engine, folder, known)
    _make_states(engine, path, known)
    state = _State(engine)
    _read(engine, state, path)
    for number, group in enumerate(engine.optimizer.param_groups):
        for name, value in group.items():
            if _is_number(value):
                group[name] = type(value)(state[f"group/{number}/{name}"].item())
    engine.steps = int(state["engine/steps"])
    engine.scale.skipped = int(state["engine/skipped"])
    if engine.scale.dynamic:
        engine.scale.value = max(1.0, state["engine/scale"].item())
    engine.publish()
    engine.synchronize()


def _read(engine: Engine, state: dict[str, Any], path: Path) -> None:
    try:
        state_dict_loader.load(state, checkpoint_id=path, process_group=engine.comm.group)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise ValueError(f"{path} cannot be read: {reason}") from error


def _require_alike(engine: Engine, folder: Path, known: dict[str, Any]) -> None:
    """Raise ValueError where the checkpoint is of another model."""
    here = {}
    for name, shape in zip(engine.names, engine.shapes, strict=True):
        here[f"parameter/{name}"] = shape.numel()
    there = {key: known[key].size.numel() for key in known if key.startswith("parameter/")}
    floating = {
        f"parameter/{n}" for n, p in zip(engine.names, engine.params, strict=True) if p.is_floating_point()
    }
    for key in sorted(floating | set(there)):
        if there.get(key) != here.get(key):
            name = key.removeprefix("parameter/")
            sizes = f"{there.get(key, 0)} elements there, {here.get(key, 0)} here"
            raise ValueError(f"{folder} is of another model: {name} has {sizes}")


def _make_states(engine: Engine, path: Path, known: dict[str, Any]) -> None:
    """The optimizer's states, which may not exist yet, as the checkpoint has them: numbers read, tensors to be read."""
    kinds = sorted({key.split("/", 1)[0] for key in known} - {"parameter", "buffer", "group", "engine"})
    numbers = {key: _number(0) for key in known if ":" in key.split("/", 1)[0]}
    _read(engine, numbers, path)
    groups = {p: group for group in engine.optimizer.param_groups for p in group["params"]}
    for _, piece, param in engine.owned:
        made = engine.optimizer.state[param] = {}
        for kind in kinds:
            key = f"{kind}/{engine.names[piece.param]}"
            of, _, name = kind.rpartition(":")
            if key in numbers:
                made[name] = _as_kept(numbers[key], of, param, groups[param])
            elif key in known:
                made[name] = torch.zeros_like(param.detach(), dtype=known[key].properties.dtype)


def _as_kept(number: torch.Tensor, of: str, param: torch.Tensor, group: dict[str, Any]) -> Any:
    """A number of a parameter's state as its optimizer keeps it: ``of`` is the name of its type."""
    if of == "float":
        return float(number.item())
    if of != "Tensor":
        return int(number.item())
    # Where torch's own optimizers keep their step.
    device = torch.device("cpu")
    if group.get("fused") or group.get("capturable"):
        device = param.device
    return number.to(device, torch.float32)
