"""The vocabulary of reasons: documented, given by code, filed with its words, and read by no condition."""

import ast
import doctest
import json
import re
import sys

import pytest
from dynamiccl.traces import reasons
from dynamiccl.traces.header import plain
from dynamiccl.traces.reasons import (
    VOCABULARY,
    Happened,
    NotAgreeing,
    Recalled,
    RowRefused,
    RunEnds,
    Why,
    revived,
)
from paths import DATA, ROOT

MEMBERS = [one for kind in VOCABULARY for one in kind]
#: What the tuner does needs no cure: these are in the filed list only.
EXPLAINED = [one for one in MEMBERS if not isinstance(one, Happened | Recalled)]
PAGE = (ROOT / "OPERATING.md").read_text(encoding="utf-8").partition("## Reasons")[2]
#: Each code and its words: whoever changes one reads the whole list.
#: `PYTHONPATH=tests/helpers python tests/traces/test_reasons.py` writes it.
FILED = DATA / "reasons.txt"
#: Where reasons are given, and the calls and names that take one.
TELLERS = (
    *(f"envs/nccl/agreement/{name}.py" for name in ("agreement", "protocol", "store")),
    *("envs/nccl/plugin/bindings.py", "envs/nccl/probe/probe.py"),
    *(f"envs/live/{name}.py" for name in ("job", "windows", "obedience")),
    *(f"agent/daemon/{name}.py" for name in ("tuner", "daemon", "console", "summarise")),
)
SINKS = {"_stop", "close", "LeftOut", "JobEnded", "Closed", "KeyboardInterrupt"}
SINKS |= {"_say", "_warn", "NothingToTune", "OtherJob"}
FIELDS = {"ended", "dropped", "failure", "stopped", "closing", "clash", "closed", "why"}
#: Functions that return a reason.
RETURN = {"_odd", "stage", "waits_for", "_ended", "nothing", "_identity", "elsewhere", "one_of"}


def example(one):
    """A member with its facts."""
    return one(**dict.fromkeys(one.gaps, 7))


@pytest.mark.parametrize("one", MEMBERS, ids=lambda one: one.code)
def test_a_reason_travels_as_its_code_and_its_facts(one):
    why = example(one)
    assert Why.of(json.loads(json.dumps(why.as_json()))) == Why.unpacked(why.packed()) == why
    assert revived(plain([{"a": why}])) == [{"a": why}] and plain(why)["text"] == str(why)
    assert Why.unpacked(why.packed()[: len(one.code) + 2]).reason is one, "a record cuts it"


def listed():
    return "".join(f"{one.code}: {example(one)}\n" for one in MEMBERS)


def test_every_code_is_printed_once_as_the_filed_list_has_it():
    assert listed() == FILED.read_text(encoding="utf-8")
    assert len(MEMBERS) == len({one.code for one in MEMBERS}) == len({one.value for one in MEMBERS})


def test_a_communicator_without_a_count_keeps_its_table():
    """Before: "NCCL decides alone on that communicator", where a table that is current stays until the job ends."""
    assert str(NotAgreeing.NO_CLOCK(rank=3, why="x")).endswith("no table changes on that communicator")


def test_a_reason_within_a_reason_is_told_too():
    deep = NotAgreeing.FAULT(rank=1, error=NotAgreeing.LATE_STORE())
    told = RunEnds.NO_MORE_SWITCHES(why=NotAgreeing.NOT_CONNECTED(why=deep))
    assert told.codes == ["no-more-switches", "not-connected", "fault", "late-store"]
    assert NotAgreeing.FAULT in told and NotAgreeing.NO_GROUP not in told
    assert Why.unpacked(told.packed()) == told != deep and len({told, deep, told}) == 2
    assert doctest.testmod(reasons).failed == 0


@pytest.mark.parametrize("found", ["", None, {}, {"code": "fault"}, {"code": "x", "facts": {}}])
def test_what_is_no_reason_is_refused(found):
    with pytest.raises(ValueError, match="reason"):
        Why.of(found)
    assert Why.unpacked("something else") is None and revived({"a": found}) == {"a": found}


@pytest.mark.parametrize("facts", [{"ran": "ring/ll/4"}, {"ran": 1, "decision": 2, "slot": 3, "other": 4}])
def test_facts_that_are_missing_or_foreign_are_an_error(facts):
    with pytest.raises(KeyError):
        RowRefused.NOT_OBEYED(**facts)


