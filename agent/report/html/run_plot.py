"""The plot of a run, drawn by matplotlib as SVG: the time of each step over the whole run, and the loss below it.

matplotlib is optional (``pip install '.[plot]'`` in a checkout). Only the process that draws the report imports it.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from ..losses import Losses, binned_losses
from ..verdict import DEFAULT, OWN, ms, side
from .course import Course, Mark
from .points import as_dashes, binned, trial_spans

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Size:
    """A plot's size in pixels, the points of its line, and how many of its pixels a letter of text takes."""

    name: str
    width: int
    height: int
    points: int
    letter: float = 6.5


#: The panel of the loss, where the job tells its loss: its part of the plot, and of the plot's height what it adds.
_LOSS_PART, _LOSS_MORE = 0.35, 0.4
#: A report shows the one that fits its window.
SIZES = (Size("wide", 1064, 340, 2000), Size("narrow", 320, 260, 500))
#: Colours of the page by their names in ``page.py``; a file of its own has these values.
COLOURS = {
    "ink": "#1c2024",
    "quiet": "#5a6671",
    "line": "#e3e6e8",
    "faint": "#f1f3f4",
    "tuned": "#086460",
    "tuned-soft": "#d5ebe9",
    "slot-1": "#d98a1f",
}
#: Colours of bands: NCCL's default, and a kept table, whichever it is. The trials' colour is neither.
_DEFAULT_BAND, _TABLE_BAND = "faint", "tuned-soft"
#: Steps above this many times the longest usual one (98 of 100) are drawn at the edge, and told in words. The edge is
#: this part of the axis: a line there is whole.
_ROOM, _USUAL, _EDGE = 1.25, 98, 0.985
#: Height of the strip of trials as a part of the axis, and pixels of one row of labels.
_STRIP, _ROW = 0.03, 14
#: Margins in pixels: room for the texts of the axes.
_LEFT, _RIGHT, _BOTTOM, _TOP = 60, 12, 42, 6
_FONT = "system-ui, Arial, sans-serif"
_DPI = 72


def run_plots(course: Course, losses: Losses | None = None) -> dict[str, str]:
    """Returns the plot as SVG by the names of SIZES, in the page's colours; with the loss where it is known.

    Raises ImportError if matplotlib is not installed. A course without steps has no plot.
    """
    if not course.steps.size:
        return {}
    return {size.name: draw(course, size, "var(--{})", losses) for size in SIZES}


def draw(course: Course, size: Size, colour: str = "", losses: Losses | None = None) -> str:
    """Returns one SVG. ``colour``: how a colour is written from its name; empty: by its value in COLOURS."""
    import matplotlib
    from matplotlib.figure import Figure

    if losses:
        size = replace(size, height=round(size.height * (1 + _LOSS_MORE)))
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": size.name, "font.size": 12}
    with matplotlib.rc_context(style):
        inches = size.width / _DPI, size.height / _DPI
        figure = Figure(inches, dpi=_DPI)
        if losses:
            ratios = [1 - _LOSS_PART, _LOSS_PART]
            axes, below = figure.subplots(2, sharex=True, height_ratios=ratios)
            _loss(below, losses, course, size)
        else:
            axes = below = figure.subplots()
        _step_times(axes, course, size)
        below.set_xlabel("step of the job", color=COLOURS["quiet"])
        left, right = _LEFT / size.width, 1 - _RIGHT / size.width
        bottom, top = _BOTTOM / size.height, 1 - _TOP / size.height
        figure.subplots_adjust(left, bottom, right, top)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    return _inline(file.getvalue(), size, _said(course), colour)


