"""Where ``tune --log-to`` sends a run's figures: TensorBoard, Weights & Biases, or MLflow, each by its own package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """What a run's figures go to."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of an optimizer step."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Event files in ``OUT/tensorboard``."""

    def __init__(self, out: Path, name: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(out / "tensorboard"))
        self.writer.add_text("dynamiccl/job", name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of an optimizer step."""
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)
        self.writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


class Wandb:
    """A run of Weights & Biases, by its own variables: WANDB_PROJECT, WANDB_MODE, WANDB_API_KEY."""

    def __init__(self, out: Path, name: str) -> None:
        import wandb

        self.run = wandb.init(dir=str(out), name=f"dynamiccl {out.name}", config={"job": name})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of an optimizer step."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is left."""
        self.run.finish()


class MLflow:
    """A run of MLflow, by its own variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, out: Path, name: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient()
        experiments = self.client.search_experiments(max_results=1)
        self.run_id = self.client.create_run(
            experiments[0].experiment_id if experiments else "0", run_name=f"dynamiccl {out.name}"
        ).info.run_id
        self.client.set_tag(self.run_id, "job", name[:500])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of an optimizer step."""
        for key, value in values.items():
            self.client.log_metric(self.run_id, key, value, step=step)

    def close(self) -> None:
        """Write what is left."""
        self.client.set_terminated(self.run_id)


#: Name -> (what makes it, the package that it needs).
LOGGERS: dict[str, tuple[Callable[[Path, str], Any], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (Wandb, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}


def check_logger(name: str) -> None:
    """Raise ValueError if there is no such logger, or its package is missing."""
    if name not in LOGGERS:
        raise ValueError(f"--log-to is one of {', '.join(LOGGERS)}, not {name!r}")
    package = LOGGERS[name][1]
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"--log-to {name} needs its package: pip install {package}")
