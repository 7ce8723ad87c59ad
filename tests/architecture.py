"""Draws the imports between the folders into CONTRIBUTING.md: ``python tests/architecture.py``; a test compares."""

import ast
from collections import Counter

from test_layers import FOLDERS, PYTHON, ROOT, imports, name_of

TITLE = "## The architecture, drawn from the imports"
ROOMS = {
    "agent/commands": "the command line",
    "agent": "search, policies, training, daemon, reports",
    "envs": "decisions, search spaces, Gymnasium environments",
    "envs/nccl": "a running NCCL: plugin, probe, agreement",
    "envs/sim": "the emulated cluster, NCCL's cost model",
    "traces": "what was seen: records, files, importers",
    "zero_workload": "the job: ZeRO 1, 2, 3",
}


def room(path):
    """The innermost folder of the list that a file of ours, or a module's parts, lie in."""
    return next(r for r in sorted(ROOMS, key=len, reverse=True) if f"{path}/".startswith(f"{r}/"))


def arrows():
    """(from, to) -> in how many files a folder imports another."""
    found = Counter()
    for path in PYTHON:
        names = [module.split(".") for _, module in imports(ast.parse(path.read_text()), path)]
        rooms = {room("/".join(n[1:])) for n in names if n[0] == "dynamiccl" and len(n) > 1 and n[1] in FOLDERS}
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
