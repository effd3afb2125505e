"""The governor: notices when a learner has broken, and takes it back to where it was healthy.

One per learner. After every epoch it looks at numbers that were gathered anyway; it never decides what to grow. Its
snapshot is one copy, in CPU memory, of what is there for good: the host and its fossilized seeds (R109, R146).

A fault needs two signs: the validation loss, measured after the last update, and the training loss. The first alone
may jump while running statistics lag behind fast features, the second alone when a seed has just been pruned. Only what
is not finite, or beyond all doubt, is believed at once.

A healthy epoch:  check -> None, then keep (remember the level, refresh the snapshot).
A broken epoch:   check -> Verdict, then roll_back, and resume once the restored network has been measured.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from esper.engine.learner import Learner, TrainReport
from esper.engine.measure import Evaluation
from esper.growth.model import GrowingModel
from esper.lifecycle import Stage, Transition
from esper.plain_data import as_data, from_data


class Fault(StrEnum):
    """How training can break."""

    NON_FINITE = "non-finite"
    """A loss or a weight is NaN or infinite."""
    RETURN_TO_CHANCE = "return to chance"
    """The network had learnt, and has lost it all: dead units, a saturated layer."""
    DIVERGENCE = "divergence"
    """The validation loss is far above its recent level."""


FAULTS = tuple(Fault)
"""The order of codes in columns."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an epoch was undone."""

    kind: Fault
    seen: float
    """The validation loss; for a non-finite training loss, that."""
    limit: float
    """The validation loss from which on this is a fault; infinity for what is not finite."""
    message: str


# When an epoch counts as broken. No false alarm in 13,109 epochs of ordinary runs (568 episodes of mixed, natural,
# mnist1d and digits under the random and the heuristic controller, 1,343 prunings among them).
WINDOW = 10
"""Healthy epochs that make up the recent level."""
TRAINING_RISE = 0.25
"""In a broken epoch the training loss is above its recent median by this share of it."""
DIVERGENCE_FACTOR = 3.0
"""A diverged loss is over this many times the recent median, …"""
DIVERGENCE_SPREAD = 6.0
"""… and over the median by this many robust standard deviations (1.48 times the median deviation), …"""
DIVERGENCE_START = 1.5
"""… and over this many times the loss at the start: worse than knowing nothing, …"""
DIVERGENCE_KEPT = 0.5
"""… while less than this share of the points above chance is left: a few extreme examples can carry a loss away. (Half
of `LEARNT_POINTS` at least, for a network that knows little yet.)"""
DIVERGENCE_CERTAIN = 10.0
"""This many times as far above the level, a loss needs no other evidence, and no level of the network's own."""
LEARNT_POINTS = 20.0
"""A network has learnt when its recent median score is this many points above chance …"""
LEARNT_LOSS = 0.25
"""… and its recent median loss lies below that of chance by this share."""
LOST_SHARE = 0.9
"""It is back at chance when it has lost this share of both gains."""


