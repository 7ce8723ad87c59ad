"""The report's figures, as plain plotly dictionaries. Colours are names of the page's style ("--tuned")."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ..traces.costs import Generations, typical_step
from ..traces.files import Trace
from ..traces.records import Slot, size_class

#: Bars drawn per step and ranks drawn at most: beyond, a timeline is neither readable nor light.
MAX_BARS, MAX_RANKS = 3000, 4
N_COLOURS = 6
_OTHER = "--slot-other"

FONT = {"family": "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", "color": "--quiet", "size": 12}
_HOVER = {"bgcolor": "--card", "bordercolor": "--line", "font": {**FONT, "color": "--ink"}, "align": "left"}
#: How a window's outcome is drawn: (marker symbol, colour, filled).
_OUTCOMES = {
    "kept": ("circle", "--tuned", True),
    "measured": ("circle", "--tuned", True),
    "rolled back": ("x", "--warn", True),
    "given up": ("x", "--warn", False),
}
#: A window of NCCL's own choice, within a comparison or after the verdict.
_AUTO = ("circle", "--default", False)


def slot_colours(slots: list[str]) -> dict[str, str]:
    """Colour name of each slot: the first ones in the list get one of their own."""
    return {s: f"--slot-{i}" if i < N_COLOURS else _OTHER for i, s in enumerate(slots)}


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis of the pages' figures; ``more`` is plotly's."""
    label = {"text": title, "font": {**FONT, "size": 12}, "standoff": 10}
    look = {"gridcolor": "--line", "zeroline": False, "linecolor": "--line", "automargin": True}
    return {"title": label, **look, **more}


def layout_of(height: int, **more: Any) -> dict[str, Any]:
    """The layout of the pages' figures; ``more`` is plotly's."""
    look: dict[str, Any] = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": FONT,
        "hoverlabel": _HOVER,
    }
    legend = {"orientation": "h", "y": 1.07, "yanchor": "bottom", "x": 0, "font": FONT}
    look["modebar"] = {"bgcolor": "rgba(0,0,0,0)", "color": "--default", "activecolor": "--ink", "orientation": "v"}
    return {"height": height, "margin": {"l": 64, "r": 36, "t": 62, "b": 48}, "legend": legend, **look, **more}


def windows_figure(windows: pd.DataFrame) -> dict[str, Any] | None:
    """Step time over windows beside the interleaved default; None when no window was measured."""
    if windows.empty or "step_ms" not in windows:
        return None
    rows = windows.reset_index(drop=True)
    rows = rows[rows["step_ms"].notna()]
    for name in ("verdict", "phase", "slot", "decision", "previous", "reason"):
        rows[name] = rows[name].fillna("").astype(str) if name in rows else ""
    tried = rows[rows["phase"] != "profile"]
    hover = [_window_text(row) for row in tried.to_dict("records")]
    looks = [
        _AUTO if said == "auto" and phase != "search" else _OUTCOMES.get(v, _AUTO)
        for v, said, phase in zip(tried["verdict"], tried["decision"], tried["phase"], strict=True)
    ]
    marker = {
        "symbol": [s if full else f"{s}-open" for s, _, full in looks],
        "color": [colour for _, colour, _ in looks],
        "size": 8,
        "line": {"width": 1.6, "color": [colour for _, colour, _ in looks]},
    }
    default = {
        "type": "scatter",
        "mode": "lines",
        "name": "NCCL's own choice, measured in between",
        "x": rows.index.tolist(),
        "y": plain(rows.get("default_ms", rows["step_ms"])),
        "line": {"color": "--default", "width": 2},
        "hovertemplate": "default %{y:.1f} ms<extra></extra>",
    }
    trial = {
        "type": "scatter",
        "mode": "markers",
        "name": "a window",
        "x": tried.index.tolist(),
        "y": plain(tried["step_ms"]),
        "marker": marker,
        "text": hover,
        "hovertemplate": "%{text}<extra></extra>",
    }
    shapes, notes = [], []
    for _, span in rows.groupby((rows["phase"] != rows["phase"].shift()).cumsum()):
        name = str(span["phase"].iloc[0])
        if name != "verify" and not (len(span) >= 8 and name == "search"):
            continue
        first, last = span.index[0] - 0.5, span.index[-1] + 0.5
        text = "comparison" if name == "verify" else name
        notes.append({"x": first, "y": 1, "xref": "x", "yref": "paper", "text": text, "showarrow": False})
        notes[-1] |= {"xanchor": "left", "yanchor": "bottom", "font": FONT}
        if name == "verify":
            shapes.append({"type": "rect", "xref": "x", "yref": "paper", "x0": first, "x1": last, "y0": 0, "y1": 1})
            shapes[-1] |= {"fillcolor": "--faint", "line": {"width": 0}, "layer": "below"}
    axes = {"xaxis": axis("window", rangemode="tozero"), "yaxis": axis("step time, ms")}
    layout = layout_of(400, hovermode="closest", shapes=shapes, annotations=notes, **axes)
    return {"data": [default, trial], "layout": layout}


