"""Makes the pictures in ``agent/pictures/``: ``python tests/make_pictures.py [RUN...]``, by default of ``runs/demo``.

Needs the folders of finished runs (``make demo`` leaves one; the first is the report's) and Chromium on PATH. Nothing
is drawn by hand: what is wrong in a picture is wrong in a page.
"""

import re
import sys
import tempfile
from io import StringIO
from pathlib import Path

from browser import CHROMIUM, ROOT, Browser
from dynamiccl.agent.commands.top import table
from dynamiccl.agent.report.report import write_report
from dynamiccl.agent.report.runs import state
from dynamiccl.agent.report.summary import RunSummary
from dynamiccl.traces.files import Trace
from rich.console import Console

OUT = ROOT / "agent" / "pictures"
MOST_BYTES = 150_000


def svg(states):
    """``dynamiccl top`` as a terminal shows it. Rich's fonts are fetched from elsewhere: the reader's own serve."""
    console = Console(record=True, width=156, file=StringIO(), highlight=False)
    console.print(table(states))
    text = console.export_svg(title="dynamiccl top --once")
    text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.S).replace("Fira Code", "ui-monospace")
    assert "http" not in text.replace("http://www.w3.org", "").replace("https://www.textualize.io", "")
    return text


def main():
    runs = [Path(a) for a in sys.argv[1:]] or [ROOT / "runs" / "demo"]
    lacking = [run for run in runs if not (run / "summary.json").exists()]
    if lacking or CHROMIUM is None:
        raise SystemExit(f"error: {lacking[0]} holds no finished run: make demo" if lacking else "error: no Chromium")
    OUT.mkdir(exist_ok=True)
    (OUT / "top.svg").write_text(svg([state(run) for run in runs]), encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        summary = RunSummary.read(runs[0])
        report = write_report(Path(scratch) / "report.html", summary, Trace.read(runs[0] / "trace"))
        with Browser(Path(scratch) / "profile") as browser:
            browser.open(report, 1280).picture(OUT / "report.png", 940)
    for path in sorted(OUT.iterdir()):
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}  {size:,} bytes")
        assert size < MOST_BYTES, f"{path} is too large for a page that people read"


if __name__ == "__main__":
    main()
