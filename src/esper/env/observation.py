"""From columns to tensors: what the learned policy sees, what it may do, and what it did.

The layout is data: one list of named fields for the run, one for a slot; each has one definition, here, and lies
in [-1, 1]. What was not measured yet is `NOT_MEASURED`, outside of that range, never 0. A change of the lists is
a new `SCHEMA_VERSION`, because trained policies depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, Action, Op
from esper.env.spaces import ActionMasks, Observation
from esper.env.world import HISTORY, World
from esper.growth.blueprints import LAYOUTS, blueprint_names
from esper.lifecycle import Stage

SCHEMA_VERSION = 1
NOT_MEASURED = -2.0


def squash(value: Tensor, scale: float) -> Tensor:
    """Sign-preserving logarithm, 1 at `scale`, clipped there: large values stay bounded, small ones stay visible."""
    return torch.copysign((value.abs().log1p() / math.log1p(scale)).clamp(max=1.0), value)


def _known(value: Tensor) -> Tensor:
    return torch.where(value.isnan(), NOT_MEASURED, value)


# -- the run as a whole: [N, fields] ----------------------------------------------------------------------------------


def _time(w: World) -> list[Tensor]:
    epoch, horizon = w.epoch.double(), w.horizon.double()
    return [epoch / horizon, ((horizon - epoch) / 50).clamp(max=1.0)]


def _results(w: World) -> list[Tensor]:
    """Accuracies and losses of the current epoch and those before it, the current one first."""
    return [*_known(w.accuracy / 100).unbind(1), *_known(squash(w.loss, 20.0)).unbind(1)]


def _training(w: World) -> list[Tensor]:
    """What is not a number in an epoch that broke counts as the worst."""
    since_best = (w.epoch - 1 - w.best_epoch).double() / w.horizon
    gap = torch.where(w.train_loss.isfinite(), w.loss[:, 0] - w.train_loss, math.inf)
    sizes = [squash(x.nan_to_num(math.inf), scale) for x, scale in ((w.train_loss, 20.0), (gap, 20.0))]
    columns = [*sizes, since_best, squash(w.host_gradient.nan_to_num(math.inf), 100.0)]
    return [torch.where(w.epoch > 0, column, NOT_MEASURED) for column in columns]


def _sizes(w: World) -> list[Tensor]:
    parameters = w.parameters
    return [
        squash(parameters / w.host_parameters - 1.0, 20.0),
        squash((w.budget - parameters) / w.host_parameters, 10.0),
        (w.seeds_left / w.slots.present.sum(1).clamp(min=1)).clamp(max=1.0),
        (w.host_parameters.clamp(min=1).log10() / 8).clamp(max=1.0),
    ]


_STAGES_TOGETHER = {
    "slots_empty": (Stage.DORMANT,),
    "slots_incubating": (Stage.GERMINATED, Stage.TRAINING),
    "slots_blending": (Stage.BLENDING, Stage.HOLDING),
    "slots_fossilized": (Stage.FOSSILIZED,),
}


def _shares(w: World) -> list[Tensor]:
    present = w.slots.present
    count = present.sum(1).clamp(min=1)
    return [(w.slots.within(stages) & present).sum(1).double() / count for stages in _STAGES_TOGETHER.values()]


def _last_op(w: World) -> list[Tensor]:
    return [*((w.op == op).double() for op in Op), w.changed.double()]


# Names, and the function that gives their columns.
_OVERALL: list[tuple[tuple[str, ...], Callable[[World], list[Tensor]]]] = [
    (("progress", "epochs_left"), _time),
    (tuple(f"val_{what}_{ago}_ago" for what in ("accuracy", "loss") for ago in range(HISTORY + 1)), _results),
    (("train_loss", "generalisation_gap", "epochs_since_best", "host_gradient"), _training),
    (("growth", "budget_left", "seeds_left", "host_size"), _sizes),
    (tuple(_STAGES_TOGETHER), _shares),
    ((*(f"last_op_{op.name.lower()}" for op in Op), "last_op_changed"), _last_op),
]
OVERALL_FIELDS = tuple(name for names, _ in _OVERALL for name in names)

# -- one slot: [N, S, fields] -----------------------------------------------------------------------------------------


def _place(w: World) -> list[Tensor]:
    return [w.position, (w.channels.clamp(min=1).log2() / 10).clamp(max=1.0)]


def _age(w: World) -> list[Tensor]:
    v = w.slots
    counts = ((v.age, 20), (v.dwell, 10), (v.pruned, 4))
    return [v.alpha, v.retiring.double(), *((count.double() / most).clamp(max=1.0) for count, most in counts)]


def _activity(w: World) -> list[Tensor]:
    gradient = ((w.slots.gradient + 1e-9).log10() / 5).clamp(-1.0, 1.0)
    return [squash(w.slots.size / w.host_parameters[:, None], 20.0), _known(gradient)]


def _worth(contrast: Tensor) -> list[Tensor]:
    """Points, loss saved, and points per standard error: is it more than noise?"""
    accuracy, loss, error = contrast.unbind(-1)
    certainty = (accuracy / error.clamp(min=1e-3) / 5).clamp(-1.0, 1.0)
    return [_known(squash(accuracy, 50.0)), _known(squash(loss, 3.0)), _known(certainty)]


def _staleness(w: World) -> list[Tensor]:
    v = w.slots
    unknown = v.shadow_points.isnan() & v.contribution_points.isnan()
    return [torch.where(unknown, NOT_MEASURED, ((v.age - v.measured_age).double() / 10).clamp(max=1.0))]


def _legal(w: World) -> list[Tensor]:
    return [column.double() for column in (w.growable.any(-1), w.slots.prunable, w.slots.fossilizable)]


_SLOT: list[tuple[tuple[str, ...], Callable[[World], list[Tensor]]]] = [
    (tuple(f"stage_{stage.name.lower()}" for stage in Stage), lambda w: _one_hot(w.slots.stage, len(Stage))),
    (tuple(f"layout_{layout}" for layout in LAYOUTS), lambda w: _one_hot(w.layout, len(LAYOUTS))),
    (("position", "channels"), _place),
    (("alpha", "retiring", "age", "dwell", "seeds_before"), _age),
    (("parameters", "gradient"), _activity),
    (("shadow_points", "shadow_loss", "shadow_certainty"), lambda w: _worth(w.slots.shadow)),
    (("contribution_points", "contribution_loss", "contribution_certainty"), lambda w: _worth(w.slots.contribution)),
    (("staleness",), _staleness),
    (("growable", "prunable", "fossilizable"), _legal),
]
SLOT_FIELDS = tuple(name for names, _ in _SLOT for name in names)


def _one_hot(column: Tensor, count: int) -> list[Tensor]:
    return list(F.one_hot(column, count).double().unbind(-1))


# -- all together -----------------------------------------------------------------------------------------------------


def features(w: World) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: of the runs [N, G], of the slots [N, S, F], and what blueprints cost [N, S, B], in host sizes."""
    overall = torch.stack([column for _, columns in _OVERALL for column in columns(w)], -1)
    slots = torch.stack([column for _, columns in _SLOT for column in columns(w)], -1)
    slots = torch.where(w.slots.present[..., None], slots, 0.0)
    return overall, slots, _known(squash(w.costs / w.host_parameters[:, None, None], 20.0))


