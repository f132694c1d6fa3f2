"""Sphinx configuration: ``make docs`` builds the pages of this folder without a network, and warnings are errors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "Slapo"
copyright = "the authors of Slapo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "registered_names"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["extensions"]
html_theme = "furo"
html_title = "Slapo"
html_show_copyright = False
html_show_sphinx = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "groupwise"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
