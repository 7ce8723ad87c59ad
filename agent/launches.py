"""Launches of a job beside each other: how long their steps take, how sure that is, how far equal launches differ."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..traces.files import Trace, TraceError

Array = np.ndarray[Any, Any]

#: What of a header makes two launches equal, beside its ``environment``.
SETTINGS = ("job", "cluster", "nccl", "stage", "emulated", "bytes_scale", "time_scale")
#: Variables that are no settings of a launch: where the plugin lies, what is written where.
_NO_SETTING = ("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")
_BATCHES, _LEAST = 20, 8


def launch_settings(environ: Mapping[str, str], headroom: int | None = None) -> dict[str, str]:
    """What a launch says to NCCL and to PyTorch's communicators, for the header of the run."""
    found = {
        k: v for k, v in sorted(environ.items()) if k.startswith(("NCCL_", "TORCH_NCCL_")) and k not in _NO_SETTING
    }
    return found | ({"NCCL_MIN_CTAS": str(headroom)} if headroom else {})


def launch(trace: Trace) -> dict[str, Any]:
    """Steps of one launch under NCCL's own choice: median ms, its standard error, and the settings that it had.

    The error is that of the medians of consecutive batches: steps that follow each other are alike. Raises TraceError
    for fewer than eight steps.
    """
    default = {g for g, rules in trace.tables.items() if not rules}
    steps = trace.steps[
        (trace.steps["rank"] == trace.steps["rank"].min()) & trace.steps["table_generation"].isin(default)
    ]
    ms = steps.sort_values("index")["duration_ns"].to_numpy(np.float64) / 1e6
    if len(ms) > 2 * _LEAST:
        ms = ms[max(1, len(ms) // 20) :]  # the first steps hold the job's set-up
    if len(ms) < _LEAST:
        raise TraceError(
            f"{trace.folder} holds {len(ms)} steps under NCCL's own choice: {_LEAST} at least are compared"
        )
    middle = float(np.median(ms))
    batches = np.array([np.median(part) for part in np.array_split(ms, min(_BATCHES, len(ms) // 4))])
    error = 1.4826 * float(np.median(np.abs(batches - np.median(batches)))) * math.sqrt(math.pi / 2 / len(batches))
    settings = {key: trace.header.get(key) for key in SETTINGS if trace.header.get(key) is not None}
    settings |= trace.header.get("environment") or {}
    return {"run": str(trace.folder), "steps": len(ms), "median_ms": middle, "error_ms": error, "settings": settings}


def side_by_side(launches: list[dict[str, Any]]) -> dict[str, Any]:
    """Launches against the first one, by settings; ``between`` is how far equal launches differ (log, one sigma).

    A difference counts only beyond both the launches' own errors and ``between``; where no two launches are equal
    that is not known, and the result says so.
    """
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in launches:
        groups[repr(sorted(one["settings"].items()))].append(one)
    apart = [np.log([o["median_ms"] for o in group]) for group in groups.values() if len(group) > 1]
    freedom = sum(len(x) - 1 for x in apart)
    between = math.sqrt(sum(float(((x - x.mean()) ** 2).sum()) for x in apart) / freedom) if freedom else None
    first, *others = groups.values()
    base, base_error = _mean(first, between)
    rows = []
    for group in others:
        mean, error = _mean(group, between)
        wide = 1.96 * math.hypot(error, base_error)
        change = {k: v for k, v in group[0]["settings"].items() if first[0]["settings"].get(k) != v}
        ratio, low, high = (math.exp(mean - base + x) for x in (0.0, -wide, wide))
        word = "unknown" if between is None else "slower" if low > 1 else "faster" if high < 1 else "same"
        rows.append({"runs": [o["run"] for o in group], "differs_in": change, "ratio": ratio, "low": low, "high": high})
        rows[-1]["verdict"] = word
    return {"launches": launches, "between_equal_launches": between, "against_the_first": rows}


def _mean(group: list[dict[str, Any]], between: float | None) -> tuple[float, float]:
    """Mean log step time of equal launches, and its standard error."""
    own = [(o["error_ms"] / o["median_ms"]) ** 2 for o in group]
    variance = (sum(own) / len(own) + (between or 0.0) ** 2) / len(group)
    return float(np.mean(np.log([o["median_ms"] for o in group]))), math.sqrt(variance)
