"""The traffic of a step tells the ZeRO stages apart without labels: by its collectives, and their bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import make_stages
import pytest
from dry_run import dry_run
from public_models import Shape


def fingerprint(**settings: Any) -> Counter[str]:
    """Bytes of a step by collective, of GPT-2's shape with four blocks."""
    shape = Shape(layers=4, width=256, heads=4, seq=64, vocab=1024)
    total: Counter[str] = Counter()
    for call in dry_run(shape, ranks=8, **settings)[0]:
        if call.dtype == "bfloat16":  # the rest is the engine's own note
            total[call.func] += call.n_bytes
    return total


def named(seen: Counter[str]) -> str:
    """The stage, from what was seen alone."""
    if seen["all_reduce"]:
        return "1, classic" if seen["all_gather"] else "0"
    ratio = seen["all_gather"] / seen["reduce_scatter"]
    return "1 or 2" if ratio == 1 else "3" if 1.4 < ratio <= 2 else "?"


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({"stage": 0}, "0"),
        ({"stage": 1, "classic": True}, "1, classic"),
        ({"stage": 1}, "1 or 2"),
        ({"stage": 2}, "1 or 2"),
        ({"stage": 3}, "3"),
        ({"stage": 3, "keep_last": False}, "3"),
        ({"stage": 3, "unit": "layer"}, "3"),
    ],
)
def test_the_stage_is_read_off_the_stream(settings: dict[str, Any], stage: str) -> None:
    assert named(fingerprint(**settings)) == stage


@pytest.mark.slow
def test_distances_alone_separate_the_stages() -> None:
    """The runs of the page's picture: one group for each stream, whatever the model and its ranks."""
    points = [make_stages.fingerprint(*run) for run in make_stages.every_run()]
    found = make_stages.groups(points)
    pairs = set(zip(found, (point.stage for point in points), strict=True))
    assert len(pairs) == len(set(found)) == len({point.stage for point in points}) == 4


def test_the_picture_shows_four_groups() -> None:
    """The committed picture is that of the command's runs."""
    picture = make_stages.OUT.read_text(encoding="utf-8")
    assert f"{len(make_stages.every_run())} dry runs: 4 groups" in picture
    for stage in dict.fromkeys(stage for _, stage, _ in make_stages.STAGES):
        assert f": {stage}</text>" in picture  # alone in its group
