"""The board as one self-contained page: table, regret curves with bands, clusters."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from ..envs.arena import WINDOWS
from ..envs.leaderboard import by_task, per_task, step_time

if TYPE_CHECKING:
    from .board import Board

Array = np.ndarray[Any, Any]

#: One colour an entrant, ours first; told apart also by people who see few colours, as lines are labelled in the table.
COLOURS: tuple[str, ...] = (
    "#0b6e4f",
    "#7fb7a3",
    "#c1440e",
    "#444444",
    "#9a9a9a",
    "#1f4e9c",
    "#8e44ad",
    "#c2185b",
    "#b8860b",
    "#2a9d8f",
)
COLOURS += ("#5d4037", "#111111")
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1{margin-bottom:.2em} p{max-width:52em} .wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:13px}
td,th{padding:.35em .6em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
tr.ours{background:#eef7f3} tr.unranked td{color:#777}
"""


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
    figures = "".join(f.to_html(full_html=False, include_plotlyjs=False) for f in (*_curves(board), *_clusters(board)))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><link rel='icon' href='data:,'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{title}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body><h1>{title}</h1>"
        f"<p>{_words(board, rows)}</p><div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody>"
        f"</table></div>{figures}</body></html>\n"
    )


def _words(board: Board, rows: list[dict[str, Any]]) -> str:
    suite = board.suite
    text = (
        f"{len(suite)} slots, suite {html.escape(suite.name)} {suite.digest}; simulated or predicted, no figure here is"
        " a GPU's. All entrants meet the same tasks, the same price mask and the same noise; scores use expected step"
        " times and come from replayed decisions. Regret: sum over the windows of step time over the oracle's, minus"
        " 1, exploration included. Entrants with = share a rank: the 95 % bootstrap interval of their paired"
        " difference holds 0."
    )
    for row in rows:
        if "difference_ci95" in row:
            low, high = row["difference_ci95"]
            text += f" A/A: under other noise our policy's regret differs by [{low:+.3f}, {high:+.3f}]: that is luck."
    return text


def _curves(board: Board) -> list[go.Figure]:
    """Regret and share of the oracle's gain over windows, with 95 % bands over tasks."""
    regret, gain = go.Figure(), go.Figure()
    windows = np.arange(1, WINDOWS + 1)
    n_tasks = len(board.suite)
    order = [row["entrant"] for row in board.rows()]
    for i, name in enumerate(order):
        played, colour = board.played[name], COLOURS[i % len(COLOURS)]
        lost = step_time(played.expected, played.share) / step_time(played.oracle, played.share) - 1
        if name != "oracle":  # its regret is 0, and the axis is logarithmic
            _line(regret, name, colour, windows, _tasks(np.cumsum(lost, axis=0), n_tasks))
        saved, could = (_tasks(a * played.share, n_tasks) for a in (played.best, played.oracle))
        _line(gain, name, colour, windows, saved, could)
    regret.update_layout(
        title="Step time lost so far (in steps, mean over tasks; lower is better; bands: 95 %)",
        yaxis={"type": "log", "dtick": 1},
    )
    gain.update_layout(title="Share of the oracle's gain that a stop would keep", yaxis_tickformat=".0%")
    for figure in (regret, gain):
        figure.update_layout(template="plotly_white", xaxis_title="window", height=460, margin={"l": 70, "r": 20})
    return [regret, gain]


def _tasks(values: Array, n_tasks: int) -> Array:
    """(windows, n) -> (windows, tasks)."""
    return np.stack([by_task(row, n_tasks) for row in values])


def _line(figure: go.Figure, name: str, colour: str, x: Array, values: Array, over: Array | None = None) -> None:
    """A line of means of ``values`` (windows, tasks), or of their sums over those of ``over``, with its band."""
    draws = np.random.default_rng(0).integers(0, values.shape[1], (300, values.shape[1]))
    mean, drawn = values.mean(axis=1), values[:, draws].mean(axis=2)
    if over is not None:
        mean = mean / np.maximum(over.mean(axis=1), 1e-9)
        drawn = drawn / np.maximum(over[:, draws].mean(axis=2), 1e-9)
    low, high = np.percentile(drawn, [2.5, 97.5], axis=1).round(4)
    visible = "legendonly" if name == "aa" else True
    common = {"legendgroup": name, "visible": visible}
    band = {"x": np.concatenate([x, x[::-1]]), "y": np.concatenate([high, low[::-1]])}
    tint = f"rgba({int(colour[1:3], 16)},{int(colour[3:5], 16)},{int(colour[5:7], 16)},0.10)"
    figure.add_scatter(
        **band, fill="toself", fillcolor=tint, line_width=0, hoverinfo="skip", showlegend=False, **common
    )
    width = 3 if name == "lstm" else 1.5
    figure.add_scatter(x=x, y=mean.round(4), name=name, mode="lines", line={"color": colour, "width": width}, **common)


def _clusters(board: Board) -> list[go.Figure]:
    """Regret, and runs' speed-up at the end, by the size of the cluster."""
    groups = groups_of(board)
    names = [row["entrant"] for row in board.rows()]
    figures = []
    for key, title, form in (
        ("regret", "Regret by cluster (nodes x GPUs a node)", ".2f"),
        ("speedup", "Speed-up at the end by cluster", ".3f"),
    ):
        z = [[float(per_task(board.played[n])[key][rows].mean()) for rows in groups.values()] for n in names]
        heat = go.Heatmap(z=z, x=list(groups), y=names, texttemplate=f"%{{z:{form}}}", showscale=False)
        heat.colorscale = "Oranges" if key == "regret" else "Greens"
        figure = go.Figure(heat)
        figure.update_layout(
            template="plotly_white", title=title, height=120 + 30 * len(names), yaxis_autorange="reversed"
        )
        figure.update_layout(margin={"l": 140, "r": 20})
        figures.append(figure)
    return figures


def groups_of(board: Board) -> dict[str, Array]:
    """Rows of an arena by the number of nodes and of GPUs a node, which every label begins with: ``4 x 8 ...``."""
    shapes = np.array([[int(part) for part in str(label).split(" ")[0:3:2]] for label in board.suite.label])
    n = len(next(iter(board.played.values())).share) if board.played else 0
    nodes, per_node = shapes[np.arange(n) % len(shapes)].T
    sizes = (("1", 1, 1), ("2-8", 2, 8), ("9-64", 9, 64), ("65+", 65, 10**9))
    found = {}
    for said, low, high in sizes:
        for gpus, least, most in (("1", 1, 1), ("2-4", 2, 4), ("5+", 5, 10**9)):
            rows = np.flatnonzero((nodes >= low) & (nodes <= high) & (per_node >= least) & (per_node <= most))
            if len(rows):
                tasks = len(np.unique(rows % len(shapes)))
                found[f"{said} x {gpus}<br>({tasks} tasks)"] = rows
    return found
