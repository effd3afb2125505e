"""Grow one model and keep it: `esper.grow` for a person's own model, `grow_task` for a built-in task."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.actions import Action
from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.engine.eager import EagerEngine, EpochRecord
from esper.engine.governor import Governor
from esper.engine.learner import Learner
from esper.engine.measure import Evaluation, Loss, Score, evaluate, gather
from esper.engine.optimizer import GrowingOptimizer
from esper.engine.prepare import task_learner
from esper.env.rent import RENT_RATE, check_rent, extra_rent
from esper.env.reward.objective import score
from esper.env.situation import observe
from esper.growth.attach import attach
from esper.growth.blueprints import Layout
from esper.growth.export import Saved, plain_model, save
from esper.growth.slot import preserved_rng
from esper.lifecycle import Rules, Stage, Transition
from esper.policy.controller import Controller, NoGrowth
from esper.tasks.feed import Batch, Feed, TensorFeed, chunks
from esper.tasks.registry import Task, percent_correct
from esper.training.catalogue import make_controller
from esper.training.data import (
    Data,
    as_feed,
    check_objective,
    checked_data,
    default_objective,
    evaluation_batches,
)
from esper.training.history import History
from esper.training.interrupt import interruptible
from esper.training.remarks import Outlook, Targets, outlook, remarks, warn_user

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
    remarks: tuple[str, ...] = ()
    """What a person should know about this run, a sentence each: why nothing grew, that it ended at chance, …"""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def rent(self) -> float:
        """Points that one more host-size of parameters had to earn."""
        return self.history.rent

    @property
    def score(self) -> float:
        """Accuracy on the test (else validation) data minus the rent of the model's size, in points."""
        found = self.test or self.validation
        return score(found.accuracy, self.parameters, self.history.host_parameters, self.rent)

    @property
    def control_score(self) -> float | None:
        """The same for the control, whose size costs nothing."""
        host = self.history.host_parameters
        return None if self.control is None else score(self.control.accuracy, host, host, self.rent)

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
    metric: Score | None = None,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] | None = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    batch_size: int = 128,
    updates_per_epoch: int | None = None,
    budget: int | None = None,
    max_seeds: int | None = None,
    rent: float = RENT_RATE,
    blueprints: Sequence[str] | None = None,
    layouts: dict[str, Layout] | None = None,
    rules: Rules | None = None,
    seed: int = 0,
    device: str | torch.device = "auto",
    control: bool = False,
    on_epoch: OnEpoch | None = None,
) -> Grown:
    """Train `model` and let it grow at `slots` (module paths or patterns); the result is a plain model.

    Data are (inputs, targets) tensors or arrays, or `DataLoader`s. The metric gives a score in percent, per example
    where it can; integer targets default to cross-entropy and accuracy, others to squared error and the variance
    explained. `optimizer` makes an optimizer from parameters, `scheduler` a scheduler (stepped per update) from an
    optimizer. Parameters that do not require gradients stay as they are; of a frozen model, only what grows is trained.
    `rent` is the price of size: points of accuracy that a seed as large as the model must earn. Rules, what is kept at
    the end and `Grown.score` use it; learned controllers were trained with 5 and cannot read another one yet.
    With `control`, an ungrown copy trains beside it, for an honest comparison. Ctrl-C keeps what was grown so far.
    What is known to go wrong before the training is warned of (`GrowthWarning`); `Grown.remarks` has all of it.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    _check_counts(epochs=epochs, batch_size=batch_size, updates_per_epoch=updates_per_epoch)
    rent = check_rent(rent)
    decider = as_controller(controller)
    where = pick_device(device)
    model.to(where)
    labels = loss is None  # integer targets are class numbers, unless somebody's loss says what they are
    train, val = checked_data(train_data, "train", labels=labels), checked_data(val_data, "val", labels=labels)
    held_out = None if test_data is None else checked_data(test_data, "test", labels=labels)
    feed, batch, targets = as_feed(train, val, where, batch_size, updates_per_epoch, seed, labels=labels)
    example = feed.train.x[:2] if isinstance(feed, TensorFeed) else batch[0]
    default_loss, default_metric = default_objective(targets)
    make_optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))

    def learner(host: nn.Module, feed: Feed) -> Learner:
        growing = attach(
            host,
            slots,
            example,
            layouts=layouts,
            rules=rules,
            blueprints=blueprints,
            budget=budget,
            max_seeds=max_seeds,
            rng_seed=seed,
        )
        # Of a frozen host nothing is trained; but seeds take over the settings of a group, and a group is never empty.
        trained = [p for p in host.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(0, device=where))]
        made = make_optimizer(trained)
        optimizing = GrowingOptimizer(made, [scheduler(made)] if scheduler else [])
        return Learner(
            growing, optimizing, feed, loss or default_loss, metric or default_metric, seed=seed, epochs=epochs
        )

    learners = [learner(model, feed)]
    classes = check_objective(model, feed, batch, learners[0].loss, learners[0].score, labels=labels)
    if control:
        other, _, _ = as_feed(train, val, where, batch_size, updates_per_epoch, seed, labels=labels)
        learners.append(learner(copy.deepcopy(model), other))
    test = None if held_out is None else evaluation_batches(held_out, where, feed, classes)
    before = outlook(learners[0].model, decider, epochs, rent, usual_metric=metric is None)
    return _run(learners, before, example, test, seed, on_epoch, warn_user)


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
    rent: float = RENT_RATE,
    control: bool = False,
    on_epoch: OnEpoch | None = None,
    on_remark: Callable[[str], None] = warn_user,
) -> Grown:
    """Grow the host of a built-in task. `seed` decides the host's start, its minibatches and its seeds.

    `rent` is as in `grow`. `on_remark` is called before the training with each remark that is known then.
    """
    _check_counts(epochs=epochs)
    rent = check_rent(rent)
    decider = as_controller(controller)
    learners = [
        task_learner(task, seed, epochs, budget=budget, max_seeds=max_seeds) for _ in range(2 if control else 1)
    ]
    test = partial(chunks, task.splits.test)
    before = outlook(learners[0].model, decider, epochs, rent, usual_metric=task.score is percent_correct)
    return _run(learners, before, task.splits.train.x[:2], test, seed, on_epoch, on_remark)


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
    before: Outlook,
    example: Any,
    test: Callable[[], Iterable[Batch]] | None,
    seed: int,
    on_epoch: OnEpoch | None,
    on_remark: Callable[[str], None],
) -> Grown:
    """The loop: decide, step, note. The first learner grows; a second one is the control."""
    for remark in before.remarks:
        on_remark(remark)
    epochs = before.epochs
    controllers: list[Controller] = [before.controller, NoGrowth()][: len(learners)]
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
                one.decide([observe(learner, epochs, past, rent=before.rent)])[0]
                for one, learner, past in zip(controllers, learners, records, strict=True)
            ]
            _step(engine, actions, records, min(MOST_ROLLBACKS, epochs))
            if on_epoch is not None:
                on_epoch(records[0][-1], records[1][-1] if len(records) > 1 else None)
    return _finish(learners, before, untrained[0].accuracy, records[0], example, test)


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
    before: Outlook,
    untrained: float,
    records: list[EpochRecord],
    example: Any,
    test: Callable[[], Iterable[Batch]] | None,
) -> Grown:
    grown = learners[0]
    settled = settle(grown, before.rent)
    model = grown.model
    slots = tuple(slot.path for slot in model.slots)
    history = History(before.controller.name, slots, model.host_parameters, tuple(records), tuple(settled), before.rent)
    held_out = [_evaluate(learner, test) for learner in learners] if test else []
    targets = Targets(grown.feed.validation, grown.score if before.usual_metric else None)
    validation = [_evaluate(one, targets if one is grown else one.feed.validation) for one in learners]
    return Grown(
        model=plain_model(model).eval(),
        history=history,
        validation=validation[0],
        test=held_out[0] if held_out else None,
        control=(held_out or validation)[1] if len(learners) > 1 else None,
        example=example,
        interrupted=len(records) < before.epochs,
        remarks=remarks(before, history, validation[0].accuracy, untrained, targets),
    )


def settle(learner: Learner, rent: float = RENT_RATE) -> list[Transition]:
    """End of the run: an unfinished seed stays if it was measured to help, and goes if it was not.

    Above the default rent, it must also contribute more than what its size costs beyond that.
    """
    transitions: list[Transition] = []
    model = learner.model
    for slot in model.live:
        life = slot.life
        worth = -math.inf if life.contribution is None else life.contribution.accuracy
        owed = 0.0 if slot.seed is None else max(0.0, extra_rent(rent, slot.seed.size, model.host_parameters))
        if life.fossilizable and (owed == 0.0 or worth > owed):
            transitions += model.fossilize(slot, epoch=learner.epoch, reason="the run ended, and it contributes")
        elif not (life.stage is Stage.BLENDING and worth > owed and not life.retiring):
            reason = "the run ended first"
            if 0.0 < worth <= owed:
                reason = (
                    f"the run ended, and it contributes {worth:+.1f} points, less than the {owed:.1f} of its extra rent"
                )
            transitions += model.prune(slot, epoch=learner.epoch, reason=reason, at_once=True)
    return transitions


def _evaluate(learner: Learner, batches: Callable[[], Iterable[Batch]]) -> Evaluation:
    with preserved_rng(learner.model.device):
        return gather([evaluate(learner.model, batches(), learner.loss, learner.score)])[0]
