"""Sphinx settings of the documentation: ``make docs``.

The pages are read on GitHub as they are, and on the site. There a block ``<!-- site: PATH "FROM" "TO" -->`` ... ``<!--
/site -->`` is replaced by the text of that file of the checkout (between the two texts, if they are given), and links
lead to pages of the site. A link to a file that is no page becomes its text. All other links have to lead somewhere.
"""

import os
import re
from pathlib import Path

project = "dynamiccl"
author = "the dynamiccl authors"
copyright = "2026, the dynamiccl authors. Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "dynamiccl"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Sections that are included begin with the heading of their page.
suppress_warnings = ["myst.header"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
#: Files of the checkout that are pages of the site under another name.
PAGES = {ROOT / "OPERATING.md": "operating.md", ROOT / "zero_workload" / "README.md": "workload.md"}
_BLOCK = re.compile(r'<!-- site: (\S+?)(?: "(.*?)" "(.*?)")? -->\n.*?<!-- /site -->', re.DOTALL)
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def linked(text: str, page: Path) -> str:
    """The text of a file of the checkout with the links that the site has."""

    def link(found: re.Match) -> str:
        is_picture, words, target, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        file = (page.parent / target).resolve()
        if is_picture:
            return f"![{words}]({os.path.relpath(file, DOCS)})"
        name = PAGES.get(file, file.name if file.parent == DOCS else "")
        return f"[{words}]({name}{anchor})" if name else words

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def included(found: re.Match) -> str:
    """What the site has in place of a block."""
    file = (DOCS / found[1]).resolve()
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return f"```python\n{text}```"
    if found[2]:
        text = text.split(found[2], 1)[1].split(found[3], 1)[0]
    return linked(text, file)


def read_source(app, docname, source) -> None:
    """Sphinx reads a page."""
    page = DOCS / f"{docname}.md"
    parts, end = [], 0
    for found in _BLOCK.finditer(source[0]):
        app.env.note_dependency(str((DOCS / found[1]).resolve()))
        parts += [linked(source[0][end : found.start()], page), included(found)]
        end = found.end()
    source[0] = "".join([*parts, linked(source[0][end:], page)])


def setup(app) -> None:
    """Sphinx starts."""
    app.connect("source-read", read_source)
