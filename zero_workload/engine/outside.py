"""What a loop may do to gradients, parameters and the optimizer behind the engine's back, and how it is noticed.

Everything here is refused in one line, because it would have no effect, or another one on each rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class Elements(dict[tuple[torch.dtype, torch.device, float], torch.Tensor]):
    """(dtype, device, value) -> a number that stands for all values that are elsewhere; it is never written."""

    def __missing__(self, key: tuple[torch.dtype, torch.device, float]) -> torch.Tensor:
        dtype, device, value = key
        made = self[key] = torch.full((), value, dtype=dtype, device=device)
        return made


def _nothing(*_: Any, **__: Any) -> None:
    """The engine's hooks on a copy of the model."""


def _of_copies() -> Callable[..., None]:
    return _nothing


class Hook:
    """A hook of the engine on the user's module. A copy of the module (an average of the weights) is a plain module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the engine's own function."""
        return self.call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _of_copies, ()


class Taken(torch.Tensor):
    """Stands for the gradient of a parameter between the last backward and the step: it is reduced, or on its way.

    Whoever reads or changes it (``clip_grad_norm_(model.parameters(), ...)``) is told what to do instead.
    """

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(
            "the engine has taken this step's gradients: clip them by zero(max_norm=...), whose engine.step() returns "
            "their norm, and call engine.step() before the next backward"
        )


class Outside:
    """Watches what belongs to the engine.

    Args:
        params: of the model; once the engine holds them.
        names: theirs.
        private: parameters are not what the optimizer updates: a change of them would be lost.
        fixed: they stay in the memory where they are now. At stage 3 the engine itself moves them.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], names: Sequence[str], private: bool, fixed: bool
    ) -> None:
        self.params, self.names, self.private, self.fixed = params, names, private, fixed
        self._frozen = {name for name, p in zip(names, params, strict=True) if not p.requires_grad}
        self.stepping = False  # the engine itself steps the optimizer
        self._elements = Elements()
        self._taken: dict[int, torch.Tensor] = {}  # in the place of gradients, by the parameter's number
        self._is_taken = False
        self._left = self._seen()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse ``optimizer.step()`` by anybody but the engine."""
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.stepping:
            raise RuntimeError(
                "the optimizer's gradients are the engine's: call engine.step(), not optimizer.step()"
            )

    def take_gradients(self) -> None:
        """After the last backward of a step: put a :class:`Taken` in the place of each gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            for number, param in enumerate(self.params):
                if param.requires_grad:
                    if number not in self._taken:
                        zeros = self._elements[param.dtype, param.device, 0.0].expand(param.shape)
                        self._taken[number] = torch.Tensor._make_subclass(Taken, zeros)
                    param.grad = self._taken[number]
        self._is_taken = True

    def give_gradients(self) -> None:
        """Before the next step: gradients may come again."""
        with torch._C.DisableTorchFunctionSubclass():
            for param in self.params:
                param.grad = None
        self._is_taken = False

    def _seen(self) -> list[Any]:
        """Of each parameter what nobody but the engine changes."""
        with torch._C.DisableTorchFunctionSubclass():  # one whose values are on their way is not waited for
            return [
                (
                    p.dtype,
                    p.device,
                    p._version,
                    p.untyped_storage()._cdata if self.fixed else 0,
                    p.requires_grad,
                )
                for p in self.params
            ]

    def require_kinds(self) -> None:
        """Raise RuntimeError where a parameter was converted since ``zero()``."""
        with torch._C.DisableTorchFunctionSubclass():
            kinds = [(p.dtype, p.device) for p in self.params]
        for name, now, left in zip(self.names, kinds, self._left, strict=True):
            if now != left[:2]:
                what = f"{name} became {now[0]} on {now[1]}"
                raise RuntimeError(f"{what} after zero(): convert the model before zero()")

    def require_untouched(self) -> None:
        """Raise RuntimeError where a parameter was changed, converted or unfrozen since the last step, or its gradient
        removed or replaced since backward. A change in place of ``param.data`` leaves no trace.
        """
        seen = self._seen()
        if seen != self._left:
            self.require_kinds()
            for name, now, left in zip(self.names, seen, self._left, strict=True):
                self._require_value(name, now, left)
        self._require_gradients()

    def _require_gradients(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for number, taken in self._taken.items() if self._is_taken else ():
                param = self.params[number]
                if param.requires_grad and param.grad is not taken:
                    what = f"the gradient of {self.names[number]} was removed or replaced after backward"
                    raise RuntimeError(
                        f"{what}, and the engine has its own: leave it until engine.step(), which clears it, or use "
                        "max_norm to clip"
                    )

    def _require_value(self, name: str, now: Any, left: Any) -> None:
        if now[4] and name in self._frozen:
            raise RuntimeError(f"{name} was frozen in zero() and is not now: unfreeze it before zero()")
        cure = "change it before zero(), or give a model with the changed engine.full_state() to zero() again"
        if now[3] != left[3]:
            raise RuntimeError(f"{name}.data was replaced, and the engine updates the memory before: {cure}")
        if self.private and now[2] != left[2]:
            raise RuntimeError(f"{name} was changed, but the engine holds its exact value: {cure}")

    def settle(self) -> None:
        """The parameters are as the engine left them."""
        self._left = self._seen()
