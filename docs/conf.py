"""Sphinx configuration: `make docs` builds the pages of this folder into build/docs."""

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
exclude_patterns = ["*.py"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"


class Generated(SphinxDirective):
    """```{generated} NAME [argument]``` is the Markdown that this function of `generated.py` makes."""

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        text = getattr(generated, self.arguments[0])(*self.arguments[1:])
        holder = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), self.arguments[0]), 0, holder, match_titles=True)
        return holder.children


def setup(app: Sphinx) -> None:
    app.add_directive("generated", Generated)
