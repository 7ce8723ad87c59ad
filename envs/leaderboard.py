"""What policies made of tasks of single slots, in figures and intervals."""

from __future__ import annotations

from typing import Any

import numpy as np

from .arena import Played
from .scores import bootstrap

Array = np.ndarray[Any, Any]

#: "Near the oracle": the slot costs at most this much more than under its best config.
NEAR = 0.02
#: Trials after which the share of the oracle's gain is told.
MARKS = (1, 2, 4, 8, 16, 32, 64)
#: A window this many times the default's is one that people notice.
HARSH = 1.5
#: Pairs of windows of the A/A comparison that says what counts as slower.
AA_PAIRS = 20
#: Intervals speak of other tasks; with fewer tasks than this they can only speak of other noise on the same ones.
FEW = 10


def step_time(saving: Array, share: Array) -> Array:
    """Step time in units of the default's, for scaled savings of a slot with that share of the step."""
    return np.maximum(1 - np.asarray(saving) * share, 0.05)


def shares_of_gain(played: Played) -> dict[str, float]:
    """Part of the oracle's gain in step time that the best config measured so far brings, summed over tasks."""
    gain, got = played.oracle @ played.share, played.best @ played.share
    return {str(k): round(float(got[k - 1] / gain[k - 1]), 4) for k in MARKS if k <= len(gain)}


def trials_until_near(played: Played) -> Array:
    """(n,) windows until the best measured config is within NEAR of the oracle; 0: AUTO is; windows + 1: never."""
    near = played.gap <= NEAR
    first = np.where(near.any(axis=0), near.argmax(axis=0) + 1, len(near) + 1)
    # Before any trial AUTO is what a stop would commit; its saving is 0.
    auto = played.oracle[0] / np.maximum(1 - played.oracle[0], 0.05) <= NEAR
    return np.where(auto, 0, first)


def per_task(played: Played) -> dict[str, Array]:
    """The figures of each row, (n,): what intervals and ranks are made of.

    ``regret``: sum over the windows of step time over the oracle's step time, minus 1, exploration included.
    ``is_slower``: ends slower than default by more than AA_PAIRS windows of default against default could show.
    ``is_harsh``: had a window of more than HARSH default steps.
    """
    expected, oracle = step_time(played.expected, played.share), step_time(played.oracle, played.share)
    final, best = step_time(played.best[-1], played.share), step_time(played.oracle[-1], played.share)
    return {
        "regret": (expected / oracle - 1).sum(axis=0),
        "slot_regret": played.regret.sum(axis=0),
        "trials_until_near": trials_until_near(played).astype(float),
        "speedup": 1 / final,
        "oracle_speedup": 1 / best,
        "gain": 1 - final,
        "oracle_gain": 1 - best,
        "worst_window": expected.max(axis=0),
        "is_slower": (final > 1 + 1.96 * played.noise * np.sqrt(2 / AA_PAIRS)).astype(float),
        "is_harsh": (expected.max(axis=0) > HARSH).astype(float),
    }


def by_task(values: Array, n_tasks: int) -> Array:
    """Mean over the repeats of each task, (n_tasks,), of ``values`` (repeats x n_tasks,): repeats of one task are not
    independent, so intervals are drawn over tasks. With fewer than FEW tasks ``values`` are returned as they are."""
    return values if n_tasks < FEW else np.asarray(values.reshape(-1, n_tasks).mean(axis=0))


def _spread(values: Array, digits: int = 4) -> list[float]:
    return [round(float(q), digits) for q in np.percentile(values, [10, 50, 90])]


def summary(played: Played, n_tasks: int | None = None) -> dict[str, Any]:
    """Figures of one entrant over all rows of an arena, for people and programs.

    ``n_tasks``: tasks of the suite, of which the rows are repeats (default: every row is a task of its own).
    ``..._percentiles`` are p10, median and p90 over rows, ``..._ci95`` bootstrap intervals over tasks.
    """
    rows = per_task(played)
    n_tasks = n_tasks or len(played.share)
    near, regret = rows["trials_until_near"], rows["regret"]
    speed = by_task(np.log(rows["speedup"]), n_tasks)
    gain, got = (by_task(saved[-1] * played.share, n_tasks) for saved in (played.oracle, played.best))
    return {
        "speedup": round(float(np.exp(speed.mean())), 4),
        "speedup_ci95": [round(float(np.exp(q)), 4) for q in bootstrap(speed)],
        "speedup_percentiles": _spread(rows["speedup"]),
        "oracle_speedup": round(float(np.exp(np.log(rows["oracle_speedup"]).mean())), 4),
        "share_of_gain": shares_of_gain(played),
        "share_of_gain_ci95": bootstrap(got, over=gain),
        "trials_until_near": _spread(near),
        "never_near": round(float((near > len(played.best)).mean()), 4),
        "regret": round(float(regret.mean()), 3),
        "regret_ci95": bootstrap(by_task(regret, n_tasks)),
        "regret_percentiles": _spread(regret, 3),
        "slot_regret": round(float(rows["slot_regret"].mean()), 3),
        "worst_window": round(float(rows["worst_window"].max()), 3),
        "worst_window_percentiles": _spread(rows["worst_window"], 3),
        "harsh": round(float(rows["is_harsh"].mean()), 4),
        "slower": round(float(rows["is_slower"].mean()), 4),
        "decision_us": round(played.decision_us, 1),
    }
