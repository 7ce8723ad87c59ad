"""No promise is lost: each item of ``tests/data/promises.toml`` stands on the page that the file names for it, and the
file has every variable, metric, reason, option, exit status and result that the code has."""

import ast
import json
import re
import tomllib
from functools import cache

import pytest
from command import NAMES, invoke
from dynamiccl.agent.integrations.follow import KEYS
from dynamiccl.agent.report.outputs import RESULTS
from dynamiccl.agent.report.runs import METRICS
from dynamiccl.traces.reasons import NotAgreeing, NotTuning, RowRefused, RunEnds
from paths import DATA, ROOT

LISTED = tomllib.loads((DATA / "promises.toml").read_text("utf-8"))
#: Kinds whose items are words that stand together in one paragraph, list item or table row.
IN_WORDS = ("promise", "limit", "exit")
ITEMS = [(kind, name, item) for kind in IN_WORDS for name, item in LISTED[kind].items()]
#: Kinds whose items are exact words, by page.
TOKENS = [(kind, page, token) for kind in ("variable", "metric", "logger", "reason", "file")
          for page, tokens in LISTED[kind].items() for token in tokens]  # fmt: skip
FOLDERS = ("agent", "envs", "traces", "zero_workload")


@cache
def page(name):
    return (ROOT / name).read_text("utf-8")


@cache
def blocks(name):
    """The paragraphs, list items and table rows of a page, each on one line, without links and marks of Markdown."""
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) |\|)", page(name))
    return [re.sub(r"\s+", " ", re.sub(r"\]\([^)]*\)|[`*\[\]]", "", part)).strip() for part in parts]


def stands(item, name):
    """Whether one block of the page has all words of the item."""
    return any(all(re.search(said, block, re.I) for said in item["says"]) for block in blocks(name))


def pages():
    """All pages of the checkout, for people who look for an item that has moved."""
    found = [
        *ROOT.glob("*.md"),
        *(p for f in (*FOLDERS, "docs", "examples") for p in (ROOT / f).rglob("*.md")),
    ]
    return sorted({path.relative_to(ROOT).as_posix() for path in found})


@pytest.mark.parametrize(("kind", "name", "item"), ITEMS, ids=lambda one: one if isinstance(one, str) else "")
def test_each_promise_stands_on_its_page(kind, name, item):
    elsewhere = [other for other in pages() if stands(item, other)]
    assert stands(item, item["on"]), (
        f"{kind} {name} is not on {item['on']}; it is on: {elsewhere or 'no page'}"
    )


def test_each_word_stands_on_its_page():
    assert [(kind, token, on) for kind, on, token in TOKENS if token not in page(on)] == []


def test_a_lost_promise_is_seen():
    assert not stands({"says": ["never kills the job", "a word that stands nowhere"]}, "OPERATING.md")
    assert len(ITEMS) > 200 and len(TOKENS) > 100


def listed(kind):
    tokens = [token for _, _, token in filter(lambda one: one[0] == kind, TOKENS)]
    assert len(tokens) == len(set(tokens)), f"one {kind} stands twice in the list"
    return set(tokens)


def sources():
    """(tree or text) of each file of the product."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix == ".py":
                yield ast.parse(path.read_text("utf-8"))
            elif path.suffix in (".c", ".h"):
                yield path.read_text("utf-8")


def strings(source):
    """The texts in quotes of a file."""
    if isinstance(source, str):
        return re.findall(r'"(\w+)"', source)
    return [n.value for n in ast.walk(source) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def test_every_variable_of_the_code_is_listed():
    """Ours and NCCL's, which the code reads or sets. Those of others are listed too if a page explains them."""
    variable = re.compile(r"(?:DYNAMICCL|NCCL)_[A-Z0-9_]*[A-Z0-9]")
    used = {text for source in sources() for text in strings(source) if variable.fullmatch(text)}
    assert used - listed("variable") == set()
    ours = {name for name in listed("variable") if name.startswith("DYNAMICCL_")}
    assert ours <= used and len(used) > 40


#: Kinds of reasons that OPERATING.md explains; the others tell what happened.
EXPLAINED = (RunEnds, NotTuning, RowRefused, NotAgreeing)


def test_every_metric_reason_and_result_of_the_code_is_listed():
    assert {name for name, _, _ in METRICS} == listed("metric")
    assert set(KEYS) == listed("logger")
    assert {one.code for kind in EXPLAINED for one in kind} == listed("reason")
    assert {name.removesuffix(".1") for name in RESULTS} <= listed("file")


def test_every_option_is_in_the_help_and_on_record():
    """The list of the options is ``command_line.json``; their page is ``--help``."""
    options = json.loads((DATA / "command_line.json").read_text())
    for name in NAMES:
        told = invoke([*name.split(), "--help"]).stdout
        words = [word for one in options[f"dynamiccl {name}"] for word in one.split("/")]
        assert [word for word in words if word.strip(".").rstrip("S") not in told] == []


def test_every_exit_status_of_the_code_is_listed():
    """Numbers with which a command ends; 128 + n is a signal."""
    used = set()
    for path in (ROOT / "agent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            ends = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "SystemExit"
            if ends or (isinstance(node, ast.FunctionDef) and node.name == "_exit_code"):
                used |= {
                    n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) is int
                }
    told = {status for item in LISTED["exit"].values() for status in item["status"]}
    assert used - {128} <= told and {2, 126, 127} <= used
