"""Optimizers by their name, ``MODULE:CLASS``, and whether ZeRO may cut their parameters at any element."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..engine.parts import BY_MATRIX, ELEMENTWISE, REFUSED

#: Optimizers of pytorch_optimizer that look at each element by itself [Xie et al., Adan; Chen et al., Lion].
_KNOWN = {"Adan", "Lion"}

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


def optimizer_of(text: str | None, rate: float, elementwise: bool = False) -> tuple[OptimizerOf, bool | None]:
    """What makes the optimizer ``text`` (default: fused AdamW), and whether it is elementwise (``None``: zero() knows).

    Muon takes every matrix; AdamW takes the rest.

    Args:
        text: ``MODULE:CLASS``.
        rate: its learning rate.
        elementwise: the user says that it looks at each element by itself.

    Raises:
        ValueError: no such name, not made from parameters and a rate alone, or nobody says that it is elementwise.
    """
    adamw = partial(torch.optim.AdamW, fused=True, lr=rate)
    if text is None:
        return adamw, None
    kind: Any = named(text)
    if kind in BY_MATRIX:
        return partial(_muon_and_adamw, muon=partial(kind, lr=rate), adamw=adamw), None
    made = partial(kind, lr=rate)
    if kind in ELEMENTWISE or kind.__name__.lower() in REFUSED:  # zero() says why not
        return made, None
    known = kind.__module__.startswith("pytorch_optimizer.") and kind.__name__ in _KNOWN
    if not (elementwise or known or getattr(kind, "elementwise", False)):
        raise ValueError(
            f"{text} may need whole matrices, and ZeRO cuts parameters up at any element: "
            "give --elementwise if it looks at each element by itself"
        )
    try:
        made([nn.Parameter(torch.ones(2, 2))])
    except Exception as error:  # an optimizer that is made for something else may raise anything
        raise ValueError(f"{text} cannot be made from parameters and lr alone: {error}") from error
    return made, True


def _muon_and_adamw(params: list[nn.Parameter], muon: Any, adamw: Any) -> torch.optim.Optimizer:
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return Together([muon(matrices), adamw(rest)])
