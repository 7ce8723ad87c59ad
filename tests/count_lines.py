"""Lines of the product by folder, Python and C: ``python tests/count_lines.py``.

Fails where a folder, or the whole, has more lines than stand here, and where it has so many fewer that the number is to
be lowered: the numbers only ever go down.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Folder -> most lines of (Python, C). Whoever adds beyond these takes something away first.
CEILINGS = {
    "agent": (6_386, 0),
    "envs": (5_041, 0),
    "envs/nccl": (2_494, 2_051),
    "envs/sim": (2_538, 164),
    "traces": (2_177, 0),
    "zero_workload": (1_846, 0),
}
IN_ALL = (20_482, 2_215)
#: So far below its number a count is only by an oversight.
SLACK = 200


def lines(folder, *suffixes):
    """Of the files below a folder that no other folder of the list holds."""
    inner = [ROOT / f for f in CEILINGS if f.startswith(f"{folder}/")]
    files = [p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes and not any(i in p.parents for i in inner)]
    return sum(len(p.read_text().splitlines()) for p in files)


def faults(counts, ceilings):
    """What is above its number, or SLACK below it, one line each; counts and ceilings are {name: (Python, C)}."""
    found = []
    for name, both in counts.items():
        for kind, n, most in zip(("Python", "C"), both, ceilings[name], strict=True):
            if n > most:
                found.append(f"{name}: {n:,} lines of {kind}, {most:,} are allowed: take something away first")
            elif n <= most - SLACK:
                found.append(f"{name}: {n:,} lines of {kind}, {most:,} are allowed: lower that in tests/count_lines.py")
    return found


def main():
    counts = {f: (lines(f, ".py"), lines(f, ".c", ".h")) for f in CEILINGS}
    counts["in all"] = tuple(map(sum, zip(*counts.values(), strict=True)))
    for folder, (python, c) in counts.items():
        print(f"{folder:14} {python:7,} lines of Python {c:6,} of C")
    if found := faults(counts, {**CEILINGS, "in all": IN_ALL}):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
