"""How a GPU trains a user's model: number format, compiled regions, CUDA graphs. The training itself stays the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from esper.engine.eager import EagerEngine
from esper.engine.governor import Governor
from esper.engine.graphs import GraphCache, GraphEngine
from esper.engine.learner import Learner
from esper.engine.measure import Loss
from esper.engine.precision import Precision
from esper.engine.regions import compile_regions, compiled_loss, compiler_works
from esper.errors import did_you_mean
from esper.growth.model import GrowingModel

DEVICES = frozenset({"cuda"})
WITHOUT_DOUBLE = frozenset({"mps"})
"""Kinds of device that cannot calculate in double precision."""


def check_device(device: torch.device) -> None:
    """Losses and scores are summed in double precision where the network is: a difference of two sums must hold."""
    if device.type in WITHOUT_DOUBLE:
        raise ValueError(
            f"networks cannot grow on {device}, which has no double precision, in which seeds are measured: use the "
            "CPU (device='cpu', in Lightning accelerator='cpu', in a Trainer use_cpu=True)"
        )


class GpuOptions:
    """`precision`, `compiled` and `cuda_graphs` of one run, which all of its networks share."""

    def __init__(self, device: torch.device, precision: str, *, compiled: bool, cuda_graphs: bool) -> None:
        known = [one.value for one in Precision]
        if precision not in known:
            hint = did_you_mean(precision, known, f"there are {', '.join(known)}")
            raise ValueError(f"there is no precision {precision!r}; {hint}")
        wanted = {"precision": precision != Precision.FP32, "compiled": compiled, "cuda_graphs": cuda_graphs}
        for name, asked in wanted.items():
            if asked and device.type not in DEVICES:
                raise ValueError(f"{name}= is for GPUs, and {device} is none: leave it out, or name a GPU")
        self.precision = Precision(precision)
        self.compiled = compiled and compiler_works(device)
        self._cache = GraphCache() if cuda_graphs else None

    def prepared(self, growing: GrowingModel, loss: Loss) -> Loss:
        """The loss; with `compiled`, it and the parts of the network that have no slot inside are compiled."""
        if not self.compiled:
            return loss
        compile_regions(growing)
        return compiled_loss(loss)

    def engine(self, learners: Sequence[Learner], governors: Sequence[Governor | None]) -> EagerEngine:
        if self._cache is None:
            return EagerEngine(learners, governors)
        return GraphEngine(learners, governors, cache=self._cache)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Why networks were trained without the graphs that were asked for."""
        refused = () if self._cache is None else tuple(self._cache.refused)
        return tuple(f"Without CUDA graphs, and slower: {reason}." for reason in refused)
