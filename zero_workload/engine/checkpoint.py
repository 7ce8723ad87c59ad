"""The engine's state: whole on one rank, or written by all ranks through ``torch.distributed.checkpoint``.

On disk a parameter, and each elementwise optimizer state, is one flat tensor under the parameter's name, so any other
stage and number of ranks can read it. The rest are pickled values. Each save is a folder; a file names the last whole
one.
"""

from __future__ import annotations

import copy
import os
import re
import secrets
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from ..buffers.layout import Piece
from ..buffers.pieces import Pieces

Engine = Any  # engine.Engine, which imports this file
#: What lies where in a checkpoint. One of another number is refused.
FORMAT = 2
_ABOUT = "engine/about"
#: Before a parameter's name: its states that are no tensor of elements.
_SMALL = "small/"
#: The parameters themselves, and how a step is computed on a machine: the optimizer that resumes has its own.
_NOT_KEPT = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
#: What the folder of a save is called, before its number. Nobody calls a file of their own so: old saves are deleted.
_SAVE = "zero-save-"
_NAME = re.compile(_SAVE + "[0-9a-f]{12}")
#: Names the folder of the last save.
_CURRENT = f"{_SAVE}current"
#: The cure where one rank does not see what another writes.
_SHARED = "all nodes must share the folder"


class _Value:
    """Anything that is pickled as it is: DCP takes a dictionary apart."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _State(dict[str, Any]):
    """Views of the tensors that a checkpoint holds, by ``kind/name of the parameter``."""

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
                if _is_of_elements(value, param):
                    self._add(name, piece, value)
        frozen = [bucket for bucket in engine.all_buckets if bucket.master is None]
        for bucket in frozen:
            for piece in bucket.mine():
                part = bucket.shard[piece.where]
                self._add("parameter", piece, part)

    def _add(self, kind: str, piece: Piece, tensor: torch.Tensor) -> None:
        index = piece.param
        key = f"{kind}/{self.names[index]}"
        if key not in self:
            numel = self.shapes[index].numel()
            self[key] = Pieces.of(numel)
        flat = tensor.detach().view(-1)
        self[key].parts[piece.start] = flat


def _is_of_elements(value: Any, param: torch.Tensor) -> bool:
    """Whether a state of a parameter is a tensor with a value for each of its elements."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == param.numel()


def _is_small(value: Any) -> bool:
    """Whether a state is the same in whatever way a parameter is cut: a number, a word, a tuple of these."""
    if isinstance(value, tuple | list):
        return all(_is_small(one) for one in value)
    if isinstance(value, torch.Tensor):
        return not value.dim()
    return isinstance(value, bool | int | float | str | None)


def _values(engine: Engine) -> dict[str, _Value]:
    """What else the optimizer and the engine hold."""
    optimizer, scale = engine.optimizer, engine.scale
    about = {
        "format": FORMAT,
        "optimizer": type(optimizer).__name__,
        "groups": [_settings(group) for group in optimizer.param_groups],
        "steps": engine.steps,
        "skipped": scale.skipped,
        "scale": scale.value if scale.dynamic else None,
        "good_steps": scale.good_steps,
    }
    found = {_ABOUT: _Value(about)}
    for _, piece, param in engine.owned:
        state = optimizer.state.get(param, {})
        small = {name: _on_host(value) for name, value in state.items() if _is_small(value)}
        found[f"{_SMALL}{engine.names[piece.param]}"] = _Value(small)
    return found


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Those of an optimizer's group that a checkpoint keeps."""
    return {name: _on_host(value) for name, value in group.items() if name not in _NOT_KEPT}


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def lost(optimizer: torch.optim.Optimizer) -> list[str]:
    """What an optimizer holds in its state beside that of parameters, and names of states that cannot be kept."""
    found = dict[str, None]()
    for of, state in optimizer.state.items():
        if not isinstance(of, torch.Tensor):
            found[str(of)] = None
            continue
        for name, value in state.items():
            if not (_is_small(value) or _is_of_elements(value, of)):
                found[name] = None
    return list(found)


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
            state = _State(engine) | _values(engine)
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
    except (FileNotFoundError, NotADirectoryError):  # it may be a save itself
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
    about = _about(engine, folder, path, known)
    _require_alike(engine, folder, known)
    _require_same_optimizer(engine, folder, about)
    for group, settings in zip(engine.optimizer.param_groups, about["groups"], strict=True):
        group.update(_as_here(settings, group))
    _make_states(engine, path, known)
    _read(engine, _State(engine), path)
    engine.steps = about["steps"]
    engine.scale.skipped = about["skipped"]
    if engine.scale.dynamic and about["scale"] is not None:
        engine.scale.value, engine.scale.good_steps = about["scale"], about["good_steps"]
    engine.publish()
    engine.synchronize()


def _about(engine: Engine, folder: Path, path: Path, known: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises ValueError where it is of another format."""
    found = {_ABOUT: _Value({"format": 1})}
    if _ABOUT in known:
        _read(engine, found, path)
    about: dict[str, Any] = found[_ABOUT].value
    if about["format"] != FORMAT:
        there = f"{folder} is a checkpoint of format {about['format']}, and this release reads {FORMAT}"
        raise ValueError(
            f"{there}: resume it with the release that wrote it, or start anew from its full_state()"
        )
    return about


def _as_here(settings: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Settings of a checkpoint; a tensor on the device where the optimizer's own is."""
    found = {}
    for name, value in settings.items():
        here = group.get(name)
        both = isinstance(value, torch.Tensor) and isinstance(here, torch.Tensor)
        found[name] = value.to(here) if both else value
    return found


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


def _require_same_optimizer(engine: Engine, folder: Path, about: dict[str, Any]) -> None:
    """Raise ValueError where the checkpoint is of another optimizer."""
    here, groups = type(engine.optimizer).__name__, engine.optimizer.param_groups
    said = f"{folder} is of another optimizer"
    if about["optimizer"] != here:
        raise ValueError(f"{said}: {about['optimizer']} there, {here} here")
    if len(about["groups"]) != len(groups):
        raise ValueError(f"{said}: {len(about['groups'])} parameter groups there, {len(groups)} here")


def _make_states(engine: Engine, path: Path, known: dict[str, Any]) -> None:
    """The optimizer's states, which may not exist yet, as the checkpoint has them: values read, tensors to be read."""
    optimizer = engine.optimizer
    small = {key: _Value({}) for key in known if key.startswith(_SMALL)}
    _read(engine, small, path)
    kinds = {key.partition("/")[0] for key in known} - {"parameter", "buffer", "engine", "small"}
    group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
    for _, piece, param in engine.owned:
        owner = engine.names[piece.param]
        state = optimizer.state[param] = {}
        for name, value in small[f"{_SMALL}{owner}"].value.items():
            is_tensor = isinstance(value, torch.Tensor)
            value = copy.deepcopy(value)  # each piece of a parameter has its own
            state[name] = _placed(name, value, param, group_of[param]) if is_tensor else value
        for kind in sorted(kinds):
            about = known.get(f"{kind}/{owner}")
            if about is not None:
                state[kind] = torch.zeros_like(param.detach(), dtype=about.properties.dtype)


def _placed(name: str, value: torch.Tensor, param: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """A 0-dim state on the device where it belongs: torch's optimizers keep their step on the host unless they are
    fused or captured. What else is 0-dim belongs to a 0-dim parameter.
    """
    is_step = param.dim() or name == "step"
    on_device = group.get("fused") or group.get("capturable") or not is_step
    return value.to(param.device if on_device else "cpu")
