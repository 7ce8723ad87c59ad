"""Accelerate: ``watch(accelerator)`` logs what the tuner does to the trackers of ``init_trackers``."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch.optim.optimizer import register_optimizer_step_post_hook

from .current import Values


class _Watch(GeneralTracker):  # type: ignore[misc]
    """The hook by which one accelerator is watched. It stands among the trackers: ``end_training`` ends them all."""

    name, requires_logging_directory, tracker = "dynamiccl", False, None

    def __init__(self, accelerator: Accelerator, every: int) -> None:
        super().__init__()
        self.accelerator, self.values, self.steps = accelerator, Values(every), 0
        self.handle = register_optimizer_step_post_hook(self.after)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""
        self.steps += 1
        if self.accelerator.is_main_process:
            self.values.log(self.steps, self.send)

    def send(self, values: dict[str, float]) -> None:
        """Log to the other trackers."""
        for tracker in self.accelerator.trackers:
            # W&B drops what comes with a step below its newest. So the job alone moves its step: our figures wait
            # for what the job logs next.
            how = {"commit": False} if tracker.name == "wandb" else {"step": self.steps}
            if tracker is not self:
                tracker.log(values, **how)

    def finish(self) -> None:
        """The training has ended."""
        self.handle.remove()


def watch(accelerator: Accelerator, every: int = 10) -> None:
    """Log step time, current table and verdict after each ``every``-th step of an optimizer, on rank 0.

    Ends with ``accelerator.end_training()``. A second call replaces the first.

    Args:
        accelerator: an Accelerator whose trackers are initialised before the first step.
        every: optimizer steps between two logs, of all optimizers, from 0 in each process.

    Raises:
        ValueError: if ``every`` is below 1.
    """
    watching = _Watch(accelerator, every)
    for tracker in [one for one in accelerator.trackers if isinstance(one, _Watch)]:
        tracker.finish()
        accelerator.trackers.remove(tracker)
    accelerator.trackers.append(watching)
