"""Puts a finished demo on record: ``make demo && python tests/tools/make_demo.py [RUN]``, by default of ``runs/demo``.

Writes ``envs/results/demo.json``, and its figures, with those of the sweep on record
(``tests/tools/make_oracle.py``), into the table of ``docs/evidence.md``.
"""

import json
import re
import sys
from pathlib import Path

from dynamiccl.traces.header import new_header

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "envs" / "results", ROOT / "docs" / "evidence.md"
#: What a summary has of its own machine, and no record.
_NOT = ("run", "run_id", "trace", "table", "report", "log", "memory", "tables", "comparisons", "refused")


def figures(name):
    """A result of the record as the page says it."""
    found = json.loads((RESULTS / name).read_text())
    (low, high), (least, most) = found["speedup_ci95"], found["aa_speedup_ci95"]
    return f"speed-up {found['speedup']:.3f} [{low:.3f}, {high:.3f}], default against itself [{least:.3f}, {most:.3f}]"


def written(page):
    """The page with the figures on record, in the rows that name their files."""
    for name in ("demo.json", "oracle_demo.json"):
        pattern = rf"speed-up [^|`]*?(?= \(`envs/results/{re.escape(name)}`, )"
        page, n = re.subn(pattern, lambda _, name=name: figures(name), page)
        assert n == 1, f"{PAGE} has {n} rows of {name}"
        date = json.loads((RESULTS / name).read_text())["date"][:10]
        page = re.sub(rf"(?<=`envs/results/{re.escape(name)}`, )[-\d]+", date, page)
    return page


def main():
    run = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "runs" / "demo"
    told, header = json.loads((run / "summary.json").read_text()), new_header()
    first = {"made_by": "make demo", "date": header["date"], "commit": header.get("commit")}
    first["note"] = "emulated cluster: these are not GPU times"
    kept = {name: value for name, value in told.items() if name not in _NOT}
    (RESULTS / "demo.json").write_text(json.dumps(first | kept, indent=2) + "\n")
    PAGE.write_text(written(PAGE.read_text()))
    print(f"{run}: {figures('demo.json')}")


if __name__ == "__main__":
    main()
