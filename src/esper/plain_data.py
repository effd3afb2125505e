"""Records as plain data and back: dictionaries, lists, numbers and strings, which `torch.load` reads without trust.

The types of a record's fields say what it is made of. NaN and infinity stay what they are, but in JSON (`as_json`).
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_Record = TypeVar("_Record")


def as_data(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: as_data(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {key: as_data(part) for key, part in value.items()}
    return [as_data(part) for part in value] if isinstance(value, tuple | list) else value


def as_json(value: Any) -> Any:
    """For JSON, which has no NaN and no infinity. Of an enumeration the text, or else the name."""
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {one.name: as_json(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {key: as_json(part) for key, part in value.items()}
    return [as_json(part) for part in value] if isinstance(value, tuple | list) else value


def from_data(kind: type[_Record], data: Any) -> _Record:
    """The inverse of `as_data`, for a record of this type."""
    read: _Record = _read(kind, data)
    return read


def _read(kind: Any, data: Any) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if data is None else _read(next(part for part in parts if part is not NoneType), data)
    if origin is tuple:
        return tuple(_read(parts[0], part) for part in data)
    if origin is dict:
        return {key: _read(parts[1], part) for key, part in data.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: _read(hints[name], part) for name, part in data.items()})
    return kind(data) if isinstance(kind, type) and issubclass(kind, Enum) else data
