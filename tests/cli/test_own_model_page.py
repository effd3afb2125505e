"""Every snippet of docs/own_model.md runs, in the order of the page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "own_model.md"


def test_the_snippets_of_the_page_run(tmp_path: Path) -> None:
    for package in ("pandas", "torchmetrics", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed, and the page uses it")
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(snippets) > 12
    (tmp_path / "page.py").write_text("\n".join(snippets), "utf-8")
    command = [sys.executable, "-W", "ignore", "page.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "layouts={'1': 'conv1d'}" in result.stdout
    assert "as optimizer group 0 (lr 0.01, weight_decay 0.01)" in result.stdout
    assert "drop_last=True" in result.stdout
