"""The job's loss over its steps, with the steps that ran under a table: did tuning change what was learned?

Source: ``job.jsonl`` beside the report: lines ``{"step": ..., "loss": ...}``, ``{"step": ..., "held_out": ...}`` with
the job's own numbers of steps; the trace counts from 0 in each process. A line ``"first_step": ...`` at each start puts
them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...traces.files import Trace
from ...traces.queries.costs import default_generations
from ...traces.queries.lives import last_life
from ...traces.queries.steps import of_one_rank
from .outputs import log_lines, values

Array = np.ndarray[Any, Any]

#: The job's log, in the folder of the results.
JOB_LOG = "job.jsonl"
#: In the line that the job writes when it starts: its own number of the first step that it takes.
FIRST_STEP = "first_step"
#: Points of the curve at most.
MOST_POINTS = 300
#: Steps around a step whose median is taken as the loss that was due there.
AROUND = 21
#: Fewer steps under tables, or under the default, say nothing.
LEAST_STEPS = 10


@dataclass(frozen=True)
class Losses:
    """Losses by step of the job's last life, counted from 0, as the rest of the report counts them."""

    steps: Array  # (n,) int64, rising
    losses: Array  # (n,)
    tuned: Array  # (n,) bool: the step ran under a table
    held_out: list[tuple[int, float]]  # (step, loss on text that is never trained on)
    first: int = 0  # the job's own number of step 0: others than 0 where it resumed


def read_losses(trace: Trace) -> Losses | None:
    """The losses that the job of a trace has logged in its last life. None: none, or it is not known which they are."""
    life = last_life(trace)
    lines = log_lines(Path(trace.folder).parent / JOB_LOG)
    starts = [place for place, line in enumerate(lines) if isinstance(line.get(FIRST_STEP), int)]
    lines = lines[starts[-1] :] if starts else []
    pairs = values(lines, "loss")
    if not pairs:
        return None
    first = lines[0][FIRST_STEP]
    steps, losses = np.array([step for step, _ in pairs]) - first, np.array([loss for _, loss in pairs])
    tuned = np.isin(steps, steps_under_tables(life))
    held_out = [(step - first, loss) for step, loss in values(lines, "held_out")]
    return Losses(steps, losses, tuned, held_out, first)


def steps_under_tables(life: Trace) -> Array:
    """Steps of a life of a job, counted from 0, that did not run under the default alone.

    The first recorded step begins where the life's first step ends.
    """
    recorded = of_one_rank(life.steps)
    is_default = recorded["table_generation"].isin(default_generations(life))
    return recorded["index"][~is_default].to_numpy(np.int64) + 1


def difference(found: Losses) -> tuple[float, float] | None:
    """How much higher the loss is under tables than under the default, and the standard error of that.

    Training lowers the loss with time, so each step is compared with the median of its neighbours. None: too few steps.
    """
    due = _running_median(found.losses, AROUND)
    apart = found.losses - due
    under, default = apart[found.tuned], apart[~found.tuned]
    if min(len(under), len(default)) < LEAST_STEPS:
        return None
    of_under = under.var(ddof=1) / len(under)
    of_default = default.var(ddof=1) / len(default)
    error = np.sqrt(of_under + of_default)
    return float(under.mean() - default.mean()), float(error)


def loss_lines(found: Losses) -> list[str]:
    """The losses in words."""
    first, last = found.losses[0], found.losses[-1]
    said = [f"training loss {first:.3f} at step {found.steps[0]}, {last:.3f} at step {found.steps[-1]}"]
    if found.first:
        said.append(f"the job resumed: step 0 here is step {found.first} of its log")
    if found.held_out:
        step, loss = found.held_out[-1]
        said.append(f"held-out loss {loss:.3f} after step {step}")
    apart = difference(found)
    if apart:
        mean, error = apart
        said.append(
            f"loss under tables minus loss under the default: {mean:+.4f} (standard error {error:.4f})"
        )
    return said


def _running_median(values: Array, around: int) -> Array:
    """The median of the ``around`` values about each one; fewer at the ends, alike on both sides."""
    half = around // 2
    found = np.empty(len(values))
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        found[i] = np.median(values[i - reach : i + reach + 1])
    return found


def binned_losses(found: Losses) -> tuple[Array, Array]:
    """Mean step and mean loss of neighbouring steps, in at most MOST_POINTS points."""
    parts = min(MOST_POINTS, len(found.steps))
    middle = [part.mean() for part in np.array_split(found.steps, parts)]
    means = [part.mean() for part in np.array_split(found.losses, parts)]
    return np.array(middle), np.array(means)
