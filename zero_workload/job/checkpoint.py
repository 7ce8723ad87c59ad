"""Sharded checkpoints through ``torch.distributed.checkpoint``: each rank writes the elements that it owns.

On disk a parameter, and each optimizer state of it, is one flat tensor under the parameter's name, whatever stage and
number of ranks wrote it; so any other stage and number can read it.
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

from ..comm import ask
from ..layout import Piece
from ..parts import Part
from ..zero import Engine

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

    def add(kind: str, piece: Piece, tensor: torch.Tensor) -> None:
        numel = engine.shapes[piece.param].numel()
        pieces = found.setdefault(f"{kind}/{engine.names[piece.param]}", _Pieces.of(numel))
        pieces.parts[piece.start] = tensor.detach().view(-1)

    for _, piece, param in engine.owned:
        for name, value in {"parameter": param, **engine.optimizer.state.get(param, {})}.items():
            if isinstance(value, torch.Tensor) and value.dim():
                add(name, piece, value)
            else:
                kind = f"{type(value).__name__}:{name}"
                found[f"{kind}/{engine.names[piece.param]}"] = torch.tensor(float(value), dtype=torch.float64)
    for bucket in engine.replicated.frozen + engine.sharded.buckets:
        if bucket.master is None:
            for piece in bucket.mine():
                add("parameter", piece, bucket.shard[piece.where])
    return found


def _scalar(kind: str, value: float, part: Part, group: dict[str, Any]) -> Any:
    if kind != "Tensor":
        return float(value) if kind == "float" else int(value)
    there = group.get("fused") or group.get("capturable")  # where torch's own optimizers keep their step
    return torch.tensor(value, dtype=torch.float32, device=part.param.device if there else "cpu")


def _read(engine: Engine, state: dict[str, Any], folder: Path) -> None:
    """Read from ``folder`` into the tensors of ``state``; a collective. Raises ValueError."""
    try:
        state_dict_loader.load(state, checkpoint_id=folder, process_group=engine.comm.group)
    except CheckpointException as error:
        raise ValueError(f"{folder} cannot be read: {next(iter(error.failures.values()))[0]}") from error


def save(engine: Engine, folder: Path, step: int, *, keep: int = 2) -> Path:
    """Write ``folder/step-NNNNNNNN`` on all ranks together; the ``keep`` newest stay.

    It is written under another name and renamed when whole: killed in the middle, the previous one is untouched.

    Raises:
        OSError: on every rank: one of them could not write.
        ValueError: on every rank: the folder holds a later step, of another run.
    """
    require_newest(folder, step)
    engine.synchronize()
    done, partial, replicas = folder / f"step-{step:08d}", folder / f"step-{step:08d}.partial", engine.comm.replicas
    first = engine.comm.rank == 0 and not (replicas and replicas.rank)  # the first replica writes

    def begin() -> None:
        for old in folder.glob(f"{STEPS}.partial"):  # of a save that failed
            shutil.rmtree(old)
        partial.mkdir(parents=True)

    def write() -> None:
        state_dict_saver.save(_state(engine), checkpoint_id=partial, process_group=engine.comm.group)

    def end() -> None:
        meta: dict[str, Any] = {"step": step, "shapes": dict(zip(engine.names, engine.shapes, strict=True))}
        meta |= {"skipped": engine.health.skipped, "optimizer": type(engine.optimizer).__name__}
        meta["rates"] = [float(group.get("lr", 0)) for group in engine.optimizer.param_groups]
        (partial / "meta.json").write_text(json.dumps(meta))
        shutil.rmtree(done, ignore_errors=True)
        partial.rename(done)
        for old in sorted(folder.glob(STEPS))[:-keep]:
            shutil.rmtree(old)

    for part, mine in ((begin, first), (write, not (replicas and replicas.rank)), (end, first)):
        error: BaseException | None = None
        try:
            if mine:
                part()
        except (OSError, CheckpointException) as caught:
            error = caught
        said = ask(f"rank {dist.get_rank()}: {type(error).__name__}: {error}" if error else "", *engine.comm.groups)
        if any(said):
            raise error if isinstance(error, OSError) else OSError(f"a peer failed: {max(said)}") from error
    return done


def require_newest(folder: Path, step: int) -> None:
    """Raise ValueError when ``folder`` holds a checkpoint of a later step than ``step``, which would count as newer."""
    newest = max(folder.glob(STEPS), default=None)
    if newest is not None and int(newest.name.removeprefix("step-")) > step:
        raise ValueError(f"{newest} is of another run, and later than step {step}: resume from it, or save elsewhere")


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
    _require_alike(engine, newest, meta)
    engine.synchronize()
    _make_states(engine, newest)
    _read(engine, _state(engine), newest)
    engine.steps, engine.health.skipped = int(meta["step"]), meta.get("skipped", 0)
    for group, rate in zip(engine.optimizer.param_groups, meta.get("rates", ()), strict=False):
        if "lr" in group:
            group["lr"] = rate
    engine.publish()
    engine.synchronize()
    return engine.steps


def _require_alike(engine: Engine, folder: Path, meta: dict[str, Any]) -> None:
    """Raise ValueError where the checkpoint is of another model or optimizer."""
    there, here = meta["shapes"], {name: list(shape) for name, shape in zip(engine.names, engine.shapes, strict=True)}
    for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
            raise ValueError(f"{folder} is of another model: {name} is {there.get(name)}, not {here.get(name)}")
    if meta.get("optimizer") != type(engine.optimizer).__name__:
        raise ValueError(f"{folder} is of another optimizer: {meta.get('optimizer')}")


def _make_states(engine: Engine, folder: Path) -> None:
    """The optimizer's states, which do not exist yet, as the checkpoint has them: scalars read, tensors to be read."""
    known: dict[str, Any] = filesystem.FileSystemReader(folder).read_metadata().state_dict_metadata
    kinds = sorted({key.split("/", 1)[0] for key in known} - {"parameter", "buffer"})
    scalars = {key: torch.zeros((), dtype=torch.float64) for key in known if ":" in key.split("/", 1)[0]}
    _read(engine, scalars, folder)
    groups = {p: group for group in engine.optimizer.param_groups for p in group["params"]}
    for part in engine.owned:
        made = engine.optimizer.state[part.param] = {}
        for kind in kinds:
            key, (of, _, name) = f"{kind}/{engine.names[part.piece.param]}", kind.rpartition(":")
            if key in scalars:
                made[name] = _scalar(of, scalars[key].item(), part, groups[part.param])
            elif key in known:
                made[name] = torch.zeros_like(part.param.detach(), dtype=known[key].properties.dtype)
