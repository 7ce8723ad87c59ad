"""An optimizer's settings and small states as a checkpoint keeps them: one value a key, under its path and its type.

A path is a name; of a tuple each element has one, ``name.place``, and of a list ``name.lplace``. The type is in the
key, so that a value can be made again where a new optimizer does not have it yet: many make their ``step`` in their
first step.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

#: The parameters themselves, and how a step is computed on a machine: the optimizer that resumes has its own.
_NOT_KEPT = {"params", "foreach", "fused", "capturable", "differentiable"}
#: Types of what is kept, by their names in a key; a bool is an int too, so it comes first.
_TYPES: dict[str, type] = {
    "bool": bool,
    "int": int,
    "float": float,
    "NoneType": type(None),
    "Tensor": torch.Tensor,
}

#: Path -> type and value.
Kept = dict[str, tuple[str, torch.Tensor]]


def kept(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Path, type and value of each of ``settings`` that is a number, a bool, None, a tensor, or a tuple of these.

    Tensors are not copied; other values become float64 (scalar).
    """
    for name, value in settings.items():
        if name in _NOT_KEPT:
            continue
        paths = {name: value}
        if isinstance(value, tuple | list):
            of = "l" if isinstance(value, list) else ""
            paths = {f"{name}.{of}{place}": element for place, element in enumerate(value)}
        types = {path: _type(element) for path, element in paths.items()}
        if not all(types.values()):
            continue
        for path, element in paths.items():
            yield path, types[path], exact(element)


def exact(value: Any) -> torch.Tensor:
    """A number as a checkpoint keeps it, float64 (scalar); a tensor as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    number = float(value or 0)
    return torch.tensor(number, dtype=torch.float64)


def lost(optimizer: torch.optim.Optimizer) -> list[str]:
    """What an optimizer holds in its state beside that of parameters, and names of states that cannot be kept.

    A parameter's state is kept if it is a tensor of elements, or what :func:`kept` knows.
    """
    found = dict[str, None]()
    for of, state in optimizer.state.items():
        if not isinstance(of, torch.Tensor):
            found[str(of)] = None
            continue
        for name, value in state.items():
            values = [value for _, _, value in kept({name: value})]
            is_small = bool(values) and not any(value.dim() for value in values)
            if not (is_small or is_of_elements(value, of)):
                found[name] = None
    return list(found)


def is_of_elements(value: Any, param: torch.Tensor) -> bool:
    """Whether a state of a parameter is a tensor with a value for each of its elements."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == param.numel()


def restore(settings: dict[str, Any], values: Kept) -> None:
    """Give ``settings`` the values that were kept, also those that they do not have yet."""
    rows: dict[str, list[Any]] = {}
    lists = set[str]()
    for path, (of, value) in sorted(values.items(), key=lambda item: _split(item[0])):
        name, place, is_list = _split(path)
        if is_list:
            lists.add(name)
        if place < 0:
            settings[name] = _made(value, of, settings.get(name))
            continue
        here = None
        with suppress(KeyError, TypeError, IndexError):
            here = settings[name][place]
        element = _made(value, of, here)
        rows.setdefault(name, []).append(element)
    for name, elements in rows.items():
        settings[name] = elements if name in lists else tuple(elements)


def _split(path: str) -> tuple[str, int, bool]:
    """Name and place of an element, and whether it is of a list; -1 where the path is of no element."""
    name, _, place = path.rpartition(".")
    digits = place.removeprefix("l")
    if not name or not digits.isdigit():
        return path, -1, False
    return name, int(digits), digits != place


def _type(value: Any) -> str:
    """The name of the type that a value is kept as; empty where it is not kept."""
    return next((name for name, kind in _TYPES.items() if isinstance(value, kind)), "")


def _made(value: torch.Tensor, of: str, here: Any) -> Any:
    """A kept value as the settings have it, in which ``here`` stands now (None: nothing).

    Checkpoints of earlier releases have no type (``of`` is empty), and only numbers.
    """
    if of == "NoneType":
        return None
    if isinstance(here, torch.Tensor):
        return value.to(here)
    if of == "Tensor" and here is None:
        return value
    number = value.item()
    if of in ("", "Tensor"):
        of = "int" if float(number).is_integer() and not isinstance(here, float) else "float"
    return _TYPES[of](number)