class Governor:
    """Watches one learner and can take it back."""

    def __init__(self, learner: Learner, *, chance: Evaluation | None = None) -> None:
        """`chance` is what an untrained network scores; without it the first evaluation stands for it."""
        self.chance = chance if chance is not None and math.isfinite(chance.loss) else None
        self._learner = learner
        self._recent: deque[Evaluation] = deque(maxlen=WINDOW)
        """Healthy evaluations, since the network was last reduced or restored."""
        self._training: deque[float] = deque(maxlen=WINDOW)
        """Healthy training losses, since the network was last reduced."""
        self._alphas: dict[int, float] = {}
        """By number of the seed: how much of each one was part of the network that was judged last."""
        self._snapshot = Snapshot(learner.model)

    # -- judging ------------------------------------------------------------------------------------------------

    def check(self, trained: TrainReport, measured: Evaluation) -> Verdict | None:
        """None when all is well."""
        if not math.isfinite(trained.loss):
            return _non_finite(trained.loss, f"the training loss became {trained.loss}")
        if not math.isfinite(measured.loss):
            return _non_finite(measured.loss, f"the validation loss became {measured.loss}")
        if not trained.finite:
            return _non_finite(measured.loss, "a weight or a running statistic is no longer finite")
        self._notice_reduction()
        level = median(self._training) if self._training else math.inf
        rose = trained.loss > level + TRAINING_RISE * abs(level)
        return (self._back_at_chance(measured) if rose else None) or self._diverged(measured, rose)

    def _diverged(self, measured: Evaluation, training_rose: bool) -> Verdict | None:
        level, start = self._level(), self.chance
        if level is None or start is None or measured.loss <= level.loss:  # no limit lies below the level
            return None
        spread = 1.4826 * median(abs(one.loss - level.loss) for one in self._recent) if self._recent else 0.0
        # Distances instead of products, for losses that may be negative.
        margin = max((DIVERGENCE_FACTOR - 1.0) * abs(level.loss), DIVERGENCE_SPREAD * spread)
        limit = max(level.loss + margin, start.loss + (DIVERGENCE_START - 1.0) * abs(start.loss))
        points, kept = level.accuracy - start.accuracy, measured.accuracy - start.accuracy
        if not training_rose or kept >= DIVERGENCE_KEPT * max(points, LEARNT_POINTS):
            limit = level.loss + DIVERGENCE_CERTAIN * (limit - level.loss)
        if measured.loss <= limit:
            return None
        message = f"the validation loss jumped from about {level.loss:.3g} to {measured.loss:.3g} (limit {limit:.3g})"
        return Verdict(Fault.DIVERGENCE, measured.loss, limit, message)

    def _back_at_chance(self, measured: Evaluation) -> Verdict | None:
        level, chance = self._level(), self.chance
        if level is None or chance is None:
            return None
        points, saved = level.accuracy - chance.accuracy, chance.loss - level.loss
        limit = level.loss + LOST_SHARE * saved
        learnt = points >= LEARNT_POINTS and saved >= LEARNT_LOSS * abs(chance.loss)
        lost = level.accuracy - measured.accuracy >= LOST_SHARE * points and measured.loss >= limit
        if not (learnt and lost):
            return None
        message = (
            f"the network forgot what it had learnt: validation accuracy fell from about {level.accuracy:.1f} % "
            f"to {measured.accuracy:.1f} % (chance {chance.accuracy:.1f} %)"
        )
        return Verdict(Fault.RETURN_TO_CHANCE, measured.loss, limit, message)

    def _level(self) -> Evaluation | None:
        """What is normal now; chance while nothing is known of this network; None before the first evaluation."""
        if not self._recent:
            return self.chance
        return Evaluation(median(one.loss for one in self._recent), median(one.accuracy for one in self._recent))

    def _notice_reduction(self) -> None:
        """Removing a seed on purpose may lower the accuracy at once. That was decided, so it is no fault.

        Seen in the `mixed` family, where a host stands at chance without its seed: pruning it looks like a collapse.
        """
        alphas = {slot.life.seed: slot.strength for slot in self._learner.model.joined}
        if any(alphas.get(seed, 0.0) < alpha for seed, alpha in self._alphas.items()):
            self._recent.clear()
            self._training.clear()
        self._alphas = alphas

    # -- keeping and restoring ------------------------------------------------------------------------------------

    def keep(self, trained: TrainReport, measured: Evaluation) -> None:
        """The epoch was healthy: its level is the new normal, and this is the state to come back to."""
        self._training.append(trained.loss)
        self._note(measured)
        self._snapshot.take(self._learner.packed)

    def fossilized(self, slot: str) -> None:
        """A seed became permanent between two epochs, so it must be in the snapshot before anything can break."""
        self._snapshot.include(slot)

    def roll_back(self, verdict: Verdict) -> list[Transition]:
        """Undo the epoch: unfinished seeds go, the rest is as it was, the optimizer starts afresh.

        The data stream and the random numbers go on: with the same minibatches it could only break again.
        """
        transitions = self._learner.abandon_seeds(f"governor: {verdict.message}")
        self._snapshot.restore()
        self._learner.optimizer.reset()
        return transitions

    def resume(self, restored: Evaluation) -> None:
        """Judge what comes by the restored network: without its unfinished seeds its level may be another."""
        self._notice_reduction()
        self._recent.clear()
        if math.isfinite(restored.loss):
            self._note(restored)

    def _note(self, measured: Evaluation) -> None:
        if self.chance is None:
            self.chance = measured
        self._recent.append(measured)

    def state(self) -> dict[str, Any]:
        """All but the snapshot: between two epochs that is the network itself."""
        return {
            "chance": as_data(self.chance),
            "recent": as_data(list(self._recent)),
            "training": list(self._training),
            "alphas": dict(self._alphas),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Of a network as it is now."""
        self.chance = None if state["chance"] is None else from_data(Evaluation, state["chance"])
        self._recent.extend(from_data(Evaluation, one) for one in state["recent"])
        self._training.extend(state["training"])
        self._alphas = dict(state["alphas"])
        self._snapshot.take()


class Snapshot:
    """One copy of a growing model's permanent tensors, in CPU memory that is allocated once and written over."""

    def __init__(self, model: GrowingModel) -> None:
        self._model = model
        self._known: Hashable = None
        """What was permanent when the lists below were made: finding it again costs more than the copies."""
        self._flat: list[tuple[Tensor, list[Tensor]]] = []
        """For each type of number: the copies, one after the other, and the tensors that they are of."""
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self.take()

    def take(self, packed: Mapping[torch.dtype, Tensor] | None = None) -> None:
        """`packed` is what `pack` gives, if that is known."""
        if not self._is_current():
            self._look()
        for copies, tensors in self._flat:
            copies.copy_(packed[copies.dtype] if packed else _lined_up(tensors), non_blocking=True)

    def _is_current(self) -> bool:
        """A host may put a new buffer in the place of an old one."""
        unchanged = all(module._buffers.get(name) is buffer for module, name, buffer in self._buffers)
        return unchanged and self._known == _permanent_seeds(self._model)

    def _look(self) -> None:
        parameters, buffers = _permanent_places(self._model)
        tensors = _by_name(parameters, buffers)
        # The objects, not detached aliases: an engine may move their numbers.
        by_type = _by_type(tensors.values())
        layout = [(name, t.shape, t.dtype) for name, t in tensors.items()]
        if layout != self._layout:
            self._allocate(layout, by_type)
        self._flat = [(copies, by_type[copies.dtype]) for copies, _ in self._flat]
        self._buffers = [place[1:] for place in buffers]
        self._known = _permanent_seeds(self._model)

    def _allocate(
        self, layout: list[tuple[str, torch.Size, torch.dtype]], by_type: dict[torch.dtype, list[Tensor]]
    ) -> None:
        """A place for everything; what was there before is kept."""
        before = self._copies
        if any(copies.is_pinned() for copies, _ in self._flat):  # the last copies may still be on their way
            torch.cuda.current_stream(self._model.device).synchronize()
        sizes = {dtype: sum(tensor.numel() for tensor in tensors) for dtype, tensors in by_type.items()}
        # Pinned, so that a copy from a GPU does not wait for it; the stream keeps copies in order.
        self._flat = [
            (torch.zeros(sizes[dtype], dtype=dtype, pin_memory=tensors[0].is_cuda), [])
            for dtype, tensors in by_type.items()
        ]
        self._layout = layout
        if before:
            for name, copy in self._copies.items():
                if name in before and before[name].shape == copy.shape:
                    copy.copy_(before[name])

    @property
    def _copies(self) -> dict[str, Tensor]:
        """By name. They are told apart when they are needed: most networks are never taken back."""
        found: dict[str, Tensor] = {}
        for copies, _ in self._flat:
            own = [(name, shape) for name, shape, dtype in self._layout if dtype == copies.dtype]
            pieces = torch.split(copies, [shape.numel() for _, shape in own])
            found |= {name: piece.view(shape) for (name, shape), piece in zip(own, pieces, strict=True)}
        return found

    def include(self, slot: str) -> None:
        """Take the seed of a slot in and leave the rest: it was taken when it was known to be healthy."""
        index = next(one.index for one in self._model.slots if one.path == slot)
        prefix = f"seeds.{index}."
        self._look()
        copies = self._copies
        for name, tensor in permanent_tensors(self._model).items():
            if name.startswith(prefix):
                copies[name].copy_(tensor.detach(), non_blocking=True)

    def restore(self) -> None:
        """Write into the model's own tensors: parameters stay the objects that the optimizer holds."""
        copies = self._copies
        with torch.no_grad():
            for name, tensor in permanent_tensors(self._model).items():
                if name not in copies and not isinstance(tensor, nn.Parameter):
                    continue  # a buffer that the host made in the broken epoch: there is nothing to go back to
                saved = copies[name]
                if tensor.shape != saved.shape:  # a buffer that the host replaced
                    tensor.resize_(saved.shape)
                tensor.copy_(saved)

    @property
    def bytes(self) -> int:
        return sum(copies.nbytes for copies, _ in self._flat)


def pack(model: GrowingModel, places: Mapping[torch.dtype, Tensor] | None = None) -> dict[torch.dtype, Tensor]:
    """For each type of number, all permanent tensors one after the other, in the order of `permanent_tensors`.

    With `places`, what an earlier call gave, they are written there.
    """
    places, by_type = places or {}, _by_type(permanent_tensors(model).values())
    return {dtype: _lined_up(tensors, places.get(dtype)) for dtype, tensors in by_type.items()}


def _by_type(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    return by_type


def _lined_up(tensors: Sequence[Tensor], place: Tensor | None = None) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors], out=place)


