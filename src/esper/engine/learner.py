"""One growing model in training: model, optimizer and data, changed together and in the right order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper.actions import Action, Effect, Op
from esper.engine.bf16_weights import Bf16Weights
from esper.engine.measure import Evaluation, Loss, Pending, Score, evaluate
from esper.engine.optimizer import GrowingOptimizer
from esper.engine.precision import Precision, arithmetic, uses_bf16
from esper.growth.model import GrowingModel
from esper.growth.probe import arguments
from esper.growth.randomness import OtherRngs, preserved_rng
from esper.growth.slot import Slot
from esper.lifecycle import IllegalTransitionError, Stage, Transition
from esper.tasks.feed import Batch, Feed


@dataclass(frozen=True, slots=True)
class TrainReport:
    """What one epoch of updates showed."""

    loss: float
    """Mean training loss."""
    host_gradient: float
    """Norm of the host's gradient at the last update."""
    seed_gradients: dict[int, float]
    """By slot: root-mean-square gradient of the seed's parameters at the last update."""
    shadow_losses: dict[int, float]
    """By slot: mean loss of the shadow pass of an incubating seed."""
    finite: bool = True
    """Every parameter and buffer of host and seeds is a number after the last update."""


class Learner:
    """Trains one growing model. It owns its random numbers, so neighbours cannot disturb it."""

    def __init__(
        self,
        model: GrowingModel,
        optimizer: GrowingOptimizer,
        feed: Feed,
        loss: Loss,
        score: Score,
        *,
        seed: int = 0,
        epochs: int | None = None,
        precision: Precision = Precision.FP32,
    ) -> None:
        self.model = model
        model.driven = True
        self.optimizer = optimizer
        self.feed = feed
        self.loss = loss
        self.score = score
        self.epoch = 0
        self.epochs = epochs
        """The run's length, if it is known: after its last epoch the network stays as it was measured."""
        self.precision = precision
        self.packed: dict[torch.dtype, Tensor] = {}
        """What is permanent in the network (`pack`), as an engine has laid it together; empty if it has not."""
        self._half: Bf16Weights | None = None
        """Set while passes are made in bfloat16."""
        self.rng_state = torch.Generator().manual_seed(seed).get_state()
        """Where this learner's own sequence of random numbers is."""
        self.other_rngs = OtherRngs.seeded(seed)
        """The same of Python and numpy."""

    # -- one epoch, in this order -------------------------------------------------------------------------------

    def apply(self, action: Action) -> Effect:
        """Carry out a decision. What is impossible changes nothing, and the effect says why."""
        model, slot = self.model, None if action.slot is None else self._slot(action.slot)
        try:
            if slot is None:
                return Effect(action, False, action.reason or "wait")
            if action.op is Op.GERMINATE:
                blueprint, blend = str(action.blueprint), str(action.blend)  # an Action guarantees both
                done = model.germinate(slot, blueprint, blend, epoch=self.epoch, reason=action.reason)
                settings = self.optimizer.add(slot.index, model.seed_parameters(slot), model.near_parameters(slot))
                return Effect(action, True, action.reason, tuple(done), settings)
            if action.op is Op.PRUNE:
                done = model.prune(slot, epoch=self.epoch, reason=action.reason)
                self._drop_pruned(done)
            else:
                done = model.fossilize(slot, epoch=self.epoch, reason=action.reason)
        except IllegalTransitionError as error:
            return Effect(action, False, str(error))
        return Effect(action, True, action.reason, tuple(done))

    def begin_epoch(self) -> list[Transition]:
        return self.model.begin_epoch(self.epoch)

    def train(self) -> Pending[TrainReport]:
        """Make the epoch's updates, without waiting for the device."""
        self.model.train()
        updates = Updates(self)
        with self.own_rng(), self.arithmetic(), updates.recording():
            for remaining in reversed(range(self.feed.updates_per_epoch)):
                updates.add(self.gradients(self.feed.next_batch(), updates.incubating))
                if remaining == 0:
                    updates.norms = self.gradient_norms()
                self.optimizer.step()
                updates.made += 1
                self.updated()
        return updates.report()

    def evaluate(self) -> Pending[Evaluation]:
        """Measure the network and every seed that is neither kept nor removed yet, on the validation set."""
        with preserved_rng(self.model.device), self.arithmetic():
            return evaluate(self.model, self.feed.validation(), self.loss, self.score, contrasts=self.measured_slots)

    def end_epoch(self) -> list[Transition]:
        """Follow the columns, in which the seeds of all networks have moved on (`esper.engine.eager.end_epochs`)."""
        transitions = self.model.follow(self.epoch)
        self._drop_pruned(transitions)
        self.epoch += 1
        return transitions

    @property
    def in_last_epoch(self) -> bool:
        return self.epochs is not None and self.epoch + 1 >= self.epochs

    def abandon_seeds(self, reason: str) -> list[Transition]:
        """Remove every seed that is not kept yet, at once."""
        transitions = [
            transition
            for slot in self.model.live
            for transition in self.model.prune(slot, epoch=self.epoch, reason=reason, at_once=True)
        ]
        self._drop_pruned(transitions)
        return transitions

    # -- the parts of an epoch, for engines that put it together themselves ---------------------------------------

    def gradients(self, batch: Batch, incubating: Sequence[Slot]) -> Tensor:
        """Gradients of one minibatch: the host's from the plain pass, each incubating seed's from its shadow.

        Gives the losses [1 + incubating].
        """
        self.optimizer.zero_grad()
        return self.add_gradients(batch, incubating)

    def add_gradients(
        self,
        batch: Batch,
        incubating: Sequence[Slot],
        *,
        scale: Callable[[Tensor], Tensor] | None = None,
        casting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """The same, added to what is there. `scale` is applied to losses before their gradients are taken; `casting` is
        the context of the passes."""
        inputs, targets = batch
        args, kwargs = arguments(inputs)
        scaled = scale or (lambda loss: loss)
        with casting():
            loss = self.loss(self.model(*args, **kwargs), targets)
        if loss.requires_grad:  # not when the whole host is frozen and no seed has joined it yet
            scaled(loss).backward()  # type: ignore[no-untyped-call]
        losses = [loss.detach()]
        for slot in incubating:
            parameters = self.model.seed_parameters(slot)
            if self._half is not None:
                parameters = self._half.copies_of(parameters)
            with ExitStack() as within:
                within.enter_context(self._constant_but(parameters))
                with casting():
                    outputs = within.enter_context(self.model.shadow(slot, *args, **kwargs))
                    shadow_loss = self.loss(outputs, targets)
                add_shadow_gradients(parameters, scaled(shadow_loss))
            losses.append(shadow_loss.detach())
        if self._half is not None:
            self._half.hand_over()
        return torch.stack(losses) if incubating else losses[0].unsqueeze(0)

    def add_shadow_gradients_of(
        self, loss: Callable[[], Tensor], slot: Slot, scale: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Of an incubating seed, for a pass that only its owner can make: `loss` makes it, and gives the loss."""
        parameters = self.model.seed_parameters(slot)
        with self._constant_but(parameters), self.model.in_shadow(slot):
            found = loss()
            add_shadow_gradients(parameters, found if scale is None else scale(found))
        return found.detach()

    def updated(self) -> None:
        """To be called after every update that is followed by another pass."""
        if self._half is not None:
            self._half.refresh()

    def gradient_norms(self) -> Tensor:
        """[1 + seeds]: the host's gradient norm, then that of each seed, in the order of the slots."""
        return norms_of(self.held_gradients(), self.model.device)

    def held_gradients(self) -> list[list[Tensor]]:
        """The host's gradients, then those of each seed, in the order of the slots."""
        host: list[Tensor] = list(self.model.host.parameters())
        if self._half is not None:
            host = self._half.weights_of(host)
        owners = [host, *(self.model.seed_parameters(slot) for slot in self._seeded)]
        return [[p.grad for p in parameters if p.grad is not None] for parameters in owners]

    def read_training(
        self, numbers: Sequence[float], incubating: Sequence[Slot], updates: float | None = None
    ) -> TrainReport:
        """From losses summed over the epoch [1 + incubating], gradient norms [1 + seeds], and whether all is finite.

        `updates` is how many losses were summed, where that is not the feed's number of updates.
        """
        seeded = self._seeded
        losses = [total / (updates or self.feed.updates_per_epoch) for total in numbers[: 1 + len(incubating)]]
        host, *seeds, finite = numbers[len(losses) :]
        return TrainReport(
            loss=losses[0],
            host_gradient=host,
            seed_gradients={s.index: g / max(1, s.trained_size) ** 0.5 for s, g in zip(seeded, seeds, strict=True)},
            shadow_losses={slot.index: loss for slot, loss in zip(incubating, losses[1:], strict=True)},
            finite=finite == 1.0,
        )

    @property
    def measured_slots(self) -> list[Slot]:
        """Slots whose seed an evaluation measures."""
        return [slot for slot in self.model.live if slot.stage is not Stage.GERMINATED]

    # -- internals ----------------------------------------------------------------------------------------------

    @property
    def _seeded(self) -> list[Slot]:
        return [slot for slot in self.model.slots if slot.seed is not None]

    def _drop_pruned(self, transitions: list[Transition]) -> None:
        for transition in transitions:
            if transition.target is Stage.PRUNED:
                slot = next(slot for slot in self.model.slots if slot.path == transition.slot)
                self.optimizer.drop(slot.index)

    def _slot(self, index: int) -> Slot:
        if not 0 <= index < len(self.model.slots):
            raise IndexError(f"there is no slot {index}: this model has {len(self.model.slots)}")
        return self.model.slots[index]

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Within, the device calculates as precisely as this learner wants."""
        with arithmetic(self.precision, self.model.device):
            if not uses_bf16(self.precision, self.model.device):
                yield
                return
            self._half = Bf16Weights(self.model)
            try:
                with self._half.in_place():
                    yield
            finally:
                self._half = None

    @contextmanager
    def _constant_but(self, trained: Sequence[Tensor]) -> Iterator[None]:
        """Within, only these get gradients. Autograd leaves the others out by itself; a compiled region does not."""
        kept = {id(parameter) for parameter in trained}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in kept]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    @contextmanager
    def own_rng(self) -> Iterator[None]:
        """Dropout and the like draw from this learner's own sequences; on a GPU all learners share the device's."""
        with preserved_rng(torch.device("cpu")):
            torch.set_rng_state(self.rng_state)
            self.other_rngs.set()
            yield
            self.rng_state, self.other_rngs = torch.get_rng_state(), OtherRngs.now()


class Updates:
    """The updates of one epoch, made one by one: losses and gradients for the report at its end."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.incubating = learner.model.incubating
        self.made = 0
        self.losses = 0
        """How many were summed: of an update whose gradient is the sum of several passes, several."""
        self.total: Tensor | None = None  # [1 + incubating]
        self.norms: Tensor | None = None  # [1 + seeds]

    def recording(self) -> AbstractContextManager[None]:
        """Around passes that shadow passes follow."""
        return self.learner.model.recording() if self.incubating else nullcontext()

    def backward(self, batch: Batch, **settings: Any) -> Tensor:
        """Add the gradients of a batch (settings: see `Learner.add_gradients`); gives its losses [1 + incubating]."""
        losses = self.learner.add_gradients(batch, self.incubating, **settings)
        self.add(losses)
        return losses

    def add(self, losses: Tensor) -> None:
        self.total = losses if self.total is None else self.total + losses
        self.losses += 1

    def report(self) -> Pending[TrainReport]:
        assert self.total is not None
        assert self.norms is not None
        read = partial(self.learner.read_training, incubating=self.incubating, updates=self.losses)
        return Pending(torch.cat([self.total, self.norms, all_finite(self.learner.model)]), read)


def add_shadow_gradients(parameters: Sequence[Tensor], loss: Tensor) -> None:
    """Those of a seed alone. A pass may leave the slot out (layer drop); a seed that is never used shows none."""
    if not loss.requires_grad:
        return
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            ordered = _in_order_of(parameter, gradient)
            parameter.grad = ordered if parameter.grad is None else parameter.grad + ordered


def _in_order_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the parameter's order in memory, as `backward` leaves it: fused optimizers read both as rows."""
    if gradient.is_sparse or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def norms_of(gradients: Sequence[list[Tensor]], device: torch.device) -> Tensor:
    """The norm of each list."""
    return torch.stack([_norm(found, device) for found in gradients])


def _norm(found: list[Tensor], device: torch.device) -> Tensor:
    gradients = [g.coalesce().values() if g.is_sparse else g for g in found]  # sparse: an embedding may ask for it
    if not gradients:
        return torch.zeros((), device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def all_finite(model: GrowingModel) -> Tensor:
    """[1]: 1 when every weight is finite and no buffer is NaN, else NaN. It travels with the other numbers."""
    parameters = [t.detach() for t in model.parameters() if t.is_floating_point() and t.numel() > 0]
    buffers = [t.detach() for t in model.buffers() if t.is_floating_point() and t.numel() > 0]
    largest = torch.stack([t.float() for t in torch._foreach_norm([*parameters, *buffers], math.inf)])
    # Buffers may hold infinities on purpose, such as attention masks.
    largest[len(parameters) :].clamp_(max=0.0)
    return (largest * 0.0).sum(0, keepdim=True) + 1.0  # anything finite times 0 is 0; infinity and NaN give NaN
