"""Makes the pictures in ``agent/pictures/``: ``python tests/make_pictures.py [RUN...]``, by default of ``runs/demo``.

Needs the folders of finished runs (``make demo`` leaves one; the first is the report's), the board on record, and
Chromium on PATH. Nothing is drawn by hand: what is wrong in a picture is wrong in a page.
"""

import json
import re
import sys
import tempfile
from io import StringIO
from pathlib import Path

from browser import CHROMIUM, ROOT, Browser
from dynamiccl.agent.board import Board, filed_results
from dynamiccl.agent.commands.top import grid
from dynamiccl.agent.report import write_report
from dynamiccl.agent.runs import state
from dynamiccl.agent.runs_page import write_runs_page
from dynamiccl.envs.job_suites import JobSuite
from dynamiccl.traces.files import Trace
from rich.console import Console

OUT = ROOT / "agent" / "pictures"
MOST_BYTES = 150_000


def svg(states):
    """``dynamiccl top`` as a terminal shows it. Rich's fonts are fetched from elsewhere: the reader's own serve."""
    console = Console(record=True, width=156, file=StringIO(), highlight=False)
    console.print(grid(states))
    text = console.export_svg(title="dynamiccl top --once")
    text = re.sub(r"@font-face \{.*?\}", "", text, flags=re.S).replace("Fira Code", "ui-monospace")
    assert "http" not in text.replace("http://www.w3.org", "").replace("https://www.textualize.io", "")
    return text


def pages(folder, runs):
    """{name: (file, height of the picture)} of the pages, written into ``folder``."""
    summary = json.loads((runs[0] / "summary.json").read_text())
    report = write_report(folder / "report.html", summary, Trace.read(runs[0] / "trace"))
    print("the board of 400 jobs: some half a minute", file=sys.stderr)
    board = Board(JobSuite.load("standard"))
    for submission in filed_results("standard")["submissions"]:
        refused = board.judge(submission)
        assert not refused, refused
    (folder / "board.html").write_text(board.page(), encoding="utf-8")
    write_runs_page(folder / "runs.html", [state(run) for run in runs])
    return {"report": (report, 940), "board": (folder / "board.html", 860), "top": (folder / "runs.html", 720)}


def main():
    runs = [Path(a) for a in sys.argv[1:]] or [ROOT / "runs" / "demo"]
    lacking = [run for run in runs if not (run / "summary.json").exists()]
    if lacking or CHROMIUM is None:
        raise SystemExit(f"error: {lacking[0]} holds no finished run: make demo" if lacking else "error: no Chromium")
    OUT.mkdir(exist_ok=True)
    (OUT / "top.svg").write_text(svg([state(run) for run in runs]), encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        made = pages(Path(scratch), runs)
        with Browser(Path(scratch) / "profile") as browser:
            for name, (file, height) in made.items():
                page = browser.open(file, 1280)
                page.picture(OUT / f"{name}.png", height)
    for path in sorted(OUT.iterdir()):
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}  {size:,} bytes")
        assert size < MOST_BYTES, f"{path} is too large for a page that people read"


if __name__ == "__main__":
    main()