def encode(w: World) -> tuple[Observation, ActionMasks]:
    """The columns as tensors. Where an episode is over, nothing but WAIT is possible."""
    overall, slots, costs = features(w)
    seen = Observation(overall.float(), slots.float(), w.slots.blueprint + 1, costs.float(), w.slots.present)
    return seen, legal_actions(w)


def legal_actions(w: World) -> ActionMasks:
    goes_on = ~w.over[:, None]
    growable = w.growable & goes_on[..., None]
    by_op = {Op.GERMINATE: growable.any(-1), Op.PRUNE: w.slots.prunable, Op.FOSSILIZE: w.slots.fossilizable}
    nowhere = torch.zeros_like(w.slots.present)
    slot = torch.stack([by_op.get(op, nowhere) & goes_on for op in Op], 1)  # [N, O, S]
    op = slot.any(-1)
    op[:, Op.WAIT] = True
    blend = growable.any(-1, keepdim=True).expand(-1, -1, len(BLENDS)).clone()
    return ActionMasks(op, slot, growable, blend)


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
    """The inverse of `decode`: [N, heads] int64, 0 for what an operation does not use, -1 for an unknown blueprint."""
    numbers = {name: number for number, name in enumerate(blueprint_names())}
    rows = [
        {
            "slot": action.slot or 0,
            "blueprint": 0 if action.blueprint is None else numbers.get(action.blueprint, -1),
            "blend": 0 if action.blend is None else BLENDS.index(action.blend),
            "op": int(action.op),
        }
        for action in actions
    ]
    return torch.tensor([[row[head] for head in HEAD_NAMES] for row in rows], dtype=torch.int64)
