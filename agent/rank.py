"""Does replaying a recorded trace rank policies as running them did? Both by the same tuner, and two figures each.

``speedup``: of the table that the run ends with. ``saved``: mean part of the step saved over the search's windows,
exploration included, with the rest of the windows at the final table: the benchmark's regret, as a live run has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..envs.live_windows import LiveWindows
from ..envs.replay import Recorded, load
from ..envs.replay_job import RecordedJob
from ..traces.files import Trace
from .choosing import make_chooser
from .tuner import Line, Settings, Tuner

Array = np.ndarray[Any, Any]

FIGURES = ("speedup", "saved")
#: Windows of a search, as opposed to profiling before and the closing A/B after it.
SEARCH = ("search",)
DRAWS = 2000


@dataclass(frozen=True)
class Run:
    """One run of one policy, live or replayed; ``error``: standard error of each of FIGURES."""

    policy: str
    speedup: float
    saved: float
    error: tuple[float, float] = (0.0, 0.0)


def saved(savings: Sequence[float], final: float, windows: int) -> float:
    """Mean of ``savings``, one a search window, filled up to ``windows`` with ``final``."""
    spent = list(savings)[:windows]
    return (sum(spent) + (windows - len(spent)) * final) / windows


def live_run(folder: Path, windows: int) -> Run:
    """The figures of a run folder of ``dynamiccl tune``. Raises ValueError, TraceError when it holds no result."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        policy, speedup, kept = str(summary["policy"]), summary["speedup"], bool(summary["kept"])
        low, high = summary["speedup_ci95"] or (0.0, 0.0)
        same = summary["aa_speedup_ci95"] or (0.0, 0.0)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} is no run of `dynamiccl tune`: {type(error).__name__} {error}") from error
    if speedup is None:
        raise ValueError(f"{folder} ended before its closing comparison: give it more --steps")
    lines = Trace.read(folder).windows
    found = lines[lines["phase"].isin(SEARCH)]["saving"].astype(float).tolist() if len(lines) else []
    final = 1 - 1 / speedup if kept else 0.0
    # The closing A/B compares about ten pairs of default windows with each other; a search window is one pair.
    one_window = (same[1] - same[0]) / 3.92 * np.sqrt(10)
    errors = ((high - low) / 3.92 if kept else 0.0, float(one_window / np.sqrt(windows)))
    return Run(policy, float(speedup) if kept else 1.0, saved(found, final, windows), errors)


def replayed_run(trace: Trace, recorded: Recorded, policy: str, settings: Settings, seed: int) -> Run:
    """A whole tuning run on the recorded job; the speed-up is that of its table, free of noise."""
    job = RecordedJob(trace, recorded, seed, settings.steps)
    lines: list[Line] = []
    scale = float(trace.header.get("time_scale") or 1.0)
    outcome = Tuner(LiveWindows(job, time_scale=scale), make_chooser(policy, seed), settings, lines.append).run()
    final = job.saving(outcome.decisions) if outcome.kept else 0.0
    search = [line.saving for line in lines if line.phase in SEARCH]
    return Run(policy, 1 / (1 - final), saved(search, final, settings.windows))


def spearman(a: Array, b: Array) -> float:
    """Rank correlation of (n,) and (n,), ties at their mean rank; 0 where one of them does not vary."""

    def rank(values: Array) -> Array:
        return np.array([(values < v).sum() + ((values == v).sum() - 1) / 2 for v in values])

    x, y = rank(np.asarray(a)), rank(np.asarray(b))
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size > 0 else 0.0


def rank(
    trace: Trace,
    live: Sequence[Run],
    settings: Settings,
    seeds: int = 8,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Replay each policy of ``live`` ``seeds`` times and set the two rankings against each other.

    The intervals (95 %) draw the live figures within their errors and resample the replays. Raises TraceError when the
    trace holds nothing to tune, ValueError with fewer than three policies.
    """
    names = list(dict.fromkeys(run.policy for run in live))
    if len(names) < 3:
        raise ValueError(f"a ranking needs runs of at least three policies, not of {', '.join(names) or 'none'}")
    recorded = load(trace)
    replays: dict[str, list[Run]] = {}
    for name in names:
        replays[name] = [replayed_run(trace, recorded, name, settings, seed) for seed in range(seeds)]
        progress(f"{name}: replayed {seeds} times")
    by_name = {name: [run for run in live if run.policy == name] for name in names}
    found: dict[str, Any] = {"policies": [], "seeds": seeds, "trace": str(trace.folder)}
    for name in names:
        row: dict[str, Any] = {"policy": name, "live_runs": len(by_name[name])}
        for figure in FIGURES:
            row[f"live_{figure}"] = float(np.mean([getattr(run, figure) for run in by_name[name]]))
            row[f"replay_{figure}"] = float(np.mean([getattr(run, figure) for run in replays[name]]))
        found["policies"].append(row)
    configs = np.isfinite(recorded.truth).sum() - len(recorded.slots)
    found["measured_configs"] = [int(recorded.measured.sum()), int(configs)]
    for i, figure in enumerate(FIGURES):
        found[figure] = _correlation(names, by_name, replays, i)
    return found


def _correlation(
    names: Sequence[str], live: Mapping[str, Sequence[Run]], replays: Mapping[str, Sequence[Run]], i: int
) -> dict[str, Any]:
    """Spearman's correlation of the means of figure ``i``, and its interval."""
    rng = np.random.default_rng(0)
    mean, error, replayed = [], [], []
    for name in names:
        mean.append(np.mean([getattr(run, FIGURES[i]) for run in live[name]]))
        error.append(np.sqrt(sum(run.error[i] ** 2 for run in live[name])) / len(live[name]))
        replayed.append([getattr(run, FIGURES[i]) for run in replays[name]])
    values = np.array(replayed)  # (policies, seeds)
    drawn = []
    for _ in range(DRAWS):
        picked = np.stack([row[rng.integers(0, len(row), len(row))].mean() for row in values])
        drawn.append(spearman(np.array(mean) + np.array(error) * rng.standard_normal(len(mean)), picked))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {"spearman": spearman(np.array(mean), values.mean(axis=1)), "ci95": [float(low), float(high)]}
