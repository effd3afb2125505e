"""benchmarks/removals.py: PRUNE is forbidden in one of two plays of the same draws, and in no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import removals
from esper.actions import Op
from esper.agent import policies
from short_family import ShortFamily


def test_one_policy_with_and_without_removals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(policies, "without_costly_removals", policies.without_costly_removals)  # put back afterwards
    monkeypatch.setattr(removals, "get_family", lambda name: ShortFamily("mixed/vector"))
    seen: list[bool] = []
    forbid = removals.no_removals
    monkeypatch.setattr(
        removals,
        "no_removals",
        lambda masks, world: (found := forbid(masks, world), seen.append(bool(found.op[:, Op.PRUNE].any())))[0],
    )
    assert removals.main("mixed/vector", draws=2) == 0
    assert seen
    assert not any(seen)  # no step of the second play could remove
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| all draws | 2 | ")
