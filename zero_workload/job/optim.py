"""Optimizers that torch does not have: Adan and Lion."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import nn


class _Optimizer(torch.optim.Optimizer):
    """Calls ``_update`` for every parameter that has a gradient; ``options`` are the keywords and their defaults. The
    state of each is a ``step``, which counts from 1, and ``moments``.
    """

    elementwise = True
    options: ClassVar[dict[str, Any]]
    moments: ClassVar[tuple[str, ...]] = ("exp_avg",)
    _update: Callable[..., None]  # changes a parameter by its gradient, in place, with its state and group

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        if unknown := options.keys() - self.options.keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(unknown)}: its options are {self.options}")
        super().__init__(params, self.options | options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter once."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state.update(step=0, **{name: torch.zeros_like(param) for name in self.moments})
                    state["step"] += 1
                    self._update(param, param.grad, state, group)


class Adan(_Optimizer):
    """Adan (Xie et al., 2022, algorithm 1): Nesterov momentum from differences of gradients.

    ``betas`` are the decays of first moment, difference and second moment; ``weight_decay`` is proximal, as in the
    paper. State per element: three moments in the parameter's dtype, the previous gradient in ``previous_dtype``
    (``None``: the parameter's; bfloat16 halves it, and gradients of bfloat16 parameters arrive in that precision).
    """

    options: ClassVar = {
        "lr": 1e-3,
        "betas": (0.98, 0.92, 0.99),
        "eps": 1e-8,
        "weight_decay": 0,
        "previous_dtype": None,
    }
    moments = ("exp_avg", "exp_avg_diff", "exp_avg_sq")

    def _update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if state["step"] == 1:
            state["previous"] = g.to(group["previous_dtype"] or p.dtype, copy=True)
        (beta1, beta2, beta3), change = group["betas"], g - state["previous"]
        state["previous"].copy_(g)
        state["exp_avg"].lerp_(g, 1 - beta1)
        state["exp_avg_diff"].lerp_(change, 1 - beta2)
        state["exp_avg_sq"].mul_(beta3).add_((g + beta2 * change).square_(), alpha=1 - beta3)
        n = state["step"]
        root = (state["exp_avg_sq"] / (1 - beta3**n)).sqrt_().add_(group["eps"])
        move = state["exp_avg"] / (1 - beta1**n) + beta2 * state["exp_avg_diff"] / (1 - beta2**n)
        p.addcdiv_(move, root, value=-group["lr"]).div_(1 + group["lr"] * group["weight_decay"])


class Lion(_Optimizer):
    """Lion (Chen et al., 2023, algorithm 2): the sign of an interpolated momentum. State: one moment.

    ``lr`` is a third to a tenth of Adam's; ``betas``: interpolation of the update, decay of the moment;
    ``weight_decay`` is decoupled.
    """

    options: ClassVar = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}

    def _update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(torch.lerp(g, state["exp_avg"], beta1).sign_(), alpha=group["lr"])
        state["exp_avg"].lerp_(g, 1 - beta2)
