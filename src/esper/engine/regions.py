"""Regional `torch.compile`: the parts of a host between its slots, and each seed, compiled by themselves.

Slots stay outside, so growing compiles nothing but the new seed. Networks of one architecture share what was compiled:
dynamo keeps it by the code of `forward`, with guards on shapes. A region that does not compile runs as it is, and the
log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from esper.growth.model import GrowingModel

log = logging.getLogger(__name__)

MOST_VERSIONS = 512
"""Versions of one `forward` that may be compiled: every shape of every blueprint counts."""


class Region:
    """A module's forward, compiled; after a failure as it was."""

    def __init__(self, module: nn.Module) -> None:
        self._plain: Callable[..., Any] = module.forward
        self._call: Callable[..., Any] = torch.compile(self._plain, dynamic=False)
        self._name = type(module).__name__
        self.failure = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._call(*args, **kwargs)
        except TorchDynamoException as error:
            self.failure = str(error).partition("\n")[0]
            log.warning("torch.compile failed on a %s, which runs uncompiled: %s", self._name, self.failure)
            self._call = self._plain
            return self._plain(*args, **kwargs)


def compile_regions(model: GrowingModel) -> None:
    """Compile what is there now, and every seed that will be planted."""
    torch._dynamo.config.recompile_limit = max(MOST_VERSIONS, torch._dynamo.config.recompile_limit)
    for part in model.regions:
        part.__dict__["forward"] = Region(part)
    model.on_planting = _compile_seed


def _compile_seed(seed: nn.Module) -> None:
    seed.__dict__["forward"] = Region(seed)
