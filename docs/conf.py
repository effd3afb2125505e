"""Sphinx configuration: `make docs` builds the pages of this folder into build/docs."""

project = "Esper"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "Esper"
html_show_copyright = False  # the licence is in LICENSE
html_static_path = ["static"]
html_css_files = ["wide.css"]
exclude_patterns = ["*.py"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
