"""The agreement of the engines: paired by draw, with an interval."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from short_family import ShortFamily

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import stacked as page


def test_engines_are_compared_on_the_same_draws(capsys: pytest.CaptureFixture[str]) -> None:
    found = page.agreement(ShortFamily("mixed/vector"), {"none": "none", "schedule": "schedule"}, range(4))
    page.show(found)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["controller", "none", "schedule", "seconds:"]
    for row in found:
        assert row.stacked - row.plain == pytest.approx(row.difference.value)
        assert abs(row.accuracy.value) < 5.0
