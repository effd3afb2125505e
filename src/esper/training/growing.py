"""Grow one model and keep it: `esper.grow` for a person's own model, `grow_task` for a built-in task."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from esper.actions import Action
from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.engine.eager import EagerEngine, EpochRecord
from esper.engine.governor import Governor
from esper.engine.learner import Learner
from esper.engine.measure import Evaluation, Loss, evaluate, gather
from esper.engine.optimizer import GrowingOptimizer
from esper.engine.prepare import decay_over, task_learner
from esper.env.situation import observe
from esper.growth.attach import attach, check_model
from esper.growth.export import Saved, save
from esper.growth.model import GrowingModel, Survey
from esper.growth.plain import ExportError, allowed_gap, check_exportable, copied, output_gap, plain_model
from esper.growth.probe import arguments, untouched
from esper.growth.slot import preserved_rng
from esper.lifecycle import Rules, Stage, Transition
from esper.policy.controller import Controller, NoGrowth
from esper.tasks.feed import Batch, Feed, chunks
from esper.tasks.registry import Task
from esper.training.catalogue import make_controller
from esper.training.data import (
    Data,
    as_feed,
    check_batches_of_one,
    checked_data,
    evaluation_batches,
    example_of,
)
from esper.training.history import History
from esper.training.interrupt import interruptible
from esper.training.objective import fit_objective, integers_are_classes
from esper.training.own_metric import Metric, Scale
from esper.training.own_optimizer import MakeOptimizer, MakeScheduler, make_optimizer, make_scheduler

OnEpoch = Callable[[EpochRecord, EpochRecord | None], None]
"""Called after every epoch with what happened to the growing model, and to the control if there is one."""

MOST_ROLLBACKS = 3
"""Epochs in a row that are undone before a run is given up."""


class DivergedError(RuntimeError):
    """Training broke, and there is nothing sensible to go on with."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A grown model and how it came to be."""

    model: nn.Module
    """Plain PyTorch: no hooks, nothing of Esper's machinery; train it further, deploy it, keep it. In evaluation mode,
    in which it was measured; `model.train()` to train on."""
    history: History
    validation: Evaluation
    test: Evaluation | None
    """On the test data, if there are any. Nothing was decided by them."""
    control: Evaluation | None
    """The same host without growth, trained as long, on the same test (else validation) data."""
    example: Any
    interrupted: bool
    """The run was stopped before its last epoch."""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def save(self, directory: str | Path) -> Saved:
        """Write the model in its portable forms, and its history, into `directory`."""
        return save(self.model, directory, self.example, history=self.history.to_json())


