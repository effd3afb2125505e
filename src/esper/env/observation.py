"""From columns to tensors: what the learned policy sees, what it may do, and what it did.

The layout is data: one list of named fields for the run, one for a slot; each has one definition, here, and lies
in [-1, 1]. What was not measured yet is `NOT_MEASURED`, outside of that range, never 0. A change of the lists is
a new `SCHEMA_VERSION`, because trained policies depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, Action, Op
from esper.env.spaces import ActionMasks, Observation
from esper.env.world import HISTORY, World
from esper.growth.blueprints import LAYOUTS, blueprint_names
from esper.lifecycle import Stage

SCHEMA_VERSION = 2
"""2 has the rent, as the last field of a run; see `agent/schema_1.py` for what was made before."""
NOT_MEASURED = -2.0
DEAR = 20.0
"""A rent that is shown as 1, and so is every higher one."""


def squash(value: Tensor, scale: float | tuple[float, ...]) -> Tensor:
    """Sign-preserving logarithm, 1 at `scale`, clipped there: large values stay bounded, small ones stay visible.

    Several scales are those of the last axis.
    """
    unit = math.log1p(scale) if isinstance(scale, float) else _numbers(tuple(map(math.log1p, scale)), value.device)
    return torch.copysign((value.abs().log1p() / unit).clamp(max=1.0), value)


@cache
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


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
    losses = torch.stack((w.train_loss, w.loss[:, 0] - w.train_loss, w.host_gradient), -1)
    broken = w.train_loss.isnan() | w.train_loss.isinf()
    losses[:, 1].masked_fill_(broken, math.inf)
    loss, gap, gradient = squash(losses.nan_to_num(math.inf), (20.0, 20.0, 100.0)).unbind(-1)
    columns = torch.stack((loss, gap, since_best, gradient), -1)
    return torch.where(w.epoch[:, None] > 0, columns, NOT_MEASURED)


def _sizes(w: World) -> Tensor:
    parameters, host = w.parameters, w.host_parameters
    room = torch.stack((parameters / host - 1.0, (w.budget - parameters) / host), -1)
    seeds = (w.seeds_left / w.slots.present.sum(1).clamp(min=1)).clamp(max=1.0)
    size = (host.clamp(min=1).log10() / 8).clamp(max=1.0)
    return torch.cat((squash(room, (20.0, 10.0)), torch.stack((seeds, size), -1)), -1)


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


def _rent(w: World) -> Tensor:
    return squash(w.rent, DEAR)[:, None]


# Names, and the function that gives their columns.
_OVERALL: list[tuple[tuple[str, ...], Callable[[World], Tensor]]] = [
    (("progress", "epochs_left"), _time),
    (tuple(f"val_{what}_{ago}_ago" for what in ("accuracy", "loss") for ago in range(HISTORY + 1)), _results),
    (("train_loss", "generalisation_gap", "epochs_since_best", "host_gradient"), _training),
    (("growth", "budget_left", "seeds_left", "host_size"), _sizes),
    (tuple(_STAGES_TOGETHER), _shares),
    ((*(f"last_op_{op.name.lower()}" for op in Op), "last_op_changed"), _last_op),
    (("rent",), _rent),
]
OVERALL_FIELDS = tuple(name for names, _ in _OVERALL for name in names)

# -- one slot: [N, S, fields] -----------------------------------------------------------------------------------------


def _place(w: World) -> Tensor:
    return torch.stack((w.position, (w.channels.clamp(min=1).log2() / 10).clamp(max=1.0)), -1)


def _age(w: World) -> Tensor:
    v = w.slots
    counts = torch.stack((v.age, v.dwell, v.pruned), -1).double() / _numbers((20.0, 10.0, 4.0), v.age.device)
    return torch.cat((torch.stack((v.alpha, v.retiring.double()), -1), counts.clamp(max=1.0)), -1)


def _activity(w: World) -> Tensor:
    gradient = ((w.slots.gradient + 1e-9).log10() / 5).clamp(-1.0, 1.0)
    return torch.stack((squash(w.slots.size / w.host_parameters[:, None], 20.0), _known(gradient)), -1)


def _worth(w: World) -> Tensor:
    """Of the shadow, then of the contribution: points, loss saved, and points per standard error, beyond noise?"""
    both = torch.stack((w.slots.shadow, w.slots.contribution), -2)  # [N, S, 2, 3]
    certainty = both[..., :1] / both[..., 2:].clamp(min=1e-3) / 5
    return _known(torch.cat((squash(both[..., :2], (50.0, 3.0)), certainty.clamp(-1.0, 1.0)), -1)).flatten(2)


def _staleness(w: World) -> Tensor:
    v = w.slots
    unknown = v.shadow_points.isnan() & v.contribution_points.isnan()
    return torch.where(unknown, NOT_MEASURED, ((v.age - v.measured_age).double() / 10).clamp(max=1.0))[..., None]


_SLOT: list[tuple[tuple[str, ...], Callable[[World], Tensor]]] = [
    (tuple(f"stage_{stage.name.lower()}" for stage in Stage), lambda w: _one_hot(w.slots.stage, len(Stage))),
    (tuple(f"layout_{layout}" for layout in LAYOUTS), lambda w: _one_hot(w.layout, len(LAYOUTS))),
    (("position", "channels"), _place),
    (("alpha", "retiring", "age", "dwell", "seeds_before"), _age),
    (("parameters", "gradient"), _activity),
    (tuple(f"{of}_{what}" for of in ("shadow", "contribution") for what in ("points", "loss", "certainty")), _worth),
    (("staleness",), _staleness),
]
_LEGAL = ("growable", "prunable", "fossilizable")
SLOT_FIELDS = (*(name for names, _ in _SLOT for name in names), *_LEGAL)


def _one_hot(column: Tensor, count: int) -> Tensor:
    return _unit(count, column.device)[column]


@cache
def _unit(count: int, device: torch.device) -> Tensor:
    return torch.eye(count, dtype=torch.float64, device=device)


# -- all together -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Legal:
    """What may be done in each network, were its episode not over: both masks and features are made of it."""

    growable: Tensor
    """[N, S, B] bool"""
    slot: Tensor
    """[N, S, 3] bool, in the order of `_LEGAL`, which is that of the operations after WAIT."""

    @classmethod
    def of(cls, w: World) -> _Legal:
        growable = w.growable
        return cls(growable, torch.stack((growable.any(-1), w.slots.prunable, w.slots.fossilizable), -1))


def features(w: World) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: of the runs [N, G], of the slots [N, S, F], and what blueprints cost [N, S, B], in host sizes."""
    return _features(w, _Legal.of(w))


