"""Optimizers by their name, ``MODULE:CLASS``, and whether ZeRO may cut their parameters at any element."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..buffers.kept import lost

#: Elements of the runs that an optimizer is tried on, and steps of the trial.
_RUNS, _TRIAL_STEPS = [7, 17], 150
#: Runs may differ by so much of the movement, and of a weight of about 1: they may round in another way.
_NEAR, _ROUNDING = 1e-4, 1e-6

OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Together(torch.optim.Optimizer):
    """Several optimizers as one: their groups side by side, one state. Of each class only its ``step`` is used."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups  # the same dictionaries: what changes a group changes it for both
        for optimizer in optimizers:
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each of them."""
        for optimizer in self.optimizers:
            optimizer.step()


def named(text: str) -> type[torch.optim.Optimizer]:
    """The class ``MODULE:CLASS``. Raises ValueError with what is wrong."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"an optimizer is MODULE:CLASS, e.g. torch.optim:SGD, not {text!r}")
    try:
        kind = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        cure = "Adan and Lion are in pytorch_optimizer (pip install pytorch-optimizer)"
        raise ValueError(f"{text}: there is no module {error.name}: {cure}") from error
    except AttributeError as error:
        raise ValueError(f"{text}: {module} has no {name}") from error
    except Exception as error:  # a module may raise anything
        raise ValueError(f"{text}: {module} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"{text} is no torch.optim.Optimizer")
    return kind


def looks_at_elements(optimizer: OptimizerOf) -> bool:
    """Whether a matrix [6, 4] and two uneven runs of its elements come to the same, by trial.

    Each run has an optimizer of its own, as each rank has. What looks at all elements together may do so slowly, or
    only where a gradient is unusual: so the trial has many steps in one direction, with gradients of several sizes,
    some of them nearly orthogonal to the weights.
    """
    draw = torch.Generator().manual_seed(0)
    start, direction = torch.randn(2, 6, 4, generator=draw)
    whole = nn.Parameter(start.clone())
    runs = [nn.Parameter(part.clone()) for part in start.flatten().split(_RUNS)]
    optimizers = [optimizer([param]) for param in (whole, *runs)]
    for step in range(_TRIAL_STEPS):
        size = torch.randn((), generator=draw).exp()
        grad = size * (direction + 0.5 * torch.randn(6, 4, generator=draw))
        if step % 3 == 0:  # as of weights that a norm follows
            weights = whole.detach()
            grad -= 0.99 * (grad * weights).sum() / weights.square().sum() * weights
        whole.grad = grad.clone()
        for run, part in zip(runs, grad.flatten().split(_RUNS), strict=True):
            run.grad = part.clone()
        for one in optimizers:
            one.step()
    together = torch.cat([run.detach() for run in runs])
    apart = (whole.detach().flatten() - together).abs().max()
    moved = (whole.detach() - start).abs().max()
    return bool(apart <= _NEAR * moved + _ROUNDING)


def _rates(kind: Any, rate: float) -> list[float]:
    """Rates to try an optimizer at: the one asked for, and its usual one. What it learns by itself may need that."""
    usual = inspect.signature(kind).parameters.get("lr")
    has_number = usual is not None and isinstance(usual.default, int | float)
    return [rate, float(usual.default)] if usual and has_number else [rate]


def require_kept(optimizer: OptimizerOf, text: str) -> None:
    """Raise ValueError where a checkpoint would not keep all that the optimizer ``text`` holds, after one step."""
    params = [nn.Parameter(torch.ones(*shape)) for shape in ((6, 4), (24,))]
    made = optimizer(params)
    for param in params:
        param.grad = torch.ones_like(param)
    made.step()
    forgotten = lost(made)
    if forgotten:
        names = ", ".join(forgotten)
        raise ValueError(
            f"{text} holds {names}, which no checkpoint keeps: leave --save out, or take another one"
        )


def optimizer_of(text: str | None, rate: float) -> tuple[OptimizerOf, bool | None]:
    """What makes the optimizer ``text`` (default: fused AdamW), and whether it is elementwise (``None``: zero() knows).

    Muon takes every matrix, those of the embeddings and the head too; AdamW takes the rest.

    Raises:
        ValueError: there is none of that name, or it cannot be made from parameters and a rate alone.
    """
    adamw = partial(torch.optim.AdamW, fused=True, lr=rate)
    if text is None:
        return adamw, None
    kind: Any = named(text)
    if kind.__module__.startswith("torch.") and kind.__name__ == "Muon":
        return partial(_muon_and_adamw, muon=partial(kind, lr=rate), adamw=adamw), None
    made = partial(kind, lr=rate)
    if kind.__name__.lower() in ("shampoo", "kfac"):  # zero() says why not
        return made, None
    try:
        elementwise = all(looks_at_elements(partial(kind, lr=each)) for each in _rates(kind, rate))
    except Exception as error:  # an optimizer that is made for something else may raise anything
        raise ValueError(f"{text} cannot train a matrix from parameters and lr alone: {error}") from error
    if not elementwise:
        raise ValueError(f"{text} does not look at each element by itself, so ZeRO cannot cut its parameters")
    return made, True


def _muon_and_adamw(params: list[nn.Parameter], muon: Any, adamw: Any) -> torch.optim.Optimizer:
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return Together([muon(matrices), adamw(rest)])
