"""The engine's state: whole on one rank, or written by all ranks through ``torch.distributed.checkpoint``.

On disk a parameter, and each optimizer state of it, is one flat tensor under the parameter's name, whatever stage and
number of ranks wrote it; so any other stage and number can read it.

Each save is a folder of its own in the user's, and a file names the last whole one. So a save that is cut short leaves
the one before as it was.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from ..buffers.kept import Kept, exact, is_of_elements, kept, lost, restore
from ..buffers.layout import Piece
from ..buffers.pieces import Pieces

Engine = Any  # engine.Engine, which imports this file
#: Checkpoints of earlier releases lack these numbers.
_GOOD_STEPS, _SCALED = "engine/good_steps", "engine/scaled"
_ADDED = {_GOOD_STEPS, _SCALED}
#: Before the name of the optimizer's class.
_CLASS = "optimizer/"
#: What the folder of a save is called, before its number. Nobody calls a file of their own so: old saves are deleted.
_SAVE = "zero-save-"
_NAME = re.compile(_SAVE + "[0-9a-f]{12}")
#: Names the folder of the last save. Earlier releases wrote none: their checkpoint is the whole folder.
_CURRENT = f"{_SAVE}current"
#: The cure where one rank does not see what another writes.
_SHARED = "all nodes must share the folder"


class _State(dict[str, Any]):
    """Views of the tensors that a checkpoint holds, by ``kind/name of the parameter``, and the engine's numbers."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.names, self.shapes = engine.names, engine.shapes
        for name, buffer in engine.model.named_buffers():
            self[f"buffer/{name}"] = buffer
        states = engine.optimizer.state
        for _, piece, param in engine.owned:
            self._add("parameter", piece, param)
            state = states.get(param, {})
            for name, value in state.items():
                if is_of_elements(value, param):
                    self._add(name, piece, value)
        frozen = [bucket for bucket in engine.all_buckets if bucket.master is None]
        for bucket in frozen:
            for piece in bucket.mine():
                part = bucket.shard[piece.where]
                self._add("parameter", piece, part)
        scale = engine.scale
        self["engine/steps"] = exact(engine.steps)
        self["engine/skipped"] = exact(scale.skipped)
        self["engine/scale"] = exact(scale.value)
        self[_GOOD_STEPS] = exact(scale.good_steps)
        self[_SCALED] = exact(scale.dynamic)

    def _add(self, kind: str, piece: Piece, tensor: torch.Tensor) -> None:
        index = piece.param
        key = f"{kind}/{self.names[index]}"
        if key not in self:
            numel = self.shapes[index].numel()
            self[key] = Pieces.of(numel)
        flat = tensor.detach().view(-1)
        self[key].parts[piece.start] = flat


def _settings(engine: Engine) -> dict[str, torch.Tensor]:
    """What else the optimizer holds: its class, ``group/number/type:path`` of its groups' settings, and
    ``type:path/parameter`` of the states that are no tensor of elements.
    """
    optimizer = engine.optimizer
    found = {f"{_CLASS}{type(optimizer).__name__}": exact(0)}
    for number, group in enumerate(optimizer.param_groups):
        for path, of, value in kept(group):
            found[f"group/{number}/{of}:{path}"] = value
    for _, piece, param in engine.owned:
        owner = engine.names[piece.param]
        for path, of, value in kept(optimizer.state.get(param, {})):
            if not value.dim():
                found[f"{of}:{path}/{owner}"] = value
    return found


def _part(engine: Engine, folder: Path) -> Path:
    """Where this rank's part of the model is kept: tensor and pipeline ranks have different parameters."""
    model = engine.comm.model
    return folder / f"part-{model.rank}" if model else folder


def save(engine: Engine, folder: Path) -> None:
    """Write the state on all ranks together. Raises OSError where a rank cannot write.

    Warns of what the optimizer holds and no checkpoint keeps: the rest is worth keeping.
    """
    engine.synchronize()
    comm = engine.comm
    if forgotten := lost(engine.optimizer):
        held = f"{type(engine.optimizer).__name__} holds {', '.join(forgotten)}"
        warnings.warn(f"{held}, which no checkpoint keeps: a resume goes on without", stacklevel=2)
    name = _new_name(engine)
    is_writer, is_first = _is_writer(engine), _is_first(engine)
    _make_folder(engine, folder, name, is_first)
    error: BaseException | None = None
    try:
        if is_writer:
            state = _State(engine) | _settings(engine)
            path = _part(engine, folder / name)
            state_dict_saver.save(state, checkpoint_id=path, process_group=comm.group)
    except (OSError, CheckpointException) as caught:
        error = caught
    _require_written(engine, folder, error)
    try:
        if is_first:
            _make_current(folder, name)
    except OSError as caught:
        error = caught
    _require_written(engine, folder, error)