def test_every_reason_is_documented_and_every_documented_one_exists():
    """A code stands in one row with what to do, or among those that ask nothing. Its words stand in the code alone."""
    codes = [
        code for line in PAGE.splitlines() if "|" not in line for code in re.findall(r"`([\w-]+)`", line)
    ]
    rows = re.findall(r"^\| (`[^|]+`) \| (.+?) \|$", PAGE, flags=re.M)
    codes += [code for names, _ in rows for code in re.findall(r"`([\w-]+)`", names)]
    told = [code for code in codes if code != "text"]
    assert sorted(told) == sorted(one.code for one in EXPLAINED)
    assert len(rows) > 15 and all(len(cure) > 3 for _, cure in rows)


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
        p.read_text("utf-8") for folder in ("agent", "envs", "traces") for p in (ROOT / folder).rglob("*.py")
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
        "self._say(f'verdict after {n} steps')",
        "def waits_for(self):\n    return 'no step yet'",
        "def stage(self):\n    return f'rank {r} is late' if r else X.Y()",
    ],
)
def test_the_rule_catches(source):
    assert free_words(source)


# -- no condition reads words ----------------------------------------------------------------------------------------

#: Names under which reasons travel.
CARRIERS = {
    "why",
    "reason",
    "ended",
    "dropped",
    "no_table",
    "failure",
    "lacked",
    "stopped",
    "error",
    "verdict",
}
SEARCHES = {"startswith", "endswith", "find", "index", "count", "match", "search", "fullmatch"}
#: Words that are not ours, which their program gives in no other form.
FOREIGN = {
    ("traces/importers/json_stream.py", "'end of data' in error.msg"),  # msgspec
    ("traces/importers/json_stream.py", "'UTF-8' in str(reason)"),  # msgspec
    ("traces/outside.py", "'Not a gzipped file' not in str(error)"),  # gzip
}


def carries(node):
    """Whether a node stands for a reason, or for the words of one."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") == "str" and bool(node.args) and carries(node.args[0])
    if isinstance(node, ast.Subscript):
        return getattr(node.slice, "value", None) in CARRIERS
    if isinstance(node, ast.Attribute) and node.attr in ("msg", "message", "text"):
        return carries(node.value)
    return getattr(node, "attr", getattr(node, "id", "")) in CARRIERS


def is_sentence(node):
    return isinstance(node, ast.Constant) and bool(re.search(r"\w+ \w+ \w+", str(node.value)))


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 1


def read_words(source):
    """Expressions of a program that look for something in the words of a reason, or compare a sentence."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            values = [
                v for s in sides for v in (s.elts if isinstance(s, ast.Tuple | ast.List | ast.Set) else [s])
            ]
            is_within = isinstance(node.ops[0], ast.In | ast.NotIn) and is_text(node.left)
            is_within &= carries(node.comparators[0])
            is_equal = any(isinstance(s, ast.Call) and carries(s) for s in sides)
            hit = is_within or is_equal or any(map(is_sentence, values))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SEARCHES:
            hit = any(map(carries, (node.func.value, *node.args)))
        else:
            hit = isinstance(node, ast.MatchValue) and is_sentence(node.value)
        found += [ast.unparse(node)] if hit else []
    return found


@pytest.mark.parametrize("room", ["agent", "envs", "traces"])
def test_no_condition_reads_the_words_of_a_reason(room):
    found = set()
    for path in (ROOT / room).rglob("*.py"):
        name = str(path.relative_to(ROOT))
        found |= {(name, text) for text in read_words(path.read_text(encoding="utf-8"))}
    assert not found - FOREIGN


@pytest.mark.parametrize(
    "source",
    [
        "'no plugin' in why",
        "if 'other-backend' in str(self.outcome.ended): pass",
        "error.startswith('rank')",
        "summary['why'].endswith('gone')",
        "re.search('rank (.*) is', reason)",
        "x == 'the job has ended'",
        "x in ('a', 'the job has ended')",
        "str(reason.why) == text",
        "match x:\n    case 'the job has ended': pass",
    ],
)
def test_the_search_finds(source):
    assert read_words(source)


def test_the_vocabulary_needs_nothing_but_the_standard_library():
    source = (ROOT / "traces" / "reasons.py").read_text(encoding="utf-8")
    modules = {n.module or "" for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom)}
    modules |= {a.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import) for a in n.names}
    assert {m.partition(".")[0] for m in modules} <= sys.stdlib_module_names


if __name__ == "__main__":
    FILED.write_text(listed(), encoding="utf-8")
