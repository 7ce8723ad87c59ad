"""Makes the pictures in ``agent/pictures/``: ``python tests/tools/make_pictures.py [RUN...]``, by default of
``runs/demo``.

Needs the folders of finished runs (``make demo`` leaves one; the first is the report's) and Chromium on PATH. Nothing
is drawn by hand: what is wrong in a picture is wrong in a page, or on a terminal of 80 columns.
"""

import re
import sys
import tempfile
from dataclasses import fields
from html import escape
from io import StringIO
from pathlib import Path
from unittest import mock

from browser import CHROMIUM, ROOT, Browser
from dynamiccl.agent.commands.top import table
from dynamiccl.agent.daemon.console import LiveView, show_summary
from dynamiccl.agent.daemon.tuner import WindowLine
from dynamiccl.agent.report.html.course import course_of
from dynamiccl.agent.report.html.report import write_report
from dynamiccl.agent.report.html.run_plot import SIZES, draw
from dynamiccl.agent.report.runs import state
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.verdict import verdict, what_changed
from dynamiccl.traces.files import Trace
from rich.console import Console

OUT = ROOT / "agent" / "pictures"
MOST_BYTES = 150_000
#: Widths in pixels at which the report is shown, and how much of it.
WIDTHS = {360: 1400, 1280: 780}


def recorder(width=80):
    """A terminal that keeps what is printed."""
    return Console(record=True, width=width, file=StringIO(), highlight=False, force_terminal=True)


def svg(console, title):
    """What a terminal shows. Rich's fonts are fetched from elsewhere: the reader's own serve."""
    text = console.export_svg(title=title)
    text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.S).replace("Fira Code", "ui-monospace")
    assert "http" not in text.replace("http://www.w3.org", "").replace("https://www.textualize.io", "")
    return text


def windows_of(trace):
    """A run's windows as its tuner told them, each with the time at which it did, seconds."""
    names = [f.name for f in fields(WindowLine)]
    rows = [line for line in trace.log if line["kind"] == "window"]
    return [(WindowLine(**{name: row[name] for name in names}), row["time"]) for row in rows]


def live(lines):
    """``dynamiccl tune`` in the middle of its first comparison."""
    view = LiveView(0.05)
    view.console = recorder()
    view._prefix, view._is_live = "", True
    shown = lines[: 2 + next(i for i, (line, _) in enumerate(lines) if line.phase == "verify")]
    for line, at_s in shown:
        view._live = None
        with mock.patch("time.monotonic", return_value=at_s):
            view.window(line)
    view.console.print(view._block(shown[-1][0]))
    return view.console


def end(summary):
    """What it ends with; paths are this machine's and told without their folders."""
    console = recorder()
    for name in ("trace", "table", "report"):
        value = getattr(summary, name)
        setattr(summary, name, value and f"runs/demo/{Path(value).name}")
    show_summary(console, summary)
    return console


#: Of the animated picture: pixels above the plot, seconds of a round, and the part of it in which the run goes by.
HEAD, SECONDS, MOVES = 84, 10, 0.7


def animated(trace, summary):
    """The demo's run as it goes by, every step of it; at its end what changed. Without animation it shows the end."""
    wide = SIZES[0]
    plot = draw(course_of(trace), wide)
    inside = plot[plot.index(">") + 1 : plot.rindex("</svg>")]
    height = HEAD + wide.height
    timing = f'dur="{SECONDS}s" repeatCount="indefinite"'
    told = [*what_changed(summary), verdict(summary)]
    lines = [f'<text x="14" y="{52 + 22 * i}">{escape(line)}</text>' for i, line in enumerate(told)]
    fade = (
        f'<animate attributeName="opacity" values="0;0;1;1" keyTimes="0;{MOVES};{MOVES + 0.02};1" {timing}/>'
    )
    move = (
        f'<animate attributeName="x" values="61;{wide.width};{wide.width}" keyTimes="0;{MOVES};1" {timing}/>'
    )
    size = f'width="{wide.width - 61}" height="{wide.height - 42}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide.width} {height}"',
            'font-family="system-ui, Arial, sans-serif" font-size="17" fill="#1c2024">',
            f'<rect width="{wide.width}" height="{height}" fill="#ffffff"/>',
            '<text x="14" y="26" font-weight="bold">dynamiccl demo: the time of every step of the job</text>',
            f"<g>{fade}{''.join(lines)}</g>",
            f'<g transform="translate(0,{HEAD})" font-size="12">{inside}',
            f'<rect x="{wide.width}" {size} fill="#ffffff">{move}</rect></g>',
            "</svg>\n",
        ]
    )


def main():
    runs = [Path(a) for a in sys.argv[1:]] or [ROOT / "runs" / "demo"]
    lacking = [run for run in runs if not (run / "summary.json").exists()]
    if lacking or CHROMIUM is None:
        raise SystemExit(
            f"error: {lacking[0]} holds no finished run: make demo" if lacking else "error: no Chromium"
        )
    for old in OUT.iterdir():
        old.unlink()
    wide = recorder(132)
    wide.print(table([state(run) for run in runs], wide))
    (OUT / "top.svg").write_text(svg(wide, "dynamiccl top --once"), encoding="utf-8")
    summary, trace = RunSummary.read(runs[0]), Trace.read(runs[0] / "trace")
    (OUT / "demo.svg").write_text(animated(trace, summary), encoding="utf-8")
    (OUT / "tune.svg").write_text(svg(live(windows_of(trace)), "dynamiccl tune"), encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        report = write_report(Path(scratch) / "report.html", summary, trace)
        with Browser(Path(scratch) / "profile") as browser:
            for width, height in WIDTHS.items():
                browser.open(report, width).picture(OUT / f"report-{width}.png", height)
    (OUT / "verdict.svg").write_text(svg(end(summary), "dynamiccl tune, at its end"), encoding="utf-8")
    for path in sorted(OUT.iterdir()):
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}  {size:,} bytes")
        assert size < MOST_BYTES, f"{path} is too large for a page that people read"


if __name__ == "__main__":
    main()
