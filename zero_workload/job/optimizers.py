"""Optimizers by their name, ``MODULE:CLASS``, and whether ZeRO may cut their parameters at any element."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

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
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"{text} is no torch.optim.Optimizer")
    return kind


def looks_at_elements(optimizer: OptimizerOf) -> bool:
    """Whether a matrix [6, 4] and two uneven runs of its elements come to the same, in four steps, by trial."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=draw)
    whole = nn.Parameter(start.clone())
    runs = [nn.Parameter(part.clone()) for part in start.flatten().split([7, 17])]
    optimizers = [optimizer([whole]), optimizer(runs)]
    for _ in range(4):
        grad = torch.randn(6, 4, generator=draw)
        whole.grad = grad.clone()
        for run, part in zip(runs, grad.flatten().split([7, 17]), strict=True):
            run.grad = part.clone()
        for one in optimizers:
            one.step()
    together = torch.cat([run.detach() for run in runs])
    return torch.allclose(whole.detach().flatten(), together, rtol=1e-5, atol=1e-7)


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
        elementwise = looks_at_elements(made)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{text} cannot train a matrix from parameters and lr alone: {error}") from error
    if not elementwise:
        raise ValueError(f"{text} does not look at each element by itself, so ZeRO cannot cut its parameters")
    return made, True


def _muon_and_adamw(params: list[nn.Parameter], muon: Any, adamw: Any) -> torch.optim.Optimizer:
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return Together([muon(matrices), adamw(rest)])
