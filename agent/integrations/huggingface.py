"""Hugging Face Trainer: ``watch(trainer)`` logs what the tuner does, wherever the trainer logs."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from .current import Values


class DynamicclCallback(TrainerCallback):  # type: ignore[misc]
    """Logs the figures of :class:`~dynamiccl.agent.integrations.current.Values` through the trainer, on rank 0."""

    def __init__(self, trainer: Trainer, every: int = 10) -> None:
        self.trainer = trainer
        self.values = Values(every)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called by the trainer after each optimizer step."""
        if not state.is_world_process_zero:
            return
        values = self.values.at(state.global_step)
        if values:
            self.trainer.log(values)


def watch(trainer: Trainer, every: int = 10) -> None:
    """Let ``trainer`` log step time, current table and verdict.

    Args:
        trainer: a Trainer that has not begun to train.
        every: optimizer steps between two logs.

    Raises:
        ValueError: if ``every`` is below 1.
    """
    trainer.add_callback(DynamicclCallback(trainer, every))
