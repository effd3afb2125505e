"""The tensors of one learner that an epoch reads and writes, in tensors that stay where they are.

A CUDA graph works on fixed addresses. `Storage` owns such addresses; a learner that is bound to it keeps its parameter
objects, its optimizer and its seeds, but their numbers live in the storage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate

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


ALIGNED = 64
"""Numbers. Kernels read several at a time, from addresses that are multiples of it."""


def side_by_side(like: Sequence[Tensor], make: Callable[..., Tensor] = torch.empty) -> list[Tensor]:
    """A new tensor with the layout of each; those of one type lie in one piece of memory, which is made by one call."""
    places: list[Tensor | None] = [None] * len(like)
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(like):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
    for (dtype, device), rows in kinds.items():
        sizes = (-(-like[i].numel() // ALIGNED) * ALIGNED for i in rows)
        *starts, end = accumulate(sizes, initial=0)
        whole = make(end, dtype=dtype, device=device)
        for i, start in zip(rows, starts, strict=True):
            places[i] = whole.as_strided(like[i].shape, _strides(like[i]), start)
    return [place for place in places if place is not None]


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Those of a new tensor of this layout, which has no gaps."""
    if tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.stride()  # to make a tensor, even without memory, takes ten times as long
    return torch.empty_like(tensor, device="meta").stride()


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


def own_tensors(whole: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """`parameters()` and `buffers()` of a module, found in one pass: torch's own two take three times as long."""
    parameters: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [whole]
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
    slots = tuple((id(slot.seed), slot_role(slot)) for slot in learner.model.slots if slot.seed is not None)
    return slots, len(learner.optimizer.optimizer.state)


_ROLES = {
    stage: (stage in IN_FORWARD, stage is Stage.TRAINING, stage not in (Stage.GERMINATED, Stage.FOSSILIZED))
    for stage in Stage
}
"""Whether a seed takes part in the output, incubates, and is measured."""


def slot_role(slot: Slot) -> Hashable:
    """All that decides what a slot does in an epoch, besides its seed and the numbers in its tensors."""
    life = slot.life
    return None if slot.seed is None else (_ROLES[life.stage], life.alpha == 0.0, life.alpha == 1.0)


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
    return (layout(split.x), layout(split.y)) if is_copied(split) else (Same(split.x), Same(split.y))


def tensor_feed(learner: Learner) -> TensorFeed:
    assert isinstance(learner.feed, TensorFeed)  # `why_not_static` is asked first
    return learner.feed


class Storage:
    """Fixed addresses for the moving tensors of one learner at a time."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._places = side_by_side(tensors)
        self._bound: list[Tensor] = []

    def bind(self, tensors: list[Tensor]) -> None:
        """Move the learner's numbers here. The learner's tensors stay the same objects."""
        _copy(tensors, self._places)
        for tensor, place in zip(tensors, self._places, strict=True):
            tensor.data = place
        self._bound = tensors

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the bound ones: a host may put new buffers in the place of old ones."""
        return len(tensors) == len(self._bound) and all(a is b for a, b in zip(tensors, self._bound, strict=True))

    def let_go(self) -> None:
        """Give the learner addresses of its own again, so that the next one here does not overwrite its numbers."""
        places = side_by_side(self._bound)
        _copy(self._bound, places)
        for tensor, place in zip(self._bound, places, strict=True):
            tensor.data = place
        self.forget()

    def forget(self) -> None:
        """The learner has moved on."""
        self._bound = []


def _copy(tensors: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    """With few kernels: one call for each type of number."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, place in zip(tensors, places, strict=True):
        sources, targets = by_type.setdefault(place.dtype, ([], []))
        sources.append(tensor)
        targets.append(place)
    with torch.no_grad():
        for sources, targets in by_type.values():
            torch._foreach_copy_(targets, sources)
