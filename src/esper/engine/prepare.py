"""A learner from a task: host, slots, optimizer, minibatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from esper.engine.few_channel_conv import use_few_channel_convs
from esper.engine.learner import Learner
from esper.engine.measure import Loss
from esper.engine.optimizer import GrowingOptimizer
from esper.engine.precision import Precision
from esper.engine.regions import compile_regions, compiled_loss, compiler_works
from esper.growth.attach import survey
from esper.growth.model import GrowingModel, Survey
from esper.growth.randomness import preserved_rng
from esper.growth.tensors import move_together
from esper.growth.trial import uses_other_rngs
from esper.lifecycle import Rules
from esper.tasks.data import Split, channels_last
from esper.tasks.feed import TensorFeed
from esper.tasks.registry import Task

DECAY = 0.3
"""Share of a run over which the learning rate falls to zero; before that it is constant, so that late seeds learn."""


def decay_over(updates: int) -> Callable[[int], float]:
    """The share of its rate with which a group makes each of a run's updates."""
    return lambda update: max(0.0, min(1.0, (updates - update) / (DECAY * updates)))


def task_learner(
    task: Task,
    seed: int,
    epochs: int,
    *,
    budget: int | None = None,
    max_seeds: int | None = None,
    rules: Rules | None = None,
    precision: Precision = Precision.FP32,
    compiled: bool = False,
    known: Survey | None = None,
) -> Learner:
    """A fresh host of the task, ready to train and grow for `epochs`.

    `known` is the survey of another network of the same task, and spares this one its own.
    """
    train, val = task.splits.train, task.splits.val
    device, half_images = train.x.device, precision is Precision.BF16 and train.x.is_cuda and train.x.dim() == 4
    with preserved_rng(torch.device("cpu")):
        torch.default_generator.manual_seed(seed)
        host = task.make_host()
    move_together(host, device, by_pixel=half_images)
    if half_images:
        use_few_channel_convs(host)
        train, val = Split(channels_last(train.x), train.y), Split(channels_last(val.x), val.y)
    found = known
    if found is None:
        found = survey(host, task.slots, train.x[:2], visibility=task.visibility)
        found = replace(found, uses_other_rngs=uses_other_rngs(host, train.x[:2]))
    growing = GrowingModel(host, found, rules=rules, budget=budget, max_seeds=max_seeds, rng_seed=seed)
    growing.first_weights = None if task.numbers is None else task.numbers.seed
    if half_images:
        growing.on_planting = use_few_channel_convs
    loss: Loss = task.loss
    if compiled and compiler_works(device):
        compile_regions(growing)
        loss = compiled_loss(loss)
    # Fused: one call for all parameters, on CPU too. Per-parameter calls cost more than the arithmetic in small hosts.
    adam = torch.optim.AdamW(host.parameters(), lr=task.learning_rate, weight_decay=task.weight_decay, fused=True)
    feed = TensorFeed(
        train,
        val,
        batch_size=task.batch_size,
        updates_per_epoch=task.updates_per_epoch,
        augment=task.augment,
        seed=seed,
        numbers=task.numbers,
    )
    updates = epochs * task.updates_per_epoch
    optimizer = GrowingOptimizer(adam, warmup_updates=task.updates_per_epoch, decay=decay_over(updates))
    return Learner(growing, optimizer, feed, loss, task.score, seed=seed, epochs=epochs, precision=precision)