def _is_writer(engine: Engine) -> bool:
    """Of replicas of a shard one is written."""
    replicas = engine.comm.replicas
    return not replicas or replicas.rank == 0


def _is_first(engine: Engine) -> bool:
    comm = engine.comm
    return _is_writer(engine) and comm.rank == 0 and not (comm.model and comm.model.rank)


def require_writable(engine: Engine, folder: Path) -> None:
    """Try what :func:`save` begins with. Raises OSError on all ranks where a save into ``folder`` could not be made."""
    name, is_first = _new_name(engine), _is_first(engine)
    _make_folder(engine, folder, name, is_first)
    if is_first:
        with suppress(OSError):
            (folder / name).rmdir()


def _new_name(engine: Engine) -> str:
    """A name for the folder of a save, the same on all ranks."""
    device = engine.params[0].device
    number = torch.tensor(secrets.randbits(48), device=device)
    engine.comm.broadcast(number)
    if engine.comm.model:
        engine.comm.model.broadcast(number)
    return f"{_SAVE}{number.item():012x}"


def _make_folder(engine: Engine, folder: Path, name: str, is_first: bool) -> None:
    """The first rank makes the folder of a save, and all see it. Raises OSError on all ranks.

    On disks of their own the ranks would write parts that no rank could read together. The check comes before anything
    is written. Nobody has looked at the name before, so a network file system cannot answer from a cache.
    """
    path = folder / name
    error: OSError | None = None
    try:
        if is_first:
            path.mkdir(parents=True)
    except OSError as caught:
        error = caught
    _require_written(engine, folder, error)
    try:
        os.listdir(path)
    except OSError as caught:
        error = OSError(f"{_SHARED} ({caught})")
    try:
        _require_written(engine, folder, error, f"another rank does not see it: {_SHARED}")
    except OSError:
        if is_first:
            path.rmdir()
        raise


def _on_any(engine: Engine, is_so: bool) -> bool:
    """Whether it is so on any rank."""
    comm = engine.comm
    found = torch.tensor([float(is_so)], device=engine.params[0].device)
    comm.agree(found)
    if comm.model:
        comm.model.agree(found)
    return bool(found.item())


def _require_written(
    engine: Engine, folder: Path, error: BaseException | None, elsewhere: str = "another rank failed"
) -> None:
    """Raise OSError on all ranks where one had an ``error``; the others say ``elsewhere``."""
    if _on_any(engine, error is not None):
        reason = error or elsewhere
        raise OSError(f"{folder} could not be written: {reason}") from error


def _make_current(folder: Path, name: str) -> None:
    """From now on ``folder`` holds the save of that name, and no other. Raises OSError."""
    new = folder / f"{_CURRENT}.new"
    with new.open("w") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _CURRENT)
    for other in folder.iterdir():
        if _NAME.fullmatch(other.name) and other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def _current(folder: Path) -> Path:
    """Where the last whole save in ``folder`` lies."""
    try:
        name = (folder / _CURRENT).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return folder
    return folder / name


def _find(engine: Engine, folder: Path) -> tuple[Path, dict[str, Any]]:
    """This rank's part of the last whole save, and what it says of each of its keys. Raises ValueError on all ranks
    where one has none: a rank that goes on alone would wait for the others.
    """
    path, known, error = folder, dict[str, Any](), None
    try:
        path = _part(engine, _current(folder))
        known = filesystem.FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as caught:  # of a pickle that was cut short anything can come
        error = caught
    if _on_any(engine, error is not None):
        where = "" if error else " where another rank looks"
        cure = f"give the folder that engine.save() wrote; {_SHARED}"
        raise ValueError(f"{folder} holds no whole checkpoint{where}: {cure}") from error
    return path, known


def load(engine: Engine, folder: Path) -> None:
    """Read the state, of whatever stage and number of ranks, on all ranks together.

    Raises:
        ValueError: there is no whole checkpoint, or it is of another model or optimizer.
    """
    path, known = _find(engine, folder)
    engine.synchronize()
    _require_alike(engine, folder, known)
    _require_same_optimizer(engine, folder, known)
    _load_groups(engine, path, known)
    _make_states(engine, path, known)
    state = _State(engine)
    for key in _ADDED - set(known):
        del state[key]
    _read(engine, state, path)
    engine.steps = int(state["engine/steps"])
    _load_scale(engine, state)
    engine.publish()
    engine.synchronize()


def _load_scale(engine: Engine, state: dict[str, Any]) -> None:
    """The scale of float16 as it was, if it was one: who trains in another dtype writes 1."""
    scale = engine.scale
    scale.skipped = int(state["engine/skipped"])
    there = state["engine/scale"].item()
    was_scaled = bool(state.get(_SCALED, there > 1 or scale.skipped))
    if scale.dynamic and was_scaled:
        scale.value = max(1.0, there)
        scale.good_steps = int(state.get(_GOOD_STEPS, 0))


