"""Rent, the price of size: what a network's parameters beyond its host's must earn. It needs no torch."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

_Number = TypeVar("_Number", float, "Tensor")

RENT_RATE = 5.0
"""Points that one more host-size of parameters must earn by default. The rules' settings are for this one."""


def rent(parameters: _Number, host_parameters: _Number, rate: _Number | float = RENT_RATE) -> _Number:
    """Points that the parameters beyond the host's must earn; numbers or columns."""
    return rate * (parameters / host_parameters - 1.0)


def seed_rent(parameters: _Number, host_parameters: _Number, rate: _Number | float) -> _Number:
    """Points that a seed of so many parameters must earn; numbers or columns."""
    return rate * parameters / host_parameters


def score(
    accuracy: _Number, parameters: _Number, host_parameters: _Number, rate: _Number | float = RENT_RATE
) -> _Number:
    """Accuracy minus rent, in percentage points: what every controller is judged by; numbers or columns."""
    return accuracy - rent(parameters, host_parameters, rate)


def extra_rent(rate: _Number, parameters: _Number, host_parameters: _Number) -> _Number:
    """Points that a seed must earn beyond what it must at the default rent; negative where size is cheaper."""
    return (rate - RENT_RATE) * parameters / host_parameters


def check_rent(rent: object) -> float:
    """Refuse what is no price."""
    if isinstance(rent, bool) or not isinstance(rent, Real) or not 0.0 <= float(rent) < math.inf:
        raise ValueError(f"rent must be a finite number of at least 0, not {rent!r}")
    return float(rent)
