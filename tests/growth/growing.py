"""Growing models by hand, at any stage of life, with seeds that act: what the export tests start from."""

from __future__ import annotations

import torch
from torch import nn

from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from esper.lifecycle import Stage
from esper.tasks.hosts import Conv1dHost, Conv2dHost, GPTHost, MLPHost
from small_worlds import advance, force, stages_of

STAGES = ("TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "retiring")
Planting = tuple[int, str, str, str]
"""Slot, blueprint, blend, and the stage (or "retiring") that the seed has reached."""


def built_in(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A small host and a batch of four for it."""
    torch.manual_seed(0)
    if name == "mlp":
        return MLPHost(12, [16, 16, 8], 5), torch.randn(4, 3, 4)
    if name == "conv1d":
        return Conv1dHost(1, [8, 8, 8], [5, 3, 3], 10), torch.randn(4, 1, 40)
    if name == "conv2d":
        return Conv2dHost(3, [8, 8, 16], [3, 3, 1], 10, pooling="average"), torch.randn(4, 3, 12, 12)
    return GPTHost(20, 16, 16, 2, 3, dropout=0.1), torch.randint(0, 20, (4, 12))


def grow(
    host: nn.Module, example: object, plantings: list[Planting], slots: list[str] | None = None, **options: object
) -> GrowingModel:
    model = attach(host, slots or stages_of(host), example, **options)
    model.train()
    for _ in range(2):  # running statistics that are not those of birth
        model(*example) if isinstance(example, tuple) else model(example)
    for index, blueprint, blend, stage in plantings:
        plant(model, model.slots[index], blueprint, blend, stage)
    return model.eval()


def plant(model: GrowingModel, slot: Slot, blueprint: str, blend: str, stage: str) -> None:
    model.germinate(slot, blueprint, blend, epoch=0)
    torch.manual_seed(slot.index)
    for parameter in model.seed_parameters(slot):
        nn.init.normal_(parameter, std=0.3)  # at birth a seed does nothing: a test could not see whether it is there
    target = Stage["HOLDING" if stage == "retiring" else stage]
    while slot.life.stage is not target:
        if slot.life.stage is Stage.HOLDING:
            force(slot, stage=Stage.FOSSILIZED)
        elif target is Stage.TRAINING:
            force(slot, stage=Stage.TRAINING)
        else:
            advance(slot)
    if stage == "retiring":
        force(slot, age=100)
        model.lifecycle.prune(slot.index, epoch=0)
    model._follow(slot)
