"""Sphinx configuration: `make docs` builds the pages of this folder into build/docs."""

project = "Esper"
extensions = ["myst_parser"]
html_theme = "furo"
exclude_patterns = ["conf.py"]
myst_heading_anchors = 4
