"""Draws the imports between the folders into CONTRIBUTING.md: ``python tests/architecture.py``; a test compares."""

import ast
from collections import Counter

from test_layers import PYTHON, ROOMS, ROOT, imports, name_of, room, rooms_of

TITLE = "## The architecture, drawn from the imports"


def arrows():
    """(from, to) -> in how many files a folder imports another."""
    found = Counter()
    for path in PYTHON:
        rooms = set().union(*(rooms_of(module) for _, module in imports(ast.parse(path.read_text()), path)))
        here = room(name_of(path))
        found.update((here, there) for there in rooms - {here})
    return found


def picture():
    lines = ["```mermaid", "graph TD"]
    lines += [f'  {r.replace("/", "_")}["{r}/<br/>{what}"]' for r, what in ROOMS.items()]
    for (a, b), n in sorted(arrows().items()):
        lines.append(f"  {a.replace('/', '_')} -->|{n}| {b.replace('/', '_')}")
    return "\n".join([*lines, "```"])


def section():
    return f"{TITLE}\n\nA number is how many files of the one folder import from the other.\n\n{picture()}\n"


if __name__ == "__main__":
    file = ROOT / "CONTRIBUTING.md"
    before, _, rest = file.read_text().partition(TITLE)
    after = rest.partition("\n## ")[2]
    file.write_text(before + section() + (f"\n## {after}" if after else ""))
    print(f"{len(arrows())} arrows drawn into {file.name}")
