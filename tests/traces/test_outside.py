"""JSON from outside: whatever is wrong with it is a ValueError, and one bad file hides no other."""

import ast
import contextlib
import json
from pathlib import Path

import pytest
from dynamiccl.agent.daemon import memory
from dynamiccl.traces import outside
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
DEEP = "[" * 100_000 + "]" * 100_000
BAD = {
    "huge whole number": '{"n": 1' + "0" * 400 + "}",
    "beyond 64 bits": '{"n": 18446744073709551616}',
    "long digits": "1" * 100_000,
    "infinite fraction": '{"n": 1e999}',
    "NaN": '{"n": NaN}',
    "Infinity": "[-Infinity]",
    "deep lists": DEEP,
    "deep objects": '{"a":' * 65 + "1" + "}" * 65,
    "cut off": '{"n": [1, 2',
    "nothing": "",
    "control character": '["\x01"]',
}


@pytest.mark.parametrize("name", list(BAD))
def test_each_kind_of_bad_json_is_one_value_error(name):
    """Before: OverflowError and RecursionError passed by the handlers of ValueError."""
    for text in (BAD[name], BAD[name].encode()):
        with pytest.raises(ValueError) as raised:
            outside.parse_json(text)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 200


def test_bytes_that_are_no_utf_8_and_texts_beyond_the_limit_are_value_errors(tmp_path):
    with pytest.raises(ValueError, match="utf-8"):
        outside.parse_json(b'["\xff"]')
    (tmp_path / "long.json").write_text(json.dumps("x" * 100))
    with pytest.raises(ValueError, match="at most 50"):
        outside.read_json(tmp_path / "long.json", 50)
    assert outside.parse_json('\ufeff["x"]'.encode()) == ["x"]


PLAIN = st.none() | st.booleans() | st.integers(-(2**64) + 1, 2**64 - 1) | st.text()
PLAIN |= st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_what_is_within_the_limits_is_read_as_json_reads_it(value):
    assert outside.parse_json(json.dumps(value)) == value


@settings(max_examples=300, deadline=None)
@given(st.binary() | st.text())
def test_any_text_is_a_value_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        outside.parse_json(text)


#: Files that parse JSON by themselves, with the reason. Importers read profiles of any size, in blocks.
OTHERS = {
    "traces/outside.py": "the one reader",
    "traces/reasons.py": "the probe imports it, which has the standard library only; a reason that is none is refused",
    "agent/daemon/launcher.py": "its own plan; it runs without site-packages",
}
#: What a process of ours hands to itself, or lies in the package.
OURS = (
    "agent/checks/",
    "agent/api.py",
    "agent/commands/bench.py",
    "agent/report/html/report.py",
    "agent/train/",
    "envs/bench/",
    "envs/sim/fabric/measured.py",
    "traces/importers/",
    "zero_workload/",
)


def test_all_json_from_outside_goes_through_the_reader():
    found = set()
    for folder in ("agent", "envs", "traces"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            calls = (
                node
                for node in ast.walk(ast.parse(path.read_text("utf-8")))
                if isinstance(node, ast.Attribute)
            )
            if not name.startswith(OURS) and any(
                call.attr in ("load", "loads")
                and getattr(call.value, "id", "").startswith(("json", "orjson"))
                for call in calls
            ):
                found.add(name)
    assert found <= OTHERS.keys()


def kept(**changes):
    """A file of the memory, as text, with a slot changed."""
    slot = {"n_ranks": 8, "n_nodes": 1, "func": "all_gather", "size_class": 20}
    row = {
        "slot": slot,
        "n_bytes": 2**20,
        "own": "ring/ll",
        "call_us": 50.0,
        "decision": "ring/simple/8",
    } | changes
    told = {"format": memory.FORMAT, "written": "2026-11-26T10:00:00+00:00", "job": "j", "speedup": None}
    told["cluster"] = dict.fromkeys(memory.FACTS, "x")
    return json.dumps(told | {"slots": [row]})


#: Files of the memory that are damaged, each in its way.
DAMAGED = {
    "number": kept().replace("1048576", "1" + "0" * 400),
    "infinite": kept().replace("50.0", "1e999"),
    "deep": DEEP,
    "text for a number": kept(n_bytes="many"),
    "below 0": kept(call_us=-1.0),
    "true": kept(n_bytes=True),
    "list for a slot": kept(slot=[1]),
    "no object": "[]",
    "long": kept(own="x" * memory.MOST_BYTES),
    "bytes": "\udcff",
}


def test_a_damaged_file_of_the_memory_hides_no_other(tmp_path):
    """Before: 10**400 bytes ended the tuner by an OverflowError; deep nesting hid all other files."""
    facts = dict.fromkeys(memory.FACTS, "x")
    folder = tmp_path / memory.key_of(facts)
    folder.mkdir(parents=True)
    for name, text in DAMAGED.items():
        (folder / f"2-{name}.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    (folder / "1-good.json").write_text(kept())
    runs, passed = memory.Store(str(tmp_path)).read(memory.key_of(facts))
    assert [run["slots"][0].n_bytes for run in runs] == [2**20]
    assert len(passed) == len(DAMAGED) and all(len(text) < 1000 for text in passed)
