"""Prints a picture of the imports between the rooms, in Mermaid: ``python tests/tools/architecture.py``.

An arrow is an import. It leaves out an arrow if other arrows form a path between its ends.
"""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("project", "helpers")]

from test_layers import STATED, arrows


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


if __name__ == "__main__":
    print(picture())
