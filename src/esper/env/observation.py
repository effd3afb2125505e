"""From a readable situation to tensors: what the learned policy sees, what it may do, and what it did.

The layout is data: one list of named fields for the run, one for a slot; each has one definition, here, and lies
in [-1, 1]. What was not measured yet is `NOT_MEASURED`, outside of that range, never 0. A change of the lists is
a new `SCHEMA_VERSION`, because trained policies depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, Action, Op
from esper.env.situation import Situation, SlotView
from esper.env.spaces import ActionMasks, Observation
from esper.growth.blueprints import LAYOUTS, blueprint_names
from esper.lifecycle import Contrast, Stage

_Value = TypeVar("_Value")

SCHEMA_VERSION = 1
NOT_MEASURED = -2.0
HISTORY = 4
"""Past epochs that are shown besides the current one."""


def squash(value: float, scale: float) -> float:
    """Sign-preserving logarithm, 1 at `scale`, clipped there: large values stay bounded, small ones stay visible."""
    size = math.log1p(abs(value)) / math.log1p(scale)
    return math.copysign(size if size < 1.0 else 1.0, value)


def _one_hot(values: Iterable[_Value]) -> dict[_Value, tuple[float, ...]]:
    known = tuple(values)
    return {value: tuple(float(other == value) for other in known) for value in known}


_OPS, _STAGES, _LAYOUTS = _one_hot(Op), _one_hot(Stage), _one_hot(LAYOUTS)

# -- the run as a whole -----------------------------------------------------------------------------------------------


def _padded(values: list[float]) -> list[float]:
    return values + [NOT_MEASURED] * (HISTORY + 1 - len(values))


def _results(s: Situation) -> list[float]:
    """Accuracies and losses of the current epoch and those before it, the current one first."""
    latest = [record.measured for record in s.history[: -HISTORY - 2 : -1]]
    accuracies = [measured.accuracy / 100 for measured in latest]
    return _padded(accuracies) + _padded([squash(measured.loss, 20.0) for measured in latest])


def _training(s: Situation) -> Sequence[float]:
    if not s.history:
        return (NOT_MEASURED,) * 4
    last = s.history[-1]
    return (
        squash(last.trained.loss, 20.0),
        squash(last.measured.loss - last.trained.loss, 20.0),
        _since_best(s),
        squash(last.trained.host_gradient, 100.0),
    )


def _since_best(s: Situation) -> float:
    accuracies = np.array([record.measured.accuracy for record in s.history])
    return (len(accuracies) - 1 - int(accuracies.argmax())) / s.horizon


def _sizes(s: Situation) -> Sequence[float]:
    return (
        squash(s.parameters / s.host_parameters - 1.0, 20.0),
        1.0 if s.budget is None else squash((s.budget - s.parameters) / s.host_parameters, 10.0),
        1.0 if s.seeds_left is None else min(1.0, s.seeds_left / max(1, len(s.slots))),
        min(1.0, math.log10(max(1, s.host_parameters)) / 8),
    )


_STAGES_TOGETHER = {
    "slots_empty": (Stage.DORMANT,),
    "slots_incubating": (Stage.GERMINATED, Stage.TRAINING),
    "slots_blending": (Stage.BLENDING, Stage.HOLDING),
    "slots_fossilized": (Stage.FOSSILIZED,),
}


def _shares(s: Situation) -> list[float]:
    found = [slot.stage for slot in s.slots]
    return [sum(map(found.count, stages)) / max(1, len(found)) for stages in _STAGES_TOGETHER.values()]


def _last_op(s: Situation) -> Sequence[float]:
    if s.last_effect is None:
        return (0.0,) * (len(Op) + 1)
    return (*_OPS[s.last_effect.action.op], float(s.last_effect.changed))


# Names, and the function that gives their values: related ones together, because every call takes time.
_OVERALL: list[tuple[tuple[str, ...], Callable[[Situation], Sequence[float]]]] = [
    (("progress", "epochs_left"), lambda s: (s.epoch / s.horizon, min(1.0, s.remaining / 50))),
    (tuple(f"val_{what}_{ago}_ago" for what in ("accuracy", "loss") for ago in range(HISTORY + 1)), _results),
    (("train_loss", "generalisation_gap", "epochs_since_best", "host_gradient"), _training),
    (("growth", "budget_left", "seeds_left", "host_size"), _sizes),
    (tuple(_STAGES_TOGETHER), _shares),
    ((*(f"last_op_{op.name.lower()}" for op in Op), "last_op_changed"), _last_op),
]
OVERALL_FIELDS = tuple(name for names, _ in _OVERALL for name in names)

# -- one slot ---------------------------------------------------------------------------------------------------------


def _worth(contrast: Contrast | None) -> Sequence[float]:
    """Points, loss saved, and points per standard error: is it more than noise?"""
    if contrast is None:
        return (NOT_MEASURED,) * 3
    certainty = contrast.accuracy / max(contrast.error, 1e-3) / 5
    return squash(contrast.accuracy, 50.0), squash(contrast.loss, 3.0), max(-1.0, min(1.0, certainty))


def _age(s: Situation, v: SlotView) -> Sequence[float]:
    return v.alpha, float(v.retiring), min(1.0, v.age / 20), min(1.0, v.dwell / 10), min(1.0, v.seeds_before / 4)


def _activity(s: Situation, v: SlotView) -> Sequence[float]:
    gradient = NOT_MEASURED if v.gradient is None else max(-1.0, min(1.0, math.log10(v.gradient + 1e-9) / 5))
    return squash(v.parameters / s.host_parameters, 20.0), gradient


def _staleness(s: Situation, v: SlotView) -> Sequence[float]:
    unknown = v.contribution is None and v.shadow_benefit is None
    return (NOT_MEASURED if unknown else min(1.0, v.staleness / 10),)


_SLOT: list[tuple[tuple[str, ...], Callable[[Situation, SlotView], Sequence[float]]]] = [
    (tuple(f"stage_{stage.name.lower()}" for stage in Stage), lambda s, v: _STAGES[v.stage]),
    (tuple(f"layout_{layout}" for layout in LAYOUTS), lambda s, v: _LAYOUTS[v.layout]),
    (("position", "channels"), lambda s, v: (v.position, min(1.0, math.log2(max(1, v.channels)) / 10))),
    (("alpha", "retiring", "age", "dwell", "seeds_before"), _age),
    (("parameters", "gradient"), _activity),
    (("shadow_points", "shadow_loss", "shadow_certainty"), lambda s, v: _worth(v.shadow_benefit)),
    (("contribution_points", "contribution_loss", "contribution_certainty"), lambda s, v: _worth(v.contribution)),
    (("staleness",), _staleness),
    (("growable", "prunable", "fossilizable"), lambda s, v: (float(bool(v.growable)), v.prunable, v.fossilizable)),
]
SLOT_FIELDS = tuple(name for names, _ in _SLOT for name in names)


_FIELD_OF_OP = {
    Op.GERMINATE: SLOT_FIELDS.index("growable"),
    Op.PRUNE: SLOT_FIELDS.index("prunable"),
    Op.FOSSILIZE: SLOT_FIELDS.index("fossilizable"),
}
"""Which feature of a slot says that the operation is possible there."""

# -- all together -----------------------------------------------------------------------------------------------------


class Encoder:
    """The situations of some networks as tensors, padded to a number of slots.

    What it was told of a row stays until it is told otherwise, slot by slot: an empty slot is the same view epoch
    after epoch, and costs nothing.
    """

    def __init__(self, networks: int, slots: int) -> None:
        self._names = blueprint_names()
        shape = (networks, slots)
        self._views: dict[tuple[int, int], SlotView] = {}
        """What was written, by row and slot."""
        self._overall = np.zeros((networks, len(OVERALL_FIELDS)), np.float32)
        self._features = np.zeros((*shape, len(SLOT_FIELDS)), np.float32)
        self._planted = np.zeros(shape, np.int64)
        self._costs = np.full((*shape, len(self._names)), NOT_MEASURED, np.float32)
        self._present = np.zeros(shape, bool)
        self._growable = np.zeros((*shape, len(self._names)), bool)

    def write(self, row: int, s: Situation) -> None:
        """The situation of one network, from now on."""
        self._overall[row] = [x for _, values in _OVERALL for x in values(s)]
        for v in s.slots:
            place = row, v.index
            last = self._views.get(place)
            if v is last:  # besides the view, a slot's fields depend on the host's size alone
                continue
            self._views[place] = v
            self._features[place] = [x for _, values in _SLOT for x in values(s, v)]
            self._planted[place] = 0 if v.blueprint is None else self._names.index(v.blueprint) + 1
            self._growable[place] = _marks(v.growable, self._names)
            if last is None or v.costs is not last.costs:
                self._costs[place] = _relative(tuple(v.costs.items()), s.host_parameters, self._names)
                self._present[place] = True

    def tensors(self, finished: Sequence[bool]) -> tuple[Observation, ActionMasks]:
        """All rows as they are now. Where an episode is `finished`, nothing but WAIT is possible."""
        goes_on = ~np.array(finished, bool)[:, None, None]
        growable = self._growable & goes_on
        slot_mask = np.zeros((len(growable), len(Op), growable.shape[1]), bool)
        for op, field in _FIELD_OF_OP.items():
            slot_mask[:, op] = self._features[:, :, field] > 0.0
        slot_mask &= goes_on
        op_mask: NDArray[np.bool_] = np.any(slot_mask, axis=2)
        op_mask[:, Op.WAIT] = True
        blend: NDArray[np.bool_] = np.repeat(np.any(growable, axis=2, keepdims=True), len(BLENDS), 2)
        shown = (self._overall, self._features, self._planted, self._costs, self._present)
        return (
            Observation(*(torch.from_numpy(part.copy()) for part in shown)),
            ActionMasks(*map(torch.from_numpy, (op_mask, slot_mask, growable, blend))),
        )


@lru_cache(4096)
def _marks(some: frozenset[str], names: tuple[str, ...]) -> NDArray[np.bool_]:
    return np.array([name in some for name in names], bool)


@lru_cache(4096)
def _relative(costs: tuple[tuple[str, int], ...], host_parameters: int, names: tuple[str, ...]) -> NDArray[np.float64]:
    """What each blueprint costs, in host sizes, squashed; `NOT_MEASURED` where it does not fit."""
    known = dict(costs)
    sizes = np.array([known.get(name, math.nan) for name in names]) / host_parameters
    squashed = np.minimum(1.0, np.log1p(sizes) / math.log1p(20.0))  # `squash`, all at once
    return np.where(np.isnan(sizes), NOT_MEASURED, squashed)


def encode(
    situations: Sequence[Situation], slots: int | None = None, finished: Sequence[bool] | None = None
) -> tuple[Observation, ActionMasks]:
    """N situations as tensors, padded to `slots` (default: the most that any of them has).

    Where an episode is `finished`, nothing but WAIT is possible.
    """
    encoder = Encoder(len(situations), slots or max(len(s.slots) for s in situations))
    for row, s in enumerate(situations):
        encoder.write(row, s)
    return encoder.tensors(finished or [False] * len(situations))


def decode(actions: Tensor) -> list[Action]:
    """Actions [N, heads] as records; what an operation does not use is ignored."""
    return [decode_one(row) for row in actions.tolist()]


def decode_one(row: Sequence[int], reason: str = "", probability: float | None = None) -> Action:
    """One row of actions, in the order of `HEAD_NAMES`."""
    slot, blueprint, blend, op = row
    if op == Op.WAIT:
        return Action(reason=reason, probability=probability)
    if op == Op.GERMINATE:
        return Action(Op.GERMINATE, slot, blueprint_names()[blueprint], BLENDS[blend], reason, probability)
    return Action(Op(op), slot, reason=reason, probability=probability)


def to_tensor(actions: Sequence[Action]) -> Tensor:
    """The inverse of `decode`: [N, heads] int64, 0 for what an operation does not use."""
    names = blueprint_names()
    rows = [
        {
            "slot": action.slot or 0,
            "blueprint": 0 if action.blueprint is None else names.index(action.blueprint),
            "blend": 0 if action.blend is None else BLENDS.index(action.blend),
            "op": int(action.op),
        }
        for action in actions
    ]
    return torch.tensor([[row[head] for head in HEAD_NAMES] for row in rows], dtype=torch.int64)
