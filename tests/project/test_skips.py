"""A run of the tests ends with what it skipped, in one line."""

from types import SimpleNamespace

from conftest import in_one_line


def test_what_was_skipped_stands_in_one_line_by_reason():
    skips = ["Skipped: no\nGPU", "Skipped: Chromium is not installed", "Skipped: no\nGPU"]
    reports = [SimpleNamespace(longrepr=("test_a.py", 3, words)) for words in skips]
    assert in_one_line(reports) == "skipped: 2 (no GPU), 1 (Chromium is not installed)"
