"""What a loop may do to gradients, parameters and the optimizer behind the engine's back, and how it is noticed.

Everything here is refused in one line, because it would have no effect, or another one on each rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


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
        self.params, self.names, self.private = params, names, private
        self.graded = [p.requires_grad for p in params]
        self.kinds = [(p.dtype, p.device) for p in params]
        self.stepping = False  # the engine itself steps the optimizer
        self.taken = False  # each gradient is a Taken
        self.places = [_place(p) for p in params] if fixed else []
        self._versions = [p._version for p in params]
        self._element: dict[Any, torch.Tensor] = {}  # (dtype, device) -> one element of memory

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse ``optimizer.step()`` by anybody but the engine."""
        optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.stepping:
            raise RuntimeError(
                "the optimizer's gradients are the engine's: call engine.step(), not optimizer.step()"
            )

    def take_gradients(self) -> None:
        """After the last backward of a step: put :class:`Taken` in the place of each gradient."""
        for param in self.params:
            if not param.requires_grad:
                continue
            kind = param.dtype, param.device
            if kind not in self._element:
                self._element[kind] = torch.zeros((), dtype=param.dtype, device=param.device)
            every = self._element[kind].expand(param.shape)
            param.grad = torch.Tensor._make_subclass(Taken, every)
        self.taken = True

    def give_gradients(self) -> None:
        """Before the next step: gradients may come again."""
        for param in self.params:
            param.grad = None
        self.taken = False

    def require_untouched(self) -> None:
        """Raise RuntimeError where a parameter was changed, converted or unfrozen since the last step, or its gradient
        removed or replaced since backward. A change in place of ``param.data`` leaves no trace.
        """
        for number, param in enumerate(self.params):
            self._require_kind(number, param)
            self._require_value(number, param)
            if self.taken and param.requires_grad and not isinstance(param.grad, Taken):
                name = self.names[number]
                what = f"the gradient of {name} was removed or replaced after backward, and the engine has its own"
                raise RuntimeError(
                    f"{what}: leave it until engine.step(), which clears it, or use max_norm to clip"
                )

    def _require_kind(self, number: int, param: nn.Parameter) -> None:
        name = self.names[number]
        if (param.dtype, param.device) != self.kinds[number]:
            what = f"{name} became {param.dtype} on {param.device}"
            raise RuntimeError(f"{what} after zero(): convert the model before zero()")
        if param.requires_grad and not self.graded[number]:
            raise RuntimeError(f"{name} was frozen in zero() and is not now: unfreeze it before zero()")

    def _require_value(self, number: int, param: nn.Parameter) -> None:
        name = self.names[number]
        cure = "change it before zero(), or give a model with the changed engine.full_state() to zero() again"
        if self.places and _place(param) != self.places[number]:
            raise RuntimeError(f"{name}.data was replaced, and the engine updates the memory before: {cure}")
        if self.private and param._version != self._versions[number]:
            raise RuntimeError(f"{name} was changed, but the engine holds its exact value: {cure}")

    def settle(self) -> None:
        """The parameters are as the engine left them."""
        self._versions = [p._version for p in self.params]


def _place(param: torch.Tensor) -> int:
    """Which allocation holds ``param``: a number that no other has while this one lives."""
    return param.untyped_storage()._cdata
