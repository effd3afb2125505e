"""benchmarks/removals.py: PRUNE is forbidden in one of two plays of the same draws, and in no other."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import removals
from esper.actions import Op
from esper.agent import policies
from esper.env.spaces import ActionMasks
from esper.env.world import World
from esper.lifecycle import Rules, Stage
from esper.slot_columns import SlotColumns
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


def test_the_rule_removes_what_holds_at_a_loss_and_keeps_nothing_else_from_being_kept() -> None:
    """Three networks with a holding seed of 100 parameters on a host of 200, at a rent of 5: it owes 2.5 points."""
    stage = torch.tensor([[Stage.HOLDING], [Stage.HOLDING], [Stage.BLENDING]])
    contribution = torch.tensor([[[1.0, 0.0, 0.1]], [[4.0, 0.0, 0.1]], [[1.0, 0.0, 0.1]]]).double()
    slots = SlotColumns.empty([1, 1, 1], [Rules()] * 3)
    slots.stage, slots.contribution = stage, contribution
    slots.size = torch.full((3, 1), 100)
    networks = torch.ones(3, dtype=torch.float64)
    world = SimpleNamespace(slots=slots, host_parameters=200 * networks, rent=5 * networks)
    every = torch.ones((3, len(Op)), dtype=torch.bool)
    some = torch.ones((3, 1, 1), dtype=torch.bool)
    masks = removals.no_losses(ActionMasks(every, every[..., None].clone(), some, some), cast(World, world))
    assert masks.op.tolist() == [[op == Op.PRUNE for op in Op], [op != Op.PRUNE for op in Op], [True] * len(Op)]
