"""Property tests: the same examples in ``make test``, others in ``make test-random``, which ``make test-slow`` runs."""

import re

from paths import ROOT


def test_no_property_test_keeps_its_examples_when_they_are_to_be_drawn_anew():
    """Before: four tests said ``derandomize`` themselves, so that no target ever drew others for them."""
    setting = re.compile(r"\bderandomize\s*=")
    tests = sorted((ROOT / "tests").rglob("*.py"))
    fixed = [path.name for path in tests if setting.search(path.read_text(encoding="utf-8"))]
    assert fixed == ["conftest.py"]


def test_the_slow_tests_draw_examples_anew_and_print_the_seed():
    make = (ROOT / "Makefile").read_text(encoding="utf-8")
    slow, drawn = (
        make.partition(f"\n{target}:")[2].partition("\n\n")[0] for target in ("test-slow", "test-random")
    )
    assert "$(MAKE) test-random" in slow
    assert "HYPOTHESIS_PROFILE=random" in drawn and "echo" in drawn and "--hypothesis-seed=$$seed" in drawn
