"""The board as one self-contained page: table, time lost beside the best, when verdicts come, by gain and by slots."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from plotly.offline import get_plotlyjs

from ..envs.scores import HORIZONS, STRATA
from .choosing import DEFAULT
from .page import page as skeleton
from .page import plot, section, table
from .report_figures import axis, layout_of

if TYPE_CHECKING:
    from .board import Board

#: What each stratum is called: the part of the step that there is to gain.
_STRATA = {"none": "under 0.5 %", "little": "0.5 to 2 %", "some": "2 to 5 %", "much": "over 5 %"}
#: Entrants whose curves have a colour; the others are there to compare with.
_COLOURS = {DEFAULT: "--tuned", "lstm": "--slot-1", "coordinate-descent": "--slot-0", "default": "--slot-3"}
_LOST = f"lost_{HORIZONS[0]}"

Figure = dict[str, Any]


def page(board: Board) -> str:
    """HTML, plotly inside, nothing loaded from elsewhere."""
    rows = board.rows()
    title = f"dynamiccl board: {board.suite.name}"
    made = {
        "apart": _apart(board, rows),
        "verdicts": _verdicts(board, rows),
        "strata": _by_stratum(rows),
        "slots": _by_slots(rows),
    }
    figures = {name: figure for name, figure in made.items() if figure}
    told = {
        "apart": (
            "Time lost beyond the best",
            f"Default steps lost in {HORIZONS[0]:,} beyond the first of the ranking, on the same jobs, with the 95 % "
            "interval of the paired difference: one that holds 0 is a tie.",
        ),
        "verdicts": ("When the verdict is there", "Part of the jobs whose search is over after so many steps."),
        "strata": (
            "By what there is to gain",
            f"Default steps lost in {HORIZONS[0]:,}, by the part of the step that the best table saves.",
        ),
        "slots": ("By the number of slots", "Part of the oracle's gain that was delivered."),
    }
    body = f"<header><h1>{escape(title)}</h1></header>"
    badge = "simulated or predicted: no figure here is a GPU's"
    body += f'<p style="margin-top:10px"><span class="badge">{badge}</span></p>'
    body += section("Ranking", _words(board, rows), _table(board, rows))
    body += "".join(section(*told[name], plot(name, told[name][1])) for name in figures)
    return skeleton(title, body, figures, get_plotlyjs())


def _table(board: Board, rows: list[dict[str, Any]]) -> str:
    from .board import COLUMNS

    lines = []
    for row in rows:
        cells = [escape(say(row)) for _, say in COLUMNS]
        name = escape(row["entrant"])
        mark = "strong" if row["entrant"] in (DEFAULT, "lstm") else "span"
        remark = f'<span class="quiet">{cells[1].removeprefix(name)}</span>'
        cells[1] = f'<div class="named"><{mark}>{name}</{mark}>{remark}</div>'
        lines.append(cells)
    for name, why in board.refused.items():
        lines.append(["", escape(name), f"refused: {escape(why)}", *[""] * (len(COLUMNS) - 3)])
    heads = [(title or "rank", i > 1) for i, (title, _) in enumerate(COLUMNS)]
    return table(heads, lines, "Ranking")


def _words(board: Board, rows: list[dict[str, Any]]) -> str:
    text = (
        f"{len(board.suite)} jobs, suite {board.suite.name} {board.suite.digest}. All entrants run in the same search"
        " as dynamiccl tune --policy and meet the same jobs and the same noise. Time lost: default steps that a job"
        " loses against the oracle's table from its first step on, every step billed, by true step times. Entrants with"
        " = share a rank: the 95 % bootstrap interval of their paired difference holds 0."
    )
    for row in rows:
        if "difference" in row:
            low, high = row["difference"]["steps_ci95"]
            text += f" A/A: under other noise the same policy differs by [{low:+.1f}, {high:+.1f}] steps: that is luck."
    return text


def _apart(board: Board, rows: list[dict[str, Any]]) -> Figure:
    """Time that each loses beyond the best of those that have a rank, with its interval."""
    ranked = [row["entrant"] for row in rows if row["rank"] is not None]
    if len(ranked) < 2:
        return {}
    apart = {name: board.against(name, ranked[0]) for name in ranked[1:]}
    x = [d["steps"] for d in apart.values()]
    bars = {"type": "data", "symmetric": False, "thickness": 2, "width": 5}
    bars["array"] = [d["steps_ci95"][1] - d["steps"] for d in apart.values()]
    bars["arrayminus"] = [d["steps"] - d["steps_ci95"][0] for d in apart.values()]
    colours = [_COLOURS.get(name, "--default") for name in apart]
    marks = {"mode": "markers", "marker": {"size": 10, "color": colours}, "error_x": {**bars, "color": "--default"}}
    hover = "%{y}: %{x:.0f} steps<extra></extra>"
    zero = {"type": "line", "xref": "x", "yref": "paper", "x0": 0, "x1": 0, "y0": 0, "y1": 1}
    zero |= {"line": {"color": "--quiet", "width": 1, "dash": "dot"}}
    layout = layout_of(90 + 30 * len(apart), shapes=[zero], yaxis=_names(), showlegend=False)
    layout["margin"] = {"l": 64, "r": 24, "t": 16, "b": 48}
    layout["xaxis"] = axis(f"steps lost beyond {ranked[0]}")
    return {"data": [{"type": "scatter", "x": x, "y": [*map(escape, apart)], "hovertemplate": hover, **marks}],
            "layout": layout}  # fmt: skip


def _verdicts(board: Board, rows: list[dict[str, Any]]) -> Figure:
    """Part of the jobs whose verdict is there after so many steps."""
    drawn = []
    for row in sorted(rows, key=lambda r: r["entrant"] in _COLOURS):  # those with a colour lie above the others
        steps = np.sort(board.scores[row["entrant"]].verdict)
        if steps.max(initial=0) <= 0:
            continue
        look: Figure = {"color": _COLOURS.get(row["entrant"], "--slot-other"), "shape": "hv"}
        look["width"] = 2.5 if row["entrant"] in _COLOURS else 1.2
        y = (np.arange(1, len(steps) + 1) / len(steps)).round(4).tolist()
        name = escape(row["entrant"])
        drawn.append({"type": "scatter", "mode": "lines", "x": steps.tolist(), "y": y, "name": name, "line": look})
        drawn[-1]["hovertemplate"] = f"{name}: %{{y:.0%}} after %{{x:,.0f}} steps<extra></extra>"
    if not drawn:
        return {}
    axes = {"xaxis": axis("optimizer steps", type="log", dtick="D2"), "yaxis": axis("jobs", tickformat=".0%")}
    axes["yaxis"]["range"] = [0, 1.02]
    layout = layout_of(520, **axes)
    layout["legend"] |= {"y": -0.2, "yanchor": "top", "traceorder": "reversed"}
    return {"data": drawn, "layout": layout | {"margin": {"l": 64, "r": 24, "t": 24, "b": 48}}}


def _by_stratum(rows: list[dict[str, Any]]) -> Figure:
    """Time lost by what there is to gain."""
    keys = [k for k in STRATA if any(k in row["by_stratum"] for row in rows)]
    z = [[row["by_stratum"].get(k, {}).get(_LOST, np.nan) for k in keys] for row in rows]
    colour = np.log1p(np.maximum(np.array(z, float), 0.0))
    return _heat(z, [_STRATA[k] for k in keys], rows, ".0f", "--warn-soft", colour)


def _by_slots(rows: list[dict[str, Any]]) -> Figure:
    """Gain delivered by the number of slots."""
    keys = sorted({k for row in rows for k in row["by_slots"]})
    z = [[row["by_slots"].get(k, {}).get("gain_delivered", np.nan) for k in keys] for row in rows]
    return _heat(z, [f"{k} slots" for k in keys], rows, ".0%", "--tuned-soft", np.array(z, float))


def _heat(z: Any, x: list[str], rows: list[dict[str, Any]], form: str, to: str, colour: Any) -> Figure:
    """A map of figures: the larger, the nearer its ground is to the colour ``to``."""
    names = [escape(row["entrant"]) for row in rows]
    text = [["" if v != v else format(v, form) for v in line] for line in z]
    shade = [[None if v != v else round(float(v), 4) for v in line] for line in colour]
    heat: Figure = {"type": "heatmap", "z": shade, "x": x, "y": names, "text": text, "texttemplate": "%{text}"}
    heat |= {"showscale": False, "colorscale": [[0, "--card"], [1, to]], "textfont": {"color": "--ink", "size": 13}}
    heat |= {"hovertemplate": "%{y}, %{x}: %{text}<extra></extra>", "xgap": 2, "ygap": 2}
    layout = layout_of(90 + 30 * len(names), yaxis=_names(), xaxis=axis("", side="top", type="category"))
    return {"data": [heat], "layout": layout | {"margin": {"l": 64, "r": 24, "t": 40, "b": 24}}}


def _names() -> Figure:
    return axis("", autorange="reversed", type="category", ticks="")
