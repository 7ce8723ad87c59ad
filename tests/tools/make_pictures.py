"""Makes the pictures in ``agent/pictures/``, of the run that comes with the package: ``make pictures``.

Nothing is drawn by hand: what is wrong in a picture is wrong in a page, or on a terminal. A test draws them again and
compares.
"""

import re
from html import escape
from io import StringIO
from pathlib import Path

import pandas as pd
from dynamiccl.agent.commands.top import table
from dynamiccl.agent.report.html.course import course_of
from dynamiccl.agent.report.html.run_plot import COLOURS, SIZES, beyond, draw, legend
from dynamiccl.agent.report.runs import state
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.agent.report.verdict import verdict, what_changed
from dynamiccl.traces.files import Trace
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "agent" / "samples" / "run"
OUT = ROOT / "agent" / "pictures"


def recorder(width=80):
    """A terminal that keeps what is printed."""
    return Console(record=True, width=width, file=StringIO(), highlight=False, force_terminal=True)


def svg(console, title):
    """What a terminal shows. Rich's fonts are fetched from elsewhere: the reader's own serve."""
    text = console.export_svg(title=title)
    text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.S).replace("Fira Code", "ui-monospace")
    assert "http" not in text.replace("http://www.w3.org", "").replace("https://www.textualize.io", "")
    return text


#: Of the animated picture: pixels above the plot, seconds of a round, and the part of it in which the run goes by.
HEAD, SECONDS, MOVES = 128, 10, 0.7
#: Pixels of a letter of the legend.
LETTER = 8


def key(course):
    """The legend, and what needs a word: a row of squares with texts."""
    parts, x = [], 14
    for name, colour in legend(course).items():
        parts.append(f'<rect x="{x}" y="{HEAD - 26}" width="12" height="12" fill="{COLOURS[colour]}"/>')
        parts.append(f'<text x="{x + 18}" y="{HEAD - 15}" font-size="14">{escape(name)}</text>')
        x += 40 + LETTER * len(name)
    return "".join(parts)


def animated(trace, summary):
    """The demo's run as it goes by, every step of it; at its end what changed. Without animation it shows the end."""
    wide = SIZES[0]
    course = course_of(trace)
    plot = draw(course, wide)
    inside = plot[plot.index(">") + 1 : plot.rindex("</svg>")]
    height = HEAD + wide.height
    timing = f'dur="{SECONDS}s" repeatCount="indefinite"'
    told = [*what_changed(summary), verdict(summary)]
    lines = [f'<text x="14" y="{50 + 22 * i}">{escape(line)}</text>' for i, line in enumerate(told)]
    words = " ".join(filter(None, [evaluations(trace, course), beyond(course), "Times are emulated."]))
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
            f'<text x="14" y="{HEAD - 36}" font-size="14">{escape(words)}</text>{key(course)}',
            f"<g>{fade}{''.join(lines)}</g>",
            f'<g transform="translate(0,{HEAD})" font-size="12">{inside}',
            f'<rect x="{wide.width}" {size} fill="#ffffff">{move}</rect></g>',
            "</svg>\n",
        ]
    )


def evaluations(trace, course):
    """What the peaks of the default's and the kept table's steps are; '' where there are others too."""
    every = int(re.search(r"--held-out-every (\d+)", trace.header["job"])[1])
    usual = ~course.on_trial
    times = pd.Series(course.ms[usual], course.steps[usual])
    peaks = times.index[times > 1.3 * times.rolling(15, center=True, min_periods=1).median()]
    is_known = len(peaks) and all((step + 1) % every == 0 for step in peaks)
    return f"Peaks: every {every} steps the job computes its loss on held-out text." if is_known else ""


def pictures():
    """All pictures: name -> text."""
    summary, trace = RunSummary.read(RUN), Trace.read(RUN / "trace")
    wide = recorder(132)
    wide.print(table([{**state(RUN), "run": "runs/demo"}], wide))
    return {"demo.svg": animated(trace, summary), "top.svg": svg(wide, "dynamiccl top --once")}


def main():
    for name, text in pictures().items():
        (OUT / name).write_text(text, encoding="utf-8")
        print(f"{(OUT / name).relative_to(ROOT)}  {len(text):,} bytes")


if __name__ == "__main__":
    main()