def grow(
    model: nn.Module,
    train_data: Data,
    val_data: Data,
    *,
    slots: Sequence[str],
    test_data: Data | None = None,
    controller: str | Path | Controller = DEFAULT_CONTROLLER,
    epochs: int = 40,
    loss: Loss | None = None,
    metric: Metric | None = None,
    metric_scale: Scale | None = None,
    optimizer: MakeOptimizer | None = None,
    scheduler: MakeScheduler | None = None,
    batch_size: int = 128,
    updates_per_epoch: int | None = None,
    budget: int | None = None,
    max_seeds: int | None = None,
    blueprints: Sequence[str] | None = None,
    layouts: Mapping[str, str] | None = None,
    visibility: str | Mapping[str, str] | None = None,
    rules: Rules | None = None,
    seed: int = 0,
    device: str | torch.device = "auto",
    control: bool = False,
    in_place: bool = False,
    on_epoch: OnEpoch | None = None,
) -> Grown:
    """Train a copy of `model` and let it grow at `slots` (module paths or patterns); the result is a plain model.

    Data are (inputs, targets) tensors, arrays or frames, or `DataLoader`s. The metric gives one number per example, or
    one for the whole set, or is an object with `update` and `compute` as in torchmetrics; its scale is recognised where
    that is certain, else `metric_scale` says it. Without a loss, integer targets mean cross-entropy, others squared
    error, and a model of Hugging Face its own; without a metric, the loss decides what is right.

    `optimizer` makes an optimizer from (parameters) or (parameters, model), where the model is the one that is trained;
    `scheduler` makes a scheduler (stepped per update) from an optimizer, in place of the usual rate, which is constant
    and falls to zero over the last 30 % of the run. Parameters that do not require gradients stay as they are; of a
    frozen model, only what grows is trained. `layouts` and `visibility` are as in `esper.attach`.

    With `control`, an ungrown copy trains beside it, for an honest comparison. Ctrl-C keeps what was grown so far.
    `model` itself is not touched, unless it is trained `in_place`, for want of memory: then it ends as the trained
    host without its seeds, and `grown.model` is made of the same tensors.
    """
    _check_counts(epochs=epochs, batch_size=batch_size, updates_per_epoch=updates_per_epoch)
    decider = as_controller(controller)
    where = pick_device(device)
    host = _own(model, in_place=in_place).to(where)
    labels = integers_are_classes(loss)
    train, val = checked_data(train_data, "train", labels=labels), checked_data(val_data, "val", labels=labels)
    held_out = None if test_data is None else checked_data(test_data, "test", labels=labels)
    feed, batch, targets = as_feed(host, train, val, where, batch_size, updates_per_epoch, seed, labels=labels)
    example = _in_own_memory(example_of(feed, batch))
    objective = fit_objective(host, feed, batch, targets, loss, metric, metric_scale)
    check_batches_of_one(host, feed, example)

    def learner(host: nn.Module, feed: Feed) -> Learner:
        growing = attach(
            host,
            slots,
            example,
            layouts=layouts,
            visibility=visibility,
            rules=rules,
            blueprints=blueprints,
            budget=budget,
            max_seeds=max_seeds,
            rng_seed=seed,
        )
        made = make_optimizer(optimizer, host)
        optimizing = GrowingOptimizer(
            made,
            make_scheduler(scheduler, made),
            warmup_updates=feed.updates_per_epoch,
            decay=None if scheduler else decay_over(epochs * feed.updates_per_epoch),
        )
        return Learner(growing, optimizing, feed, objective.loss, objective.score, seed=seed, epochs=epochs)

    learners = [learner(host, feed)]
    check_exportable(learners[0].model, example)
    if control:
        other, _, _ = as_feed(host, train, val, where, batch_size, updates_per_epoch, seed, labels=labels)
        learners.append(learner(copy.deepcopy(host), other))
    test = None if held_out is None else evaluation_batches(held_out, where, feed, objective.classes, objective.ignored)
    modes = {module: module.training for module in host.modules()}
    try:
        return _run(learners, decider, epochs, example, test, seed, on_epoch)
    finally:  # however it ended, a host that is the user's own is theirs again
        learners[0].model.detach()
        for module, training in modes.items():
            module.training = training


def _own(model: nn.Module, *, in_place: bool) -> nn.Module:
    """The module that is trained: a copy of the user's, or theirs."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # of torch.compile; what grows is compiled by whoever uses it
    check_model(model)
    return model if in_place else copied(model)


def _in_own_memory(inputs: Any) -> Any:
    """Some inputs in memory of their own: a view of the data would keep all of them, in a pickle too."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), inputs)


