"""Optimizers that torch does not have, or not for flat shards.

Adan and Lion are elementwise and run at every stage. Muon needs whole matrices: stages 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class _Optimizer(torch.optim.Optimizer):
    """``step()`` calls ``update(param, gradient, state, group)`` for every parameter that has a gradient."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter once; ``closure``, if given, is called first and its value returned."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)
        return result

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One parameter, in place."""
        raise NotImplementedError


class Adan(_Optimizer):
    """Adan (Xie et al., 2022, algorithm 1): Nesterov momentum from differences of gradients.

    State per element: three moments in the parameter's dtype and the previous gradient in ``previous_dtype``.

    Args:
        params: flat shards.
        lr: learning rate.
        betas: decay of first moment, difference and second moment.
        eps: added to the root of the second moment.
        weight_decay: proximal, as in the paper.
        previous_dtype: bfloat16 halves what the previous gradient takes; gradients arrive in that precision anyway
            when parameters are bfloat16. ``None`` is the parameter's dtype.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        previous_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.previous_dtype = previous_dtype

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One parameter, in place."""
        if not state:
            state["step"] = 0
            state.update({name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq")})
            state["previous"] = g.to(self.previous_dtype or p.dtype, copy=True)
        state["step"] += 1
        beta1, beta2, beta3 = group["betas"]
        change = g - state["previous"]
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

    Args:
        params: flat shards.
        lr: learning rate; a third to a tenth of Adam's.
        betas: interpolation of the update, decay of the moment.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One parameter, in place."""
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        beta1, beta2 = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.sub_(torch.lerp(g, state["exp_avg"], beta1).sign_(), alpha=group["lr"])
        state["exp_avg"].lerp_(g, 1 - beta2)


class Muon(_Optimizer):
    """Muon (Jordan et al., 2024): momentum made orthogonal by Newton-Schulz iterations; Adam for what is no matrix.

    Args:
        params: whole parameters.
        lr: learning rate of matrices, scaled by ``sqrt(max(1, rows / columns))``.
        momentum: decay of the moment, Nesterov.
        adam_lr: learning rate of vectors and scalars.
    """

    elementwise = False

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.95, adam_lr: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "adam_lr": adam_lr})

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """One parameter, in place."""
        if p.dim() < 2:
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["step"] += 1
            state["exp_avg"].lerp_(g, 0.1)
            state["exp_avg_sq"].mul_(0.999).addcmul_(g, g, value=0.001)
            root = (state["exp_avg_sq"] / (1 - 0.999 ** state["step"])).sqrt_().add_(1e-8)
            p.addcdiv_(state["exp_avg"] / (1 - 0.9 ** state["step"]), root, value=-group["adam_lr"])
            return
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        state["exp_avg"].mul_(group["momentum"]).add_(g)
        update = orthogonal((g + group["momentum"] * state["exp_avg"]).flatten(1))
        scale = max(1.0, update.shape[0] / update.shape[1]) ** 0.5
        p.sub_(update.view(p.shape), alpha=group["lr"] * scale)


def orthogonal(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """The matrix [rows, columns] with all singular values brought near 1 (between about 0.7 and 1.2).

    Quintic Newton-Schulz iteration with the coefficients of Jordan et al., 2024.
    """
    x = matrix / (matrix.norm() + 1e-7)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.T
