"""`esper.Growth`: growth in a training loop of a person's own.

The loop keeps its data, clipping, scaler, accumulation and schedulers; Growth trains seeds beside the host, measures,
and decides. What would leave a seed untrained is an error, never silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.actions import Effect
from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.config import LARGEST_NUMBER, Count, check_number
from esper.engine.eager import EpochRecord
from esper.engine.learner import Learner
from esper.engine.measure import Loss
from esper.engine.optimizer import GrowingOptimizer
from esper.env.rent import RENT_RATE, check_rent
from esper.growth.attach import SlotChoice, attach, check_model
from esper.growth.auto_slots import AUTO
from esper.growth.plain import check_exportable, graft_from
from esper.growth.randomness import preserved_rng
from esper.growth.slot import preserved_modes
from esper.lifecycle import Rules
from esper.policy.controller import Controller
from esper.tasks.feed import LoaderFeed
from esper.training.catalogue import as_controller
from esper.training.own.arguments import explained
from esper.training.own.average import WeightAverage
from esper.training.own.checkpoint import read_state, write_state
from esper.training.own.data import (
    Data,
    as_validation,
    check_batches_of_one,
    checked_data,
    example_of,
    takes_labels,
    without_labels,
)
from esper.training.own.gpu import check_device
from esper.training.own.grown import Grown
from esper.training.own.loop_updates import LoopUpdates
from esper.training.own.metric import Metric, Scale
from esper.training.own.objective import fit_objective, integers_are_classes
from esper.training.own.optimizer import check_optimizer
from esper.training.own.remarks import outlook, warn_user
from esper.training.own.run import Trained, finish_growth, given_back
from esper.training.own.stepper import StateError

NO_VALIDATION = "validate= is missing: pass data by which seeds are measured, such as validate=(x_val, y_val)"


class Growth(LoopUpdates):
    """Grows `model`, the object itself, at `slots` while your loop trains it with `optimizer`.

    In the loop: `backward(batch)`, your clipping, `step()`; after each epoch `end_epoch()`; at the end `finish()`.
    """

    @explained(
        "esper.Growth",
        "which your loop makes: torch.optim.AdamW(model.parameters(), {}=0.1)",
        {
            "validate": NO_VALIDATION,
            "epochs": "epochs= is missing: say how many your loop makes",
            "optimizer": "the optimizer is missing: esper.Growth(model, optimizer, validate=…, epochs=…)",
            "": "pass the model and the optimizer, and all else by name",
        },
    )
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        slots: SlotChoice = AUTO,
        validate: Data,
        epochs: int,
        controller: str | Path | Controller = DEFAULT_CONTROLLER,
        loss: Loss | None = None,
        metric: Metric | None = None,
        metric_scale: Scale | None = None,
        schedulers: Sequence[LRScheduler] = (),
        autocast: torch.dtype | None = None,
        average: float | None = None,
        budget: int | None = None,
        max_seeds: int | None = None,
        rent: float = RENT_RATE,
        blueprints: Sequence[str] | None = None,
        layouts: Mapping[str, str] | None = None,
        visibility: str | Mapping[str, str] | None = None,
        rules: Rules | None = None,
        seed: int = 0,
    ) -> None:
        """`validate` are data by which seeds are measured and decided on, in any form that `esper.grow` takes.

        `schedulers` are those of `optimizer`: your loop steps them, and seeds follow. `autocast` is the type in which
        passes are made. `average` is the decay of a moving average of the weights, see `averaged`. The rest is as in
        `esper.grow`.
        """
        check_number("epochs", epochs, Count(1, LARGEST_NUMBER))
        _check_one_process()
        if not isinstance(model, nn.Module):
            raise ValueError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
        check_model(model)
        check_optimizer(optimizer, model)
        device = next(model.parameters()).device
        check_device(device)
        labels = integers_are_classes(loss)
        limits: dict[str, Any] = {"rules": rules, "blueprints": blueprints, "budget": budget, "max_seeds": max_seeds}
        with preserved_rng(device):  # a loader draws for every pass; the person's training must not notice
            feed, batch = as_validation(model, checked_data(validate, "val", labels=labels), device, labels=labels)
            example = example_of(feed, batch)
            objective = fit_objective(model, feed, batch, batch[1], loss, metric, metric_scale, copied=False)
            check_batches_of_one(model, feed, example)
            growing = attach(model, slots, example, layouts=layouts, visibility=visibility, **limits, rng_seed=seed)
            check_exportable(growing, example)
        following = GrowingOptimizer(optimizer, followed=schedulers)
        learner = Learner(growing, following, feed, objective.loss, objective.score, seed=seed, epochs=epochs)
        self._outlook = outlook(
            growing,
            as_controller(controller),
            epochs,
            check_rent(rent),
            constant=objective.constant,
            ignored=objective.ignored,
            metric=objective.metric,
            auto=isinstance(slots, str),
            noticed=(objective.remark,),
        )
        for remark in self._outlook.remarks:
            warn_user(remark)
        self._average = None if average is None else WeightAverage(growing, average)
        self._averaged: nn.Module | None = None
        super().__init__(learner, self._outlook.controller, epochs, rent=self._outlook.rent, seed=seed)
        self._schedulers, self._autocast = list(schedulers), autocast
        self._example = without_labels(model, example)
        self._batches = LoaderFeed([], [], device, updates_per_epoch=1, labels=labels, pass_labels=takes_labels(model))
        self._batches.classes, self._batches.ignored = objective.classes, objective.ignored
        # A loop of one's own says model.eval() and model.train() to the host: seeds follow.
        self._mode = model.register_forward_pre_hook(lambda host, _: _same_mode(growing.seeds, host.training))
        self._check_schedulers()

    @property
    def model(self) -> nn.Module:
        """The host, with its seeds in place."""
        return self.learner.model.host

    @property
    def averaged(self) -> nn.Module:
        """A plain copy of the network as it is now, after `finish` as it ended, with averaged weights (`average=`)."""
        if self._average is None:
            raise RuntimeError("no average was kept: pass average=0.999 to Growth")
        return self._average.model() if self._averaged is None else self._averaged

    # -- the loop -------------------------------------------------------------------------------------------------

    def backward(  # type: ignore[override]
        self, batch: Any, *, scaler: torch.amp.GradScaler | None = None, accumulate: int = 1
    ) -> Tensor:
        """Gradients of the host's pass and of each incubating seed's shadow pass, added to those that are there.

        `batch` is what a loader gives, such as (x, y); or a function without arguments that makes the pass with your
        model and returns the loss. An update of several batches: `accumulate` is their number, which divides the loss
        (a function divides it itself). Gives the loss of the host.
        """
        if scaler is not None:
            self.keep_norms()
        self.before_gradients()
        scale = _scale(scaler, accumulate)
        if not callable(batch):
            checked = self._batches.checked(batch, "train")
            return super().backward(checked, scale=scale, casting=self.casting)[0]
        loss: Tensor = batch()
        if loss.requires_grad:
            scale(loss).backward()  # type: ignore[no-untyped-call]
        self.shadow_backward(batch, loss, scale=scale)
        return loss.detach()

    def shadow_backward(
        self, compute: Callable[[], Tensor], loss: Tensor, *, scale: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """For a Trainer that has made the host's pass and its gradients itself: those of incubating seeds.

        `compute` makes the same pass again and returns its loss; `loss` is that of the host's pass.
        """
        self.add_losses([loss, *self.shadows(compute, scale)])

    def clip_grad_norm_(self, most: float) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` does: host and acting seeds as one, each incubating seed by itself.

        Gives the norm of the first. (`clip_grad_norm_(model.parameters(), …)` leaves seeds as they are.)
        """
        model = self.learner.model
        acting = [p for slot in model.joined for p in model.seed_parameters(slot)]
        for slot in model.incubating:
            nn.utils.clip_grad_norm_(model.seed_parameters(slot), most)
        return nn.utils.clip_grad_norm_([*model.host.parameters(), *acting], most)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """One update, as your own `optimizer.step()` would make it; with a scaler, its `step` and `update`."""
        if scaler is None:
            self.learner.optimizer.step()
        else:
            scaler.step(self.learner.optimizer.optimizer)
            scaler.update()
            self._stepped = True  # the scaler may have left the update out

    def start(self) -> None:
        with _modes_kept(self.model):
            super().start()

    def begin_epoch(self) -> Effect:
        self._check_schedulers()
        if self._average is not None and self.between_epochs:
            self._average.keep()
        with _modes_kept(self.model):
            return super().begin_epoch()

    def end_epoch(self) -> EpochRecord:
        """Measure, undo a broken epoch, let seeds move on. The record says what was decided before this
        epoch, and why."""
        updates = self._updates.made
        with _modes_kept(self.model):
            record = super().end_epoch()
        self.learner.optimizer.warmup_updates = updates  # a seed warms up over one epoch
        if self._average is not None and record.verdict is not None:
            self._average.undo()
        return record

    def _updated(self) -> None:
        super()._updated()
        if self._average is not None and not self.between_epochs:
            self._average.update()

    def state_dict(self) -> dict[str, Any]:
        average = {} if self._average is None else {"average": self._average.state()}
        return super().state_dict() | average

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if ("average" in state) != (self._average is not None):
            raise StateError(f"the state is of a run {'with' if 'average' in state else 'without'} average=")
        super().load_state_dict(state)
        if self._average is not None:
            self._average.load(state["average"])

    def save_state(self, path: str | Path) -> None:
        """`state_dict()` as a file that is there whole or not at all. Call it after `end_epoch()`."""
        write_state(Path(path), self.state_dict())

    def load_state(self, path: str | Path) -> bool:
        """Go on exactly from what `save_state` wrote; False where there is no such file."""
        if not Path(path).exists():
            return False
        self.load_state_dict(read_state(Path(path)))
        return True

    def finish(self, *, in_place: bool = False) -> Grown:
        """What unfinished seeds come to, and the plain model (`.model`), as `esper.grow` gives it. The loop is over.

        With `in_place`, the plain grown model is the very object that was trained; else that is the host alone again.
        The optimizer holds all of the grown model's parameters, and can train it further.
        """
        if self._epoch is not None and self._updates.made:
            raise RuntimeError("updates were made since the last end_epoch(): call it after every epoch")
        if not self.records:
            raise RuntimeError("end_epoch() was never called, so nothing could grow: call it after every epoch")
        self.close()
        self._mode.remove()
        model = self.learner.model
        with given_back(model):
            trained = Trained(self.untrained, tuple(self.records), interrupted=not self.over)
            grown = finish_growth([self.learner], self._outlook, trained, self._example, None)
            self._averaged = None if self._average is None else self._average.model()
            self.learner.optimizer.release({slot.index for slot in model.joined})
        if in_place:
            graft_from(grown.model, model.host)
            grown = replace(grown, model=model.host)
        return grown

    # -- internals ------------------------------------------------------------------------------------------------

    def casting(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.learner.model.device.type, self._autocast)

    def _check_schedulers(self) -> None:
        groups = self.learner.optimizer.optimizer.param_groups
        if not self._schedulers and any("initial_lr" in group for group in groups):
            raise ValueError(
                "the optimizer has a learning-rate scheduler: pass schedulers=[scheduler] to Growth, so that seeds "
                "follow it"
            )


def _scale(scaler: torch.amp.GradScaler | None, accumulate: int) -> Callable[[Tensor], Tensor]:
    def scaled(loss: Tensor) -> Tensor:
        part = loss if accumulate == 1 else loss / accumulate
        return part if scaler is None else scaler.scale(part)

    return scaled


def _same_mode(seeds: nn.Module, training: bool) -> None:
    for seed in seeds.children():
        if seed.training != training:
            seed.train(training)


def _modes_kept(host: nn.Module) -> AbstractContextManager[None]:
    """Parts of a host in training that its owner has put into evaluation mode (a frozen body, say) stay in it."""
    return preserved_modes(host) if host.training else nullcontext()


def _check_one_process() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ValueError(
            "Growth trains in one process: gradients of seeds are not exchanged between processes (DDP) yet, and their "
            "copies of the network would grow apart"
        )
