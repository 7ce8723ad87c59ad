"""Accelerate: ``watch(accelerator)`` logs what the tuner does to the trackers of ``init_trackers``."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_post_hook

from .current import Values


def watch(accelerator: Accelerator, every: int = 10) -> None:
    """Log step time, current table and verdict after each ``every``-th step of an optimizer, on rank 0.

    Args:
        accelerator: an Accelerator whose trackers are initialised before the first step.
        every: optimizer steps between two logs.

    Raises:
        ValueError: if ``every`` is below 1.
    """
    values = Values(every)
    steps = 0

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal steps
        steps += 1
        if accelerator.is_main_process and (found := values.at(steps)):
            accelerator.log(found, step=steps)

    register_optimizer_step_post_hook(after)
