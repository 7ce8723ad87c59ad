"""Hugging Face Trainer: ``watch(trainer)`` adds what the tuner does to the training logs of the trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from .current import Values


class DynamicclCallback(TrainerCallback):  # type: ignore[misc]
    """Adds the figures of :class:`~dynamiccl.agent.integrations.current.Values` to the trainer's logs, on rank 0.

    It makes no log of its own: ``Trainer.log`` within a step clears ``control.should_log``. Rank 0 alone would then
    skip the log of the loss, with its all-gather. Logs of evaluations stay as they are: their figures are results.
    """

    def __init__(self, every: int = 10) -> None:
        self.values = Values(every)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        """Called by the trainer on every rank, with what it logs."""
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return

        def add(values: dict[str, float]) -> None:
            for entry in (logs, *state.log_history[-1:]):
                entry.update(values)

        self.values.log(state.global_step, add)


def watch(trainer: Trainer, every: int = 10) -> None:
    """Let ``trainer`` log step time, current table and verdict beside its loss. A second call replaces the first.

    Args:
        trainer: a Trainer that has not begun to train. Its ``logging_steps`` say when it logs.
        every: optimizer steps between two logs of these figures, at least.

    Raises:
        ValueError: if ``every`` is below 1.
    """
    callback = DynamicclCallback(every)
    trainer.remove_callback(DynamicclCallback)
    # Before those that report: they are called in this order, with one dict.
    trainer.callback_handler.callbacks.insert(0, callback)
