"""Documentation that cannot rot: docstrings on everything public, and a README whose tree is the tree."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("agent", "envs", "traces", "zero_workload")
PYTHON = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
README = ROOT / "README.md"
READMES = sorted(p for folder in (".", *FOLDERS, "envs/nccl") for p in (ROOT / folder).glob("*.md"))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def undocumented(tree):
    """Public classes, functions and methods without a docstring (a Protocol's ``...`` needs none), and the module."""
    missing = [] if ast.get_docstring(tree) or not tree.body else ["the module"]

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if child.name.startswith("_"):
                    continue
                overload = any("overload" in ast.dump(d) for d in child.decorator_list)
                setter = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in child.decorator_list)
                stub = isinstance(child.body[-1], ast.Expr) and getattr(child.body[-1].value, "value", 0) is ...
                if not ast.get_docstring(child) and not (overload or setter or stub):
                    missing.append(prefix + child.name)
                if isinstance(child, ast.ClassDef):
                    visit(child, prefix + child.name + ".")

    visit(tree, "")
    return missing


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_everything_public_has_a_docstring(path):
    assert undocumented(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_the_check_sees_what_is_missing():
    source = (
        '"""M."""\nclass A:\n    """A."""\n    def f(self): return 1\n    def _g(self): return 2\ndef h(): return 3\n'
    )
    assert undocumented(ast.parse(source)) == ["A.f", "h"]
    assert undocumented(ast.parse("x = 1")) == ["the module"]


def tree_of(readme):
    """Paths named in the README's tree: the first code block in which a line begins with one of our folders.

    A line holds a path or, indented under its folder, a name, then a comment. Names after a folder on its own line may
    be written several to a line.
    """
    for block in re.findall(r"```\w*\n(.*?)```", readme, flags=re.S):
        if not re.search(rf"^(?:{'|'.join(FOLDERS)})/", block, flags=re.M):
            continue
        paths, stack = set(), []
        for line in block.splitlines():
            if not line.strip():
                continue
            indent = len(line) - len(line.lstrip())
            while stack and stack[-1][0] >= indent:
                stack.pop()
            prefix = stack[-1][1] if stack else ""
            for name in re.split(r"\s{2,}|\s+#", line.strip())[0].split():
                if name.endswith("/"):
                    stack.append((indent, prefix + name))
                else:
                    paths.add(prefix + name)
        return paths
    return None


def files_of_the_tree():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: there is no telling which files belong to the project")
    boring = ("__init__.py", "py.typed")
    return {f for f in listed.stdout.split() if (ROOT / f).exists() and not f.endswith(boring)}


def test_readme_tree_lists_each_file_and_no_other():
    if not README.exists() or (listed := tree_of(README.read_text(encoding="utf-8"))) is None:
        pytest.skip("the README has no tree yet")
    listed = {p for p in listed if p.split("/")[0] in FOLDERS and not p.endswith(("__init__.py", "py.typed"))}
    existing = files_of_the_tree()
    assert sorted(existing - listed) == [], "in the tree, not in the README"
    assert sorted(listed - existing) == [], "in the README, not in the tree"


def test_the_tree_is_read_as_people_write_it():
    readme = """
```
pip install dynamiccl
```

```
agent/             what decides
  policy.py        the LSTM
  commands/        one file a command
    show.py tune.py
envs/nccl/         a running NCCL
  plugin.c         loaded by NCCL
traces/records.py  the records
tests/             one file a module
```
"""
    assert tree_of(readme) == {
        "agent/policy.py",
        "agent/commands/show.py",
        "agent/commands/tune.py",
        "envs/nccl/plugin.c",
        "traces/records.py",
    }
    assert tree_of("no tree here\n```\nls\n```\n") is None


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_links_inside_the_repository_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", text)
    assert [t for t in targets if not (path.parent / t).exists()] == []


def test_the_tour_of_the_job_names_what_is_there():
    """Every name in backticks that stands outside of links is something that the folder's modules define."""
    folder = ROOT / "zero_workload"
    tour = (folder / "README.md").read_text(encoding="utf-8").partition("## A guided tour")[2]
    nodes = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    named = set(re.findall(r"(?<!\[)`(\w+)`", tour))
    assert len(named) > 10 and named <= defined


def test_every_test_that_the_fault_matrix_names_exists():
    page = (ROOT / "envs" / "nccl" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", page)
    missing = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text("utf-8")]
    assert len(named) > 20 and not missing


def test_every_variable_that_the_job_or_people_set_is_on_the_deployment_page():
    page = (ROOT / "envs" / "nccl" / "README.md").read_text(encoding="utf-8")
    sources = [p for p in (ROOT / "envs").rglob("*") if p.suffix in (".py", ".c", ".h")]
    read = {n for p in sources for n in re.findall(r"[\"'](DYNAMICCL_[A-Z_]+[A-Z])[\"']", p.read_text("utf-8"))}
    assert "DYNAMICCL_RUN" in read and sorted(n for n in read if n not in page) == []
