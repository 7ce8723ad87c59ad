"""The picture of a ``gpu-check``: time of every config over message size, one panel a collective and placement."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from ..traces.records import PAIRS, format_bytes
from .page import page, plot, section

_COLOURS = dict(
    zip(
        ("auto", *("/".join(pair) for pair in PAIRS)),
        ("#111111", "#0072b2", "#009e73", "#d55e00", "#cc79a7", "#e69f00", "#56b4e9"),
        strict=True,
    )
)


def write_page(path: Path, result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One self-contained page: what was found in words, the figure, the whole result as JSON."""
    label = "emulated, no GPU was measured" if result["emulated"] else "measured"
    title = f"gpu-check, {result['device']}, {result['date']} ({label})"
    figures = {"sweep": _themed(figure(rows, label))} if rows else {}
    drawn = plot("sweep", "Time of every config over message size") if rows else "<p>No sweep.</p>"
    body = f"<header><h1>{escape(title)}</h1></header>{section('Sweep', label, drawn)}"
    body += section("Result", "All that was found.", f"<pre>{escape(json.dumps(result, indent=1))}</pre>")
    path.write_text(page(title, body, figures, get_plotlyjs() if rows else ""), encoding="utf-8")


def _themed(made: go.Figure) -> dict[str, Any]:
    """A figure in the page's own colours, which change with its theme."""
    drawn: dict[str, Any] = json.loads(made.to_json().replace(_COLOURS["auto"], "--ink"))
    layout = drawn["layout"]
    del layout["template"]
    for name in ("paper_bgcolor", "plot_bgcolor"):
        layout[name] = "rgba(0,0,0,0)"
    layout["font"] = {"color": "--quiet"}
    for name, axis in layout.items():
        if name.startswith(("xaxis", "yaxis")):
            axis |= {"gridcolor": "--line", "zeroline": False, "linecolor": "--line", "automargin": True}
    return drawn


def figure(rows: list[dict[str, Any]], label: str) -> go.Figure:
    """Microseconds over bytes, logarithmic; a line an (algorithm, protocol), the best of its channel counts marked."""
    panels = sorted({(row["placement"], row["func"]) for row in rows})
    drawn = make_subplots(rows=len(panels), cols=1, subplot_titles=[f"{func} ({place})" for place, func in panels])
    timed = "kernel_us" if all(row["kernel_us"] is not None for row in rows) else "wall_us"
    legend: set[str] = set()
    for i, panel in enumerate(panels, 1):
        mine = [row for row in rows if (row["placement"], row["func"]) == panel]
        for pair, colour in _COLOURS.items():
            points = [r for r in mine if "/".join(r["decision"].split("/")[:2]) == pair]
            if not points:
                continue
            best = {
                n: min(r[timed] for r in points if r["n_bytes"] == n) for n in sorted({r["n_bytes"] for r in points})
            }
            name = "NCCL's own way" if pair == "auto" else pair
            look = {"legendgroup": pair, "marker_color": colour, "name": name}
            drawn.add_scatter(
                x=list(best), y=list(best.values()), mode="lines", showlegend=pair not in legend, row=i, col=1, **look
            )
            drawn.add_scatter(
                x=[r["n_bytes"] for r in points],
                y=[r[timed] for r in points],
                text=[f"{r['decision']}, {r['ran_channels']} channels ran" for r in points],
                hovertemplate="%{text}<br>%{y:.1f} us<extra></extra>",
                mode="markers",
                marker_size=5,
                showlegend=False,
                row=i,
                col=1,
                **look,
            )
            legend.add(pair)
    sizes = sorted({row["n_bytes"] for row in rows})
    drawn.update_xaxes(type="log", tickvals=sizes, ticktext=[format_bytes(n) for n in sizes])
    what = "kernel time" if timed == "kernel_us" else "time a call"
    drawn.update_yaxes(type="log", title=f"{what}, us ({label})")
    drawn.update_layout(height=380 * len(panels), template="plotly_white", margin={"t": 40})
    return drawn
