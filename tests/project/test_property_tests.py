"""Property tests draw the same examples in `make test` and others in `make test-random`: their profile says which."""

import ast
import re

from paths import ROOT, TESTS


def test_no_property_test_decides_by_itself_what_it_draws():
    """Before: four drew the same examples for ever."""
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) == "settings"
        if {"derandomize", "database"} & {keyword.arg for keyword in node.keywords}
    }
    assert found == set()


def test_all_slow_tests_are_the_random_ones_too():
    rules = dict(re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert [name for name in ("test-slow", "test-all") if "$(MAKE) test-random" in rules[name]] == [
        "test-slow",
        "test-all",
    ]
    assert "--hypothesis-seed=$$seed" in rules["test-random"] and "echo" in rules["test-random"]
