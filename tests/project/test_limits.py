"""A function of the product has a cyclomatic complexity of at most 12. There are no exceptions.

It is one, and one more for each if, loop, except, assert, condition of a comprehension, case of a match, conditional
expression, and each further part of an ``and`` or ``or``; as radon counts, but a function within another counts by
itself. The length of lines is limited by ruff; nothing else is limited by a number.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from paths import ROOT

FOLDERS = ("agent", "envs", "traces", "zero_workload")
COMPLEXITY = 12

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: Nodes that add one way through a function.
WAYS = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert)


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below one, without those of functions and classes within it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            yield from parts(child)


def complexity(function: Function) -> int:
    total = 1
    for node in parts(function):
        match node:
            case ast.BoolOp():
                total += len(node.values) - 1
            case ast.comprehension():
                total += 1 + len(node.ifs)
            case ast.match_case():
                total += not (isinstance(node.pattern, ast.MatchAs) and node.pattern.pattern is None)
            case _ if isinstance(node, WAYS):
                total += 1
    return total


def beyond(source: str, name: str) -> dict[str, int]:
    """Functions of a file beyond the limit -> their complexity."""
    found = dict[str, int]()

    def look(node: ast.AST, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, Function | ast.ClassDef):
                look(child, place)
                continue
            here = f"{place}{'.' if ':' in place else ':'}{child.name}"
            if isinstance(child, Function) and (n := complexity(child)) > COMPLEXITY:
                found[here] = n
            look(child, here)

    look(ast.parse(source), name)
    return found


def test_no_function_is_beyond_the_limit() -> None:
    found: dict[str, int] = {}
    for path in (p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))):
        found |= beyond(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())
    assert not found, "make them simpler"


@pytest.mark.parametrize(
    "source",
    [
        "def f(a):\n" + "    if a: pass\n" * 12,
        "def f(a):\n    return [b for b in a if b" + " and b" * 10 + "]\n",
    ],
)
def test_what_is_beyond_the_limit_is_seen(source: str) -> None:
    assert beyond(source, "x.py") == {"x.py:f": 13}


def test_a_function_within_another_counts_by_itself() -> None:
    source = "def f(a):\n    def g(a):\n" + "        if a: pass\n" * 11 + "    if a: pass\n"
    assert beyond(source, "x.py") == {}
