"""The examples of the pages run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_kind_of_seed_of_your_own(tmp_path: Path) -> None:
    """In a process of its own, because what is registered stays."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "blueprints.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "own.py").write_text("\n".join(examples) + 'esper.load("mixed_out", trust_program=True)\n', "utf-8")
    command = [sys.executable, "own.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    with_it, without = map(float, re.findall(r"([\d.]+) % (?:grown|without)", result.stdout))
    assert with_it > without + 20.0, result.stdout
