"""Every snippet of docs/own_model.md, data.md and slots.md runs, in the order of the page."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import esper

DOCS = Path(__file__).parents[2] / "docs"
PRINTED = {
    "own_model.md": "as optimizer group 0 (lr 0.01, weight_decay 0.01)",
    "data.md": "drop_last=True",
    "slots.md": "layouts={'1': 'conv1d'}",
}


@pytest.mark.parametrize("page", ["own_model.md", pytest.param("data.md", marks=pytest.mark.slow), "slots.md"])
def test_the_snippets_of_the_page_run(page: str, tmp_path: Path) -> None:
    for package in ("pandas", "torchmetrics", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed, and the page uses it")
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert len(snippets) > 1
    (tmp_path / "page.py").write_text("\n".join(snippets), "utf-8")
    command = [sys.executable, "-W", "ignore", "page.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert PRINTED[page] in result.stdout


def test_the_table_of_arguments_is_that_of_the_functions() -> None:
    """Names, order, defaults, and the stars of those that `esper.Growth` takes, too."""
    section = (DOCS / "own_model.md").read_text("utf-8").split("## All arguments\n")[1]
    rows = re.findall(r"^\| (`[^|]*`)( \*)? \|", section, re.M)
    told = {name: default for cell, _ in rows for name, default in re.findall(r"`(\w+)(?:=([^`]*))?`", cell)}
    arguments = inspect.signature(esper.grow).parameters
    assert set(told) == set(arguments)
    for name, argument in arguments.items():
        written = ast.literal_eval(told[name]) if told[name] else inspect.Parameter.empty
        assert written == argument.default, name
    starred = {name for cell, star in rows if star for name in re.findall(r"`(\w+)", cell)}
    shared = set(arguments) & set(inspect.signature(esper.Growth).parameters)
    assert starred == shared - {"optimizer"}  # an optimizer there, a function that makes one here