def _features(w: World, legal: _Legal) -> tuple[Tensor, Tensor, Tensor]:
    overall = torch.cat([columns(w) for _, columns in _OVERALL], -1)
    slots = torch.cat([*(columns(w) for _, columns in _SLOT), legal.slot.double()], -1)
    slots = torch.where(w.slots.present[..., None], slots, 0.0)
    return overall, slots, _known(squash(w.costs / w.host_parameters[:, None, None], 20.0))


def encode(w: World) -> tuple[Observation, ActionMasks]:
    """The columns as tensors. Where an episode is over, nothing but WAIT is possible."""
    legal = _Legal.of(w)
    overall, slots, costs = _features(w, legal)
    seen = Observation(overall.float(), slots.float(), w.slots.blueprint + 1, costs.float(), w.slots.present)
    return seen, _masks(w, legal)


def legal_actions(w: World) -> ActionMasks:
    return _masks(w, _Legal.of(w))


def _masks(w: World, legal: _Legal) -> ActionMasks:
    goes_on = ~w.over[:, None, None]
    growable = legal.growable & goes_on
    slot = F.pad((legal.slot & goes_on).transpose(1, 2), (0, 0, 1, 0))  # [N, O, S]; WAIT is on no slot
    op = slot.any(-1)
    op[:, Op.WAIT] = True
    return ActionMasks(op, slot, growable, slot[:, Op.GERMINATE, :, None].repeat(1, 1, len(BLENDS)))


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
