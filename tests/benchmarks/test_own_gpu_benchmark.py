"""benchmarks/own_gpu.py runs where there is no GPU: small, and without goals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "own_gpu.py"


@pytest.mark.slow
def test_a_table_of_all_arms_without_a_gpu() -> None:
    words = [sys.executable, str(SCRIPT), "--device", "cpu"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["arm", "plain loop", "no seeds", "grown"]
