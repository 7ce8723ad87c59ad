"""The architecture, enforced: imports point down, no circle, an honest package list."""

import ast
import re
import tomllib
from graphlib import TopologicalSorter

import pytest
from paths import ROOT

FOLDERS = ("agent", "envs", "traces", "zero_workload")
#: `python -m dynamiccl.zero_workload` starts there: it is the job's door, though it lies beside the engine.
DOOR = "zero_workload/__main__.py"
#: Libraries that only some folders may import: where the process touches shared memory or learns.
SHARED_MEMORY = (
    "envs/nccl/",
    "envs/sim/emulated/timeline.py",
)  # the second stands in for NCCL's own transport
ONLY_IN = {
    "mmap": SHARED_MEMORY,
    "multiprocessing.shared_memory": SHARED_MEMORY,
    "stable_baselines3": ("agent",),
    "sb3_contrib": ("agent",),
    "torch": ("agent", "envs", "zero_workload"),
    "gymnasium": ("agent", "envs"),
    "fsspec": ("agent",),
    "rich": ("agent",),
}
#: Files that import each other, each pair with its reason. It may only shrink.
CIRCLES: set[frozenset[str]] = set()

PYTHON = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


#: The rooms of the house: folders with code.
ROOMS = {name_of(path.parent) for path in PYTHON}


def imports(tree, path):
    """(line, absolute dotted name) of every import in a module of ours, wherever in the file it stands."""
    package = ["dynamiccl", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room(path):
    """The innermost room that a file of ours, or a module's parts, lie in."""
    if path == DOOR:
        return "zero_workload/job"
    return next(r for r in sorted(ROOMS, key=len, reverse=True) if f"{path}/".startswith(f"{r}/"))


def rooms_of(module):
    """Of a dotted name: the room, if it is one of ours."""
    parts = module.split(".")
    return (
        {room("/".join(parts[1:]))}
        if parts[0] == "dynamiccl" and len(parts) > 1 and parts[1] in FOLDERS
        else set()
    )


def stated():
    """Room -> (what is in it, rooms that it may import), as the tables of the four folders' pages say.

    `x/*` is the room x and all that lie in it.
    """
    found = {}
    for folder in FOLDERS:
        page = (ROOT / folder / "README.md").read_text("utf-8")
        for here, what, there in re.findall(
            rf"^\| `({folder}[\w/]*)/` \| (.+?) \| (.+?) \|$", page, flags=re.M
        ):
            named = re.findall(r"`([\w/]+)/(\*?)`", there)
            found[here] = (
                what,
                {r for n, all_ in named for r in ROOMS if r == n or (all_ and r.startswith(f"{n}/"))},
            )
    return found


STATED = stated()


def arrows():
    """(room, room) -> in how many files the one imports the other."""
    found = {}
    for path in PYTHON:
        here = room(name_of(path))
        there = set().union(
            *(rooms_of(module) for _, module in imports(ast.parse(path.read_text("utf-8")), path))
        )
        for other in there - {here}:
            found[here, other] = found.get((here, other), 0) + 1
    return found


def breaches(source, path):
    """What a file does that its folder must not, one line each."""
    tree = ast.parse(source)
    name = name_of(path)
    here = room(name)
    found = []
    for line, module in imports(tree, path):
        parts = module.split(".")
        if parts[0] in FOLDERS:
            found.append(f"{name}:{line}: import {module} bare: it is dynamiccl.{module}")
        if not rooms_of(module) <= STATED[here][1] | {here}:
            found.append(f"{name}:{line}: {here} may not import {module}")
        for library, places in ONLY_IN.items():
            if (module == library or module.startswith(library + ".")) and not name.startswith(places):
                found.append(f"{name}:{line}: {library} is imported outside {' and '.join(places)}")
    prose = {
        id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)
    }  # docstrings may say what they like
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in prose else None
        if isinstance(text, str) and "/dev/shm" in text and not name.startswith(SHARED_MEMORY):
            found.append(f"{name}:{node.lineno}: /dev/shm is named outside {' and '.join(SHARED_MEMORY)}")
    return found