def _check_counts(**counts: object) -> None:
    for name, value in counts.items():
        if value is None and name == "updates_per_epoch":  # one pass over the data
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{name} must be a whole number, not {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def as_controller(given: str | Path | Controller) -> Controller:
    """A controller by name or by path, or one that somebody made."""
    if isinstance(given, str | Path):
        return make_controller(str(given))
    can = all(callable(getattr(given, verb, None)) for verb in ("reset", "decide"))
    if isinstance(given, type) or not can or not isinstance(getattr(given, "name", None), str):
        raise ValueError(
            "the controller must be a name, the path of a policy, or an object with a name, reset() and decide(), not "
            f"{given!r:.60}"
        )
    return given


def grow_task(
    task: Task,
    *,
    controller: str | Path | Controller = DEFAULT_CONTROLLER,
    epochs: int = 40,
    seed: int = 0,
    budget: int | None = None,
    max_seeds: int | None = None,
    control: bool = False,
    on_epoch: OnEpoch | None = None,
) -> Grown:
    """Grow the host of a built-in task. `seed` decides the host's start, its minibatches and its seeds."""
    _check_counts(epochs=epochs)
    learners = [
        task_learner(task, seed, epochs, budget=budget, max_seeds=max_seeds) for _ in range(2 if control else 1)
    ]
    test = partial(chunks, task.splits.test)
    return _run(learners, as_controller(controller), epochs, task.splits.train.x[:2], test, seed, on_epoch)


def pick_device(device: str | torch.device) -> torch.device:
    """`auto` is a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
        torch.zeros(1, device=picked)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).partition(chr(10))[0]}") from error
    return picked


def _run(
    learners: list[Learner],
    decider: Controller,
    epochs: int,
    example: Any,
    test: Callable[[], Iterable[Batch]] | None,
    seed: int,
    on_epoch: OnEpoch | None,
) -> Grown:
    """The loop: decide, step, note. The first learner grows; a second one is the control."""
    controllers: list[Controller] = [decider, NoGrowth()][: len(learners)]
    for one in controllers:
        one.reset([seed])
    untrained = gather([learner.evaluate() for learner in learners])
    engine = EagerEngine(
        learners, [Governor(learner, chance=chance) for learner, chance in zip(learners, untrained, strict=True)]
    )
    records: list[list[EpochRecord]] = [[] for _ in learners]
    with interruptible() as interrupt:
        while len(records[0]) < epochs and not interrupt.requested:
            actions = [
                one.decide([observe(learner, epochs, past)])[0]
                for one, learner, past in zip(controllers, learners, records, strict=True)
            ]
            _step(engine, actions, records, min(MOST_ROLLBACKS, epochs))
            if on_epoch is not None:
                on_epoch(records[0][-1], records[1][-1] if len(records) > 1 else None)
    return _finish(learners, decider.name, records[0], example, test, interrupted=len(records[0]) < epochs)


def _step(engine: EagerEngine, actions: list[Action], records: list[list[EpochRecord]], most_rollbacks: int) -> None:
    """One epoch. One that breaks is undone and training goes on; when that does not help either, give up."""
    for past, record in zip(records, engine.step(actions), strict=True):
        past.append(record)
        undone = [one for one in past[-most_rollbacks:] if one.verdict is not None]
        if record.verdict is not None and len(undone) == most_rollbacks:
            raise DivergedError(
                f"training broke and was undone {most_rollbacks} times in a row; in epoch {record.epoch + 1}, "
                f"{record.verdict.message}: lower the learning rate, or look for extreme values in the data"
            )


def _finish(
    learners: list[Learner],
    controller: str,
    records: list[EpochRecord],
    example: Any,
    test: Callable[[], Iterable[Batch]] | None,
    *,
    interrupted: bool,
) -> Grown:
    grown = learners[0]
    settled = settle(grown)
    model = grown.model
    history = History(
        controller, tuple(slot.path for slot in model.slots), model.host_parameters, tuple(records), tuple(settled)
    )
    exported = plain_model(model, share=True).eval()  # the growing model ends here, so its tensors can live on
    held_out = [_evaluate(learner, test) for learner in learners] if test else []
    validation = [_evaluate_export(grown, exported), *(_evaluate(one, one.feed.validation) for one in learners[1:])]
    return Grown(
        model=exported,
        history=history,
        validation=validation[0],
        test=held_out[0] if held_out else None,
        control=(held_out or validation)[1] if len(learners) > 1 else None,
        example=example,
        interrupted=interrupted,
    )


def settle(learner: Learner) -> list[Transition]:
    """End of the run: an unfinished seed stays if it was measured to help, and goes if it was not."""
    transitions: list[Transition] = []
    for slot in learner.model.live:
        life = slot.life
        helps = life.contribution is not None and life.contribution.accuracy > 0.0 and not life.retiring
        if life.fossilizable:
            transitions += learner.model.fossilize(
                slot, epoch=learner.epoch, reason="the run ended, and it contributes"
            )
        elif not (life.stage is Stage.BLENDING and helps):
            transitions += learner.model.prune(slot, epoch=learner.epoch, reason="the run ended first", at_once=True)
    return transitions


def _evaluate_export(learner: Learner, exported: nn.Module) -> Evaluation:
    """The exported model on the validation data, which must give what the grown one gives, batch by batch."""

    def compared() -> Iterator[Batch]:
        for batch in learner.feed.validation():
            args, kwargs = arguments(batch[0])
            outputs = []
            for model in (learner.model, exported):
                with untouched(model), torch.no_grad():  # and with the same random numbers
                    outputs.append(model(*args, **kwargs))
            gap = output_gap(*outputs)
            if not gap <= allowed_gap(exported):
                raise ExportError(
                    f"the exported model does not give what the grown one gives: outputs differ by {gap:.2g} on the "
                    "validation data, so nothing is returned; please report it, with the model"
                )
            yield batch

    with preserved_rng(learner.model.device):
        alone = GrowingModel(exported, Survey((), ())).eval()
        measured = evaluate(alone, compared(), learner.loss, learner.score)
        return gather([measured])[0]


def _evaluate(learner: Learner, batches: Callable[[], Iterable[Batch]]) -> Evaluation:
    with preserved_rng(learner.model.device):
        return gather([evaluate(learner.model, batches(), learner.loss, learner.score)])[0]
