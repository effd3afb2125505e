"""Whole episodes as padded tensors [E, T, ...]: the rows of a rollout buffer, each exactly one episode.

An `Episodes` holds what a policy saw, what it might have done, what its teacher would have done, what was done, and
what came of it. Two actions per step, because they answer different questions: `label` is what the controller decided,
which is what cloning copies; `taken` is what happened (exploration noise may have replaced the decision), which is what
the reward and the next observation belong to, and what offline reinforcement learning must learn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, Op
from esper.agent.buffer import map_masks
from esper.agent.policies import LAYOUT
from esper.env.observation import OVERALL_FIELDS, SLOT_FIELDS
from esper.env.spaces import ActionMasks, Observation
from esper.growth.blueprints import blueprint_names
from esper.policy.distribution import (
    BLEND,
    BLUEPRINT,
    GROWTH_ACTIONS,
    OP,
    SLOT,
    FactoredPolicy,
    InvalidMaskError,
    validate_masks,
)

BEFORE_SLOTS = 2
"""Axes of a padded tensor before its slots: episodes and steps."""


class RecordingError(ValueError):
    """Episodes that cannot be used, with the reason in one line."""


@dataclass(frozen=True, slots=True)
class Schema:
    """What the numbers mean: names in the order of their indices. Two recordings mix only if these are the same."""

    layout: str
    """Version of the observation's fields."""
    overall_features: int
    slot_features: int
    blueprints: tuple[str, ...]
    blends: tuple[str, ...] = BLENDS
    ops: tuple[str, ...] = tuple(op.name for op in Op)
    heads: tuple[str, ...] = HEAD_NAMES

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def differences(self, other: dict[str, Any]) -> list[str]:
        """What a schema that was read from a file has otherwise, one phrase each."""
        ours = {name: list(v) if isinstance(v, tuple) else v for name, v in self.to_json().items()}
        names = [*ours, *(name for name in other if name not in ours)]
        return [
            f"{name}: recorded {other.get(name)!r}, here {ours.get(name)!r}"
            for name in names
            if ours.get(name) != other.get(name)
        ]


def growth_schema() -> Schema:
    """Of the growth environment as it is now."""
    return Schema(LAYOUT, len(OVERALL_FIELDS), len(SLOT_FIELDS), blueprint_names())


@dataclass(frozen=True, slots=True)
class Episodes:
    """E episodes of at most T steps and S slots. What lies beyond an episode's length means nothing."""

    observation: Observation
    """As the environment gave it: not normalised."""
    masks: ActionMasks
    label: Tensor
    """[E, T, heads] int64: the controller's own decision."""
    taken: Tensor
    """[E, T, heads] int64: what was done."""
    reward: Tensor
    """[E, T] float32: for what was done."""
    terminated: Tensor
    """[E, T] bool: nothing follows. Only an episode's last step may be; one that is not was cut short."""
    lengths: Tensor
    """[E] int64"""
    draw: Tensor
    """[E] int64: number of the problem, so that one problem never ends up on both sides of a split."""
    controller: Tensor
    """[E] int64: index into `controllers`."""
    controllers: tuple[str, ...]

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def steps(self) -> int:
        return int(self.lengths.sum())

    @property
    def valid(self) -> Tensor:
        """[E, T] bool: the steps that happened."""
        return torch.arange(self.reward.shape[1]) < self.lengths[:, None]

    def select(self, rows: Tensor) -> Episodes:
        return self._map(lambda tensor: tensor[rows])

    def played_by(self, name: str) -> Episodes:
        """The episodes of one of the controllers."""
        if name not in self.controllers:
            raise RecordingError(f"nothing was recorded of {name!r}; the controllers are {', '.join(self.controllers)}")
        chosen = self.select((self.controller == self.controllers.index(name)).nonzero().flatten())
        return replace(chosen, controller=torch.zeros_like(chosen.controller), controllers=(name,))

    def returns(self) -> Tensor:
        """[E] sum of rewards."""
        return (self.reward * self.valid).sum(1)

    def _map(self, f: Callable[[Tensor], Tensor]) -> Episodes:
        named = {name: f(tensor) for name, tensor in tensors_of(self).items()}
        return from_tensors(named, self.controllers)


_PLAIN = ("label", "taken", "reward", "terminated", "lengths", "draw", "controller")
_SEEN = tuple(field.name for field in fields(Observation))
_LEGAL = tuple(field.name for field in fields(ActionMasks))


def tensors_of(episodes: Episodes) -> dict[str, Tensor]:
    """Every tensor by its name in a file."""
    named = {f"observation.{name}": getattr(episodes.observation, name) for name in _SEEN}
    named |= {f"masks.{name}": getattr(episodes.masks, name) for name in _LEGAL}
    return named | {name: getattr(episodes, name) for name in _PLAIN}


def from_tensors(named: dict[str, Tensor], controllers: Sequence[str]) -> Episodes:
    """The inverse; names that are missing or unknown are refused."""
    expected = {f"observation.{name}" for name in _SEEN} | {f"masks.{name}" for name in _LEGAL} | set(_PLAIN)
    if wrong := sorted(expected ^ named.keys()):
        raise RecordingError(f"tensors are missing or unknown: {', '.join(wrong)}")
    return Episodes(
        Observation(*(named[f"observation.{name}"] for name in _SEEN)),
        ActionMasks(*(named[f"masks.{name}"] for name in _LEGAL)),
        **{name: named[name] for name in _PLAIN},
        controllers=tuple(controllers),
    )


