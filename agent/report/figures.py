"""The report's figures, each as HTML with its SVG. Their colours are the page's, ``var(--name)``.

Marks are placed in per cent of a plot, so that it fits a phone as a desk; its texts keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from ...traces.files import Trace
from ...traces.queries.costs import Generations, typical_step
from ...traces.records import Slot, size_class
from .summary import RunSummary
from .texts import window_parts
from .verdict import DEFAULT, OWN, ms, seconds, side

#: Bars drawn per step and ranks drawn at most: beyond, a timeline is neither readable nor light.
MAX_BARS, MAX_RANKS, N_COLOURS = 2000, 4, 6
_DEFAULT, _TUNED = "var(--default)", "var(--tuned)"


def windows_figure(trace: Trace, s: RunSummary) -> str:
    """Step time of every window over the job's steps; empty when none was measured."""
    rows = [line for line in trace.log if line["kind"] == "window" and line.get("last_step") is not None]
    if not rows:
        return ""
    place = [float(row["last_step"]) for row in rows]
    plot = Plot(spread(place, 0.03), spread(row["step_ms"] for row in rows), 320)
    _draw_comparisons(plot, s)
    plot.y_axis("ms")
    plot.x_axis("steps", _times(trace, ticks_of(*plot.x_range, 4)))
    for x, row in zip(place, rows, strict=True):
        name, colour = _role(row, s)
        plot.legend[name] = colour
        plot.dot(x, row["step_ms"], colour, "  ".join(window_parts(row)), hollow=name == OWN)
    return plot.html("Step time of each window over the job's steps")


def _draw_comparisons(plot: Plot, s: RunSummary) -> None:
    """When which two tables were compared."""
    for c in s.comparisons:
        if not c["trial"]:
            plot.bar((c["steps"][0], c["steps"][1]), plot.y_range, "var(--faint)")
            plot.text(c["steps"][0], plot.y_range[1], f"{side(c['table'])} : {side(c['against'])}", 2, 12)


def _role(row: Mapping[str, Any], s: RunSummary) -> tuple[str, str]:
    """What a window's table was to the run, and its colour."""
    table = row.get("table")
    if row.get("verdict") == "given up":
        return "given up", "var(--warn)"
    if table == DEFAULT:
        return OWN, _DEFAULT
    return (f"{side(table)}, in force", _TUNED) if table == s.in_force else ("another table", "var(--slot-1)")


def _times(trace: Trace, steps: list[float]) -> dict[float, str]:
    """When these steps ended, since the first that was recorded."""
    first = trace.steps[trace.steps["rank"] == trace.steps["rank"].min()].sort_values("index")
    if len(first) < 2:
        return {}
    ends = first["end_ns"].to_numpy(np.float64)
    found = np.interp(steps, first["index"].to_numpy(np.float64), (ends - ends[0]) / 1e9)
    return {step: seconds(after) for step, after in zip(steps, found, strict=True)}


def timeline_figure(trace: Trace, which: Generations, s: RunSummary) -> str:
    """One default step above one tuned step: a bar per sampled collective; empty when none was sampled."""
    wanted = {OWN: which.default, side(s.compared or s.in_force or "table"): which.tuned}
    steps = {name: step for name, those in wanted.items() if (step := typical_step(trace, those)) is not None}
    if not steps:
        return ""
    drawn = {name: _lanes(trace, step) for name, step in steps.items()}
    bars = pd.concat([bars for bars, _ in drawn.values()])
    dearest = bars.groupby("slot")["ms"].sum().sort_values(ascending=False).index[:N_COLOURS]
    colours = {slot: f"var(--slot-{i})" for i, slot in enumerate(dearest)}
    most = max((bars["start"] + bars["ms"]).max(), *(end or 0.0 for _, end in drawn.values()))
    lanes = sum(bars["lane"].nunique() + 1 for bars, _ in drawn.values())
    plot = Plot((0, float(most)), (0, lanes), 40 + 26 * lanes)
    plot.x_axis("ms")
    y = float(lanes)
    for name, (bars, end) in drawn.items():
        y = _draw_step(plot, f"{name}, step {steps[name]}", y, bars, end, colours)
    return plot.html("Every collective of a step, by rank")


def _draw_step(
    plot: Plot, name: str, top: float, bars: pd.DataFrame, end: float | None, colours: Mapping[str, str]
) -> float:
    """One step, its lanes from ``top`` downwards; where they end."""
    y = top - 1
    plot.text(0, y, f"{name}, {ms(end)}" if end else name, 0, -6)
    for lane, those in bars.groupby("lane"):
        y -= 1
        plot.text(0, y + 0.5, str(lane), -6, 4, "end")
        for start, length, slot, said in those[["start", "ms", "slot", "said"]].itertuples(index=False):
            colour = colours.get(slot, "var(--slot-other)")
            plot.legend[slot if slot in colours else "other"] = colour
            plot.bar((start, start + length), (y + 0.12, y + 0.88), colour, said)
    if end:
        plot.line((end, end), (y, top - 1), "var(--quiet)", "3 3")
    return y


