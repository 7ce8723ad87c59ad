"""Draws the imports between the rooms into CONTRIBUTING.md: ``python tests/tools/architecture.py``; a test compares."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("project", "helpers")]

from test_layers import ROOT, STATED, arrows

TITLE = "## The architecture, drawn from the imports"


def shortest(found):
    """Those of the arrows that no way through other rooms stands for."""
    needs = {}
    for here, there in found:
        needs.setdefault(here, set()).add(there)

    def below(rooms):
        return rooms.union(*(below(needs.get(r, set())) for r in rooms)) if rooms else set()

    return [(a, b) for a, b in sorted(found) if b not in below(needs[a] - {b})]


def picture():
    lines = ["```mermaid", "graph TD"]
    lines += [f'  {r.replace("/", "_")}["{r}/"]' for r in sorted(STATED)]
    lines += [f"  {a.replace('/', '_')} --> {b.replace('/', '_')}" for a, b in shortest(arrows())]
    return "\n".join([*lines, "```"])


def section():
    text = (
        "An arrow is an import. The drawing leaves out an arrow if other arrows form a path between its ends."
    )
    return f"{TITLE}\n\n{text}\n\n{picture()}\n"


if __name__ == "__main__":
    file = ROOT / "CONTRIBUTING.md"
    before, _, rest = file.read_text().partition(TITLE)
    after = rest.partition("\n## ")[2]
    file.write_text(before + section() + (f"\n## {after}" if after else ""))
    print(f"{len(shortest(arrows()))} arrows drawn into {file.name}")
