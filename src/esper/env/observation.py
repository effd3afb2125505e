"""From columns to tensors: what the learned policy sees, what it may do, and what it did.

The layout is data: one list of named fields for the run, one for a slot; each has one definition, here, and lies
in [-1, 1]. What was not measured yet is `NOT_MEASURED`, outside of that range, never 0. A change of the lists is
a new `SCHEMA_VERSION`, because trained policies depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
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


# -- the run as a whole: each function gives the columns of some fields, [N, fields] ----------------------------------


def _time(w: World) -> Tensor:
    left = w.horizon - w.epoch
    return torch.stack((w.epoch.double() / w.horizon, (left.double() / 50).clamp(max=1.0)), -1)


def _results(w: World) -> Tensor:
    """Accuracies and losses of the current epoch and those before it, the current one first."""
    return _known(torch.cat((w.accuracy / 100, squash(w.loss, 20.0)), -1))


def _training(w: World) -> Tensor:
    """What is not a number in an epoch that broke counts as the worst."""
    since_best = (w.epoch - 1 - w.best_epoch).double() / w.horizon
    gap = torch.where(w.train_loss.isfinite(), w.loss[:, 0] - w.train_loss, math.inf)
    losses = squash(torch.stack((w.train_loss, gap), -1).nan_to_num(math.inf), 20.0)
    rest = torch.stack((since_best, squash(w.host_gradient.nan_to_num(math.inf), 100.0)), -1)
    return torch.where(w.epoch[:, None] > 0, torch.cat((losses, rest), -1), NOT_MEASURED)


def _sizes(w: World) -> Tensor:
    parameters, host = w.parameters, w.host_parameters
    columns = (
        squash(parameters / host - 1.0, 20.0),
        squash((w.budget - parameters) / host, 10.0),
        (w.seeds_left / w.slots.present.sum(1).clamp(min=1)).clamp(max=1.0),
        (host.clamp(min=1).log10() / 8).clamp(max=1.0),
    )
    return torch.stack(columns, -1)


_STAGES_TOGETHER = {
    "slots_empty": (Stage.DORMANT,),
    "slots_incubating": (Stage.GERMINATED, Stage.TRAINING),
    "slots_blending": (Stage.BLENDING, Stage.HOLDING),
    "slots_fossilized": (Stage.FOSSILIZED,),
}


def _shares(w: World) -> Tensor:
    present = w.slots.present
    there = _groups(present.device)[w.slots.stage] & present[..., None]  # [N, S, groups]
    return there.sum(1).double() / present.sum(1).clamp(min=1)[:, None]


@cache
def _groups(device: torch.device) -> Tensor:
    """[stages, groups] bool"""
    rows = [[stage in stages for stages in _STAGES_TOGETHER.values()] for stage in Stage]
    return torch.tensor(rows, device=device)


def _last_op(w: World) -> Tensor:
    ops = torch.arange(len(Op), device=w.op.device)
    return torch.cat((w.op[:, None] == ops, w.changed[:, None]), -1).double()


# Names, and the function that gives their columns.
_OVERALL: list[tuple[tuple[str, ...], Callable[[World], Tensor]]] = [
    (("progress", "epochs_left"), _time),
    (tuple(f"val_{what}_{ago}_ago" for what in ("accuracy", "loss") for ago in range(HISTORY + 1)), _results),
    (("train_loss", "generalisation_gap", "epochs_since_best", "host_gradient"), _training),
    (("growth", "budget_left", "seeds_left", "host_size"), _sizes),
    (tuple(_STAGES_TOGETHER), _shares),
    ((*(f"last_op_{op.name.lower()}" for op in Op), "last_op_changed"), _last_op),
]
OVERALL_FIELDS = tuple(name for names, _ in _OVERALL for name in names)

# -- one slot: [N, S, fields] -----------------------------------------------------------------------------------------


def _place(w: World) -> Tensor:
    return torch.stack((w.position, (w.channels.clamp(min=1).log2() / 10).clamp(max=1.0)), -1)


def _age(w: World) -> Tensor:
    v = w.slots
    counts = [(count.double() / most).clamp(max=1.0) for count, most in ((v.age, 20), (v.dwell, 10), (v.pruned, 4))]
    return torch.stack((v.alpha, v.retiring.double(), *counts), -1)


def _activity(w: World) -> Tensor:
    gradient = ((w.slots.gradient + 1e-9).log10() / 5).clamp(-1.0, 1.0)
    return torch.stack((squash(w.slots.size / w.host_parameters[:, None], 20.0), _known(gradient)), -1)


def _worth(contrast: Tensor) -> Tensor:
    """Points, loss saved, and points per standard error: is it more than noise?"""
    accuracy, loss, error = contrast.unbind(-1)
    certainty = (accuracy / error.clamp(min=1e-3) / 5).clamp(-1.0, 1.0)
    return _known(torch.stack((squash(accuracy, 50.0), squash(loss, 3.0), certainty), -1))


def _staleness(w: World) -> Tensor:
    v = w.slots
    unknown = v.shadow_points.isnan() & v.contribution_points.isnan()
    return torch.where(unknown, NOT_MEASURED, ((v.age - v.measured_age).double() / 10).clamp(max=1.0))[..., None]


def _legal(w: World) -> Tensor:
    return torch.stack((w.growable.any(-1), w.slots.prunable, w.slots.fossilizable), -1).double()


_SLOT: list[tuple[tuple[str, ...], Callable[[World], Tensor]]] = [
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


def _one_hot(column: Tensor, count: int) -> Tensor:
    return (column[..., None] == torch.arange(count, device=column.device)).double()


# -- all together -----------------------------------------------------------------------------------------------------


def features(w: World) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: of the runs [N, G], of the slots [N, S, F], and what blueprints cost [N, S, B], in host sizes."""
    overall = torch.cat([columns(w) for _, columns in _OVERALL], -1)
    slots = torch.cat([columns(w) for _, columns in _SLOT], -1)
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
    empty = growable.any(-1)
    by_op = {Op.GERMINATE: empty, Op.PRUNE: w.slots.prunable & goes_on, Op.FOSSILIZE: w.slots.fossilizable & goes_on}
    nowhere = torch.zeros_like(empty)
    slot = torch.stack([by_op.get(op, nowhere) for op in Op], 1)  # [N, O, S]
    op = slot.any(-1)
    op[:, Op.WAIT] = True
    return ActionMasks(op, slot, growable, empty[..., None].repeat(1, 1, len(BLENDS)))


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
