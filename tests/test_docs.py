"""Documentation that cannot rot: docstrings on everything public, pages whose files and links exist."""

import ast
import re
import subprocess
import sys
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


def test_the_first_page_is_short_and_each_folder_has_one():
    assert README.stat().st_size <= 8 * 1024
    for folder in (*FOLDERS, "envs/nccl"):
        assert (ROOT / folder / "README.md").exists() and f"({folder}/README.md)" in README.read_text("utf-8")


@pytest.mark.parametrize("path", [p for p in READMES if p.parent != ROOT], ids=name_of)
def test_files_that_a_folders_page_names_exist(path):
    """Names in backticks that end as our files do; ``<...>`` stands for something."""
    named = set(re.findall(r"`([\w./<>-]+\.(?:py|c|h|md|toml))`", path.read_text(encoding="utf-8")))
    missing = [n for n in named if "<" not in n and not ((path.parent / n).exists() or (ROOT / n).exists())]
    assert sorted(missing) == []


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


def test_the_snippet_of_the_environments_runs():
    page = (ROOT / "envs" / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)```", page, re.S)[1]
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and re.fullmatch(r"\[[\d\s]+\] \d+", done.stdout.strip()), done.stderr
