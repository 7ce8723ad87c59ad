"""Sphinx settings of the documentation: ``make docs``."""

project = "dynamiccl"
author = "the dynamiccl authors"
copyright = "2026, the dynamiccl authors. Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "dynamiccl"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Pages that are included from the folders link to files of the checkout: tests/project/test_docs.py checks those.
suppress_warnings = ["myst.xref_missing", "myst.header"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
