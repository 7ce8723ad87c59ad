"""The page of a run: style, script and skeleton.

Everything is inline, and a page forbids itself any request.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

#: Colours by name; figures use the names, so that one drawing serves light and dark.
_STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfbfa; --card: #ffffff; --ink: #1c2024; --quiet: #5a6671; --line: #e3e6e8; --faint: #f1f3f4;
  --default: #8b98a5; --tuned: #086460; --tuned-soft: #d5ebe9; --warn: #7a4f00; --warn-soft: #fdf1d8; --bad: #b3372f;
  --slot-0: #2f6fb3; --slot-1: #d98a1f; --slot-2: #3f9166; --slot-3: #b9558f; --slot-4: #6a9fcf; --slot-5: #a5673f;
  --slot-other: #a9b2ba;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a; --card: #1b1f23; --ink: #e6e9eb; --quiet: #98a4af; --line: #2d3339; --faint: #23282d;
    --default: #7e8b97; --tuned: #3fb8b0; --tuned-soft: #16403e; --warn: #e9bd6a; --warn-soft: #3a2f17; --bad: #ef857c;
    --slot-0: #6ba4e0; --slot-1: #e5a64d; --slot-2: #62b98a; --slot-3: #d683b3; --slot-4: #9cc3ea; --slot-5: #c98d64;
    --slot-other: #6a747d;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
img, svg, pre { max-width: 100%; } pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
summary { cursor: pointer; padding: 6px 0; } details pre { margin: 0 0 8px; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 28px 72px; }
h1 { font-size: 15px; font-weight: 600; margin: 0; letter-spacing: .01em; }
h2 { font-size: 19px; font-weight: 600; margin: 52px 0 4px; }
p { margin: 0; } .quiet { color: var(--quiet); } .lead { color: var(--quiet); margin-bottom: 16px; max-width: 76ch; }
header { display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: baseline; justify-content: space-between; }
.badge { display: inline-block; background: var(--warn-soft); color: var(--warn); border-radius: 999px;
  padding: 3px 13px; font-size: 13px; font-weight: 550; }
.cards { display: grid; gap: 14px; margin-top: 20px; grid-template-columns: 1.9fr 1fr 1fr; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 22px; }
.card.wide { grid-row: span 2; display: flex; flex-direction: column; }
.card .name { color: var(--quiet); font-size: 13px; }
.card .big { font-size: 25px; font-weight: 600; letter-spacing: -.01em; line-height: 1.3; }
.card.wide .big { font-size: 54px; line-height: 1.1; letter-spacing: -.03em; }
.card .note { color: var(--quiet); font-size: 13px; }
.card svg { margin-top: auto; width: 100%; max-width: 520px; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--quiet); }
.missing { margin-top: 14px; border-left: 3px solid var(--warn); background: var(--warn-soft); color: var(--warn);
  padding: 9px 16px; border-radius: 0 8px 8px 0; font-size: 14px; }
.missing ul { margin: 0; padding-left: 18px; }
.plot { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 10px 8px 4px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--quiet); font-size: 13px; }
td code { white-space: nowrap; }
th, td { padding: 9px 11px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .num { text-align: right; white-space: nowrap; }
thead .num { white-space: normal; } th { vertical-align: bottom; } .named { min-width: 190px; }
code { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.config { background: var(--faint); border-radius: 6px; padding: 2px 7px; white-space: nowrap; }
.config.on { background: var(--tuned-soft); color: var(--tuned); font-weight: 600; }
.bars { white-space: nowrap; }
.bar { display: flex; align-items: center; gap: 8px; font-size: 13px; line-height: 1.35; }
.bar i { display: block; height: 9px; border-radius: 2px; background: var(--default); min-width: 1px; }
.bar.tuned i { background: var(--tuned); } .good { color: var(--tuned); } .bad { color: var(--bad); }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 5px 24px; margin: 0; font-size: 14px; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
.slot { white-space: nowrap; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
@media (max-width: 820px) { .cards, .two { grid-template-columns: 1fr; } main { padding: 24px 14px 48px; }
  .card.wide .big { font-size: 40px; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 6px; } }
@media print { main { padding: 0; } .card, .plot, .scroll { break-inside: avoid; } }
"""

# Plotly knows no CSS variables: "--name" in a figure is looked up when it is drawn, and again when the theme changes.
_SCRIPT = """
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const painted = v => typeof v === "string" ? (v.startsWith("--") ? css(v) : v)
  : Array.isArray(v) ? v.map(painted)
  : v && typeof v === "object" ? Object.fromEntries(Object.entries(v).map(([k, x]) => [k, painted(x)])) : v;
const draw = () => {
  for (const [id, figure] of Object.entries(FIGURES))
    Plotly.react(id, painted(figure.data), painted(figure.layout),
      {responsive: true, displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]]});
};
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
"""

