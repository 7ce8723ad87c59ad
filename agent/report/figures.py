"""The report's figures. Their colours are the page's, ``var(--name)``, which its script looks up as it draws them."""

from __future__ import annotations

from html import escape

import pandas as pd
import plotly.express as px
from plotly import graph_objects as go

from ...traces.files import Trace
from ...traces.queries.costs import Generations, typical_step
from ...traces.records import Slot, size_class
from .summary import RunSummary
from .texts import window_parts

#: Bars drawn per step and ranks drawn at most: beyond, a timeline is neither readable nor light.
MAX_BARS, MAX_RANKS = 3000, 4
N_COLOURS = 6
_AXIS = {"gridcolor": "var(--line)", "zeroline": False, "linecolor": "var(--line)", "automargin": True}
_CLEAR = "rgba(0,0,0,0)"
#: What all figures of the page have in common.
_LOOK = go.layout.Template(
    layout={
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {"family": "system-ui, Segoe UI, Roboto, Arial, sans-serif", "color": "var(--quiet)", "size": 12},
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font_color": "var(--ink)"},
        "hovermode": "closest",
        "legend": {"orientation": "h", "y": 1.09, "yanchor": "bottom", "x": 0},
        "modebar": {"bgcolor": _CLEAR, "color": "var(--default)", "orientation": "v"},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    }
)
_OWN = "NCCL's own choice"
#: How a window is drawn by its outcome: (colour, symbol).
_OUTCOMES = {
    _OWN: ("var(--default)", "circle-open"),
    "kept": ("var(--tuned)", "diamond"),
    "measured": ("var(--tuned)", "circle"),
    "rolled back": ("var(--warn)", "x"),
    "given up": ("var(--warn)", "x-open"),
}


def speedup_figure(summary: RunSummary) -> go.Figure | None:
    """The speed-up and the default against itself, with their intervals; None without a verdict."""
    intervals = {"A/A": summary.aa_speedup_ci95, "tuned": summary.speedup_ci95}
    if summary.speedup is None or not any(intervals.values()):
        return None
    rows = pd.DataFrame([(name, *ends) for name, ends in intervals.items() if ends], columns=["name", "low", "high"])
    rows["middle"] = (rows["low"] * rows["high"]) ** 0.5
    rows["above"], rows["below"] = rows["high"] - rows["middle"], rows["middle"] - rows["low"]
    figure = px.scatter(rows, "middle", "name", error_x="above", error_x_minus="below", template=_LOOK, height=140)
    figure.update_traces(marker={"color": "var(--tuned)", "size": 7}, hovertemplate="%{y} %{x:.3f}<extra></extra>")
    figure.update_layout(margin={"l": 8, "r": 44, "t": 8, "b": 8}, xaxis_title=None, yaxis_title=None)
    return figure.add_vline(x=1, line={"color": "var(--quiet)", "dash": "dash", "width": 1})


def windows_figure(windows: pd.DataFrame) -> go.Figure | None:
    """Step time over windows beside the interleaved default; None when no window was measured."""
    if windows.empty or "step_ms" not in windows:
        return None
    needed = ["phase", "verdict", "decision", "default_ms"]
    rows = windows.reindex(columns=windows.columns.union(needed)).reset_index(drop=True).dropna(subset="step_ms")
    said = [{str(key): value for key, value in row.items() if pd.notna(value)} for row in rows.to_dict("records")]
    rows["told"] = ["<br>".join(map(escape, window_parts(line))) for line in said]
    is_own = (rows["decision"] == "auto") & (rows["phase"] != "search") | ~rows["verdict"].isin(list(_OUTCOMES))
    rows["outcome"] = rows["verdict"].mask(is_own, _OWN)
    figure = px.line(rows, y="default_ms", template=_LOOK, height=420)
    figure.update_traces(name=f"{_OWN}, measured in between", showlegend=True, line={"color": "var(--default)"})
    figure.update_traces(hovertemplate="default %{y:.1f} ms<extra></extra>")
    looks = {"color_discrete_map": {name: colour for name, (colour, _) in _OUTCOMES.items()}}
    looks["symbol_map"] = {name: symbol for name, (_, symbol) in _OUTCOMES.items()}
    tried = rows[rows["phase"] != "profile"]
    points = px.scatter(tried, y="step_ms", color="outcome", symbol="outcome", custom_data="told", **looks)
    points.update_traces(marker_size=8, hovertemplate="%{customdata[0]}<extra></extra>")
    figure.add_traces(points.data).update_layout(xaxis_title="window", yaxis_title="step time, ms")
    for _, span in rows.groupby((rows["phase"] != rows["phase"].shift()).cumsum()):
        name, first, last = span["phase"].iloc[0], span.index[0] - 0.5, span.index[-1] + 0.5
        if name == "verify" or (name == "search" and len(span) >= 8):
            text, colour = ("comparison", "var(--faint)") if name == "verify" else (name, _CLEAR)
            place = {"annotation_text": text, "annotation_position": "top left", "annotation_yanchor": "bottom"}
            figure.add_vrect(first, last, fillcolor=colour, line_width=0, layer="below", **place)
    return figure


