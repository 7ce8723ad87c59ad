"""The page of a run: style and skeleton.

Everything is inline, and a page forbids itself any request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 28px 72px; }
h1 { font-size: 15px; margin: 0; }
h2 { font-size: 19px; margin: 52px 0 4px; }
p { margin: 0; }
pre { max-width: 100%; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; margin: 0 0 8px; }
summary { cursor: pointer; padding: 6px 0; }
header { display: flex; flex-wrap: wrap; gap: 6px 16px; align-items: baseline; justify-content: space-between; }
.quiet, .lead, .note, dt, th { color: var(--quiet); }
.lead { margin-bottom: 16px; max-width: 76ch; }
.note, th { font-size: 13px; }
.bad { color: var(--bad); }
.badge { display: inline-block; margin-top: 10px; background: var(--warn-soft); color: var(--warn);
  border-radius: 999px; padding: 3px 13px; font-size: 13px; }
.missing { margin-top: 14px; background: var(--warn-soft); color: var(--warn); padding: 9px 16px; font-size: 14px; }
.missing ul { margin: 0; padding-left: 18px; }
.card, .plot, .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 12px; min-width: 0;
  break-inside: avoid; }
.card { padding: 18px 22px; margin-top: 14px; }
.big { font-size: 23px; font-weight: 600; line-height: 1.3; }
.verdict { font-weight: 600; margin: 6px 0; }
.plot { padding: 14px 28px 44px 84px; }
svg { display: block; overflow: visible; }
svg text { font-size: 12px; fill: var(--quiet); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; margin: 0 0 6px; padding: 0; }
.legend li { font-size: 13px; }
.legend span { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.run { padding: 14px 16px; }
.run .narrow { display: none; max-width: 520px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; vertical-align: bottom; }
th, td { padding: 9px 11px; border-bottom: 1px solid var(--line); }
td { vertical-align: top; }
.num { text-align: right; }
td.num { white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 5px 24px; margin: 0; font-size: 14px; }
dd { margin: 0; overflow-wrap: anywhere; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
@media (max-width: 820px) { .two, dl { grid-template-columns: 1fr; } main { padding: 24px 14px 48px; } }
@media (max-width: 700px) { .run .wide { display: none; } .run .narrow { display: block; } }
@media (max-width: 600px) {
  .big { font-size: 19px; }
  .plot { padding-left: 74px; padding-right: 16px; }
  .plot.run { padding: 12px 4px; }
}
"""


def page(title: str, body: str) -> str:
    """The document."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def section(heading: str, lead: str, content: str) -> str:
    """One section; ``heading`` and ``lead`` are text, ``content`` is HTML."""
    return f'<section><h2>{escape(heading)}</h2><p class="lead">{escape(lead)}</p>{content}</section>'


def legend(colours: Mapping[str, str]) -> str:
    """What the colours of a figure stand for: name -> colour."""
    items = "".join(
        f'<li><span style="background:{colour}"></span>{escape(name)}</li>'
        for name, colour in colours.items()
    )
    return f'<ul class="legend">{items}</ul>'


def table(
    name: str, heads: Sequence[str], rows: Iterable[Iterable[str | None]], numbers: Collection[str] = ()
) -> str:
    """A table of texts; columns in ``numbers`` stand to the right, ``name`` is for who cannot see it."""
    kinds = [' class="num"' if head in numbers else "" for head in heads]
    head = "".join(
        f'<th scope="col"{kind}>{escape(text)}</th>' for text, kind in zip(heads, kinds, strict=True)
    )
    lines = (zip(row, kinds, strict=True) for row in rows)
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(text or '')}</td>" for text, kind in line) + "</tr>"
        for line in lines
    )
    box = f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
    return f"{box}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def facts(pairs: Mapping[str, Any]) -> str:
    """A list of names and values; None and empty values are left out."""
    shown = {k: v for k, v in pairs.items() if v not in (None, "", [], {})}
    return (
        "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in shown.items()) + "</dl>"
    )