def _read(engine: Engine, state: dict[str, Any], path: Path) -> None:
    group = engine.comm.group
    try:
        state_dict_loader.load(state, checkpoint_id=path, process_group=group)
    except CheckpointException as error:
        failures = list(error.failures.values())
        reason = failures[0][0]
        raise ValueError(f"{path} cannot be read: {reason}") from error


def _require_alike(engine: Engine, folder: Path, known: dict[str, Any]) -> None:
    """Raise ValueError where the checkpoint is of another model."""
    here, there = dict[str, int](), dict[str, int]()
    floating = set[str]()
    for index, name in enumerate(engine.names):
        here[name] = engine.shapes[index].numel()
        if engine.params[index].is_floating_point():
            floating.add(name)
    for key, about in known.items():
        kind, _, name = key.partition("/")
        if kind == "parameter":
            there[name] = about.size.numel()
    for name in sorted(floating | set(there)):
        ours, theirs = here.get(name, 0), there.get(name, 0)
        if ours != theirs:
            sizes = f"{theirs} elements there, {ours} here"
            raise ValueError(f"{folder} is of another model: {name} has {sizes}")


def _require_same_optimizer(engine: Engine, folder: Path, known: dict[str, Any]) -> None:
    """Raise ValueError where the checkpoint is of another optimizer. Those of earlier releases do not name theirs."""
    here, groups = type(engine.optimizer).__name__, engine.optimizer.param_groups
    classes = [key.removeprefix(_CLASS) for key in known if key.startswith(_CLASS)]
    numbers = {key.split("/")[1] for key in known if key.startswith("group/")}
    said = f"{folder} is of another optimizer"
    if classes and here not in classes:
        raise ValueError(f"{said}: {classes[0]} there, {here} here")
    if len(numbers) != len(groups):
        raise ValueError(f"{said}: {len(numbers)} parameter groups there, {len(groups)} here")
    lacking = [] if classes else _lacking(groups, known)
    if lacking:
        raise ValueError(f"{said}: {here} has {lacking[0]}, which is not there")


def _lacking(groups: list[dict[str, Any]], known: dict[str, Any]) -> list[str]:
    """Numbers of the groups that a checkpoint of an earlier release lacks: it has each that its own groups had."""
    found = []
    for number, group in enumerate(groups):
        names = [path for path, of, _ in kept(group) if of in ("int", "float") and path in group]
        found += [name for name in names if f"group/{number}/{name}" not in known]
    return found


def _room(about: Any) -> torch.Tensor:
    """For a tensor to be read, by what the checkpoint says of it."""
    return torch.empty(about.size, dtype=about.properties.dtype)


def _load_groups(engine: Engine, path: Path, known: dict[str, Any]) -> None:
    """The settings of the optimizer's groups, as the checkpoint has them."""
    values = dict[str, torch.Tensor]()
    for key, about in known.items():
        if key.startswith("group/"):
            values[key] = _room(about)
    _read(engine, values, path)
    for number, group in enumerate(engine.optimizer.param_groups):
        found: Kept = {}
        for key, value in values.items():
            _, place, setting = key.split("/", 2)
            if int(place) == number:
                of, _, name = setting.rpartition(":")
                found[name] = of, value
        restore(group, found)


def _make_states(engine: Engine, path: Path, known: dict[str, Any]) -> None:
    """The optimizer's states, which may not exist yet, as the checkpoint has them: numbers read, tensors to be read."""
    optimizer = engine.optimizer
    kinds, numbers = set[str](), dict[str, torch.Tensor]()
    for key, about in known.items():
        kind = key.partition("/")[0]
        kinds.add(kind)
        if ":" in kind:
            numbers[key] = _room(about)
    kinds -= {"parameter", "buffer", "group", "engine", "optimizer"}
    _read(engine, numbers, path)
    group_of = dict[nn.Parameter, dict[str, Any]]()
    for group in optimizer.param_groups:
        for param in group["params"]:
            group_of[param] = group
    for _, piece, param in engine.owned:
        owner = engine.names[piece.param]
        made = optimizer.state[param] = {}
        small: Kept = {}
        for kind in sorted(kinds):
            key = f"{kind}/{owner}"
            of, _, name = kind.rpartition(":")
            if key in numbers:
                value = numbers[key]
                small[name] = of, _as_step(value, param, group_of[param]) if of == "Tensor" else value
            elif key in known:
                dtype = known[key].properties.dtype
                made[name] = torch.zeros_like(param.detach(), dtype=dtype)
        restore(made, small)


def _as_step(number: torch.Tensor, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """A tensor of one element as torch's own optimizers keep their step; each piece of a parameter has its own."""
    device = torch.device("cpu")
    if group.get("fused") or group.get("capturable"):
        device = param.device
    return number.to(device, torch.float32, copy=True)
