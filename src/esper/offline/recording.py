"""Recordings on disk: a folder of safetensors files, one per append. Reading one never executes anything.

Every file is complete in itself (schema, provenance, episodes), is written beside its place, flushed and renamed. So
an append that is killed, or finds the disk full, leaves all earlier episodes as they were, and nothing needs repair: a
file is there or it is not. There is no index that could disagree with the files. A digest in each shows damage.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.actions import BLENDS, HEAD_NAMES, Op
from esper.agent import schema_1
from esper.agent.policies import LAYOUT
from esper.agent.tensor_files import TensorFile, TensorFileError, read_header, read_tensor_file, write_tensor_file
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
from esper.rollout.episodes import Episodes, join, map_tensors

RECORDING_VERSION = 2
"""What this code writes: 1 had no digest, which is all that differs, so both are read."""
READ_VERSIONS = (1, 2)
DIGEST_VERSION = 2
"""From here on a file without a digest is damaged."""
_HEADER = "esper-episodes"
_PATTERN = "episodes-*.safetensors"
BEFORE_SLOTS = 2
"""Axes of a padded tensor before its slots: episodes and steps."""
STORED = (
    *(f"observation.{field.name}" for field in fields(Observation)),
    *(f"masks.{field.name}" for field in fields(ActionMasks)),
    *("action", "label", "reward", "terminated", "lengths", "draw", "controller"),
)
"""Of the tensors of `Episodes`: those that a file holds. `action` is called `taken` there."""


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
class Recording:
    """What a folder holds."""

    episodes: Episodes
    provenance: tuple[dict[str, Any], ...]
    """How each file came about, in the order of the files."""

    @property
    def task(self) -> str | None:
        """The family that the episodes are from; None if they are from several, or from something else."""
        first, *others = [entry.get("task") for entry in self.provenance]  # compared: a file may hold a list there
        return first if isinstance(first, str) and all(task == first for task in others) else None


def append(folder: Path, episodes: Episodes, schema: Schema, provenance: Mapping[str, Any]) -> Path:
    """Add episodes to the recording in `folder`, which is made if need be; gives the new file."""
    check(episodes, schema)
    present = _files(folder)
    if present:
        _header_of(
            present[0], schema
        )  # a recording holds one schema: find out before the work is written, not when read
    header = {
        "version": RECORDING_VERSION,
        "schema": schema.to_json(),
        "controllers": list(episodes.controllers),
        "provenance": dict(provenance),
    }
    number = 1 + max((int(path.stem.split("-")[1]) for path in present), default=0)
    # The random part keeps two processes that record into one folder from writing over each other.
    path = folder / f"episodes-{number:06d}-{secrets.token_hex(4)}.safetensors"
    tensors = _stored(episodes)
    write_tensor_file(path, {"taken": tensors.pop("action"), **tensors}, _HEADER, header)
    return path


def read(folder: Path, schema: Schema) -> Recording:
    """All episodes of a recording. A file that is damaged, or of another schema, is refused by name, never skipped."""
    if not folder.is_dir():
        raise RecordingError(f"there is no recording {folder}: make one with esper record --out {folder}")
    files = _files(folder)
    if not files:
        raise RecordingError(f"{folder} holds no recorded episodes (no {_PATTERN})")
    parts, provenance = [], []
    for path in files:
        header, episodes = _read(path, schema)
        parts.append(episodes)
        provenance.append(header["provenance"])
    episodes = join(parts)
    # By problem, whatever order several processes finished in: what is learnt must not depend on it.
    place = torch.tensor([sorted(episodes.controllers).index(name) for name in episodes.controllers])
    order = torch.argsort(episodes.draw * len(place) + place[episodes.controller], stable=True)
    return Recording(episodes.select(order), tuple(provenance))


def of_controller(episodes: Episodes, name: str) -> Episodes:
    """The episodes of one of the controllers."""
    if name not in episodes.controllers:
        raise RecordingError(f"nothing was recorded of {name!r}; the controllers are {', '.join(episodes.controllers)}")
    chosen = episodes.select((episodes.controller == episodes.controllers.index(name)).nonzero().flatten())
    return replace(chosen, controller=torch.zeros_like(chosen.controller), controllers=(name,))


def next_draw(folder: Path, schema: Schema, first: int) -> int:
    """The number after the last problem that is recorded in `folder`, at least `first`."""
    if not folder.exists() or not _files(folder):
        return first
    return max(first, int(read(folder, schema).episodes.draw.max()) + 1)


def _files(folder: Path) -> list[Path]:
    """A file that was being written when its process died does not have this kind of name yet."""
    found = sorted(folder.glob(_PATTERN))
    for path in found:
        if not path.stem.split("-")[1].isdecimal():
            raise RecordingError(f"{path} does not have the name of a recorded file; move it elsewhere")
    return found


def _read(path: Path, schema: Schema) -> tuple[dict[str, Any], Episodes]:
    """Header and episodes of one opening, checked."""
    try:
        file = read_tensor_file(path, _HEADER)
    except TensorFileError as error:
        raise _refusal(path, f"it is damaged, cut short, or no safetensors file ({error})") from error
    header = _parsed(path, file.header, schema)
    if header["version"] >= DIGEST_VERSION and not file.has_digest:
        raise _refusal(path, "it is damaged: its header has lost the digest of its contents")
    return header, _episodes(path, header, file, schema)


def _header_of(path: Path, schema: Schema) -> dict[str, Any]:
    try:
        text, _ = read_header(path, _HEADER)
    except TensorFileError as error:
        raise _refusal(path, f"it is damaged, cut short, or no safetensors file ({error})") from error
    return _parsed(path, text, schema)


def _parsed(path: Path, text: str | None, schema: Schema) -> dict[str, Any]:
    """The JSON of a file, checked: its form, its version, its schema."""
    if text is None:
        raise _refusal(path, "it holds tensors, but no recorded episodes")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict) or not isinstance(header.get("version"), int):
        raise _refusal(path, "its header says no version")
    if header["version"] not in READ_VERSIONS:
        raise _refusal(path, f"it has version {header['version']}, this Esper reads {RECORDING_VERSION}")
    names = header.get("controllers")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise _refusal(path, "its header names no controllers")
    if not isinstance(header.get("schema"), dict) or not isinstance(header.get("provenance"), dict):
        raise _refusal(path, "its header has no schema or no provenance")
    old = schema_1.is_old(header["schema"])
    if differences := schema.differences(schema_1.with_rent(header["schema"]) if old else header["schema"]):
        raise _refusal(path, f"it was recorded under another schema: {'; '.join(differences)}")
    return header


def _episodes(path: Path, header: dict[str, Any], file: TensorFile, schema: Schema) -> Episodes:
    try:
        names = {"taken" if name == "action" else name: name for name in STORED}
        if wrong := sorted(names.keys() ^ file.tensors.keys()):
            raise RecordingError(f"tensors are missing or unknown: {', '.join(wrong)}")
        tensors = {names[name]: tensor for name, tensor in file.tensors.items()}
        if schema_1.is_old(header["schema"]):
            tensors["observation.overall"] = schema_1.overall_with_rent(tensors["observation.overall"])
        episodes = Episodes.of(tensors, header["controllers"])
        check(episodes, schema)
    except RecordingError as error:
        raise _refusal(path, str(error)) from error
    return episodes


def _refusal(path: Path, why: str) -> RecordingError:
    why = " ".join(why.split())[:500]  # text from a damaged or hostile file must not fill a screen
    return RecordingError(f"{path} was refused: {why}")


def _stored(episodes: Episodes) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in episodes.tensors().items() if name in STORED}


# -- trusting what was read --------------------------------------------------------------------------------------------


def check(episodes: Episodes, schema: Schema) -> None:
    """Refuse what training would trip over, or would silently learn nonsense from."""
    _check_shapes(episodes, schema)
    if not bool(((episodes.lengths >= 1) & (episodes.lengths <= episodes.reward.shape[1])).all()):
        raise RecordingError(f"an episode's length is not from 1 to {episodes.reward.shape[1]} steps")
    if not bool(((episodes.controller >= 0) & (episodes.controller < len(episodes.controllers))).all()):
        raise RecordingError("an episode belongs to a controller that is not named")
    valid = episodes.valid
    for name, tensor in _stored(episodes).items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor[valid]).all()):
            raise RecordingError(f"{name} holds a number that is not finite")
    if bool((episodes.terminated & valid & ~episodes.last).any()):
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
        "action": ((*row, heads), i64),
        "reward": (row, f32),
        "terminated": (row, flag),
        "lengths": ((count,), i64),
        "draw": ((count,), i64),
        "controller": ((count,), i64),
    }
    for name, tensor in _stored(episodes).items():
        shape, kind = expected[name]
        if tuple(tensor.shape) != shape or tensor.dtype != kind:
            raise RecordingError(f"{name} is {tensor.dtype} {list(tensor.shape)}, it should be {kind} {list(shape)}")
    if not count or not steps or not slots:
        raise RecordingError("it holds no episode, no step or no slot")


def _check_actions(episodes: Episodes, schema: Schema) -> None:
    """Every decision is one that its masks allow: a policy gives anything else probability 0, and a loss of 10,000."""
    valid = episodes.valid
    masks = map_tensors(episodes.masks, lambda tensor: tensor[valid])
    uses = GROWTH_ACTIONS.table()
    try:
        validate_masks(masks, uses)
    except InvalidMaskError as error:
        raise RecordingError(f"masks under which nothing can be decided: {error}") from error
    sizes = torch.zeros(len(schema.heads), dtype=torch.int64)
    sizes[SLOT], sizes[BLUEPRINT] = masks.slot.shape[-1], len(schema.blueprints)
    sizes[BLEND], sizes[OP] = len(schema.blends), len(schema.ops)
    legal = FactoredPolicy(masks.op, masks.slot, masks.blueprint, masks.blend, masks, uses)
    for name, action in (("label", episodes.label[valid]), ("action", episodes.action[valid])):
        if not bool(((action >= 0) & (action < sizes)).all()):
            raise RecordingError(f"{name} names an operation, slot, blueprint or blend that does not exist")
        if not bool((legal.log_prob(action) | ~legal.relevant(action)).all()):
            raise RecordingError(f"{name} holds a decision that its masks forbid")
