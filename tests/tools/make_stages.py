"""Draws ``zero_workload/stages.svg``: the stages told apart by traffic alone. ``python tests/tools/make_stages.py``

Each point is one dry run: a model, a number of ranks, a stage with its settings. Its place says what part of the step's
bytes is all-gathered and what part is all-reduced. Points closer than GAP are one group: no label is used for that. The
colour is the group, the letter the true stage.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

from dry_run import dry_run
from public_models import Shape

OUT = Path(__file__).resolve().parents[2] / "zero_workload" / "stages.svg"
#: Points of one group are closer than this to another one of the group; coordinates are parts of the step's bytes.
GAP = 0.06
SHAPES = {
    "12 narrow blocks": Shape(layers=12, width=128, heads=4, seq=64, vocab=1024),
    "4 blocks": Shape(layers=4, width=256, heads=4, seq=64, vocab=1024),
    "6 blocks, large vocabulary": Shape(layers=6, width=256, heads=4, seq=64, vocab=8192),
}
RANKS = (4, 64)
#: Letter, true stage, settings.
STAGES: list[tuple[str, str, dict[str, Any]]] = [
    ("0", "stage 0", {"stage": 0}),
    ("c", "stage 1 by all-reduce", {"stage": 1, "classic": True}),
    ("1", "stages 1 and 2", {"stage": 1}),
    ("2", "stages 1 and 2", {"stage": 2}),
    ("3", "stage 3", {"stage": 3}),
    ("3", "stage 3", {"stage": 3, "keep_last": False}),
]
COLOURS = ("#2f6fb3", "#d98a1f", "#3f9166", "#b9558f", "#a5673f", "#5a6671")
#: Pixels: the picture, the plot's left, top and side.
WIDTH, HEIGHT, LEFT, TOP, SIDE = 680, 460, 70, 40, 340


class Fingerprint(NamedTuple):
    """One dry run: where it lies, and what it was."""

    gathered: float  # part of the step's bytes
    all_reduced: float
    letter: str
    stage: str


def fingerprint(letter: str, stage: str, shape: Shape, ranks: int, settings: dict[str, Any]) -> Fingerprint:
    """The parts of the bytes of a step that are all-gathered and all-reduced."""
    total: Counter[str] = Counter()
    for call in dry_run(shape, ranks=ranks, **settings)[0]:
        if call.dtype == "bfloat16":  # the rest is the engine's own note
            total[call.func] += call.n_bytes
    whole = total.total()
    return Fingerprint(total["all_gather"] / whole, total["all_reduce"] / whole, letter, stage)


def every_run() -> list[tuple[str, str, Shape, int, dict[str, Any]]]:
    """The arguments of :func:`fingerprint` for all points of the picture."""
    runs = product(SHAPES.values(), RANKS, STAGES)
    return [(letter, stage, shape, ranks, settings) for shape, ranks, (letter, stage, settings) in runs]


def groups(points: list[Fingerprint]) -> list[int]:
    """The group of each point, by distances alone: a point joins every group that has one nearer than GAP."""
    group = list(range(len(points)))
    for i, one in enumerate(points):
        for k, other in enumerate(points[:i]):
            is_near = abs(one.gathered - other.gathered) + abs(one.all_reduced - other.all_reduced) < GAP
            if is_near:
                old, new = group[i], group[k]
                group = [new if g == old else g for g in group]
    names = list(dict.fromkeys(group))
    return [names.index(g) for g in group]


def drawing(points: list[Fingerprint]) -> str:
    """The picture, as SVG."""
    marks = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    marks += _axes()
    found = groups(points)
    legend: dict[int, list[str]] = {}
    for point, group in zip(points, found, strict=True):
        stages = legend.setdefault(group, [])
        if point.stage not in stages:
            stages.append(point.stage)
    for point, group in zip(points, found, strict=True):
        x, y = _place(point.gathered, point.all_reduced)
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" fill="{COLOURS[group]}" fill-opacity="0.35"/>')
        marks.append(_text(x, y + 4, point.letter, "middle"))
    for row, (group, stages) in enumerate(legend.items()):
        y = TOP + 20 + 24 * row
        marks.append(f'<circle cx="{LEFT + SIDE + 36}" cy="{y}" r="8" fill="{COLOURS[group]}"/>')
        marks.append(_text(LEFT + SIDE + 52, y + 4, f"group {group + 1}: {', '.join(stages)}"))
    title = f"{len(points)} dry runs: {len(legend)} groups, found without labels"
    marks.append(_text(LEFT, 22, title))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    style = 'font-family="system-ui, Arial, sans-serif" font-size="13" fill="#1c2024"'
    inside = "\n".join(marks)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style} role="img">\n{inside}\n</svg>\n'


def _axes() -> list[str]:
    marks = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, bottom = _place(tick, 0.0)
        left, y = _place(0.0, tick)
        marks.append(f'<path d="M{x} {TOP}V{bottom}M{left} {y}H{LEFT + SIDE}" stroke="#e3e6e8" fill="none"/>')
        marks.append(_text(x, bottom + 18, f"{tick:g}", "middle"))
        marks.append(_text(left - 10, y + 4, f"{tick:g}", "end"))
    marks.append(_text(LEFT + SIDE / 2, TOP + SIDE + 42, "all-gathered, part of the step's bytes", "middle"))
    turned = f'transform="rotate(-90 20 {TOP + SIDE / 2})"'
    marks.append(
        f'<text x="20" y="{TOP + SIDE / 2}" text-anchor="middle" {turned}>all-reduced, part of the bytes</text>'
    )
    return marks


def _place(gathered: float, all_reduced: float) -> tuple[float, float]:
    return LEFT + SIDE * gathered, TOP + SIDE * (1 - all_reduced)


def _text(x: float, y: float, said: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{said}</text>'


if __name__ == "__main__":
    OUT.write_text(drawing([fingerprint(*run) for run in every_run()]), encoding="utf-8")
    print(OUT)