def _window_text(row: dict[Any, Any]) -> str:
    step, default = row["step_ms"], row.get("default_ms")
    lines = [f"<b>window {row.get('index', '')}</b> {row['phase']}, {row.get('regime') or 'unknown'}"]
    if row["phase"] != "verify" and row["slot"]:
        lines.append(f"{row['slot']}: {row['previous']} to <b>{row['decision']}</b>")
    against = f", default {default:.1f} ms ({100 * (step / default - 1):+.1f} %)" if default else ""
    lines.append(f"step {step:.1f} ms{against}")
    lines.append(": ".join(t for t in (row["verdict"], row["reason"]) if t))
    return "<br>".join(line.replace("<=", "&lt;=") for line in lines if line)


def plain(values: pd.Series[Any]) -> list[float | None]:
    """Numbers for a figure, NaN as None."""
    return [None if pd.isna(v) else round(float(v), 3) for v in values]


def timeline_figure(trace: Trace, which: Generations, colours: dict[str, str]) -> dict[str, Any] | None:
    """One default step above one tuned step: a bar per sampled collective; None when none was sampled."""
    steps = [("NCCL's own choice", typical_step(trace, which.default)), ("tuned", typical_step(trace, which.tuned))]
    steps = [(name, step) for name, step in steps if step is not None]
    if not steps:
        return None
    data: list[dict[str, Any]] = []
    shapes, notes = [], []
    layout: dict[str, Any] = {}
    shown: set[str] = set()
    lanes_of = [_lanes(trace, int(step)) for _, step in steps if step is not None]
    gap = 0.16 if len(steps) > 1 else 0.0
    height = (1 - gap * (len(steps) - 1)) / len(steps)
    longest = 0.0
    for i, ((name, step), (bars, end_ms)) in enumerate(zip(steps, lanes_of, strict=True)):
        suffix = str(i + 1) if i else ""
        top = 1 - i * (height + gap)
        bottom = max(0.0, top - height)
        longest = max(longest, float(bars["end_ms"].max()), end_ms or 0)
        for slot, group in bars.groupby("slot", sort=False):
            drawn = _bars(str(slot), group, colours, suffix, float(bars["end_ms"].max()))
            drawn["showlegend"] = drawn["name"] not in shown
            shown.add(drawn["name"])
            data.append(drawn)
        lanes = sorted(bars["lane"].unique(), reverse=True)
        layout[f"yaxis{suffix}"] = axis("", domain=[bottom, top], categoryorder="array", categoryarray=lanes)
        layout[f"yaxis{suffix}"] |= {"gridcolor": "rgba(0,0,0,0)"}
        layout[f"xaxis{suffix}"] = axis("ms since the step began" if i == len(steps) - 1 else "", anchor=f"y{suffix}")
        label = f"<b>{name}</b>, step {step}" + (f", {end_ms:.1f} ms" if end_ms else "")
        notes.append({"x": 0, "y": top, "xref": "paper", "yref": "paper", "text": label, "showarrow": False})
        notes[-1] |= {"xanchor": "left", "yanchor": "bottom", "font": {**FONT, "color": "--ink"}}
        if end_ms:
            shapes.append(
                {"type": "line", "xref": f"x{suffix}", "yref": f"y{suffix} domain", "x0": end_ms, "x1": end_ms}
            )
            shapes[-1] |= {"y0": 0, "y1": 1, "line": {"color": "--quiet", "width": 1.5, "dash": "dot"}}
    for key in [k for k in layout if k.startswith("xaxis")]:
        layout[key]["range"] = [0, longest * 1.02]
    n_lanes = sum(bars["lane"].nunique() for bars, _ in lanes_of)
    # The legend lies below: the labels of the two steps take the room above.
    legend = {"orientation": "h", "y": -0.16, "yanchor": "top", "x": 0, "font": FONT}
    size = 150 + 80 * len(steps) + 30 * n_lanes
    frame = layout_of(size, barmode="overlay", shapes=shapes, annotations=notes, hovermode="closest")
    return {"data": data, "layout": {**frame, **layout, "legend": legend}}


