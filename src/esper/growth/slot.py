"""A slot: one place in a host where a seed can grow, the output of one of its modules.

The seed is joined to the host by a forward hook that exists only while there is a seed, so an empty slot costs
nothing and the host stays the user's own module, with its own parameter names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.blueprints import SlotShape
from esper.growth.graft import argument_names, first_input, first_tensor, readable, with_first
from esper.growth.replay import Recorded
from esper.growth.seed import Seed
from esper.growth.tensors import own_tensors
from esper.lifecycle import IN_FORWARD, Stage
from esper.slot_views import SlotLife, Slots


class SlotMode(Enum):
    """What a slot's hook does in a forward pass."""

    LIVE = auto()
    """What the seed's stage says."""
    OFF = auto()
    """The host's own output: the seed left out."""
    SHADOW = auto()
    """The seed at full strength on a detached input: how an incubating seed learns and is measured."""
    REPEAT = auto()
    """The output of the recorded pass: this slot lies before the one that is replayed."""


class Slot:
    """A place, what passes through it, the story of its seeds, and the seed that is there now."""

    def __init__(self, index: int, path: str, module: nn.Module, shape: SlotShape, lifecycle: Slots) -> None:
        self.index = index
        self.path = path
        self.module = module
        self.shape = shape
        self.life: SlotLife = lifecycle.lives[index]
        self._lifecycle = lifecycle
        self.seed: Seed | None = None
        self.trained: list[Tensor] = []
        """What an optimizer must train of the seed; a blueprint may hold constants as well."""
        self.trained_size = 0
        """How many numbers that is."""
        self.alpha = torch.zeros(())  # a tensor, so that neither a CUDA graph nor a compiled region bakes it in
        self._alpha_set = 0.0
        self.mode = SlotMode.LIVE
        self.keep_output = False
        self._repeat: Recorded | None = None
        self._handle: RemovableHandle | None = None
        self._mask_inputs: tuple[str, ...] = ()
        self._shadow_buffers: list[tuple[nn.Module, str, Tensor]] = []

    @property
    def stage(self) -> Stage:
        """Of the seed's life, as a plain value: it is read in every pass."""
        return self._lifecycle.stages[self.index]

    @property
    def strength(self) -> float:
        """Alpha as a plain number."""
        return self._lifecycle.alphas[self.index]

    def plant(self, seed: Seed, host: nn.Module) -> None:
        """Join a seed to the host. `host` lends the running statistics that the shadow pass starts from."""
        self.seed = seed
        parameters = own_tensors(seed)[0]
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.trained_size = sum(parameter.numel() for parameter in self.trained)
        precision = torch.promote_types(parameters[0].dtype, torch.float32)
        self.alpha, self._alpha_set = torch.zeros((), device=parameters[0].device, dtype=precision), 0.0
        # What a seed that reads masks needs of the module's inputs; most read none, and pay nothing.
        self._mask_inputs = argument_names(self.module) if seed.reads_mask else ()
        self._handle = self.module.register_forward_hook(self._hook, with_kwargs=True)
        self._shadow_buffers = [
            (module, name, buffer.clone())
            for module in host.modules()
            if module._buffers  # most have none, and `named_buffers` takes longer to say so than a copy
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def uproot(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self.seed = self._handle = self._repeat = None
        self.trained, self.trained_size, self._shadow_buffers = [], 0, []
        self.alpha, self._alpha_set = torch.zeros(()), 0.0  # not the old one: its place may be another network's by now

    def end_incubation(self) -> None:
        """The seed is about to act on the host itself: its private statistics are no longer needed."""
        self._shadow_buffers = []

    @property
    def shadow_buffers(self) -> list[Tensor]:
        """The incubating seed's own copy of the host's running statistics."""
        return [buffer for _, _, buffer in self._shadow_buffers]

    def set_alpha(self) -> None:
        """Take over alpha from the slot's life."""
        if self._alpha_set != self.strength:  # a fill is a kernel launch on a GPU, and most epochs change nothing
            self.alpha.fill_(self.strength)
            self._alpha_set = self.strength

    def _hook(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        seed, mode = self.seed, self.mode
        assert seed is not None
        if mode is SlotMode.REPEAT:
            if self._repeat is not None and self._repeat.intact:
                return with_first(output, self._repeat.detached())
            mode = SlotMode.LIVE
        h: Tensor = first_tensor(output)
        if mode is SlotMode.SHADOW:
            return with_first(output, self._grown(seed, h.detach(), args, kwargs, detached=True))
        if mode is SlotMode.LIVE and self.stage in IN_FORWARD:
            grown = self._grown(seed, h, args, kwargs)
            mixed = grown if self.strength == 1.0 else h + self.alpha * (grown - h)
        else:
            mixed = h
        if self.keep_output:
            self._repeat = Recorded.of(mixed)
        return None if mixed is h else with_first(output, mixed)

    def _grown(self, seed: Seed, h: Tensor, args: Any, kwargs: dict[str, Any], detached: bool = False) -> Tensor:
        other: Tensor | None = None
        if self._mask_inputs:
            other = readable(self._mask_inputs, args, kwargs, h)
        elif seed.reads_input:
            x: Tensor = first_input(args, kwargs)
            other = x.detach() if detached else x
        changed: Tensor = seed(h, other)
        return changed

    def start_pass(self, *, keep_output: bool) -> None:
        """Clear the last pass; keep what the slot gives in the next one, for replays."""
        self.keep_output, self._repeat = keep_output, None

    @contextmanager
    def private_buffers(self) -> Iterator[None]:
        """Within, the host reads and updates this seed's copy of its running statistics, never its own."""
        own = [(module, name, module.get_buffer(name)) for module, name, _ in self._shadow_buffers]
        try:
            for module, name, buffer in self._shadow_buffers:
                setattr(module, name, buffer)
            yield
        finally:
            # A module may have replaced a buffer instead of writing into it: keep what it left.
            self._shadow_buffers = [(module, name, module.get_buffer(name)) for module, name, _ in own]
            for module, name, buffer in own:
                setattr(module, name, buffer)


@contextmanager
def preserved_modes(root: nn.Module) -> Iterator[None]:
    """Afterwards each module in it is in training or in evaluation, as it was."""
    modes = {module: module.training for module in root.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def preserved_attributes(root: nn.Module, *, first: bool = False) -> Iterator[None]:
    """What its modules note on themselves inside, such as a count or the last state of a recurrence, is forgotten.

    `first`: not if it builds parts of itself inside, as in its first pass. What it noted says that they are there.
    """
    own = [(vars(module), dict(vars(module))) for module in root.modules()]
    parts = _parts(root) if first else []
    try:
        yield
    finally:
        after = _parts(root) if first else []
        if len(after) == len(parts) and all(map(is_, after, parts)):
            for attributes, before in own:
                attributes.clear()
                attributes.update(before)


def _parts(root: nn.Module) -> list[nn.Module | Tensor | None]:
    """Its modules and parameters."""
    return [
        part for module in root.modules() for kind in (module._modules, module._parameters) for part in kind.values()
    ]


@contextmanager
def preserved_buffers(*roots: nn.Module) -> Iterator[None]:
    """Buffers of these modules that are written or replaced inside are afterwards what they were."""
    own = [(m, name, b) for root in roots for m in root.modules() for name, b in m.named_buffers(recurse=False)]
    try:
        for module, name, buffer in own:
            setattr(module, name, buffer.clone())
        yield
    finally:
        for module, name, buffer in own:
            setattr(module, name, buffer)
