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

from esper.actions import BLENDS, HEAD_NAMES, WAIT, Action, Op
from esper.engine.eager import EpochRecord
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
    return math.copysign(min(1.0, math.log1p(abs(value)) / math.log1p(scale)), value)


def _one_hot(values: Iterable[_Value]) -> dict[_Value, tuple[float, ...]]:
    known = tuple(values)
    return {value: tuple(float(other == value) for other in known) for value in known}


_OPS, _STAGES, _LAYOUTS = _one_hot(Op), _one_hot(Stage), _one_hot(LAYOUTS)

# -- the run as a whole -----------------------------------------------------------------------------------------------


def _padded(values: list[float]) -> list[float]:
    return values + [NOT_MEASURED] * (HISTORY + 1 - len(values))


def _latest(s: Situation) -> list[EpochRecord]:
    """The current epoch and those before it, the current one first."""
    return list(s.history[: -HISTORY - 2 : -1])


def _accuracies(s: Situation) -> list[float]:
    return _padded([record.measured.accuracy / 100 for record in _latest(s)])


def _losses(s: Situation) -> list[float]:
    return _padded([squash(record.measured.loss, 20.0) for record in _latest(s)])


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
    accuracies = [record.measured.accuracy for record in s.history]
    return (len(accuracies) - 1 - int(np.argmax(accuracies))) / s.horizon


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
    (tuple(f"val_accuracy_{ago}_ago" for ago in range(HISTORY + 1)), _accuracies),
    (tuple(f"val_loss_{ago}_ago" for ago in range(HISTORY + 1)), _losses),
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


@lru_cache(4096)
def _marks(some: frozenset[str], names: tuple[str, ...]) -> NDArray[np.bool_]:
    return np.array([name in some for name in names], bool)


@lru_cache(4096)
def _by_name(some: tuple[str, ...], values: tuple[float, ...], names: tuple[str, ...]) -> NDArray[np.float64]:
    """The value of each name; of others, none."""
    known = dict(zip(some, values, strict=True))
    return np.array([known.get(name, math.nan) for name in names])


def encode(
    situations: Sequence[Situation], slots: int | None = None, finished: Sequence[bool] | None = None
) -> tuple[Observation, ActionMasks]:
    """N situations as tensors, padded to `slots` (default: the most that any of them has).

    Where an episode is `finished`, nothing but WAIT is possible.
    """
    width = slots or max(len(s.slots) for s in situations)
    names = blueprint_names()
    n, b = len(situations), len(names)
    features = np.zeros((n, width, len(SLOT_FIELDS)), np.float32)
    planted = np.zeros((n, width), np.int64)
    costs = np.full((n, width, b), np.nan)
    present = np.zeros((n, width), bool)
    growable = np.zeros((n, width, b), bool)
    slot_mask = np.zeros((n, len(Op), width), bool)
    overall = np.array([[x for _, values in _OVERALL for x in values(s)] for s in situations], np.float32)
    for i, s in enumerate(situations):
        for v in s.slots:
            j = v.index
            features[i, j] = [x for _, values in _SLOT for x in values(s, v)]
            planted[i, j] = 0 if v.blueprint is None else names.index(v.blueprint) + 1
            present[i, j] = True
            costs[i, j] = _by_name(tuple(v.costs), tuple(v.costs.values()), names)
            growable[i, j] = _marks(v.growable, names)
            slot_mask[i, :, j] = [v.allows(op) for op in _OPS]
    costs /= np.array([s.host_parameters for s in situations])[:, None, None]
    squashed = np.minimum(1.0, np.log1p(costs) / math.log1p(20.0))  # `squash`, all at once
    costs = np.where(np.isnan(costs), NOT_MEASURED, squashed).astype(np.float32)
    if finished is not None:
        slot_mask[np.asarray(finished)] = False
        growable[np.asarray(finished)] = False
    op_mask: NDArray[np.bool_] = np.any(slot_mask, axis=2)
    op_mask[:, Op.WAIT] = True
    blend: NDArray[np.bool_] = np.repeat(np.any(growable, axis=2, keepdims=True), len(BLENDS), 2)
    t = torch.from_numpy
    return (
        Observation(t(overall), t(features), t(planted), t(costs), t(present)),
        ActionMasks(t(op_mask), t(slot_mask), t(growable), t(blend)),
    )


def decode(actions: Tensor, reason: str = "") -> list[Action]:
    """Actions [N, heads] as records; what an operation does not use is ignored."""
    names = blueprint_names()
    slot, blueprint, blend, op = (HEAD_NAMES.index(head) for head in ("slot", "blueprint", "blend", "op"))
    decoded = []
    for row in actions.tolist():
        if row[op] == Op.WAIT:
            decoded.append(WAIT)
        elif row[op] == Op.GERMINATE:
            decoded.append(Action(Op.GERMINATE, row[slot], names[row[blueprint]], BLENDS[row[blend]], reason))
        else:
            decoded.append(Action(Op(row[op]), row[slot], reason=reason))
    return decoded


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
