"""From a readable situation to tensors: what the learned policy sees, what it may do, and what it did.

The layout is data: one list of named fields for the run, one for a slot; each has one definition, here, and lies
in [-1, 1]. What was not measured yet is `NOT_MEASURED`, outside of that range, never 0. A change of the lists is
a new `SCHEMA_VERSION`, because trained policies depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, WAIT, Action, Op
from esper.env.situation import Situation, SlotView
from esper.env.spaces import ActionMasks, Observation
from esper.growth.blueprints import LAYOUTS, blueprint_names
from esper.lifecycle import Contrast, Stage

SCHEMA_VERSION = 1
NOT_MEASURED = -2.0
HISTORY = 4
"""Past epochs that are shown besides the current one."""


def squash(value: float, scale: float) -> float:
    """Sign-preserving logarithm, 1 at `scale`, clipped there: large values stay bounded, small ones stay visible."""
    return math.copysign(min(1.0, math.log1p(abs(value)) / math.log1p(scale)), value)


# -- the run as a whole -----------------------------------------------------------------------------------------------


def _accuracy(ago: int) -> Callable[[Situation], float]:
    return lambda s: s.history[-1 - ago].measured.accuracy / 100 if len(s.history) > ago else NOT_MEASURED


def _loss(ago: int) -> Callable[[Situation], float]:
    return lambda s: squash(s.history[-1 - ago].measured.loss, 20.0) if len(s.history) > ago else NOT_MEASURED


def _share(*stages: Stage) -> Callable[[Situation], float]:
    return lambda s: sum(slot.stage in stages for slot in s.slots) / max(1, len(s.slots))


def _last_op(op: Op) -> Callable[[Situation], float]:
    return lambda s: float(s.last_effect is not None and s.last_effect.action.op is op)


def _since_best(s: Situation) -> float:
    accuracies = [record.measured.accuracy for record in s.history]
    if not accuracies:
        return NOT_MEASURED
    return (len(accuracies) - 1 - int(np.argmax(accuracies))) / s.horizon


def _budget_left(s: Situation) -> float:
    return 1.0 if s.budget is None else squash((s.budget - s.parameters) / s.host_parameters, 10.0)


def _seeds_left(s: Situation) -> float:
    return 1.0 if s.seeds_left is None else min(1.0, s.seeds_left / max(1, len(s.slots)))


OVERALL_FIELDS: dict[str, Callable[[Situation], float]] = {
    "progress": lambda s: s.epoch / s.horizon,
    "epochs_left": lambda s: min(1.0, s.remaining / 50),
    **{f"val_accuracy_{ago}_ago": _accuracy(ago) for ago in range(HISTORY + 1)},
    **{f"val_loss_{ago}_ago": _loss(ago) for ago in range(HISTORY + 1)},
    "train_loss": lambda s: squash(s.history[-1].trained.loss, 20.0) if s.history else NOT_MEASURED,
    "generalisation_gap": lambda s: (
        squash(s.history[-1].measured.loss - s.history[-1].trained.loss, 20.0) if s.history else NOT_MEASURED
    ),
    "epochs_since_best": _since_best,
    "host_gradient": lambda s: squash(s.history[-1].trained.host_gradient, 100.0) if s.history else NOT_MEASURED,
    "growth": lambda s: squash(s.parameters / s.host_parameters - 1.0, 20.0),
    "budget_left": _budget_left,
    "seeds_left": _seeds_left,
    "host_size": lambda s: min(1.0, math.log10(max(1, s.host_parameters)) / 8),
    "slots_empty": _share(Stage.DORMANT),
    "slots_incubating": _share(Stage.GERMINATED, Stage.TRAINING),
    "slots_blending": _share(Stage.BLENDING, Stage.HOLDING),
    "slots_fossilized": _share(Stage.FOSSILIZED),
    **{f"last_op_{op.name.lower()}": _last_op(op) for op in Op},
    "last_op_changed": lambda s: float(s.last_effect is not None and s.last_effect.changed),
}

# -- one slot ---------------------------------------------------------------------------------------------------------


def _points(contrast: Contrast | None) -> float:
    return NOT_MEASURED if contrast is None else squash(contrast.accuracy, 50.0)


def _loss_saved(contrast: Contrast | None) -> float:
    return NOT_MEASURED if contrast is None else squash(contrast.loss, 3.0)


def _certainty(contrast: Contrast | None) -> float:
    """Points per standard error: is it more than noise?"""
    if contrast is None:
        return NOT_MEASURED
    return max(-1.0, min(1.0, contrast.accuracy / max(contrast.error, 1e-3) / 5))


SLOT_FIELDS: dict[str, Callable[[Situation, SlotView], float]] = {
    **{f"stage_{stage.name.lower()}": lambda s, v, stage=stage: float(v.stage is stage) for stage in Stage},  # type: ignore[misc]
    **{f"layout_{layout}": lambda s, v, layout=layout: float(v.layout == layout) for layout in LAYOUTS},  # type: ignore[misc]
    "position": lambda s, v: v.position,
    "channels": lambda s, v: min(1.0, math.log2(max(1, v.channels)) / 10),
    "alpha": lambda s, v: v.alpha,
    "retiring": lambda s, v: float(v.retiring),
    "age": lambda s, v: min(1.0, v.age / 20),
    "dwell": lambda s, v: min(1.0, v.dwell / 10),
    "seeds_before": lambda s, v: min(1.0, v.seeds_before / 4),
    "parameters": lambda s, v: squash(v.parameters / s.host_parameters, 20.0),
    "gradient": lambda s, v: (
        NOT_MEASURED if v.gradient is None else max(-1.0, min(1.0, math.log10(v.gradient + 1e-9) / 5))
    ),
    "shadow_points": lambda s, v: _points(v.shadow_benefit),
    "shadow_loss": lambda s, v: _loss_saved(v.shadow_benefit),
    "shadow_certainty": lambda s, v: _certainty(v.shadow_benefit),
    "contribution_points": lambda s, v: _points(v.contribution),
    "contribution_loss": lambda s, v: _loss_saved(v.contribution),
    "contribution_certainty": lambda s, v: _certainty(v.contribution),
    "staleness": lambda s, v: (
        NOT_MEASURED if v.contribution is None and v.shadow_benefit is None else min(1.0, v.staleness / 10)
    ),
    "growable": lambda s, v: float(bool(v.growable)),
    "prunable": lambda s, v: float(v.prunable),
    "fossilizable": lambda s, v: float(v.fossilizable),
}


def encode(
    situations: Sequence[Situation], slots: int | None = None, finished: Sequence[bool] | None = None
) -> tuple[Observation, ActionMasks]:
    """N situations as tensors, padded to `slots` (default: the most that any of them has).

    Where an episode is `finished`, nothing but WAIT is possible.
    """
    width = slots or max(len(s.slots) for s in situations)
    names = blueprint_names()
    number = {name: i for i, name in enumerate(names)}
    n, b = len(situations), len(names)
    overall = np.zeros((n, len(OVERALL_FIELDS)), np.float32)
    features = np.zeros((n, width, len(SLOT_FIELDS)), np.float32)
    planted = np.zeros((n, width), np.int64)
    costs = np.full((n, width, b), np.nan)
    present = np.zeros((n, width), bool)
    growable = np.zeros((n, width, b), bool)
    slot_mask = np.zeros((n, len(Op), width), bool)
    for i, s in enumerate(situations):
        overall[i] = [field(s) for field in OVERALL_FIELDS.values()]
        for v in s.slots:
            j = v.index
            features[i, j] = [field(s, v) for field in SLOT_FIELDS.values()]
            planted[i, j] = 0 if v.blueprint is None else number[v.blueprint] + 1
            present[i, j] = True
            costs[i, j, [number[name] for name in v.costs]] = list(v.costs.values())
            growable[i, j, [number[name] for name in v.growable]] = True
            slot_mask[i, :, j] = [v.allows(op) for op in Op]
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
