"""When do two networks compute the same thing, but for the numbers in their tensors?

A captured CUDA graph may serve any network whose fingerprint equals that of the network it was captured from. So a
fingerprint errs on the safe side: what cannot be compared by value is compared by identity, and then only the very same
object matches.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from esper.engine.regions import Region
from esper.growth.model import is_growth_hook

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


class ById:
    """Equal to another wrapper of the very same object, which it keeps alive so that no other can take its place."""

    __slots__ = ("_object",)

    def __init__(self, value: object) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self._object is other._object

    def __hash__(self) -> int:
        return id(self._object)


class CachedFingerprint:
    """A fingerprint that is hashed once, and compared once with each equal one: they are long, and compared often."""

    __slots__ = ("_hash", "_value")

    def __init__(self, value: Hashable) -> None:
        self._value = value
        self._hash = hash(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CachedFingerprint) or self._hash != other._hash:
            return False
        if self._value is not other._value:
            if self._value != other._value:
                return False
            other._value = self._value  # the very same from now on
        return True

    def __hash__(self) -> int:
        return self._hash


def module_fingerprint(module: nn.Module) -> Hashable:
    """Structure, settings, hooks, and the layout of all tensors and which of them are tied; not the numbers in them."""
    known: dict[int, int] = {}
    return tuple((name, type(part), *_settings(part), *_tensors(part, known)) for name, part in module.named_modules())


def value_fingerprint(value: Any) -> Hashable:
    if type(value) in _BY_VALUE or isinstance(value, _BY_VALUE):  # the first is quick, and almost always true
        return (type(value), value)
    if isinstance(value, tuple | list | frozenset | set):
        items = [value_fingerprint(item) for item in value]
        return (type(value), frozenset(items) if isinstance(value, set | frozenset) else tuple(items))
    if isinstance(value, dict):
        return (dict, tuple((value_fingerprint(k), value_fingerprint(v)) for k, v in value.items()))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), tuple(value_fingerprint(getattr(value, field.name)) for field in fields(value)))
    if isinstance(value, partial):
        return (partial, ById(value.func), value_fingerprint(value.args), value_fingerprint(value.keywords))
    return ById(value)


def layout(tensor: Tensor) -> Hashable:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _settings(module: nn.Module) -> tuple[Hashable, ...]:
    """What a module's owner set, and hooks. Hooks that slots put there follow from the slots, and are left out."""
    own = [
        (key, value_fingerprint(Region if isinstance(value, Region) else value))
        for key, value in vars(module).items()
        if key not in _OF_EVERY_MODULE
    ]
    own.sort(key=itemgetter(0))
    before, after = module._forward_pre_hooks, module._forward_hooks
    hooks = [h for d in (before, after, module._backward_pre_hooks, module._backward_hooks) if d for h in d.values()]
    foreign = [hook for hook in hooks if not is_growth_hook(hook)]
    return tuple(own), value_fingerprint(foreign)


def _tensors(module: nn.Module, known: dict[int, int]) -> tuple[Hashable, ...]:
    """Tied tensors have one number: that of their first occurrence."""
    own = [(name, t) for held in (module._parameters, module._buffers) for name, t in held.items() if t is not None]
    return tuple((name, known.setdefault(id(t), len(known)), layout(t), _hooked(t)) for name, t in own)


def _hooked(tensor: Tensor) -> Hashable:
    """A hook on a tensor may do anything, so only this very tensor is like it."""
    hooks = tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)
    return ById(tensor) if hooks else None
