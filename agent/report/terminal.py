"""Where commands print: rich's console, in which ``module:Name`` stays what it is, and its tables."""

from __future__ import annotations

import itertools
import math
import os
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Columns where there is no terminal: tables in a pipe must not be cut to 80.
IN_A_PIPE = 160
#: Columns of a terminal from which a table is shown whole.
WIDE = 120
#: Heights of a sparkline's letters.
BARS = "▁▂▃▄▅▆▇█"


def terminal(**options: Any) -> Console:
    """A console with rich's ``options`` that takes nothing between colons for the name of an emoji."""
    return Console(emoji=False, **options)


def wide_terminal() -> Console:
    """For tables on stdout."""
    console = terminal(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = IN_A_PIPE
    return console


def say(console: Console, text: str, style: str = "") -> None:
    """Print a text, its lines wrapped between words where they are wider than a terminal. A pipe gets whole lines."""
    lines = text.splitlines()
    if console.is_terminal:
        lines = [part for line in lines for part in _wrapped(line, console.width)]
    console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)


def _wrapped(line: str, width: int) -> list[str]:
    """A line in parts of a width; the later ones are indented a bit more than the first. Long words stay whole."""
    indent = len(line) - len(line.lstrip())
    later = " " * (indent + 4)
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(line, width, subsequent_indent=later, **options) or [""]


def fitting(
    console: Console, heads: Sequence[str], narrow: Sequence[str], rows: Iterable[Sequence[Any]]
) -> tuple[Sequence[str], list[list[Any]]]:
    """Heads and rows of a table: all columns where there is room for them, else the ``narrow`` ones."""
    shown = heads if console.width >= WIDE else narrow
    places = [heads.index(head) for head in shown]
    return shown, [[row[place] for place in places] for row in rows]


def grid(
    heads: Iterable[str],
    rows: Iterable[Iterable[Any]],
    numbers: Collection[str] = (),
    no_wrap: bool = False,
    **look: Any,
) -> Table:
    """A table of plain text, None as an empty cell; columns in ``numbers`` stand to the right, ``look`` is rich's."""
    made = Table(title_justify="left", title_style="bold", **look)
    for head in heads:
        made.add_column(
            head, justify="right" if head in numbers else "left", overflow="fold", no_wrap=no_wrap
        )
    for row in rows:
        made.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return made


def sparkline(values: Sequence[float], width: int) -> str:
    """Positive values as a line of at most ``width`` letters, from 0 to the largest; more values are averaged.

    >>> sparkline([1.0, 2.0, 8.0], 20)
    '▁▂█'
    """
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        parts = [values[a:b] for a, b in itertools.pairwise(edges)]
        values = [sum(part) / len(part) for part in parts]
    top = max(values, default=1.0)
    heights = [math.ceil(len(BARS) * value / top) for value in values]
    bars = [BARS[max(height, 1) - 1] for height in heights]
    return "".join(bars)