def _step_times(axes: Axes, course: Course, size: Size) -> None:
    """The panel of step times: bands, the line, the strip of trials, marks."""
    top = _top(course)
    axes.set_xlim(course.steps[0] - 0.5, course.bands[-1].last + 0.5)
    axes.set_ylim(0, top)
    _style(axes, size)
    _draw_bands(axes, course, size)
    usual = ~course.on_trial
    shown = np.minimum(course.ms, _EDGE * top)
    line = binned(course.steps[usual], shown[usual], size.points)
    axes.plot(*line, color=COLOURS["ink"], linewidth=0.7)
    # Where two tables take turns, these are a second band of step times.
    tried = course.on_trial
    most = size.points // 2
    points = binned(course.steps[tried], shown[tried], most)
    a_pixel = len(course.steps) / size.width  # in steps; a path without length is not drawn
    length = max(a_pixel, 0.5)
    dashes = as_dashes(*points, length)
    axes.plot(*dashes, color=COLOURS["slot-1"], linewidth=2)
    trials = trial_spans(course, size.points // 2)
    strip = 0, _STRIP * top
    axes.broken_barh(trials, strip, color=COLOURS["slot-1"], linewidth=0)
    _draw_marks(axes, course, size)
    axes.set_ylabel("step time, ms", color=COLOURS["quiet"])


def _loss(axes: Axes, losses: Losses, course: Course, size: Size) -> None:
    """The panel of the loss: the curve of training, a dot for each loss on held-out text, the marks of the run."""
    _style(axes, size)
    axes.plot(*binned_losses(losses), color=COLOURS["ink"], linewidth=0.9)
    if losses.held_out:
        # Dashes as long as a pixel with round ends: a marker would be a reference to an id, and a page's SVG has none.
        a_pixel = len(course.steps) / size.width
        seen = np.array(losses.held_out)
        steps, heights = seen.T
        dots = as_dashes(steps, heights, a_pixel)
        axes.plot(*dots, color=COLOURS["tuned"], linewidth=5, solid_capstyle="round")
    for mark in course.marks:
        _draw_mark(axes, mark)
    axes.set_ylabel("loss", color=COLOURS["quiet"])


def _top(course: Course) -> float:
    """The end of the axis in ms: room above usual steps, so that a few very long ones do not flatten all others."""
    usual = float(np.percentile(course.ms, _USUAL))
    longest = float(course.ms.max())
    highest = min(longest, _ROOM * usual)
    return _ROOM * max(highest, 1e-6)


def _style(axes: Axes, size: Size) -> None:
    ticks = 8 if size.width > 600 else 4
    axes.locator_params(axis="x", nbins=ticks, integer=True)
    axes.locator_params(axis="y", nbins=5)
    axes.tick_params(length=0, colors=COLOURS["quiet"])
    axes.grid(axis="y", color=COLOURS["line"], linewidth=0.8)
    axes.set_axisbelow(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def band_colour(table: str) -> str:
    """The name of the colour of a current table."""
    return _DEFAULT_BAND if table == DEFAULT else _TABLE_BAND


def _draw_bands(axes: Axes, course: Course, size: Size) -> None:
    """A band for each current table, with its name where there is room for it."""
    n_steps = len(course.steps)
    for band in course.bands:
        left, right = band.first - 0.5, band.last + 0.5
        colour = COLOURS[band_colour(band.table)]
        axes.axvspan(left, right, color=colour, linewidth=0)
        room = size.width * (right - left) / n_steps
        name = side(band.table)
        if room > size.letter * len(name):
            middle = (left + right) / 2
            _label(axes, middle, name, row=0, align="center")


def _draw_marks(axes: Axes, course: Course, size: Size) -> None:
    """A line at each switch and each verdict; a verdict's line is solid and has its name."""
    for mark in course.marks:
        _draw_mark(axes, mark)
        if mark.is_verdict:
            late = course.steps[0] + 0.85 * len(course.steps)
            align = "right" if mark.step > late else "left"
            text = f" {mark.text} "
            _label(axes, mark.step, text, row=1, align=align)


def _draw_mark(axes: Axes, mark: Mark) -> None:
    look, name = ("solid", "tuned") if mark.is_verdict else ("dashed", "quiet")
    colour = COLOURS[name]
    axes.axvline(mark.step, color=colour, linewidth=1.2, linestyle=look)


def _label(axes: Axes, step: float, text: str, row: int, align: str) -> None:
    """A text at the top of the panel, in one of two rows."""
    below = -_ROW * (row + 1)
    axes.annotate(
        text,
        (step, 1),
        (0, below),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha=align,
        color=COLOURS["ink"],
        fontsize=11,
    )


def _said(course: Course) -> str:
    """The plot in words, for readers who do not see it."""
    names = [side(band.table) for band in course.bands]
    verdicts = [f"verdict at step {mark.step}" for mark in course.marks if mark.is_verdict]
    parts = [
        f"Step time of steps {course.steps[0]} to {course.steps[-1]}",
        f"current table: {', then '.join(names)}",
    ]
    return "; ".join([*parts, *verdicts])


def legend(course: Course, losses: Losses | None = None) -> dict[str, str]:
    """What a colour stands for -> the name of the colour."""
    found = {}
    for band in course.bands:
        name = OWN if band.table == DEFAULT else "a kept table is current"
        found[name] = band_colour(band.table)
    if course.on_trial.any():
        found["steps on trial under another table"] = "slot-1"
    if losses and losses.held_out:
        found["loss on held-out text"] = "tuned"
    return found


def beyond(course: Course) -> str:
    """A sentence about the steps that the axis cuts; empty if there are none."""
    cut = int((course.ms > _top(course)).sum())
    if not cut:
        return ""
    longest = ms(float(course.ms.max()))
    return f"{cut} step{'s' * (cut > 1)} beyond the axis, the longest {longest}."


def _inline(svg: str, size: Size, said: str, colour: str) -> str:
    """matplotlib's file as a part of a page: without prologue, ids and outer size, in the page's font and colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    svg = re.sub(r' (?:id|clip-path)="[^"]*"', "", svg)
    svg = re.sub(r"<defs>\s*<clipPath>.*?</defs>", "", svg, flags=re.S)
    svg = re.sub(r"(font: [\d.]+px) [^;\"]+", rf"\1 {_FONT}", svg)
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size.width} {size.height}" '
    opening += f'class="{size.name}" role="img" aria-label="{escape(said)}">'
    svg = re.sub(r"<svg[^>]*>", opening, svg, count=1)
    return _coloured(svg, colour)


def _coloured(svg: str, written: str) -> str:
    if written:
        for name, value in COLOURS.items():
            svg = svg.replace(value, written.format(name))
    return svg