def _lanes(trace: Trace, step: int) -> tuple[pd.DataFrame, float | None]:
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
    bars = pd.DataFrame({"start": ((start - zero) / 1e6).clip(lower=0), "ms": (end - start) / 1e6})
    bars["slot"] = [str(Slot(0, 0, func, size_class(int(n)))) for func, n in classes]
    short = ["".join(word[0] for word in str(func).split("_")).upper() for func in events["func"]]
    bars["lane"] = [f"rank {rank} {name}" for rank, name in zip(events["rank"], short, strict=True)]
    config = events["algo"] + "/" + events["proto"] + "/" + events["n_channels"].astype("str")
    bars["said"] = bars["slot"] + ", " + config + ", " + bars["ms"].map("{:.3f} ms".format)
    return bars, end_ms


class Plot:
    """``x`` and ``y``: (least, most) of the axes in the units of the marks; ``height`` is in pixels."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], height: int) -> None:
        self.x_range, self.y_range, self._height = x, y, height
        self._marks: list[str] = []
        self.legend: dict[str, str] = {}  # what a colour stands for

    def _at(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        return 100 * (x - x0) / max(x1 - x0, 1e-12), 100 * (1 - (y - y0) / max(y1 - y0, 1e-12))

    def bar(self, x: tuple[float, float], y: tuple[float, float], colour: str, said: str = "") -> None:
        """A rectangle; ``said`` is read where it is pointed at."""
        (left, bottom), (right, top) = self._at(x[0], y[0]), self._at(x[1], y[1])
        place = f'x="{left:.2f}%" y="{top:.2f}%" width="{right - left:.2f}%" height="{bottom - top:.2f}%"'
        self._marks.append(f'<rect {place} fill="{colour}">{_title(said)}</rect>')

    def dot(self, x: float, y: float, colour: str, said: str = "", hollow: bool = False) -> None:
        """A circle."""
        left, top = self._at(x, y)
        look = f'fill="none" stroke="{colour}" stroke-width="2"' if hollow else f'fill="{colour}"'
        self._marks.append(f'<circle cx="{left:.2f}%" cy="{top:.2f}%" r="4" {look}>{_title(said)}</circle>')

    def line(self, x: tuple[float, float], y: tuple[float, float], colour: str, dash: str = "") -> None:
        """A straight line between two points."""
        (left, bottom), (right, top) = self._at(x[0], y[0]), self._at(x[1], y[1])
        place = f'x1="{left:.2f}%" y1="{bottom:.2f}%" x2="{right:.2f}%" y2="{top:.2f}%"'
        self._marks.append(f'<line {place} stroke="{colour}" stroke-dasharray="{dash}"/>')

    def text(self, x: float, y: float, said: str, dx: int = 0, dy: int = 0, anchor: str = "start") -> None:
        """A text, moved by so many pixels."""
        left, top = self._at(x, y)
        place = f'x="{left:.2f}%" y="{top:.2f}%" dx="{dx}" dy="{dy}" text-anchor="{anchor}"'
        self._marks.append(f"<text {place}>{escape(said)}</text>")

    def x_axis(self, unit: str, also: Mapping[float, str] | None = None) -> None:
        """Ticks below; ``also``: a second line of text for each tick that it names."""
        for tick in (places := ticks_of(*self.x_range, 4)):
            self.line((tick, tick), self.y_range, "var(--line)")
            self.text(
                tick,
                self.y_range[0],
                f"{tick:,g}" + (f" {unit}" if tick == places[-1] else ""),
                0,
                16,
                "middle",
            )
            if also:
                self.text(tick, self.y_range[0], also.get(tick, ""), 0, 32, "middle")

    def y_axis(self, unit: str) -> None:
        """Ticks on the left."""
        for tick in (places := ticks_of(*self.y_range, 4)):
            self.line(self.x_range, (tick, tick), "var(--line)")
            self.text(
                self.x_range[0], tick, f"{tick:,g}" + (f" {unit}" if tick == places[-1] else ""), -6, 4, "end"
            )

    def html(self, said: str) -> str:
        """The plot with its legend above; ``said`` is what it shows, in words."""
        names = "".join(
            f'<li><span style="background:{colour}"></span>{escape(name)}</li>'
            for name, colour in self.legend.items()
        )
        size = f'width="100%" height="{self._height}" role="img" aria-label="{escape(said)}"'
        return (
            f'<ul class="legend">{names}</ul><div class="plot"><svg {size}>{"".join(self._marks)}</svg></div>'
        )


def ticks_of(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two.

    >>> ticks_of(0, 310, 4)
    [0.0, 100.0, 200.0, 300.0]
    """
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 5, 10) if power * f >= raw)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def spread(values: Iterable[float], room: float = 0.08) -> tuple[float, float]:
    """Least and most of some values with some room around."""
    found = [float(v) for v in values]
    low, high = min(found), max(found)
    wide = (high - low) * room or max(abs(high) * room, 1e-9)
    return low - wide, high + wide


def _title(said: str) -> str:
    return f"<title>{escape(said)}</title>" if said else ""
