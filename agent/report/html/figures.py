"""The report's timeline: every sampled collective of one default step and of one tuned step, as HTML with its SVG.

Colours are the page's, ``var(--name)``. Marks are placed in per cent of the plot, so that it fits a phone and a desk;
texts keep their size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from html import escape

import pandas as pd

from ....traces.files import Trace
from ....traces.queries.costs import Generations, typical_step
from ....traces.queries.lives import last_life
from ....traces.records import Slot, size_class
from ..slow_rank import events_of_job
from ..summary import RunSummary
from ..verdict import OWN, ms, side
from .page import legend

#: Bars and ranks that are drawn of a step at most: with more a timeline can neither be read nor loaded quickly.
MAX_BARS = 2000
MAX_RANKS = 4
#: Slots with a colour of their own; the others share one.
N_COLOURS = 6
_OTHER = "var(--slot-other)"
#: Pixels of one lane, and of the axis below all lanes.
_LANE, _AXIS = 26, 40


@dataclass(frozen=True)
class Step:
    """One step to be drawn: its title, its bars (see :func:`_bars`), its end in ms if known."""

    title: str
    bars: pd.DataFrame
    end_ms: float | None


def timeline_figure(trace: Trace, which: Generations, s: RunSummary) -> str:
    """One default step above one tuned step: a bar per sampled collective; empty when none was sampled."""
    life = last_life(trace)
    steps = _steps(replace(life, events=events_of_job(life)), which, s)
    if not steps:
        return ""
    bars = pd.concat([step.bars for step in steps])
    colours = _colours(bars)
    longest = float((bars["start"] + bars["ms"]).max())
    for step in steps:
        longest = max(longest, step.end_ms or 0.0)
    lanes = sum(step.bars["lane"].nunique() + 1 for step in steps)
    plot = Plot(longest, lanes)
    plot.x_axis("ms")
    top = lanes
    for step in steps:
        top = _draw_step(plot, step, top, colours)
    return plot.html("Every collective of a step, by rank")


def _steps(trace: Trace, which: Generations, s: RunSummary) -> list[Step]:
    """The default step and the tuned step that are drawn, as far as there are any; ``trace`` has the job's ranks."""
    wanted = {OWN: which.default}
    wanted[side(s.compared or s.in_force or "table")] = which.tuned
    found = []
    for name, generations in wanted.items():
        number = typical_step(trace, generations)
        if number is not None:
            bars, end = _bars(trace, number)
            length = f", {ms(end)}" if end else ""
            found.append(Step(f"{name}, step {number}{length}", bars, end))
    return found


def _colours(bars: pd.DataFrame) -> dict[str, str]:
    """The colours of the slots that take most time."""
    total = bars.groupby("slot")["ms"].sum()
    dearest = total.sort_values(ascending=False).index[:N_COLOURS]
    return {slot: f"var(--slot-{i})" for i, slot in enumerate(dearest)}


def _draw_step(plot: Plot, step: Step, top: int, colours: Mapping[str, str]) -> int:
    """Draw one step, its lanes from ``top`` downwards. Returns where its lanes end."""
    y = top - 1
    plot.text(0, y, step.title, dy=-6)
    for lane, bars in step.bars.groupby("lane"):
        y -= 1
        plot.text(0, y + 0.5, str(lane), dx=-6, dy=4, anchor="end")
        columns = bars[["start", "ms", "slot", "said"]]
        for start, length, slot, said in columns.to_numpy():
            colour = colours.get(slot, _OTHER)
            name = slot if slot in colours else "other"
            plot.legend[name] = colour
            plot.bar(start, length, y, colour, said)
    if step.end_ms:
        plot.upright(step.end_ms, y, top - 1, "var(--quiet)", dash="3 3")
    return y


def _bars(trace: Trace, number: int) -> tuple[pd.DataFrame, float | None]:
    """Sampled collectives of a step, and when the step ended in ms (None if clocks cannot be compared).

    Columns: ``start`` and ``ms`` since the step began, ``slot``, ``lane``, ``said``. Times are the GPU's clock. If they
    lie within the step as the host timed it, both clocks are one; otherwise each rank begins at its first collective.
    """
    events = trace.events[trace.events["step"] == number]
    events = events[events["start_ns"].notna()]
    ranks = sorted(events["rank"].unique())[:MAX_RANKS]
    events = events[events["rank"].isin(ranks)].head(MAX_BARS)
    start = events["start_ns"].astype("int64")
    end = events["end_ns"].astype("int64")
    host = trace.steps[trace.steps["index"] == number]
    host = host.drop_duplicates("rank", keep="last").set_index("rank")
    zero = events["rank"].map(host["end_ns"] - host["duration_ns"])
    is_within = (start >= zero) & (end <= events["rank"].map(host["end_ns"]))
    is_one_clock = bool(is_within.mean() > 0.5)
    if is_one_clock:
        # All ranks share one zero, the earliest begin, so that waiting for one another shows.
        zero = pd.Series(int(zero.dropna().min()), events.index)
    else:
        zero = start.groupby(events["rank"]).transform("min")
    bars = _described(events)
    bars["start"] = ((start - zero) / 1e6).clip(lower=0)
    bars["ms"] = (end - start) / 1e6
    bars["said"] += ", " + bars["ms"].map("{:.3f} ms".format)
    return bars, float(host["duration_ns"].median()) / 1e6 if is_one_clock else None


