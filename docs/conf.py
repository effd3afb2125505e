"""Sphinx configuration: `make docs` builds the pages of this folder into build/docs."""

import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parent))
import generated

project = "Esper"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "Esper"
html_static_path = ["static"]
html_css_files = ["wide.css"]
exclude_patterns = ["*.py"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # of nn.Module


class Generated(SphinxDirective):
    """```{generated} NAME [argument]``` is the Markdown that this function of `generated.py` makes."""

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        text = getattr(generated, self.arguments[0])(*self.arguments[1:])
        holder = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), self.arguments[0]), 0, holder, match_titles=True)
        return holder.children


def code_in_docstrings(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Docstrings mark code as Markdown does, with single backticks; reStructuredText needs two."""
    text = re.sub(r"(?<!`)`([^`]+)`(?=(\w)?)(?!`)", lambda m: f"``{m[1]}``" + ("\\ " if m[2] else ""), "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app: Sphinx) -> None:
    app.add_directive("generated", Generated)
    app.connect("autodoc-process-docstring", code_in_docstrings)
