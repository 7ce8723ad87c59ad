"""Lines of the product by folder, Python and C: ``python tests/count_lines.py``. Fails above the ceilings."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("agent", "envs", "envs/nccl", "envs/sim", "traces", "zero_workload")
#: Whoever adds beyond these takes something away first.
CEILINGS = {"Python": 31_250, "C": 2_700}


def lines(folder, *suffixes):
    """Of the files below a folder that no other folder of the list holds."""
    inner = [ROOT / f for f in FOLDERS if f.startswith(f"{folder}/")]
    files = [p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes and not any(i in p.parents for i in inner)]
    return sum(len(p.read_text().splitlines()) for p in files)


def main():
    counts = {f: {"Python": lines(f, ".py"), "C": lines(f, ".c", ".h")} for f in FOLDERS}
    total = {kind: sum(c[kind] for c in counts.values()) for kind in CEILINGS}
    for folder, c in {**counts, "in all": total}.items():
        print(f"{folder:14} {c['Python']:7,} lines of Python {c['C']:6,} of C")
    over = [f"{kind}: {total[kind]:,} of {most:,}" for kind, most in CEILINGS.items() if total[kind] > most]
    if over:
        sys.exit(f"above the ceiling: {', '.join(over)}")


if __name__ == "__main__":
    main()