def join(parts: Sequence[Episodes]) -> Episodes:
    """One after another, padded to the longest episode and the most slots among them."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.controllers))
    steps = max(part.reward.shape[1] for part in parts)
    slots = max(part.masks.slot.shape[-1] for part in parts)
    padded = []
    for part in parts:
        number = torch.tensor([names.index(name) for name in part.controllers])
        wide = {name: _pad(name, tensor, steps, slots) for name, tensor in tensors_of(part).items()}
        padded.append(wide | {"controller": number[part.controller]})
    return from_tensors({name: torch.cat([part[name] for part in padded]) for name in padded[0]}, names)


_SLOT_AXIS = {"observation.slots": 2, "observation.blueprints": 2, "observation.costs": 2, "observation.present": 2}
_SLOT_AXIS |= {"masks.slot": 3, "masks.blueprint": 2, "masks.blend": 2}


def _pad(name: str, tensor: Tensor, steps: int, slots: int) -> Tensor:
    """Zeros (False: absent, illegal) where there was no step or no slot."""
    if name in ("lengths", "draw", "controller"):
        return tensor
    more = [0] * (2 * tensor.dim())  # as F.pad wants them: the last axis first, before and after
    more[2 * (tensor.dim() - 2) + 1] = steps - tensor.shape[1]
    axis = _SLOT_AXIS.get(name)
    if axis is not None and tensor.shape[axis]:  # a policy that sees a plain vector has no slots to pad
        more[2 * (tensor.dim() - 1 - axis) + 1] = slots - tensor.shape[axis]
    return F.pad(tensor, more)


# -- trusting what was read --------------------------------------------------------------------------------------------


def check(episodes: Episodes, schema: Schema) -> None:
    """Refuse what training would trip over, or would silently learn nonsense from."""
    _check_shapes(episodes, schema)
    if not bool(((episodes.lengths >= 1) & (episodes.lengths <= episodes.reward.shape[1])).all()):
        raise RecordingError(f"an episode's length is not from 1 to {episodes.reward.shape[1]} steps")
    if not bool(((episodes.controller >= 0) & (episodes.controller < len(episodes.controllers))).all()):
        raise RecordingError("an episode belongs to a controller that is not named")
    valid = episodes.valid
    for name, tensor in tensors_of(episodes).items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor[valid]).all()):
            raise RecordingError(f"{name} holds a number that is not finite")
    last = torch.arange(valid.shape[1]) == episodes.lengths[:, None] - 1
    if bool((episodes.terminated & valid & ~last).any()):
        raise RecordingError("an episode goes on after it terminated")
    planted = episodes.observation.blueprints[valid]
    if not bool(((planted >= 0) & (planted <= len(schema.blueprints))).all()):
        raise RecordingError("a slot holds a blueprint that is not named")
    _check_actions(episodes, schema)


def _check_shapes(episodes: Episodes, schema: Schema) -> None:
    if episodes.reward.dim() != BEFORE_SLOTS or episodes.masks.slot.dim() != BEFORE_SLOTS + 2:
        raise RecordingError("reward is not [episodes, steps], or masks.slot not [episodes, steps, ops, slots]")
    (count, steps), slots = episodes.reward.shape, episodes.masks.slot.shape[-1]
    seen = slots if schema.slot_features else 0
    ops, blueprints, heads = len(schema.ops), len(schema.blueprints), len(schema.heads)
    row, f32, i64, flag = (count, steps), torch.float32, torch.int64, torch.bool
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "observation.overall": ((*row, schema.overall_features), f32),
        "observation.slots": ((*row, seen, schema.slot_features), f32),
        "observation.blueprints": ((*row, seen), i64),
        "observation.costs": ((*row, seen, blueprints), f32),
        "observation.present": ((*row, seen), flag),
        "masks.op": ((*row, ops), flag),
        "masks.slot": ((*row, ops, slots), flag),
        "masks.blueprint": ((*row, slots, blueprints), flag),
        "masks.blend": ((*row, slots, len(schema.blends)), flag),
        "label": ((*row, heads), i64),
        "taken": ((*row, heads), i64),
        "reward": (row, f32),
        "terminated": (row, flag),
        "lengths": ((count,), i64),
        "draw": ((count,), i64),
        "controller": ((count,), i64),
    }
    for name, tensor in tensors_of(episodes).items():
        shape, kind = expected[name]
        if tuple(tensor.shape) != shape or tensor.dtype != kind:
            raise RecordingError(f"{name} is {tensor.dtype} {list(tensor.shape)}, it should be {kind} {list(shape)}")
    if not count or not steps or not slots:
        raise RecordingError("it holds no episode, no step or no slot")


def _check_actions(episodes: Episodes, schema: Schema) -> None:
    """Every decision is one that its masks allow: a policy gives anything else probability 0, and a loss of 10,000."""
    valid = episodes.valid
    masks = map_masks(episodes.masks, lambda tensor: tensor[valid])
    uses = GROWTH_ACTIONS.table()
    try:
        validate_masks(masks, uses)
    except InvalidMaskError as error:
        raise RecordingError(f"masks under which nothing can be decided: {error}") from error
    sizes = torch.zeros(len(schema.heads), dtype=torch.int64)
    sizes[SLOT], sizes[BLUEPRINT] = masks.slot.shape[-1], len(schema.blueprints)
    sizes[BLEND], sizes[OP] = len(schema.blends), len(schema.ops)
    legal = FactoredPolicy(masks.op, masks.slot, masks.blueprint, masks.blend, masks, uses)
    for name, action in (("label", episodes.label[valid]), ("taken", episodes.taken[valid])):
        if not bool(((action >= 0) & (action < sizes)).all()):
            raise RecordingError(f"{name} names an operation, slot, blueprint or blend that does not exist")
        if not bool((legal.log_prob(action) | ~legal.relevant(action)).all()):
            raise RecordingError(f"{name} holds a decision that its masks forbid")