def _bars(slot: str, group: pd.DataFrame, colours: dict[str, str], suffix: str, span: float) -> dict[str, Any]:
    lengths = group["end_ms"] - group["start_ms"]
    # A hairline tells neighbours apart; around a bar that is hardly wider than it, it would hide the bar.
    edges = [0.7 if length > 0.01 * span else 0 for length in lengths]
    return {
        "type": "bar",
        "orientation": "h",
        "name": "other" if colours.get(slot, _OTHER) == _OTHER else slot.replace("<=", "≤ "),
        "legendgroup": slot if colours.get(slot, _OTHER) != _OTHER else "other",
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "y": group["lane"].tolist(),
        "base": plain(group["start_ms"]),
        "x": plain(lengths),
        "width": 0.62,
        "marker": {"color": colours.get(slot, _OTHER), "line": {"width": edges, "color": "--card"}},
        "text": group["text"].tolist(),
        "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }


def _lanes(trace: Trace, step: int) -> tuple[pd.DataFrame, float | None]:
    """Sampled collectives of a step in ms since it began, and when it ended (None if clocks cannot be compared).

    Times are the GPU's clock. Where they fall into the step as the host timed it the two clocks are one; otherwise each
    rank begins at its own first collective.
    """
    events = trace.events[(trace.events["step"] == step) & trace.events["start_ns"].notna()]
    events = events[events["rank"].isin(sorted(events["rank"].unique())[:MAX_RANKS])].head(MAX_BARS)
    bars = events[["rank", "func", "n_bytes", "algo", "proto", "n_channels"]].copy()
    start, end = events["start_ns"].astype("int64"), events["end_ns"].astype("int64")
    # A rank that was started anew has taken the same step twice: the last one counts.
    host = trace.steps[trace.steps["index"] == step].drop_duplicates("rank", keep="last").set_index("rank")
    zero = events["rank"].map(host["end_ns"] - host["duration_ns"])
    last = events["rank"].map(host["end_ns"])
    same_clock = bool(((start >= zero) & (end <= last)).mean() > 0.5)
    if same_clock:
        # Steps on several ranks are set against rank 0's beginning, so that waiting for one another shows.
        zero = pd.Series(int(zero.dropna().min()), events.index)
    else:
        zero = start.groupby(events["rank"]).transform("min")
    bars["start_ms"], bars["end_ms"] = (start - zero) / 1e6, (end - zero) / 1e6
    bars["slot"] = [str(Slot(0, 0, f, size_class(int(n)))) for f, n in zip(bars["func"], bars["n_bytes"], strict=True)]
    bars["lane"] = "rank " + bars["rank"].astype(str) + "  " + bars["func"].astype(str)
    bars["text"] = [
        f"{r['func']} {r['n_bytes'] / 2**20:.2f} MiB<br>{r['algo']}/{r['proto']}/{r['n_channels']}"
        f"<br>{r['start_ms']:.2f} to {r['end_ms']:.2f} ms ({r['end_ms'] - r['start_ms']:.3f} ms)"
        for r in bars.to_dict("records")
    ]
    end_ms = float(host["duration_ns"].median()) / 1e6 if same_clock else None
    return bars, end_ms
