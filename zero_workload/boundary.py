"""Where a unit of stage 3 begins and ends: the tensors that go in and come out, and parameters that are away."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class _AfterBackward(torch.autograd.Function):
    """Identity on a unit's inputs: its backward runs when every operation inside the unit has run its own.

    What it returns shares the inputs' memory without being a view of them, which a module could not change in place.
    """

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.done = done
        return tuple(
            t.new_empty(0).set_(t.untyped_storage(), t.storage_offset(), t.size(), t.stride())
            if type(t) in (torch.Tensor, nn.Parameter)
            else t
            for t in tensors
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.done()
        return None, *grads


class _Become(torch.autograd.Function):
    """In place: ``old`` is from now on what ``new``, in the same memory, was made."""

    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(old)
        return old

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]


class Entry:
    """One forward call of a unit: ``tensors``, its inputs, as the module gets them; ``done`` is called in backward."""

    def __init__(self, done: Callable[[], None], tensors: list[torch.Tensor]) -> None:
        self._outside = tensors
        self.tensors: tuple[torch.Tensor, ...] = _AfterBackward.apply(done, *tensors) if tensors else ()
        self._versions = [t._version for t in self.tensors]

    def leave(self) -> None:
        """After the module's forward: what it changed in place has changed for the caller too, gradients included."""
        for old, new, version in zip(self._outside, self.tensors, self._versions, strict=True):
            if new is not old and new._version != version:
                _Become.apply(old, new)


def tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """Every tensor in what pytrees know, and in mappings, dataclasses and objects, ``depth`` of these in each other."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and not isinstance(leaf, nn.Module | type) and not callable(leaf):
            if dataclasses.is_dataclass(leaf):
                yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)], depth - 1)
            elif isinstance(leaf, Mapping):
                yield from tensors_in(list(leaf.values()), depth - 1)
            elif hasattr(leaf, "__dict__"):
                yield from tensors_in(list(vars(leaf).values()), depth - 1)


#: What may be done to a parameter that is away: look at it, hook it.
_HARMLESS = {"__get__", "__set__", "__delete__", "__repr__", "register_hook", "register_post_accumulate_grad_hook"}
_HARMLESS |= {"size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"}
_HARMLESS |= {"requires_grad_", "untyped_storage", "storage_offset", "data_ptr", "get_device", "is_contiguous"}


class ShardedAwayParameter(nn.Parameter):
    """The class of a parameter while its unit is sharded: whoever computes with it is told which one it is."""

    place: tuple[str, str]  # its name, its unit's

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise RuntimeError with the name and the cure, unless ``func`` only looks."""
        if func.__name__ in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name, unit = next(x.place for x in tree_leaves((args, kwargs)) if type(x) is ShardedAwayParameter)
        raise RuntimeError(
            f"{name} is used outside the forward of {unit}, where stage 3 holds a shard of it only: call that module, "
            f"or keep it whole with zero(..., hybrid=N), N above the number of its elements"
        )


def send_away(param: Any, name: str, unit: str) -> None:
    """Let ``param``, which is empty now, say so when it is used. Fake tensors stay what they are."""
    if type(param) is nn.Parameter:
        param.place = (name, unit)  # type: ignore[attr-defined]
        param.__class__ = ShardedAwayParameter


def bring_back(param: Any) -> None:
    """The opposite, before it shows its values again."""
    if type(param) is ShardedAwayParameter:
        param.__class__ = nn.Parameter  # type: ignore[assignment]