def reach(needs, start):
    """All that ``start`` needs, through others too, by ``needs`` = {a: those that a needs}."""
    seen, left = set(), [start]
    while left:
        for other in needs.get(left.pop(), ()):
            if other not in seen:
                seen.add(other)
                left.append(other)
    return seen


def in_circles(needs):
    """Pairs (a, b) that need each other."""
    reached = {a: reach(needs, a) for a in needs}
    return {frozenset({a, b}) for a in reached for b in reached[a] if a != b and a in reached.get(b, ())}


def test_every_room_says_what_it_may_import_and_none_goes_in_a_circle():
    assert STATED.keys() == ROOMS
    needs = {}
    for here, there in arrows():
        needs.setdefault(here, set()).add(there)
    order = list(TopologicalSorter(needs).static_order())  # raises CycleError
    assert order.index("traces") < order.index("envs/search") < order.index("agent/daemon")


def needs_of_files():
    """File -> files of ours that it imports, wherever in it."""
    modules = {
        f"dynamiccl.{name_of(p)[:-3].removesuffix('/__init__').replace('/', '.')}": name_of(p) for p in PYTHON
    }
    found = {}
    for path in PYTHON:
        named = {m for _, m in imports(ast.parse(path.read_text("utf-8")), path)}
        found[name_of(path)] = {modules[m] for m in named if m in modules} - {name_of(path)}
    return found


def test_no_file_imports_one_that_imports_it_not_even_late():
    assert in_circles(needs_of_files()) == CIRCLES
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {frozenset({"b", "c"})}


#: What a C file gives to others: a function, or a variable, that begins a line and is neither static nor declared only.
GIVEN = re.compile(
    r"^(?!static |extern |struct \w+ \{|enum |typedef )\w[^\n;={]*?\b(\w+)(?:\(|\[\w+\]| = |;)", re.M
)


def needs_of_c(sources):
    """C file -> the others whose functions and variables it names; ``sources``: file -> text."""
    code = {}
    for name, text in sources.items():
        bare = re.sub(r'"(\\.|[^"\\\n])*"|/\*.*?\*/|//[^\n]*', '""', text, flags=re.S)
        code[name] = re.sub(r"^#[^\n]*|__attribute__\(\(\w+\)\) ", "", bare, flags=re.M)
    given = {word: name for name, text in code.items() for word in GIVEN.findall(text)}
    found = {name: {given[w] for w in re.findall(r"\w+", text) if w in given} for name, text in code.items()}
    return {name: others - {name} for name, others in found.items()}


def test_no_file_of_the_plugin_calls_one_that_calls_it():
    needs = needs_of_c({p.name: p.read_text("utf-8") for p in (ROOT / "envs/nccl/plugin").glob("*.c")})
    assert in_circles(needs) == set()
    assert {"table.c", "switch.c", "clock.c"} <= needs["tuner.c"], "or it reads too little"
    assert not needs["table.c"] | needs["ring.c"]
    above = "int late;\nbool is_late(int n) {\n  return n > late;\n}\n"
    below = "// is_late(0)\nstatic int own(void) { return is_late(1); }\n"
    assert needs_of_c({"a": above, "b": below}) == {"a": set(), "b": {"a"}}
    assert in_circles(
        needs_of_c({"a": above + "void more(void) { b(); }", "b": below + "void b(void) {\n}\n"})
    )


def test_the_tuner_beside_a_job_imports_no_simulator_and_nothing_that_draws():
    """Late imports counted."""
    daemon = "agent/daemon/daemon.py"
    seen = {daemon} | reach(needs_of_files(), daemon)
    rooms = {room(name) for name in seen}
    assert not rooms & {
        "agent/train",
        "agent/bench",
        "agent/advice",
        "envs/replay",
        "envs/sim",
        "zero_workload",
    }
    assert "agent/report/html/page.py" not in seen


