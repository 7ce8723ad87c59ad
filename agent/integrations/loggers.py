"""Where ``tune --log-to`` sends a run's figures: TensorBoard, Weights & Biases, or MLflow, each by its own package."""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

#: Variables by which `wandb.init` goes on with the job's run, joins its sweep, or its process.
OF_THE_JOBS_RUN = (
    "WANDB_RUN_ID",
    "WANDB_RESUME",
    "WANDB_RESUME_FROM",
    "WANDB_FORK_FROM",
    "WANDB_SWEEP_ID",
    "WANDB_SWEEP_PARAM_PATH",
    "WANDB_LAUNCH",
    "WANDB_SERVICE",
)
#: The metric of a run of W&B over which the others are drawn.
WANDB_STEP = "dynamiccl/step"


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
    """A run of Weights & Biases, by its own variables: WANDB_PROJECT, WANDB_MODE, WANDB_API_KEY.

    Takes variables that name the job's own run out of this process's environment.
    """

    def __init__(self, out: Path, name: str) -> None:
        import wandb

        for variable in OF_THE_JOBS_RUN:
            os.environ.pop(variable, None)
        title, own = f"dynamiccl {out.name}", uuid.uuid4().hex
        self.run = wandb.init(dir=str(out), name=title, id=own, resume="never", config={"job": name})
        self.run.define_metric("dynamiccl/*", step_metric=WANDB_STEP)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of an optimizer step. W&B's own step only grows, and the job's may begin anew."""
        self.run.log({WANDB_STEP: step, **values})

    def close(self) -> None:
        """Write what is left."""
        self.run.finish()


class MLflow:
    """A run of MLflow, by its own variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME or _ID."""

    def __init__(self, out: Path, name: str) -> None:
        from mlflow import MlflowClient

        self.client = MlflowClient()
        title = f"dynamiccl {out.name}"
        self.run_id = self.client.create_run(self._experiment_id(), run_name=title).info.run_id
        self.client.set_tag(self.run_id, "job", name[:500])

    def _experiment_id(self) -> str:
        """Of the experiment that MLflow itself would take: the one that is named, by default number 0."""
        named = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not named:
            return os.environ.get("MLFLOW_EXPERIMENT_ID") or "0"
        found = self.client.get_experiment_by_name(named)
        return str(found.experiment_id if found else self.client.create_experiment(named))

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
