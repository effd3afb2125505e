"""Calls of `esper.grow` and `esper.Growth` that Python would refuse, in words that name the cure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

from esper.errors import did_you_mean

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
OF_THE_OPTIMIZER = {"lr": "lr", "learning_rate": "lr", "rate": "lr", "weight_decay": "weight_decay"}
"""What a person may pass instead, and its name there."""


def explained(
    name: str, rate: str, missing: Mapping[str, str]
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """`rate`: what to write for a setting of the optimizer, where that has a {}; `missing`: a sentence by argument."""

    def decorated(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(function)
        known = [one for one in signature.parameters if one != "self"]

        @wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((one for one in kwargs if one not in known), None)
                if unknown is None:
                    absent = next((text for one, text in missing.items() if f"{one!r}" in str(error)), None)
                    raise TypeError(f"{name}: {absent or missing.get('', error)}") from None
                cure = did_you_mean(unknown, known, f"help({name}) lists all arguments")
                if setting := OF_THE_OPTIMIZER.get(unknown):
                    cure = f"it belongs to the optimizer, {rate.format(setting)}"
                raise TypeError(f"{name} has no argument {unknown!r}: {cure}") from None
            return function(*args, **kwargs)

        return call

    return decorated
