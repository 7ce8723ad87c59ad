"""A run's windows as TensorBoard scalars: step time by default and under tables, and the generation of the table."""

from __future__ import annotations

from pathlib import Path

from ..envs.live import Window
from ..envs.windows import Plan
from .log import log

#: What TensorBoard calls them; the step is the job's.
DEFAULT_MS, TABLE_MS, GENERATION = "step_ms/default", "step_ms/table", "generation"


class Scalars:
    """Writes an event file into ``folder``. Raises ImportError where torch or tensorboard is missing, OSError."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: SummaryWriter | None = SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def window(self, plan: Plan, window: Window) -> None:
        """One window was measured. A disk that fails ends the scalars and nothing else."""
        if self._writer is None:
            return
        step = int(window.steps[-1])
        try:
            name = TABLE_MS if plan.configs.any() else DEFAULT_MS
            self._writer.add_scalar(name, window.step_ms, step)  # type: ignore[no-untyped-call]
            self._writer.add_scalar(GENERATION, window.generation, step)  # type: ignore[no-untyped-call]
        except Exception as error:  # of its thread, whatever that met
            log.warning("no more scalars are written: %s", error)
            self._writer = None

    def close(self) -> None:
        """Write what is left."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()  # type: ignore[no-untyped-call]
            except Exception as error:
                log.warning("the last scalars are not written: %s", error)