def timeline_figure(trace: Trace, which: Generations) -> go.Figure | None:
    """One default step above one tuned step: a bar per sampled collective; None when none was sampled."""
    wanted = {_OWN: which.default, "tuned": which.tuned}
    steps = {name: step for name, those in wanted.items() if (step := typical_step(trace, those)) is not None}
    if not steps:
        return None
    drawn = [_lanes(trace, step, name) for name, step in steps.items()]
    bars = pd.concat([bars for bars, _ in drawn])
    dearest = bars.groupby("slot")["ms"].sum().sort_values(ascending=False).index[:N_COLOURS]
    bars["slot"] = bars["slot"].where(bars["slot"].isin(dearest), "other")
    colours = {slot: f"var(--slot-{i})" for i, slot in enumerate(dearest)} | {"other": "var(--slot-other)"}
    figure = px.bar(
        bars,
        x="ms",
        y="lane",
        base="start",
        color="slot",
        color_discrete_map=colours,
        orientation="h",
        facet_col="part",
        facet_col_wrap=1,
        hover_data={"start": ":.2f", "ms": ":.3f", "MiB": ":.2f", "config": True, "part": False},
        labels={"lane": "on", "start": "start, ms", "ms": "length, ms"},
        template=_LOOK,
        height=180 + 90 * len(steps) + 30 * bars.groupby("part")["lane"].nunique().sum(),
    )
    figure.update_traces(width=0.62, marker_line={"width": 0.5, "color": "rgba(128,128,128,0.5)"})
    # The legend lies below: the labels of the two steps take the room above.
    figure.update_layout(barmode="overlay", legend={"title": None, "y": -0.16, "yanchor": "top"})
    figure.update_yaxes(title=None, categoryorder="category descending", gridcolor=_CLEAR)
    figure.update_xaxes(title=None, rangemode="tozero").update_xaxes(title="ms since the step began", row=1)
    figure.for_each_annotation(lambda note: note.update(text=note.text.removeprefix("part="), x=0, xanchor="left"))
    for row, (_, end_ms) in enumerate(reversed(drawn), 1):  # plotly counts from the lowest
        if end_ms:
            figure.add_vline(end_ms, row=row, col=1, line={"color": "var(--quiet)", "width": 1.5, "dash": "dot"})
    return figure


def _lanes(trace: Trace, step: int, name: str) -> tuple[pd.DataFrame, float | None]:
    """Sampled collectives of a step in ms since it began, and when it ended (None if clocks cannot be compared).

    Times are the GPU's clock. Where they fall into the step as the host timed it the two clocks are one; otherwise each
    rank begins at its own first collective.
    """
    events = trace.events[(trace.events["step"] == step) & trace.events["start_ns"].notna()]
    events = events[events["rank"].isin(sorted(events["rank"].unique())[:MAX_RANKS])].head(MAX_BARS)
    start, end = events["start_ns"].astype("int64"), events["end_ns"].astype("int64")
    # A rank that was started anew has taken the same step twice: the last one counts.
    host = trace.steps[trace.steps["index"] == step].drop_duplicates("rank", keep="last").set_index("rank")
    zero = events["rank"].map(host["end_ns"] - host["duration_ns"])
    same_clock = bool(((start >= zero) & (end <= events["rank"].map(host["end_ns"]))).mean() > 0.5)
    if same_clock:
        # Steps on several ranks are set against rank 0's beginning, so that waiting for one another shows.
        zero = pd.Series(int(zero.dropna().min()), events.index)
    else:
        zero = start.groupby(events["rank"]).transform("min")
    end_ms = float(host["duration_ns"].median()) / 1e6 if same_clock else None
    classes = zip(events["func"], events["n_bytes"], strict=True)
    bars = pd.DataFrame(
        {
            "start": (start - zero) / 1e6,
            "ms": (end - start) / 1e6,
            "MiB": events["n_bytes"] / 2**20,
            "config": events["algo"] + "/" + events["proto"] + "/" + events["n_channels"].astype("str"),
            "slot": [str(Slot(0, 0, func, size_class(int(n)))).replace("<=", "≤ ") for func, n in classes],
            "lane": "rank " + events["rank"].astype("str") + "  " + events["func"].astype("str"),
            "part": f"<b>{name}</b>, step {step}" + (f", {end_ms:.1f} ms" if end_ms else ""),
        }
    )
    return bars, end_ms
