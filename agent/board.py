"""The board: entrants that were judged on one suite, as a table and as a self-contained page."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..envs.arena import WINDOWS, Played, Suite
from ..envs.leaderboard import per_task, ranks

Array = np.ndarray[Any, Any]

#: Columns of the table: heading, how a row says it.
COLUMNS = (
    ("", lambda row: str(row["rank"])),
    ("policy", lambda row: row["entrant"]),
    ("share of the oracle's gain", lambda row: f"{row['share_of_gain'][str(WINDOWS)]:.0%}"),
    ("after 4 trials", lambda row: f"{row['share_of_gain']['4']:.0%}"),
    ("trials to 2 % of the oracle (median, p90)", lambda row: " / ".join(map(_trials, row["trials_until_near"][1:]))),
    (
        "regret over 64 windows",
        lambda row: f"{row['regret']:.2f} [{row['regret_ci95'][0]:.2f}, {row['regret_ci95'][1]:.2f}]",
    ),
    ("runs with a window above 1.5 x", lambda row: f"{row['harsh']:.1%}"),
    ("worst window", lambda row: f"{row['worst_window']:.2f} x"),
    ("ends slower", lambda row: f"{row['slower']:.1%}"),
    ("us a decision", lambda row: f"{row['decision_us']:.0f}"),
)


def _trials(value: float) -> str:
    return f"{value:.0f}" if value <= WINDOWS else "never"


class Board:
    """Collects replayed submissions on one suite."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.played: dict[str, Played] = {}
        self.figures: dict[str, Mapping[str, Any]] = {}
        self.refused: dict[str, str] = {}

    def add(self, submission: Mapping[str, Any], played: Played) -> None:
        """An entrant whose decisions were replayed (``leaderboard.replay``)."""
        self.played[submission["entrant"]] = played
        self.figures[submission["entrant"]] = submission["figures"]

    def refuse(self, entrant: str, reason: str) -> None:
        """An entrant without a score."""
        self.refused[entrant] = reason

    def rows(self) -> list[dict[str, Any]]:
        """One row an entrant, best first; entrants that cannot be told apart share a rank."""
        regrets = {name: per_task(played)["regret"] for name, played in self.played.items()}
        place = ranks(regrets) if len({len(r) for r in regrets.values()}) <= 1 else {}
        rows = [{"rank": place.get(name, 0), "entrant": name, **figures} for name, figures in self.figures.items()]
        return sorted(rows, key=lambda row: (row["rank"], row["regret"]))

    def markdown(self) -> str:
        """The table, as it stands in the README."""
        lines = ["| " + " | ".join(head for head, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(say(row) for _, say in COLUMNS) + " |" for row in self.rows()]
        lines += [f"| | {name} | refused: {why} |" + " |" * (len(COLUMNS) - 3) for name, why in self.refused.items()]
        return "\n".join(lines) + "\n"

    def page(self) -> str:
        """One HTML file, plotly inside, nothing loaded from elsewhere."""
        import plotly.graph_objects as go
        from plotly.offline import get_plotlyjs

        regret, gain = go.Figure(), go.Figure()
        order = [row["entrant"] for row in self.rows()]
        windows = np.arange(1, WINDOWS + 1)
        for name in order:
            played = self.played[name]
            lost = np.maximum(1 - played.expected * played.share, 0.05) / np.maximum(
                1 - played.oracle * played.share, 0.05
            )
            regret.add_scatter(x=windows, y=np.cumsum(lost - 1, axis=0).mean(axis=1).round(4), name=name, mode="lines")
            got = (played.best @ played.share) / (played.oracle @ played.share)
            gain.add_scatter(x=windows, y=got.round(4), name=name, mode="lines")
        groups = self._groups()
        heat = go.Figure(
            go.Heatmap(
                z=[
                    [float(per_task(self.played[name])["regret"][rows].mean()) for rows in groups.values()]
                    for name in order
                ],
                x=list(groups),
                y=order,
                colorscale="Blues",
                texttemplate="%{z:.2f}",
                colorbar={"title": "regret"},
            )
        )
        regret.update_layout(
            title="Step time lost so far (in default steps, mean over tasks; lower is better)", yaxis_type="log"
        )
        gain.update_layout(title="Share of the oracle's gain that a stop would keep", yaxis_tickformat=".0%")
        heat.update_layout(title="Regret by cluster size", yaxis_autorange="reversed")
        figures = []
        for figure, axis in ((regret, "window"), (gain, "window"), (heat, "")):
            figure.update_layout(template="plotly_white", xaxis_title=axis, height=420, margin={"l": 120})
            figures.append(figure.to_html(full_html=False, include_plotlyjs=False))
        cells = "".join(
            "<tr>" + "".join(f"<td>{html.escape(say(row))}</td>" for _, say in COLUMNS) + "</tr>" for row in self.rows()
        )
        for name, why in self.refused.items():
            reason = f"<td colspan={len(COLUMNS) - 2}>refused: {html.escape(why)}</td>"
            cells += f"<tr><td></td><td>{html.escape(name)}</td>{reason}</tr>"
        head = "".join(f"<th>{html.escape(title)}</th>" for title, _ in COLUMNS)
        return (
            "<!doctype html><html lang='en'><head><meta charset='utf-8'><link rel='icon' href='data:,'>"
            f"<title>dynamiccl board: {html.escape(self.suite.name)}</title>"
            "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
            "table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}"
            "td,th{padding:.35em .6em;border-bottom:1px solid #ddd;text-align:left}</style>"
            f"<script>{get_plotlyjs()}</script></head><body><h1>{html.escape(self.suite.name)}</h1>"
            f"<p>{len(self.suite)} simulated slots, suite {self.suite.digest}. All entrants meet the same tasks, the"
            " same price mask and the same noise; scores use expected step times and come from replayed decisions."
            " Entrants of one rank cannot be told apart (95 % bootstrap interval of the paired difference). No figure"
            " here is a GPU's.</p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>{''.join(figures)}</body></html>\n"
        )

    def _groups(self) -> dict[str, Array]:
        """Rows of an arena by the number of nodes."""
        nodes = np.array([int(str(label).split(" ")[0]) for label in self.suite.label])
        n = len(next(iter(self.played.values())).share) if self.played else 0
        nodes = nodes[np.arange(n) % len(nodes)]
        bounds = (("1 node", 1, 1), ("2-8 nodes", 2, 8), ("9-64 nodes", 9, 64), ("65+ nodes", 65, 10**9))
        found = {name: np.flatnonzero((nodes >= low) & (nodes <= high)) for name, low, high in bounds}
        return {name: rows for name, rows in found.items() if len(rows)}
