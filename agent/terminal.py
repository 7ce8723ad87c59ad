"""Where commands print: rich's console, in which ``module:Name`` stays what it is."""

from __future__ import annotations

from typing import Any

from rich.console import Console

#: Columns where there is no terminal: tables in a pipe must not be cut to 80.
IN_A_PIPE = 160


def terminal(**options: Any) -> Console:
    """A console with rich's ``options`` that takes nothing between colons for the name of an emoji."""
    return Console(emoji=False, **options)


def wide_terminal() -> Console:
    """For tables on stdout."""
    console = terminal(highlight=False)
    if not console.is_terminal:
        console.width = IN_A_PIPE
    return console
