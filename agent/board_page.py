"""The board as one self-contained page: table, time lost by what there is to gain, when verdicts come, how sure."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from ..envs.scores import HORIZONS, STRATA

if TYPE_CHECKING:
    from .board import Board

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1{margin-bottom:.2em} p{max-width:52em} .wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:13px}
td,th{padding:.35em .6em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
tr.ours{background:#eef7f3} tr.unranked td{color:#777}
"""
#: What each stratum is called: the part of the step that there is to gain.
_STRATA = {"none": "under 0.5 %", "little": "0.5 to 2 %", "some": "2 to 5 %", "much": "over 5 %"}


def page(board: Board) -> str:
    """HTML, plotly inside, nothing loaded from elsewhere."""
    from .board import COLUMNS

    rows = board.rows()
    cells = ""
    for row in rows:
        kind = "ours" if row["entrant"] == "lstm" else "unranked" if row["rank"] is None else ""
        cells += f"<tr class='{kind}'>" + "".join(f"<td>{html.escape(say(row))}</td>" for _, say in COLUMNS) + "</tr>"
    for name, why in board.refused.items():
        reason = f"<td colspan={len(COLUMNS) - 2}>refused: {html.escape(why)}</td>"
        cells += f"<tr><td></td><td>{html.escape(name)}</td>{reason}</tr>"
    head = "".join(f"<th>{html.escape(title)}</th>" for title, _ in COLUMNS)
    title = html.escape(f"dynamiccl board: {board.suite.name}")
    figures = [_by_stratum(rows), _by_slots(rows), _verdicts(board, rows), _apart(board, rows)]
    drawn = "".join(f.to_html(full_html=False, include_plotlyjs=False) for f in figures)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><link rel='icon' href='data:,'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{title}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body><h1>{title}</h1>"
        f"<p>{_words(board, rows)}</p><div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody>"
        f"</table></div>{drawn}</body></html>\n"
    )


def _words(board: Board, rows: list[dict[str, Any]]) -> str:
    text = (
        f"{len(board.suite)} jobs, suite {html.escape(board.suite.name)} {board.suite.digest}; simulated or predicted,"
        " no figure here is a GPU's. All entrants run in the same search as `dynamiccl tune --policy` and meet the same"
        " jobs and the same noise. Time lost: default steps that a job loses against the oracle's table from its first"
        " step on, every step billed, by true step times. Entrants with = share a rank: the 95 % bootstrap interval of"
        " their paired difference holds 0."
    )
    for row in rows:
        if "difference" in row:
            low, high = row["difference"]["steps_ci95"]
            text += f" A/A: under other noise the same policy differs by [{low:+.1f}, {high:+.1f}] steps: that is luck."
    return text


def _name(name: str) -> str:
    """An entrant's name in a figure: plotly reads some tags in texts."""
    return html.escape(name)


def _by_stratum(rows: list[dict[str, Any]]) -> go.Figure:
    """Time lost by what there is to gain."""
    keys = [k for k in STRATA if any(k in row["by_stratum"] for row in rows)]
    lost = f"lost_{HORIZONS[0]}"
    z = [[row["by_stratum"].get(k, {}).get(lost, np.nan) for k in keys] for row in rows]
    title = f"Default steps lost in {HORIZONS[0]:,}, by what there is to gain of the step"
    return _heat(
        z, [_STRATA[k] for k in keys], rows, title, ".0f", "Oranges", np.log1p(np.maximum(np.array(z, float), 0.0))
    )


def _by_slots(rows: list[dict[str, Any]]) -> go.Figure:
    """Gain delivered by the number of slots."""
    keys = sorted({k for row in rows for k in row["by_slots"]})
    z = [[row["by_slots"].get(k, {}).get("gain_delivered", np.nan) for k in keys] for row in rows]
    title = "Gain delivered, of the oracle's, by the number of slots"
    return _heat(z, [f"{k} slots" for k in keys], rows, title, ".0%", "Greens", np.array(z, float))


def _heat(
    z: Any, x: list[str], rows: list[dict[str, Any]], title: str, form: str, scale: str, colour: Any
) -> go.Figure:
    names = [_name(row["entrant"]) for row in rows]
    text = [["" if v != v else format(v, form) for v in line] for line in z]
    heat = go.Heatmap(z=colour, x=x, y=names, text=text, texttemplate="%{text}", showscale=False, colorscale=scale)
    figure = go.Figure(heat)
    figure.update_layout(template="plotly_white", title=title, height=120 + 30 * len(names), margin={"l": 160, "r": 20})
    figure.update_layout(yaxis_autorange="reversed", yaxis_type="category")
    return figure


def _verdicts(board: Board, rows: list[dict[str, Any]]) -> go.Figure:
    """Part of the jobs whose verdict is there after so many steps."""
    figure = go.Figure()
    for row in rows:
        steps = np.sort(board.scores[row["entrant"]].verdict)
        if steps.max(initial=0) > 0:
            y = np.arange(1, len(steps) + 1) / len(steps)
            width = 3 if row["entrant"] in ("lstm", "expected-improvement") else 1.5
            figure.add_scatter(x=steps, y=y, name=_name(row["entrant"]), mode="lines", line_width=width)
    figure.update_layout(
        template="plotly_white", title="Jobs with a verdict", xaxis_title="optimizer steps", height=420
    )
    figure.update_layout(yaxis_tickformat=".0%", xaxis_type="log")
    return figure


def _apart(board: Board, rows: list[dict[str, Any]]) -> go.Figure:
    """Time that each loses beyond the best of those that have a rank, with its interval."""
    ranked = [row["entrant"] for row in rows if row["rank"] is not None]
    figure = go.Figure()
    if ranked:
        apart = {name: board.against(name, ranked[0]) for name in ranked[1:]}
        x = [d["steps"] for d in apart.values()]
        high = [d["steps_ci95"][1] - d["steps"] for d in apart.values()]
        low = [d["steps"] - d["steps_ci95"][0] for d in apart.values()]
        bars = {"type": "data", "symmetric": False, "array": high, "arrayminus": low}
        figure.add_scatter(x=x, y=[_name(n) for n in apart], error_x=bars, mode="markers", marker_size=9)
        figure.update_layout(
            title=f"Default steps lost in {HORIZONS[0]:,} beyond {_name(ranked[0])}, the same jobs (95 %)"
        )
    figure.update_layout(template="plotly_white", height=140 + 26 * len(ranked), margin={"l": 160, "r": 20})
    figure.update_layout(yaxis_autorange="reversed", yaxis_type="category")
    return figure
