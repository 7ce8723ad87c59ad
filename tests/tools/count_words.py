"""Print the words that readers meet, by page: ``python tests/tools/count_words.py``, with ``--json`` for programs.

Counted are all pages of the checkout, the help of each command, the docstrings that the site shows on the page of the
API, and what other docstrings have beyond 60 words. A word has a letter or a digit. The log, its archive and the
changelog are notes and are counted apart. The second column is what the site shows of a page, with the blocks that it
takes from elsewhere.
"""

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("agent", "envs", "traces", "zero_workload", "examples")
#: What a docstring may have before it is counted as a page of its own.
SHORT = 60
NOTES = ("agent/LOG.md", "agent/LOG-archive.md", "CHANGELOG.md")


def words(text: str) -> int:
    """Words with a letter or a digit; pictures, rules and the marks of a table are none."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def pages() -> dict[str, str]:
    """The pages of the checkout, by name."""
    found = [*ROOT.glob("*.md"), *(p for f in ("docs", *FOLDERS) for p in (ROOT / f).rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(found)}


def shown(pages_read: dict[str, str]) -> dict[str, int]:
    """Words of each page of the site, with the blocks that ``docs/conf.py`` puts into it."""
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    assert spec and spec.loader
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    return {
        name: words(conf._BLOCK.sub(conf.included, text))
        for name, text in pages_read.items()
        if name.startswith("docs/")
    }


def docstrings() -> Iterator[tuple[str, str, str]]:
    """(file, name within it, docstring) of all modules, classes and functions of the product. A module's name is ""."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

    def within(file: str, node: ast.AST, name: str) -> Iterator[tuple[str, str, str]]:
        if isinstance(node, (ast.Module, *kinds)) and (text := ast.get_docstring(node)):
            yield file, name, text
        for child in ast.iter_child_nodes(node):
            if isinstance(child, kinds):
                yield from within(file, child, f"{name}.{child.name}".strip("."))
            else:
                yield from within(file, child, name)

    for folder in FOLDERS[:4]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from within(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8")), "")


def on_the_site(page: str) -> Callable[[str, str], bool]:
    """Whether the page of the API shows the docstring of a file's name."""
    names: list[tuple[str, str]] = []
    for kind, dotted, options in re.findall(
        r"auto(module|class|function):: dynamiccl\.([\w.]+)\n((?:   :.*\n)*)", page
    ):
        members = re.search(r":members:(.*)", options)
        wanted = members[1].strip().replace(", ", "|") or "[a-z]\\w*" if members else None
        place, _, last = dotted.rpartition(".")
        if kind == "module":
            names.append((f"{dotted.replace('.', '/')}.py", r"(?!_)\w*(\.[a-z]\w*)?"))
        else:
            names.append((place.replace(".", "/"), f"{last}(\\.({wanted}))?" if wanted else last))
    return lambda file, name: any(
        file.startswith(begin) and re.fullmatch(pattern, name) for begin, pattern in names
    )


def helps() -> dict[str, int]:
    """Words of ``--help``, by command."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from command import NAMES, invoke

    return {
        f"dynamiccl {name}".strip(): words(invoke([*name.split(), "--help"]).stdout) for name in ("", *NAMES)
    }


def table() -> dict[str, tuple[int, int]]:
    """Name -> (words of the file, words that the site shows there)."""
    texts = pages()
    of_site = shown(texts)
    rows = {name: (words(text), of_site.get(name, 0)) for name, text in texts.items() if name not in NOTES}
    is_shown = on_the_site(texts["docs/api.md"])
    told = [(words(text), is_shown(file, name)) for file, name, text in docstrings()]
    rows["docstrings on the page of the API"] = (sum(n for n, on_site in told if on_site), 0)
    beyond = sum(max(0, n - SHORT) for n, on_site in told if not on_site)
    rows[f"other docstrings, beyond {SHORT} words each"] = (beyond, 0)
    helped = helps()
    return rows | {f"{name} --help": (n, 0) for name, n in helped.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print for programs")
    rows = table()
    if parser.parse_args().json:
        print(json.dumps({name: n for name, (n, _) in rows.items()}, indent=1))
        return
    for name, (n, on_site) in rows.items():
        print(f"{name:48} {n:7,}" + (f" {on_site:7,}" if on_site not in (0, n) else ""))
    print(f"{'in all':48} {sum(n for n, _ in rows.values()):7,}")
    texts = pages()
    for name in NOTES:
        print(f"{name:48} {words(texts[name]):7,} (notes, not in the sum)")


if __name__ == "__main__":
    main()