def _permanent_seeds(model: GrowingModel) -> tuple[int, ...]:
    return tuple(slot.life.seed for slot in model.slots if slot.stage is Stage.FOSSILIZED)


def permanent_tensors(model: GrowingModel) -> dict[str, Tensor]:
    """Parameters and buffers, by name, of the host and of the fossilized seeds; tied ones once."""
    return _by_name(*_permanent_places(model))


_Place = tuple[str, nn.Module, str, Tensor]
"""A tensor: its name, the module that holds it, and what that module calls it."""


def _permanent_places(model: GrowingModel) -> tuple[list[_Place], list[_Place]]:
    """Where parameters and buffers are, found in one pass: torch's own functions take three times as long."""
    passing = tuple(f"seeds.{slot.index}." for slot in model.slots if slot.stage is not Stage.FOSSILIZED)
    parameters: list[_Place] = []
    buffers: list[_Place] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if prefix.startswith(passing):
            continue
        for places, held in ((parameters, module._parameters), (buffers, module._buffers)):
            places += [(prefix + own, module, own, tensor) for own, tensor in held.items() if tensor is not None]
    return parameters, buffers


def _by_name(*kinds: list[_Place]) -> dict[str, Tensor]:
    """Tied tensors have the name of their first place."""
    first: dict[int, _Place] = {}
    for place in chain(*kinds):
        first.setdefault(id(place[3]), place)
    return {name: tensor for name, _, _, tensor in first.values()}


def _non_finite(seen: float, message: str) -> Verdict:
    return Verdict(Fault.NON_FINITE, seen, math.inf, message)
