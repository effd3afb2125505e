"""The tensors of one learner that an epoch reads and writes, in tensors that stay where they are.

A CUDA graph works on fixed addresses. `Storage` owns such addresses; a learner that is bound to it keeps its parameter
objects, its optimizer and its seeds, but their numbers lie in the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from esper.engine.fingerprint import ById, layout, value_fingerprint
from esper.engine.learner import Learner
from esper.engine.measure import SetScore
from esper.growth.slot import Slot
from esper.growth.tensors import Arrangement, side_by_side
from esper.lifecycle import IN_FORWARD, Stage
from esper.tasks.data import Split
from esper.tasks.feed import TensorFeed

REPLAYABLE = (Adam, AdamW, SGD)
"""Optimizers whose fused step reads its learning rate from a tensor."""


def why_not_capturable(learner: Learner) -> str:
    """Why this learner's epochs cannot be replayed; empty when they can."""
    optimizer = learner.optimizer.optimizer
    if type(learner.feed) is not TensorFeed:
        return f"minibatches come from a {type(learner.feed).__name__}: their shapes and addresses may change"
    if type(optimizer) not in REPLAYABLE or not all(group.get("fused") for group in optimizer.param_groups):
        names = ", ".join(kind.__name__ for kind in REPLAYABLE)
        return f"the optimizer is {type(optimizer).__name__}: use one of {names} with fused=True"
    if isinstance(learner.score, SetScore):
        return "the metric is of the whole validation set, and is computed outside of Esper"
    if any(group.get("dampening") for group in optimizer.param_groups):
        return "SGD with dampening treats its first update in a way of its own"
    if any(vars(scheduler).get("cycle_momentum") for scheduler in learner.optimizer.schedulers):
        return "the scheduler moves the momentum too, which a graph would not notice: use cycle_momentum=False"
    return ""


def ensure_state(optimizer: Optimizer) -> None:
    """Give every parameter its optimizer state now, as the first update would: a graph must not create it."""
    missing = [
        (parameter, name)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state[parameter]
        for name in _state_names(optimizer, group)
    ]
    count = torch.empty((), device=missing[0][0].device) if missing else torch.empty(())
    places = side_by_side([count if name == "step" else p for p, name in missing], torch.zeros)
    for (parameter, name), place in zip(missing, places, strict=True):
        optimizer.state[parameter][name] = place


def _state_names(optimizer: Optimizer, group: dict[str, object]) -> tuple[str, ...]:
    if isinstance(optimizer, SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))


Own = Callable[[nn.Module], tuple[list[Tensor], list[Tensor]]]
"""Parameters and buffers of a module, each once."""


def moving_tensors(learner: Learner, own: Own) -> list[Tensor]:
    """Every tensor that belongs to this learner alone and that its epochs read or write, in a fixed order."""
    model, optimizer = learner.model, learner.optimizer.optimizer
    tensors = [tensor for part in (model.host, *model.seeds.values()) for kind in own(part) for tensor in kind]
    for slot in model.slots:
        if slot.seed is not None:
            tensors += [slot.alpha, *slot.shadow_buffers]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors += optimizer.state[parameter].values() if parameter in optimizer.state else ()
    return tensors


def topology(learner: Learner) -> Hashable:
    """Cheap, and different whenever growth or a rollback made an epoch of this learner another computation.

    What a person changes by hand in the middle of a run (frozen parameters, weight decay) is not noticed.
    """
    slots = tuple((id(slot.seed), slot_role(slot)) for slot in learner.model.slots if slot.seed is not None)
    return slots, len(learner.optimizer.optimizer.state)


_ROLES = {
    stage: (stage in IN_FORWARD, stage is Stage.TRAINING, stage not in (Stage.GERMINATED, Stage.FOSSILIZED))
    for stage in Stage
}
"""Whether a seed takes part in the output, incubates, and is measured."""


def slot_role(slot: Slot) -> Hashable:
    """All that decides what a slot does in an epoch, besides its seed and the numbers in its tensors."""
    return None if slot.seed is None else (_ROLES[slot.stage], slot.strength == 0.0, slot.strength == 1.0)


def signature(learner: Learner, own: Own, fingerprint: Callable[[nn.Module], Hashable]) -> Hashable:
    """Equal for learners whose epochs are the same computation on other numbers; `fingerprint` is that of a module."""
    model, optimizer, feed = learner.model, learner.optimizer.optimizer, tensor_feed(learner)
    groups = tuple(
        tuple((key, value_fingerprint(value)) for key, value in group.items() if key not in _MOVING_SETTINGS)
        for group in optimizer.param_groups
    )
    parameters = [parameter for part in (model.host, *model.seeds.values()) for parameter in own(part)[0]]
    number = {id(parameter): i for i, parameter in enumerate(parameters)}
    members = tuple(tuple(number[id(parameter)] for parameter in group["params"]) for group in optimizer.param_groups)
    return (
        fingerprint(model.host),
        tuple((slot.path, slot_role(slot), slot.seed and fingerprint(slot.seed)) for slot in model.slots),
        tuple(model.seeds),  # the order of birth is the order of the optimizer's groups
        type(optimizer),
        groups,
        members,
        value_fingerprint((learner.loss, learner.score, learner.precision)),
        (feed.batch_size, feed.updates_per_epoch, feed.augment),
        tuple(data_fingerprint(split) for split in (feed.train, feed.val)),
    )


_MOVING_SETTINGS = ("params", "param_names", "lr", "initial_lr", "updates", "capturable")


COPIED_BYTES = 4 * 2**20
"""Data up to this size are copied for each learner, so that a graph can serve learners with other data."""


def is_copied(split: Split) -> bool:
    return split.x.numel() * split.x.element_size() <= COPIED_BYTES


def data_fingerprint(split: Split) -> Hashable:
    """Large data by address: many learners share them. Small data by their layout."""
    return (layout(split.x), layout(split.y)) if is_copied(split) else (ById(split.x), ById(split.y))


def tensor_feed(learner: Learner) -> TensorFeed:
    assert isinstance(learner.feed, TensorFeed)  # `why_not_capturable` is called first
    return learner.feed


class Storage:
    """Fixed addresses for the moving tensors of one learner at a time."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._arrangement = Arrangement(tensors)
        self._pieces = self._arrangement.pieces()
        self._places = self._arrangement.within(self._pieces)
        self._addresses = [place.data_ptr() for place in self._places]
        self._bound: list[Tensor] = []

    def bind(self, tensors: list[Tensor]) -> None:
        """Move the learner's numbers here. The learner's tensors stay the same objects."""
        self._arrangement.copy(tensors, self._places)
        for tensor, place in zip(tensors, self._places, strict=True):
            tensor.data = place
        self._bound = tensors

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the bound ones: a host may put new buffers in the place of old ones."""
        return len(tensors) == len(self._bound) and all(a is b for a, b in zip(tensors, self._bound, strict=True))

    def unbind(self) -> None:
        """Give the learner addresses of its own again, so that the next one here does not overwrite its numbers."""
        if [tensor.data_ptr() for tensor in self._bound] == self._addresses:
            places = self._arrangement.within([piece.clone() for piece in self._pieces])
        else:  # the network, or a part of it, was moved, and stays where it is
            own = Arrangement(self._bound)
            places = own.within(own.pieces())
            own.copy(self._bound, places)
        for tensor, place in zip(self._bound, places, strict=True):
            tensor.data = place
        self.forget()

    def forget(self) -> None:
        """The learner has moved on."""
        self._bound = []
