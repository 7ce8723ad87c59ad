"""What several views of a run say, in the words that they have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ...traces.queries.costs import decision_text, size_text
from .summary import RunSummary

#: Heads of :func:`decision_rows` and of :func:`cost_rows`; those in NUMBERS stand to the right.
DECISIONS = ("collective", "messages", "decision", "why")
COSTS = ("slot", "calls/step", "NCCL's own", "table", "default", "tuned", "change", "per step", "sampled", "timed by")
NUMBERS = ("messages", "calls/step", "default", "tuned", "change", "per step", "sampled")
COSTS_NOTE = (
    "default, tuned: median time of one call under NCCL's own choice and under the table; per step: of all calls of a "
    "default step; timed by: latest start to latest stop of all ranks, or a rank's own start to its own stop, waiting "
    "included"
)


def emulation_text(facts: Mapping[str, Any]) -> str:
    """Which emulated cluster a run was on, from its summary or the header of its trace."""
    compute = facts.get("compute_scale") or 1
    return f"emulated cluster {facts.get('cluster')}, bytes x {facts.get('bytes_scale') or 1:g}, compute x {compute:g}"


def window_parts(line: Mapping[str, Any]) -> list[str]:
    """What a logged window, its slot as text, came to; whatever is unknown is left out."""
    step, default = line.get("step_ms"), line.get("default_ms")
    parts = [f"window {line.get('index', '?')}", line.get("phase"), line.get("regime")]
    if step is not None:
        against = f", default {default:.1f} ms ({100 * (step / default - 1):+.1f} %)" if default else ""
        parts.append(f"step {step:.1f} ms{against}")
    if (slot := line.get("slot")) and line.get("phase") not in ("verify", "profile"):
        parts += [slot, f"{line.get('previous') or 'auto'} -> {line.get('decision') or 'auto'}"]
    return [str(part) for part in [*parts, line.get("verdict"), line.get("reason")] if part]


def decision_rows(summary: RunSummary) -> list[tuple[str, str, str, str]]:
    """What was decided for each kind of message."""
    texts = [decision_text(d) for d in summary.decisions]
    return [
        (
            d["func"],
            size_text(d["min_bytes"], d["max_bytes"]),
            "left to NCCL" if text == "auto" else text,
            d.get("reason") or "",
        )
        for d, text in zip(summary.decisions, texts, strict=True)
    ]


def cost_rows(costs: Sequence[Mapping[Any, Any]]) -> list[list[str | None]]:
    """What each slot costs; ``costs`` are rows of ``traces.queries.costs.slot_costs``."""
    in_ms = any(c[key] and c[key] >= 2000 for c in costs for key in ("default_us", "tuned_us"))

    def time(us: float | None) -> str | None:
        return None if pd.isna(us) else f"{us / 1e3:.2f} ms" if in_ms else f"{us:.1f} us"

    rows = []
    for c in costs:
        before, after, sampled = c["default_us"], c["tuned_us"], (c["n_default"], c["n_tuned"])
        is_timed = pd.notna(before) and pd.notna(after)
        row = [c["slot"], f"{c['calls']:.3g}", c["own"], c["ran"], time(before), time(after)]
        row.append(f"{100 * (after / before - 1):+.0f} %" if is_timed else None)
        row.append(f"{c['calls'] * before / 1e3:.2f} ms" if pd.notna(before) else None)
        rows.append([*row, f"{sampled[0]} / {sampled[1]}", c["timed_by"] if any(sampled) else None])
    return rows
