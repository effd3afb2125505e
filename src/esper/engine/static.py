"""The tensors of one learner that an epoch reads and writes, in tensors that stay where they are.

A CUDA graph works on fixed addresses. `Storage` owns such addresses; a learner that is bound to it keeps its parameter
objects, its optimizer and its seeds, but their numbers live in the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from esper.engine.fingerprint import Same, layout, value_fingerprint
from esper.engine.learner import Learner
from esper.growth.slot import Slot
from esper.lifecycle import IN_FORWARD, Stage
from esper.tasks.data import Split
from esper.tasks.feed import TensorFeed

REPLAYABLE = (Adam, AdamW, SGD)
"""Optimizers whose fused step reads its learning rate from a tensor."""


def why_not_static(learner: Learner) -> str:
    """Why this learner's epochs cannot be replayed; empty when they can."""
    optimizer = learner.optimizer.optimizer
    if type(learner.feed) is not TensorFeed:
        return f"minibatches come from a {type(learner.feed).__name__}: their shapes and addresses may change"
    if type(optimizer) not in REPLAYABLE or not all(group.get("fused") for group in optimizer.param_groups):
        names = ", ".join(kind.__name__ for kind in REPLAYABLE)
        return f"the optimizer is {type(optimizer).__name__}: use one of {names} with fused=True"
    if any(group.get("dampening") for group in optimizer.param_groups):
        return "SGD with dampening treats its first update in a way of its own"
    if any(vars(scheduler).get("cycle_momentum") for scheduler in learner.optimizer.schedulers):
        return "the scheduler moves the momentum too, which a graph would not notice: use cycle_momentum=False"
    return ""


def ensure_state(optimizer: Optimizer) -> None:
    """Give every parameter its optimizer state now, as the first update would: a graph must not create it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state[parameter]:
                optimizer.state[parameter] = _fresh_state(optimizer, group, parameter)


def _fresh_state(optimizer: Optimizer, group: dict[str, object], parameter: Tensor) -> dict[str, Tensor]:
    def zeros() -> Tensor:
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    if isinstance(optimizer, SGD):
        return {"momentum_buffer": zeros()} if group["momentum"] else {}
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    state = {"step": step, "exp_avg": zeros(), "exp_avg_sq": zeros()}
    return state | ({"max_exp_avg_sq": zeros()} if group["amsgrad"] else {})


def moving_tensors(learner: Learner) -> list[Tensor]:
    """Every tensor that belongs to this learner alone and that its epochs read or write, in a fixed order."""
    model, optimizer = learner.model, learner.optimizer.optimizer
    parameters, buffers = own_tensors(model)
    tensors = [*parameters, *buffers]
    for slot in model.slots:
        if slot.seed is not None:
            tensors += [slot.alpha, *slot.shadow_buffers]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            tensors += optimizer.state[parameter].values() if parameter in optimizer.state else ()
    return tensors


def own_tensors(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """`model.parameters()` and `model.buffers()`, found in one pass: torch's own two take three times as long, and a
    change of topology is spent in little else."""
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        for found, own in ((parameters, module._parameters), (buffers, module._buffers)):
            for tensor in own.values():
                if tensor is not None:
                    found.setdefault(id(tensor), tensor)
        waiting += reversed(module._modules.values())
    return list(parameters.values()), list(buffers.values())


def topology(learner: Learner) -> Hashable:
    """Cheap, and different whenever growth or a rollback made an epoch of this learner another computation.

    What a person changes by hand in the middle of a run (frozen parameters, weight decay) is not noticed.
    """
    slots = tuple((id(slot.seed), *slot_role(slot)) for slot in learner.model.slots)
    return slots, len(learner.optimizer.optimizer.state)


def slot_role(slot: Slot) -> tuple[bool, ...]:
    """All that decides what a slot does in an epoch, besides its seed and the numbers in its tensors."""
    life = slot.life
    if slot.seed is None:
        return ()
    measured = life.stage not in (Stage.GERMINATED, Stage.FOSSILIZED)
    return (life.stage in IN_FORWARD, life.alpha == 0.0, life.alpha == 1.0, life.stage is Stage.TRAINING, measured)


def signature(learner: Learner, fingerprint: Callable[[nn.Module], Hashable]) -> Hashable:
    """Equal for learners whose epochs are the same computation on other numbers; `fingerprint` is that of a module."""
    model, optimizer, feed = learner.model, learner.optimizer.optimizer, tensor_feed(learner)
    groups = tuple(
        tuple((key, value_fingerprint(value)) for key, value in group.items() if key not in _MOVING_SETTINGS)
        for group in optimizer.param_groups
    )
    number = {id(parameter): i for i, parameter in enumerate(own_tensors(model)[0])}
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
    return (layout(split.x), layout(split.y)) if is_copied(split) else (Same(split.x), Same(split.y))


def tensor_feed(learner: Learner) -> TensorFeed:
    assert isinstance(learner.feed, TensorFeed)  # `why_not_static` is asked first
    return learner.feed


class Storage:
    """Fixed addresses for the moving tensors of one learner at a time."""

    def __init__(self, learner: Learner) -> None:
        tensors = moving_tensors(learner)
        self._places = [torch.empty_like(t, memory_format=torch.preserve_format, requires_grad=False) for t in tensors]
        self._bound: list[Tensor] = []

    def bind(self, learner: Learner) -> None:
        """Move the learner's numbers here. The learner's tensors stay the same objects."""
        tensors = moving_tensors(learner)
        pairs = list(zip(tensors, self._places, strict=True))
        with torch.no_grad():
            for dtype in {place.dtype for place in self._places}:  # of one type each, so that few kernels copy all
                same = [(tensor, place) for tensor, place in pairs if place.dtype == dtype]
                torch._foreach_copy_([place for _, place in same], [tensor for tensor, _ in same])
        for tensor, place in pairs:
            tensor.data = place
        self._bound = tensors

    def holds(self, learner: Learner) -> bool:
        """Whether the learner's tensors are the bound ones: a host may put new buffers in the place of old ones."""
        tensors = moving_tensors(learner)
        return len(tensors) == len(self._bound) and all(a is b for a, b in zip(tensors, self._bound, strict=True))

    def let_go(self) -> None:
        """Give the learner addresses of its own again, so that the next one here does not overwrite its numbers."""
        for tensor in self._bound:
            tensor.data = tensor.detach().clone(memory_format=torch.preserve_format)
        self.forget()

    def forget(self) -> None:
        """The learner has moved on."""
        self._bound = []
