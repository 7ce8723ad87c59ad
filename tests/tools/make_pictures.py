"""Makes the pictures in ``agent/pictures/``: ``python tests/tools/make_pictures.py [RUN...]``, by default of
``runs/demo``.

Needs the folders of finished runs (``make demo`` leaves one; the first is the report's) and Chromium on PATH. Nothing
is drawn by hand: what is wrong in a picture is wrong in a page, or on a terminal of 80 columns.
"""

import re
import sys
import tempfile
from dataclasses import fields
from io import StringIO
from pathlib import Path
from unittest import mock

from browser import CHROMIUM, ROOT, Browser
from dynamiccl.agent.commands.top import table
from dynamiccl.agent.daemon.console import LiveView, show_summary
from dynamiccl.agent.daemon.tuner import WindowLine
from dynamiccl.agent.report.html.report import write_report
from dynamiccl.agent.report.runs import state
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.traces.files import Trace
from rich.console import Console

OUT = ROOT / "agent" / "pictures"
MOST_BYTES = 150_000
#: Widths in pixels at which the report is shown, and how much of it.
WIDTHS = {360: 1400, 1280: 1000}


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
    wide.print(table([state(run) for run in runs]))
    (OUT / "top.svg").write_text(svg(wide, "dynamiccl top --once"), encoding="utf-8")
    summary, trace = RunSummary.read(runs[0]), Trace.read(runs[0] / "trace")
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
