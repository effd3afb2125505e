"""Regional `torch.compile`: the parts of a host between its slots, each seed, and the loss, compiled by themselves.

Slots stay outside, so growing compiles nothing but the new seed. Networks of one architecture share what was compiled:
dynamo keeps it by the code of `forward`, with guards on shapes. A region that does not compile runs as it is, and the
log says why; where nothing compiles, it says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.errors import first_line
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.tasks.hosts import ConvHost

log = logging.getLogger(__name__)

MOST_VERSIONS = 512
"""Versions of one `forward` that may be compiled: every shape of every blueprint counts."""


@cache
def compiler_works(device: torch.device) -> bool:
    """Tried once for each device: without a C compiler, every region of every network would fail on its own."""
    try:
        _compiled(_doubled)(torch.ones(8, device=device))
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = first_line(error)
        log.warning("torch.compile does not work on %s, so nothing is compiled: %s", device, reason)
        return False
    return True


def _doubled(x: Tensor) -> Tensor:
    return x + x


class Region:
    """A function with its first arguments, compiled; after a failure as it was."""

    esper_stands_in = True
    """For something else, which it is again in an exported model (`growth/export.py`)."""
    stands_for: Callable[..., Any] | None
    """The module's own attribute; None is what its class has."""

    def __init__(
        self, name: str, function: Callable[..., Any], *first: Any, own: Callable[..., Any] | None = None
    ) -> None:
        self.stands_for = own
        self._plain: Callable[..., Any] = partial(function, *first)
        self._call: Callable[..., Any] = partial(_compiled(function), *first)
        self._name = name
        self.failure = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.failure = first_line(error)
            log.warning("torch.compile failed on %s, which runs uncompiled: %s", self._name, self.failure)
            self._call = self._plain
            return self._plain(*args, **kwargs)


def compile_regions(model: GrowingModel) -> None:
    """Compile what is there now, and every seed that will be planted. A single layer has nothing to be fused with."""
    torch._dynamo.config.recompile_limit = max(MOST_VERSIONS, torch._dynamo.config.recompile_limit)
    for part in model.regions:
        if next(part.children(), None) is not None:
            _compile(part)
    if isinstance(model.host, ConvHost):  # pooling is between the slots too, but in no module
        model.host.__dict__["pool"] = Region("pooling", type(model.host).pool, model.host)
    prepare = model.on_planting

    def planted(seed: Seed) -> None:
        if prepare is not None:
            prepare(seed)
        _compile(seed)

    model.on_planting = planted


def _compile(module: nn.Module) -> None:
    name, own = f"a {type(module).__name__}", vars(module).get("forward")  # the instance may have another forward
    module.__dict__["forward"] = (
        Region(name, type(module).forward, module) if own is None else Region(name, own, own=own)
    )


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Once for all modules of a class: the call costs milliseconds, even if everything has been compiled before."""
    return torch.compile(function, dynamic=False)


@cache
def compiled_loss(loss: Callable[..., Tensor]) -> Region:
    """One for all networks with this loss: only then may they share captured epochs."""
    return Region("the loss", loss)
