"""The vocabulary of reasons: documented, used by name, and found again in the words that people read."""

import ast
import doctest
import re
import sys

import pytest
from dynamiccl.traces import reasons
from dynamiccl.traces.reasons import VOCABULARY, NotAgreeing, RowRefused, RunEnds, names
from paths import ROOT

MEMBERS = [one for kind in VOCABULARY for one in kind]
PAGE = (ROOT / "OPERATING.md").read_text(encoding="utf-8").partition("## Reasons")[2]
#: Where reasons are given, and the calls and names that take one.
TELLERS = (
    *(f"envs/nccl/agreement/{name}.py" for name in ("agreement", "protocol", "store")),
    *("envs/nccl/plugin/bindings.py", "envs/nccl/probe/probe.py"),
    *(f"envs/live/{name}.py" for name in ("job", "windows", "obedience")),
    *(f"agent/daemon/{name}.py" for name in ("tuner", "daemon", "console", "summarise")),
)
SINKS = {"_stop", "close", "LeftOut", "JobEnded", "Closed", "Stopped", "Withdrawn", "KeyboardInterrupt"}
FIELDS = {"ended", "dropped", "failure", "stopped", "closing", "clash", "closed"}
#: Functions that return a reason as text.
RETURN = {"_odd", "misses", "stage", "waits_for", "_ended", "nothing", "_identity", "elsewhere", "one_of"}


def example(one):
    """A member's words, with facts that are no words of another."""
    facts = dict.fromkeys(re.findall(r"\{(\w+)", one.value), 7)
    return one(**facts)


@pytest.mark.parametrize("one", MEMBERS, ids=lambda one: one.title)
def test_words_tell_their_reason(one):
    assert names(example(one))[0] == one.title


def test_a_communicator_without_a_count_keeps_its_table():
    """Before: "NCCL decides alone on that communicator", where a table that is current stays until the job ends."""
    assert NotAgreeing.NO_CLOCK(rank=3, why="x").endswith("no table changes on that communicator")


def test_a_reason_within_a_reason_is_told_too():
    inner = NotAgreeing.NO_PLUGIN(rank=3)
    assert names(RunEnds.NEVER_SWITCHED(why=inner)) == ["never-switched", "no-plugin"]
    deep = NotAgreeing.FAULT(rank=1, error=NotAgreeing.LATE_STORE())
    told = RunEnds.NO_MORE_SWITCHES(why=NotAgreeing.NOT_CONNECTED(why=deep))
    assert names(told) == ["no-more-switches", "not-connected", "fault", "late-store"]
    assert names("") == names("something else") == names("something else " * 20) == []
    assert doctest.testmod(reasons).failed == 0 and names.__doc__.count(">>>") == 1


def test_a_fact_that_is_missing_is_an_error():
    with pytest.raises(KeyError):
        RowRefused.NOT_OBEYED(ran="ring/ll/4")


def test_every_reason_is_documented_and_every_documented_one_exists():
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) \| (.+?) \|$", PAGE, flags=re.M)
    assert {name: words for name, words, _ in rows} == {one.title: one.value for one in MEMBERS}
    assert (
        len(rows)
        == len(MEMBERS)
        == len({one.title for one in MEMBERS})
        == len({one.value for one in MEMBERS})
    )
    assert all(len(cure) > 3 for *_, cure in rows)


def is_words(node):
    """A text of its own: a literal with letters in it, or one put together."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(re.search(r"[a-z]{2,} [a-z]", node.value))
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.IfExp | ast.List | ast.Tuple):
        return any(is_words(child) for child in ast.iter_child_nodes(node))
    return isinstance(node, ast.JoinedStr) and any(map(is_words, node.values))


def free_words(source):
    """Lines at which a reason is given in words of its own."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += [node.lineno for a in node.args if name in SINKS and is_words(a)]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            given = {getattr(t, "attr", getattr(t, "id", "")) for t in targets} & FIELDS
            found += [node.lineno] if given and node.value is not None and is_words(node.value) else []
        elif isinstance(node, ast.FunctionDef) and node.name in RETURN:
            returns = [n for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
            found += [n.lineno for n in returns if is_words(n.value)]
    return found


@pytest.mark.parametrize("path", TELLERS)
def test_reasons_are_given_by_name(path):
    source = (ROOT / path).read_text(encoding="utf-8")
    assert free_words(source) == []


def test_every_reason_is_given_somewhere():
    sources = "".join(
        p.read_text("utf-8") for folder in ("agent", "envs") for p in (ROOT / folder).rglob("*.py")
    )
    unused = [one for one in MEMBERS if f"{type(one).__name__}.{one.name}" not in sources]
    assert unused == []


@pytest.mark.parametrize(
    "source",
    [
        "self._stop(state, 'rank 3 is gone')",
        "left_out[comm] = LeftOut(f'rank {r} is late', True)",
        "raise Closed(f'the ranks {x} no more tables')",
        "outcome.dropped = 'it was slower'",
        "self.stopped = self.stopped or 'it has ended'",
        "def waits_for(self):\n    return 'no step yet'",
        "def misses(self):\n    return f'rank {r} is late' if r else X.Y()",
    ],
)
def test_the_rule_catches(source):
    assert free_words(source)


def test_the_vocabulary_needs_nothing_but_the_standard_library():
    source = (ROOT / "traces" / "reasons.py").read_text(encoding="utf-8")
    modules = {n.module or "" for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    modules |= {a.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import) for a in n.names}
    assert {m.partition(".")[0] for m in modules} <= sys.stdlib_module_names
