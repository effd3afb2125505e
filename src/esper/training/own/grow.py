"""Grow one model and keep it: `esper.grow` for a person's own model, `grow_task` for a built-in task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.config import LARGEST_NUMBER, Count, check_number
from esper.engine.learner import Learner
from esper.engine.measure import Loss
from esper.engine.optimizer import GrowingOptimizer
from esper.engine.prepare import decay_over, task_learner
from esper.env.rent import RENT_RATE, check_rent
from esper.errors import refused
from esper.growth.attach import SlotChoice, attach, check_model
from esper.growth.auto_slots import AUTO
from esper.growth.model import GrowingModel
from esper.growth.plain import check_exportable, copied
from esper.lifecycle import Rules
from esper.policy.controller import Controller
from esper.tasks.feed import Feed, chunks
from esper.tasks.registry import Task, percent_correct
from esper.training.catalogue import as_controller
from esper.training.own.arguments import explained
from esper.training.own.data import (
    Data,
    as_feed,
    check_batches_of_one,
    checked_data,
    evaluation_batches,
    example_of,
    without_labels,
)
from esper.training.own.gpu import GpuOptions, check_device
from esper.training.own.grown import Grown
from esper.training.own.metric import Metric, Scale
from esper.training.own.objective import check_test, fit_objective, integers_are_classes
from esper.training.own.optimizer import MakeOptimizer, MakeScheduler, make_optimizer, make_scheduler
from esper.training.own.remarks import outlook, warn_user
from esper.training.own.run import OnEpoch, given_back, run_growth
from esper.training.own.unusual import ignored_batch_size, reads_model, thawed, validates_on_training
from esper.training.own.watch import watching

AT_LEAST_1 = Count(1, LARGEST_NUMBER)
ANY = Count(-LARGEST_NUMBER, LARGEST_NUMBER - 1)
BATCH = 128
"""Examples of an update, where nothing is said."""


@explained(
    "esper.grow",
    "such as optimizer=lambda parameters: torch.optim.AdamW(parameters, {}=0.1)",
    {
        "val_data": "val_data is missing: pass data to validate on, as esper.grow(model, (x, y), (x_val, y_val))",
        "": "pass the model, the training data and the validation data, as esper.grow(model, (x, y), (x_val, y_val)), "
        "and all else by name",
    },
)
def grow(
    model: nn.Module,
    train_data: Data,
    val_data: Data,
    *,
    slots: SlotChoice = AUTO,
    test_data: Data | None = None,
    controller: str | Path | Controller = DEFAULT_CONTROLLER,
    epochs: int = 40,
    loss: Loss | None = None,
    metric: Metric | None = None,
    metric_scale: Scale | None = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    batch_size: int = BATCH,
    updates_per_epoch: int | None = None,
    budget: int | None = None,
    max_seeds: int | None = None,
    rent: float = RENT_RATE,
    blueprints: Sequence[str] | None = None,
    layouts: Mapping[str, str] | None = None,
    visibility: str | Mapping[str, str] | None = None,
    rules: Rules | None = None,
    seed: int = 0,
    device: str | torch.device = "auto",
    precision: str = "fp32",
    compiled: bool = False,
    cuda_graphs: bool = False,
    control: bool = False,
    in_place: bool = False,
    on_epoch: OnEpoch | None = None,
    patience: int | None = None,
    keep_best: bool = False,
    progress: bool | Console = False,
    checkpoint: str | Path | None = None,
) -> Grown:
    """Train a copy of `model` and let it grow at `slots` (module paths or patterns); the result is a plain model.

    `slots` may also be some of those that `esper.slots(model, example)` lists; "auto" chooses by a fixed rule.

    Data are (inputs, targets) tensors, arrays or frames, or `DataLoader`s. The metric gives one number per example, or
    one for the whole set, or is an object with `update` and `compute` as in torchmetrics; its scale is recognised where
    that is certain, else `metric_scale` says it. Without a loss, integer targets mean cross-entropy, others squared
    error, and a model of Hugging Face its own; without a metric, the loss decides what is right.

    `optimizer` makes an optimizer from (parameters) or (parameters, model), where the model is the one that is trained;
    `scheduler` makes a scheduler (stepped per update) from an optimizer, in place of the usual rate, which is constant
    and falls to zero over the last 30 % of the run. Parameters that do not require gradients stay as they are; of a
    frozen model, only what grows is trained. `layouts` and `visibility` are as in `esper.attach`.

    `rent` is the price of size: points of accuracy that a seed as large as the model must earn. Rules, what is kept at
    the end, `Grown.score` and the controller `small` use it: 0 is accuracy at any size.

    On a GPU, `precision` is fp32, tf32 or bf16 (passes in bfloat16, weights in single precision), `compiled` compiles
    what lies between the slots, and `cuda_graphs` replays whole epochs, where data, optimizer and model allow it.

    With `control`, an ungrown copy trains beside it, for an honest comparison. Ctrl-C keeps what was grown so far. With
    `checkpoint`, a folder, the same call goes on after the last whole epoch of a run that was killed or interrupted.

    `patience` ends the run after so many epochs in a row without a better validation accuracy, but not while a seed is
    on its way; with `keep_best` the network of the best epoch is returned, and the control is that of its own best one.
    `progress` shows the epochs as they pass: live in a terminal or a notebook, else as lines, on the error stream.

    `model` itself is not touched, unless it is trained `in_place`, to save memory: then it ends as the trained
    host without its seeds, and `grown.model` is made of the same tensors. What is known to go wrong before the training
    is warned of (`GrowthWarning`); `Grown.remarks` has all of it.
    """
    check_number("epochs", epochs, AT_LEAST_1)
    check_number("batch_size", batch_size, AT_LEAST_1)
    check_number("updates_per_epoch", updates_per_epoch, AT_LEAST_1._replace(optional=True))  # None: one pass over data
    check_number("seed", seed, ANY)
    check_number("patience", patience, AT_LEAST_1._replace(optional=True))
    rent = check_rent(rent)
    decider = as_controller(controller)
    where = pick_device(device)
    gpu = GpuOptions(where, precision, compiled=compiled, cuda_graphs=cuda_graphs)
    host = _own(model, in_place=in_place).to(where)
    labels = integers_are_classes(loss)
    train, val = checked_data(train_data, "train", labels=labels), checked_data(val_data, "val", labels=labels)
    held_out = None if test_data is None else checked_data(test_data, "test", labels=labels)
    feed, batch, targets = as_feed(host, train, val, where, batch_size, updates_per_epoch, seed, labels=labels)
    example = example_of(feed, batch)
    objective = fit_objective(host, feed, batch, targets, loss, metric, metric_scale, copied=not in_place)
    check_batches_of_one(host, feed, example)

    named = {"loss": loss, "metric": metric}
    limits: dict[str, Any] = {"rules": rules, "blueprints": blueprints, "budget": budget, "max_seeds": max_seeds}
    growing = attach(host, slots, example, layouts=layouts, visibility=visibility, **limits, rng_seed=seed)
    check_exportable(growing, example)

    def learner(growing: GrowingModel, feed: Feed) -> Learner:
        made = make_optimizer(optimizer, growing.host)
        optimizing = GrowingOptimizer(
            made,
            make_scheduler(scheduler, made),
            warmup_updates=feed.updates_per_epoch,
            decay=None if scheduler else decay_over(epochs * feed.updates_per_epoch),
        )
        loss = gpu.prepared(growing, objective.loss)
        how: dict[str, Any] = {"seed": seed, "epochs": epochs, "precision": gpu.precision}
        return Learner(growing, optimizing, feed, loss, objective.score, **how)

    learners = [learner(growing, feed)]
    if control:
        other, _, _ = as_feed(host, train, val, where, batch_size, updates_per_epoch, seed, labels=labels)
        learners.append(learner(GrowingModel(copied(host), growing.survey, **limits, rng_seed=seed), other))
    test = None if held_out is None else evaluation_batches(held_out, where, feed, objective.classes, objective.ignored)
    if test is not None:
        check_test(host, test, objective)
    noticed = (
        ignored_batch_size(batch_size, BATCH, train),
        thawed(model),
        objective.remark,
        *("" if in_place else reads_model(what, function, model) for what, function in named.items()),
    )
    before = outlook(
        growing,
        decider,
        epochs,
        rent,
        constant=objective.constant,
        ignored=objective.ignored,
        metric=objective.metric,
        auto=isinstance(slots, str),
        noticed=noticed,
        noted=(validates_on_training(train, val),),
    )
    with given_back(growing):
        bare = without_labels(host, example)
        with watching(progress, growing, epochs, on_epoch, metric=objective.metric) as noted:
            return run_growth(
                learners,
                before,
                bare,
                test,
                seed,
                noted,
                warn_user,
                checkpoint,
                patience=patience,
                keep_best=keep_best,
                gpu=gpu,
            )


def _own(model: nn.Module, *, in_place: bool) -> nn.Module:
    """The module that is trained: a copy of the user's, or theirs."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # of torch.compile; the grown model can be compiled again
    check_model(model)
    return model if in_place else copied(model)


