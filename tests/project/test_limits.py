"""Limits of size for every file, class and function of the product. There are no exceptions.

* A file has at most 400 lines, of C and of the tests too.
* A class has at most 15 attributes: names that its methods assign on ``self``, and fields that are annotated in its
  body. Records are left out, whose methods assign nothing: named tuples, and dataclasses that only name what they hold.
* A function has a cyclomatic complexity of at most 12: one, and one more for each if, loop, except, assert, condition
  of a comprehension, case of a match, conditional expression, and each further part of an ``and`` or ``or``; as radon
  counts, but a function within another counts by itself.
* A file has at most 4.0 names a line of code, on average over its lines.
* A function of five lines or more has at most 8 different names a line, on average over its lines of code: variables,
  attributes, parameters and keywords.
"""

from __future__ import annotations

import ast
import io
import keyword
import tokenize
from collections.abc import Iterator

import pytest
from paths import ROOT

FOLDERS = ("agent", "envs", "traces", "zero_workload")
LINES, ATTRIBUTES, COMPLEXITY, NAMES = 400, 15, 12, 8

#: A file has at most so many names a line of code on average.
NAMES_A_LINE = 4.0

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


def names_a_line(function: Function, lines: list[str]) -> float:
    """``lines`` are those of the file."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0.0
    seen: set[tuple[int, str]] = set()
    for node in (n for statement in body for n in ast.walk(statement)):
        match node:
            case ast.Name():
                seen.add((node.lineno, node.id))
            case ast.Attribute():
                seen.add((node.end_lineno or 0, node.attr))
            case ast.arg() | ast.keyword() if node.arg:
                seen.add((node.lineno, node.arg))
    code = [text for text in lines[body[0].lineno - 1 : body[-1].end_lineno] if text.split("#")[0].strip()]
    return len(seen) / len(code)


def attributes(cls: ast.ClassDef) -> int:
    """0 of a record."""
    stores = [n for n in ast.walk(cls) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    assigned = {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}
    fields = {
        s.target.id for s in cls.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
    }
    return len(assigned | fields) if assigned else 0


def beyond(source: str, name: str) -> dict[str, str]:
    """What of a file is beyond a limit -> by how much."""
    lines, found = source.splitlines(), dict[str, str]()

    def look(node: ast.AST, place: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, Function | ast.ClassDef):
                look(child, place)
                continue
            here = f"{place}{'.' if ':' in place else ':'}{child.name}"
            if isinstance(child, ast.ClassDef):
                if (n := attributes(child)) > ATTRIBUTES:
                    found[here] = f"{n} attributes"
            elif (n := complexity(child)) > COMPLEXITY:
                found[here] = f"a complexity of {n}"
            elif (child.end_lineno or 0) - child.lineno >= 4 and (mean := names_a_line(child, lines)) > NAMES:
                found[here] = f"{mean:.1f} names a line"
            look(child, here)

    look(ast.parse(source), name)
    return found


def names_a_code_line(source: str) -> float:
    """Names (no keywords) over the lines of code that have a name or a keyword."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.NAME]
    lines = {token.start[0] for token in tokens}
    return sum(not keyword.iskeyword(token.string) for token in tokens) / max(1, len(lines))


def test_code_is_not_dense() -> None:
    found = {}
    for path in (p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))):
        place = path.relative_to(ROOT).as_posix()
        mean = names_a_code_line(path.read_text("utf-8"))
        if mean > NAMES_A_LINE + 0.005:
            found[place] = f"{mean:.2f} names a line"
    assert not found, "split dense expressions into named steps"


def test_files_stay_small() -> None:
    files = [p for folder in (*FOLDERS, "tests") for p in (ROOT / folder).rglob("*")]
    sources = [p for p in files if p.suffix in (".py", ".c", ".h")]
    counts = {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in sources}
    assert {name: n for name, n in counts.items() if n > LINES} == {}, "split them"


def test_nothing_is_beyond_the_limits() -> None:
    found: dict[str, str] = {}
    for path in (p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*.py"))):
        found |= beyond(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())
    assert not found, "make them smaller"


RECORD = "@dataclass\nclass A:\n" + "".join(f"    a{i}: int = 0\n" for i in range(15))
LONG = "def f(a):\n    b = a\n    c = b\n    d = c\n    return d\n"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (
            "class A:\n    def f(self):\n" + "".join(f"        self.a{i} = 0\n" for i in range(16)),
            "16 attributes",
        ),
        (RECORD + "    def f(self):\n        self.a0 = self.more = 0\n", "16 attributes"),
        ("def f(a):\n" + "    if a: pass\n" * 12, "a complexity of 13"),
        ("def f(a):\n    return [b for b in a if b" + " and b" * 10 + "]\n", "a complexity of 13"),
        ("def f(a):\n" + "    b.c = d.e(f, g=h[i], j=a)\n" * 4, "10.0 names a line"),
    ],
)
def test_what_is_beyond_a_limit_is_seen(source: str, what: str) -> None:
    assert list(beyond(source, "x.py").values()) == [what]


@pytest.mark.parametrize(
    "source",
    [
        LONG,
        RECORD + "    a15: int = 0\n    a16: int = 0\n",
        "def f(a):\n    def g(a):\n" + "        if a: pass\n" * 11 + "    if a: pass\n",
    ],
)
def test_what_is_within_the_limits_is_left_alone(source: str) -> None:
    assert beyond(source, "x.py") == {}
