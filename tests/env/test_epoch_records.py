"""Records of an epoch as columns: what was done and seen, what was not played, what was undone."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from reward_scenarios import Pretended, plant

from esper.actions import BLENDS, WAIT, Action, Op
from esper.engine.governor import FAULTS, Fault, Verdict
from esper.env.epoch_records import epoch_columns
from esper.env.world import World
from esper.growth.blueprints import blueprint_names
from esper.lifecycle import Stage
from esper.slot_columns import SlotColumns


def test_records_become_columns() -> None:
    """The first network is planted in, the second does not play, the third, with a slot less, is undone."""
    networks = [Pretended(slots=2), Pretended(slots=2), Pretended(slots=1)]
    planted = networks[0].step(plant("useful", 1))
    named = replace(planted.effect, action=Action(Op.GERMINATE, 1, "conv", "gated"))
    verdict = Verdict(Fault.DIVERGENCE, 9.0, 3.0, "")
    records = [replace(planted, effect=named), None, replace(networks[2].step(WAIT), verdict=verdict)]
    epoch = epoch_columns(records, SlotColumns.together([one.lifecycle.columns for one in networks]))
    conv, gated = blueprint_names().index("conv"), BLENDS.index("gated")
    assert epoch.played.tolist() == [True, False, True]
    done = torch.stack((epoch.op, epoch.slot, epoch.blueprint, epoch.blend), 1)
    assert done.tolist() == [[Op.GERMINATE, 1, conv, gated], [-1, 0, 0, 0], [Op.WAIT, 0, 0, 0]]
    assert epoch.changed.tolist() == [True, False, False]
    assert epoch.stage.tolist() == [[Stage.DORMANT, Stage.TRAINING], [-1, -1], [Stage.DORMANT, Stage.DORMANT]]
    assert epoch.accuracy.isnan().tolist() == epoch.train_loss.isnan().tolist() == [False, True, False]
    assert epoch.alpha.isnan().tolist() == [[False, False], [True, True], [False, False]]
    assert epoch.shadow[..., 0].nan_to_num(-1.0).tolist() == [[-1.0, 12.0], [-1.0, -1.0], [-1.0, -1.0]]
    assert epoch.fault.tolist() == [-1, -1, FAULTS.index(Fault.DIVERGENCE)]
    assert epoch.fault_seen[2:].tolist() + epoch.fault_limit[2:].tolist() == [9.0, 3.0]
    assert epoch.undone.tolist() == [False, False, True]

    world = World.together([one.world for one in networks])
    before = world.epoch
    world.record(epoch)
    assert (world.epoch - before).tolist() == [1, 0, 1]
    assert world.tried.nonzero().tolist() == [[0, 1, conv]]
    assert world.paths == ("stage0", "stage1")
    assert math.isnan(world.accuracy[1, 0])
