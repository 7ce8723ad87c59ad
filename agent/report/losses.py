"""The job's loss over its steps, with the steps that ran under a table: did tuning change what was learned?

Only a job that writes its losses has this figure: lines ``{"step": ..., "loss": ...}`` and ``{"step": ...,
"held_out": ...}`` in ``job.jsonl`` beside the report, as the built-in job does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...envs.replay.decisions import default_generations
from ...traces.files import Trace
from .figures import Plot, spread
from .outputs import logged
from .summary import RunSummary

Array = np.ndarray[Any, Any]

#: The job's log, in the folder of the results.
JOB_LOG = "job.jsonl"
#: Points of the curve, and stretches of steps that are told apart, at most.
MOST_POINTS = 300
#: Steps around a step whose median is taken as the loss that was due there.
AROUND = 21
#: Fewer steps under tables, or under the default, say nothing.
LEAST_STEPS = 10
_LOSS, _UNSEEN, _BAND = "var(--slot-0)", "var(--slot-1)", "var(--tuned-soft)"


@dataclass(frozen=True)
class Losses:
    """Losses by step of the job, counted from 0."""

    steps: Array  # (n,) int64, rising
    losses: Array  # (n,)
    tuned: Array  # (n,) bool: the step ran under a table
    held_out: list[tuple[int, float]]  # (step, loss on text that is never trained on)


def read_losses(trace: Trace) -> Losses | None:
    """The losses that the job of a trace has logged; None without any."""
    log = trace.folder.parent / JOB_LOG
    by_step = dict(logged(log, "loss"))
    if not by_step:
        return None
    steps = np.array(sorted(by_step))
    losses = np.array([by_step[step] for step in steps])
    tuned = np.isin(steps, steps_under_tables(trace))
    return Losses(steps, losses, tuned, logged(log, "held_out"))


def steps_under_tables(trace: Trace) -> Array:
    """Steps of the job, counted from 0, that did not run under the default alone.

    The first recorded step begins where the job's first step ends.
    """
    recorded = trace.steps
    first_rank = recorded[recorded["rank"] == recorded["rank"].min()]
    is_default = first_rank["table_generation"].isin(default_generations(trace))
    return first_rank["index"][~is_default].to_numpy(np.int64) + 1


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


def loss_figure(found: Losses, s: RunSummary) -> str:
    """The losses over the job's steps, as HTML."""
    middle, means = _binned(found.steps, found.losses)
    held_out_losses = [loss for _, loss in found.held_out]
    x_range = spread(found.steps, 0.03)
    plot = Plot(x_range, spread([*means, *held_out_losses]), 240)
    for begin, end in _stretches(found):
        plot.legend["under a table"] = _BAND
        plot.bar((begin, end), plot.y_range, _BAND)
    plot.y_axis("")
    plot.x_axis("steps")
    plot.legend["training loss"] = _LOSS
    for i in range(len(middle) - 1):
        both_steps = (middle[i], middle[i + 1])
        both_losses = (means[i], means[i + 1])
        plot.line(both_steps, both_losses, _LOSS)
    for step, loss in found.held_out:
        plot.legend["held-out loss"] = _UNSEEN
        plot.dot(step, loss, _UNSEEN, f"step {step}: held-out loss {loss:.4f}")
    if s.steps_to_verdict is not None:
        plot.line((s.steps_to_verdict, s.steps_to_verdict), plot.y_range, "var(--quiet)", "3 3")
        plot.text(s.steps_to_verdict, plot.y_range[1], "verdict", 4, 12)
    return plot.html("Training and held-out loss over the job's steps")


def _running_median(values: Array, around: int) -> Array:
    """The median of the ``around`` values about each one; fewer at the ends, alike on both sides."""
    half = around // 2
    found = np.empty(len(values))
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        found[i] = np.median(values[i - reach : i + reach + 1])
    return found


def _binned(steps: Array, losses: Array) -> tuple[Array, Array]:
    """Mean step and mean loss of neighbouring steps, in at most MOST_POINTS points."""
    parts = min(MOST_POINTS, len(steps))
    middle = [part.mean() for part in np.array_split(steps, parts)]
    means = [part.mean() for part in np.array_split(losses, parts)]
    return np.array(middle), np.array(means)


def _stretches(found: Losses) -> list[tuple[float, float]]:
    """First and last step of stretches that mostly ran under a table; tables that alternate make one stretch."""
    parts = min(MOST_POINTS, len(found.steps))
    stretches = list[tuple[float, float]]()
    is_open = False
    steps_of = np.array_split(found.steps, parts)
    tuned_of = np.array_split(found.tuned, parts)
    for steps, tuned in zip(steps_of, tuned_of, strict=True):
        is_tuned = tuned.mean() >= 0.5
        if is_tuned:
            begin = stretches.pop()[0] if is_open else float(steps[0])
            stretches.append((begin, float(steps[-1])))
        is_open = is_tuned
    return stretches
