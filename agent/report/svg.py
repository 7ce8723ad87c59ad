"""A plot in SVG: marks are placed in per cent of it, so that it fits a phone as a desk; its texts keep their size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape


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

    def x_axis(self, unit: str, also: Mapping[float, str] | None = None, ticks: int = 4) -> None:
        """Ticks below; ``also``: a second line of text for each tick that it names."""
        for tick in (places := ticks_of(*self.x_range, ticks)):
            self.line((tick, tick), self.y_range, "var(--line)")
            self.text(tick, self.y_range[0], f"{tick:,g}" + (f" {unit}" if tick == places[-1] else ""), 0, 16, "middle")
            if also:
                self.text(tick, self.y_range[0], also.get(tick, ""), 0, 32, "middle")

    def y_axis(self, unit: str) -> None:
        """Ticks on the left."""
        for tick in (places := ticks_of(*self.y_range, 4)):
            self.line(self.x_range, (tick, tick), "var(--line)")
            self.text(self.x_range[0], tick, f"{tick:,g}" + (f" {unit}" if tick == places[-1] else ""), -6, 4, "end")

    def html(self, said: str) -> str:
        """The plot with its legend above; ``said`` is what it shows, in words."""
        names = "".join(
            f'<li><span style="background:{colour}"></span>{escape(name)}</li>' for name, colour in self.legend.items()
        )
        size = f'width="100%" height="{self._height}" role="img" aria-label="{escape(said)}"'
        return f'<ul class="legend">{names}</ul><div class="plot"><svg {size}>{"".join(self._marks)}</svg></div>'


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