def grow_task(
    task: Task,
    *,
    controller: str | Path | Controller = DEFAULT_CONTROLLER,
    epochs: int = 40,
    seed: int = 0,
    budget: int | None = None,
    max_seeds: int | None = None,
    rent: float = RENT_RATE,
    precision: str = "fp32",
    compiled: bool = False,
    cuda_graphs: bool = False,
    control: bool = False,
    patience: int | None = None,
    keep_best: bool = False,
    progress: bool | Console = False,
    on_epoch: OnEpoch | None = None,
    on_remark: Callable[[str], None] = warn_user,
    checkpoint: str | Path | None = None,
) -> Grown:
    """Grow the host of a built-in task. `seed` decides the host's start, its minibatches and its seeds.

    The rest is as in `grow`. `on_remark` is called before the training with each remark that is known then.
    """
    check_number("epochs", epochs, AT_LEAST_1)
    rent = check_rent(rent)
    decider = as_controller(controller)
    gpu = GpuOptions(task.splits.train.x.device, precision, compiled=compiled, cuda_graphs=cuda_graphs)
    how: dict[str, Any] = {"precision": gpu.precision, "compiled": gpu.compiled}
    learners = [
        task_learner(task, seed, epochs, budget=budget, max_seeds=max_seeds, **how) for _ in range(2 if control else 1)
    ]
    test = partial(chunks, task.splits.test)
    before = outlook(
        learners[0].model, decider, epochs, rent, constant="class" if task.score is percent_correct else None
    )
    with watching(progress, learners[0].model, epochs, on_epoch, task.name) as noted:
        return run_growth(
            learners,
            before,
            task.splits.train.x[:2],
            test,
            seed,
            noted,
            on_remark,
            checkpoint,
            patience=patience,
            keep_best=keep_best,
            gpu=gpu,
        )


def pick_device(device: str | torch.device) -> torch.device:
    """`auto` is a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with refused(ValueError, f"device {str(device)!r} cannot be used here", RuntimeError, AssertionError):
        where = torch.device(device)
        check_device(where)
        torch.zeros(1, device=where)
        return where
