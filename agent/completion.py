"""Prints the completion script of a shell: ``python -m dynamiccl.agent.completion SHELL``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shtab

from .cli import NAMES, Parser

#: Parameters that take a folder, and a link or a name in its place.
_RUNS = {"run", "attach"}


def _all_commands() -> argparse.ArgumentParser:
    """One parser of all commands; a command of two words is a command of a command."""
    root = argparse.ArgumentParser("dynamiccl")
    commands = root.add_subparsers(parser_class=_parser)  # type: ignore[call-overload]
    groups: dict[str, Any] = {}
    for name in NAMES:
        first, _, second = name.partition(" ")
        if second and first not in groups:
            group = commands.add_parser(first, help="Check a machine, file results, train policies.")
            groups[first] = group.add_subparsers(parser_class=_parser)
        about = " ".join(Parser(name).paragraphs[0].split())
        where = groups[first] if second else commands
        where.add_parser(second or first, help=about)
    return root


def _parser(prog: str, **_: Any) -> argparse.ArgumentParser:
    """The parser of a command, or of a group of commands."""
    name = prog.removeprefix("dynamiccl ")
    if name not in NAMES:
        return argparse.ArgumentParser(prog)
    parser = Parser(name)
    actions: Sequence[Any] = parser._actions
    for action in actions:
        if action.dest in _RUNS or parser.kinds.get(action.dest) is Path:
            action.complete = shtab.FILE
    return parser


if __name__ == "__main__":
    print(shtab.complete(_all_commands(), sys.argv[1]))
