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
        every: optimizer steps between two logs. The steps of all optimizers count, from 0 in each process.

    Raises:
        ValueError: if ``every`` is below 1.
    """
    values = Values(every)
    steps = 0

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal steps
        steps += 1
        if accelerator.is_main_process and (found := values.at(steps)):
            for tracker in accelerator.trackers:
                # W&B drops what comes with a step below its newest. So the job alone moves its step: our figures wait
                # for what the job logs next.
                how = {"commit": False} if tracker.name == "wandb" else {"step": steps}
                tracker.log(found, **how)

    register_optimizer_step_post_hook(after)