def _described(events: pd.DataFrame) -> pd.DataFrame:
    """Slot, lane and setting of each event, in words."""
    bars = pd.DataFrame(index=events.index)
    calls = zip(events["func"], events["n_bytes"], strict=True)
    slots = [Slot(0, 0, func, size_class(int(n_bytes))) for func, n_bytes in calls]
    bars["slot"] = list(map(str, slots))
    lanes = zip(events["rank"], events["func"], strict=True)
    bars["lane"] = [f"rank {rank} {_initials(func)}" for rank, func in lanes]
    setting = events["algo"] + "/" + events["proto"] + "/" + events["n_channels"].astype("str")
    bars["said"] = bars["slot"] + ", " + setting
    return bars


def _initials(func: str) -> str:
    """``AG`` for all_gather."""
    words = func.split("_")
    return "".join(word[0] for word in words).upper()


class Plot:
    """``longest``: the end of the time axis in ms; ``lanes``: rows, counted from below."""

    def __init__(self, longest: float, lanes: int) -> None:
        self._longest = max(longest, 1e-12)
        self._lanes = max(lanes, 1)
        self._marks: list[str] = []
        self.legend: dict[str, str] = {}  # what a colour stands for

    def _x(self, time: float) -> str:
        return f"{100 * time / self._longest:.2f}%"

    def _y(self, lane: float) -> str:
        return f"{100 * (1 - lane / self._lanes):.2f}%"

    def bar(self, start: float, length: float, lane: int, colour: str, said: str) -> None:
        """A bar in a lane; ``said`` is read where it is pointed at."""
        height = f"{76 / self._lanes:.2f}%"
        place = f'x="{self._x(start)}" y="{self._y(lane + 0.88)}" width="{self._x(length)}" height="{height}"'
        self._marks.append(f'<rect {place} fill="{colour}"><title>{escape(said)}</title></rect>')

    def upright(self, time: float, low: float, high: float, colour: str, dash: str = "") -> None:
        """A vertical line between two lanes."""
        x = self._x(time)
        place = f'x1="{x}" y1="{self._y(low)}" x2="{x}" y2="{self._y(high)}"'
        self._marks.append(f'<line {place} stroke="{colour}" stroke-dasharray="{dash}"/>')

    def text(
        self, time: float, lane: float, said: str, dx: int = 0, dy: int = 0, anchor: str = "start"
    ) -> None:
        """A text, moved by so many pixels."""
        place = f'x="{self._x(time)}" y="{self._y(lane)}" dx="{dx}" dy="{dy}" text-anchor="{anchor}"'
        self._marks.append(f"<text {place}>{escape(said)}</text>")

    def x_axis(self, unit: str) -> None:
        """Ticks below."""
        places = ticks_of(0, self._longest, 4)
        for tick in places:
            name = f" {unit}" if tick == places[-1] else ""
            self.upright(tick, 0, self._lanes, "var(--line)")
            self.text(tick, 0, f"{tick:,g}{name}", dy=16, anchor="middle")

    def html(self, said: str) -> str:
        """The plot with its legend above; ``said`` is what it shows, in words."""
        height = _AXIS + _LANE * self._lanes
        size = f'width="100%" height="{height}" role="img" aria-label="{escape(said)}"'
        svg = f"<svg {size}>{''.join(self._marks)}</svg>"
        return f'{legend(self.legend)}<div class="plot">{svg}</div>'


def ticks_of(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two.

    >>> ticks_of(0, 310, 4)
    [0.0, 100.0, 200.0, 300.0]
    """
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    steps = [power * factor for factor in (1, 2, 5, 10)]
    step = next(one for one in steps if one >= raw)
    first = math.ceil(low / step)
    last = math.floor(high / step)
    return [round(i * step, 10) for i in range(first, last + 1)]
