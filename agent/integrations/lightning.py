"""Lightning: ``Trainer(callbacks=[DynamicclCallback()])`` logs what the tuner does to all loggers of the trainer."""

from __future__ import annotations

from typing import Any

import lightning

from .current import Values


class DynamicclCallback(lightning.Callback):  # type: ignore[misc]
    """Logs the figures of :class:`~dynamiccl.agent.integrations.current.Values`, on rank 0.

    Args:
        every: optimizer steps between two logs.

    Raises:
        ValueError: if ``every`` is below 1.
    """

    def __init__(self, every: int = 10) -> None:
        self.values = Values(every)

    def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
        """Called by the trainer after each batch; with accumulation several batches make one optimizer step."""
        step = trainer.global_step

        def send(values: dict[str, float]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(values, step)

        if trainer.is_global_zero:
            self.values.log(step, send)