# A page that reloads by itself must let its reader stop that (WCAG 2.2, 2.2.1): no meta refresh.
_RELOAD = '<label><input type="checkbox" id="reload" checked> The run goes on: load this page anew every {} s.</label>'
_RELOADS = """
setInterval(() => { if (document.getElementById("reload").checked) location.reload(); }, 1000 * SECONDS);
"""


def page(title: str, body: str, figures: dict[str, Any], plotly_js: str, reload_s: int = 0) -> str:
    """The whole document. ``figures`` maps the id of a div in ``body`` to plotly's ``{"data", "layout"}``.

    The page loads itself anew every ``reload_s`` seconds (0: never) until the reader turns that off.
    """
    # A tag or a comment inside the data would end the script early, or never: it has no "<".
    data = json.dumps(figures, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = f"<script>{plotly_js}</script>\n<script>const FIGURES = {data};{_SCRIPT}</script>" if figures else ""
    if reload_s:
        body = f'<p class="lead">{_RELOAD.format(reload_s)}</p>\n{body}'
        scripts += f"<script>{_RELOADS.replace('SECONDS', str(reload_s))}</script>"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
{scripts}
</body>
</html>
"""


def plot(name: str, said: str) -> str:
    """The place of the figure ``name``, with what it shows in words. Plotly puts buttons into it: it is no image."""
    return f'<div class="plot"><div id="{escape(name)}" role="figure" aria-label="{escape(said)}"></div></div>'


def section(heading: str, lead: str, content: str) -> str:
    """One section; ``heading`` and ``lead`` are text, ``content`` is HTML."""
    return f'<section><h2>{escape(heading)}</h2><p class="lead">{escape(lead)}</p>{content}</section>'


def table(columns: list[tuple[str, bool]], rows: list[list[str]], name: str = "table") -> str:
    """A table of HTML cells; ``columns`` are (heading, is a number), ``name`` is for who cannot see it."""
    kind = [' class="num"' if number else "" for _, number in columns]
    head = "".join(f'<th scope="col"{k}>{escape(title)}</th>' for (title, _), k in zip(columns, kind, strict=True))
    lines = ("".join(f"<td{k}>{cell}</td>" for cell, k in zip(row, kind, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
    return f"{box}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def config(text: str | None, on: bool = False) -> str:
    """A configuration such as ``ring/ll128/16`` as a chip; ``on`` marks what the table sets."""
    if not text:
        return '<span class="quiet">-</span>'
    return f'<code class="config{" on" if on else ""}">{escape(text)}</code>'


def facts(pairs: list[tuple[str, Any]]) -> str:
    """A list of names and values; None and empty values are left out."""
    shown = [(k, v) for k, v in pairs if v not in (None, "", [], {})]
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in shown) + "</dl>"


def interval_chart(intervals: list[tuple[str, float, list[float], str]]) -> str:
    """Intervals of a speed-up on one axis, as SVG. Each is (name, middle, [low, high], colour name)."""
    low = min(1.0, *(i[2][0] for i in intervals))
    high = max(1.0, *(i[2][1] for i in intervals))
    margin = 0.12 * (high - low) + 1e-3
    low, high = low - margin, high + margin
    left = max(56, 16 + 7 * max(len(name) for name, *_ in intervals))
    right, row = left + 294, 30

    def x(value: float) -> float:
        return left + (right - left) * (value - low) / (high - low)

    bottom = row * len(intervals) + 8
    parts = [
        f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="0" y2="{bottom}" stroke="var(--quiet)" stroke-dasharray="3 3"/>'
    ]
    parts.append(f'<text x="{x(1):.1f}" y="{bottom + 15}" text-anchor="middle">1.0</text>')
    for i, (name, middle, (a, b), colour) in enumerate(intervals):
        y = row * i + row / 2
        parts.append(f'<text x="0" y="{y + 4}">{escape(name)}</text>')
        parts.append(
            f'<rect x="{x(a):.1f}" y="{y - 5}" width="{max(x(b) - x(a), 2):.1f}" height="10" rx="5" '
            f'fill="var({colour})" opacity=".45"/><circle cx="{x(middle):.1f}" cy="{y}" r="5" fill="var({colour})"/>'
        )
        parts.append(f'<text x="{right + 14}" y="{y + 4}">{a:.3f} - {b:.3f}</text>')
    said = "; ".join(f"{name} {middle:.3f}, {a:.3f} to {b:.3f}" for name, middle, (a, b), _ in intervals)
    return (
        f'<svg viewBox="0 0 {right + 110} {bottom + 22}" role="img" aria-label="{escape(said)}">{"".join(parts)}</svg>'
    )