def test_imports_point_down():
    assert [found for path in PYTHON for found in breaches(path.read_text(encoding="utf-8"), path)] == []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("traces/x.py", "from ..envs.search import observation"),
        ("envs/nccl/x.py", "from ..sim.emulated.backend import register"),
        ("envs/sim/x.py", "def f():\n    from ..live.job import Job"),
        ("envs/live/x.py", "from ..sim.jobs import Jobs"),
        ("traces/x.py", "from .. import envs"),
        ("traces/x.py", "def f():\n    import dynamiccl.agent.policies.lstm"),
        ("envs/nccl/x.py", "from ...agent.policies.lstm import load"),
        ("agent/daemon/x.py", "from ...envs.sim.jobs import Jobs"),
        ("envs/sim/x.py", "import mmap"),
        ("envs/x.py", "from multiprocessing import shared_memory"),
        ("envs/x.py", "import stable_baselines3.common"),
        ("envs/x.py", "from traces import records"),
        ("agent/x.py", "from ..zero_workload import zero"),
        ("agent/commands/x.py", "from ...zero_workload.job.train import parser"),
        ("zero_workload/x.py", "from .job.model import Transformer"),
        ("agent/x.py", "PATH = '/dev/shm/dynamiccl'"),
        ("zero_workload/x.py", "from ..traces.records import Slot"),
        ("traces/x.py", "import torch"),
    ],
)
def test_the_rule_catches(place, source):
    """A rule that nothing breaks could as well be one that sees nothing."""
    assert len(breaches(source, ROOT / place)) >= 1


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("envs/nccl/x.py", "import mmap\nSHM = '/dev/shm'"),
        ("agent/daemon/x.py", "from ...envs.nccl import shm"),
        ("agent/train/x.py", "import sb3_contrib"),
        ("envs/live/x.py", "from ...traces.records import Slot\nfrom ..nccl.shm import RunFolder"),
        ("agent/commands/x.py", "from ...traces.files import Trace\nfrom . import fail"),
        ("agent/x.py", '"""Says /dev/shm in its documentation only."""'),
    ],
)
def test_the_rule_allows(place, source):
    assert breaches(source, ROOT / place) == []


def test_package_list_is_the_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings = project["tool"]["setuptools"]
    with_code = {p.parent for p in PYTHON}
    packages = ["dynamiccl." + p.relative_to(ROOT).as_posix().replace("/", ".") for p in with_code]
    assert sorted(settings["packages"]) == sorted(["dynamiccl", *packages])
    assert settings["package-dir"] == {"dynamiccl": "."} | {f"dynamiccl.{f}": f for f in FOLDERS}
    for folder in with_code:
        assert (folder / "__init__.py").exists(), folder
    assert (ROOT / "py.typed").exists()  # counts for all below it


def test_package_data_reaches_the_wheel():
    """Every file that is not Python matches a pattern of its package, or an installed copy would lack it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]
    missing = []
    for folder in {p.parent for p in PYTHON}:
        package = "dynamiccl." + folder.relative_to(ROOT).as_posix().replace("/", ".")
        allowed = [*patterns.get("*", []), *patterns.get(package, [])]
        for path in folder.iterdir():
            if path.is_file() and path.suffix not in (".py", ".pyc") and not any(map(path.match, allowed)):
                missing.append(name_of(path))
    assert missing == []


def test_no_folder_shadows_the_package():
    """`dynamiccl` is made of the four folders by mapping; a folder of that name would hide them."""
    assert not (ROOT / "dynamiccl").exists()


def test_tests_import_the_installed_package():
    for path in sorted((ROOT / "tests").glob("*.py")):
        bare = re.findall(
            rf"^(?:from|import) ({'|'.join(FOLDERS)})\b", path.read_text(encoding="utf-8"), flags=re.M
        )
        assert not bare, f"{name_of(path)} imports {bare} bare"
