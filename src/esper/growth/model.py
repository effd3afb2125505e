"""A host with slots: the body that grows. What grows in it is the controller's decision.

One epoch, seen from here: `germinate` / `prune` / `fossilize`, `begin_epoch`, training (`forward`, and `shadow` for
seeds that incubate), measuring (`forward` and `replay` while `recording`), `end_epoch`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from esper.actions import BLENDS
from esper.errors import GrowthWarning
from esper.growth.blueprints import VISIBILITIES, Blueprint, SlotShape, blueprint_names, fitting
from esper.growth.graft import without_nested_tensors
from esper.growth.randomness import preserved_rng
from esper.growth.replay import PassRecorder
from esper.growth.seed import Seed, parameter_count
from esper.growth.slot import Slot, SlotMode, preserved_attributes, preserved_buffers
from esper.growth.tensors import count_parameters, move_together, own_tensors
from esper.lifecycle import LIVE, IllegalTransitionError, Rules, Stage, Transition
from esper.slot_views import Slots


@dataclass(frozen=True, slots=True)
class Survey:
    """What a look at a host has shown (`esper.growth.attach`). It names modules, so it holds for hosts of a kind."""

    slots: tuple[tuple[str, SlotShape], ...]
    """The slots, in the order of the forward pass."""
    taps: tuple[str, ...]
    """The modules whose outputs a replay can use again (`esper.growth.replay`)."""
    uses_other_rngs: bool = True
    """A pass in training draws random numbers of Python or numpy, as far as is known."""


def is_growth_hook(hook: Any) -> bool:
    """Whether a hook is one of a slot or a recorder."""
    return isinstance(getattr(hook, "__self__", None), Slot | PassRecorder)


def planted_modules(model: nn.Module) -> list[str]:
    """Paths of the modules that carry hooks of Esper's."""
    return [
        path
        for path, module in model.named_modules()
        if any(is_growth_hook(hook) for hook in module._forward_hooks.values())
    ]


def _is_whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)  # numpy's, too


class GrowingModel(nn.Module):
    """A host network and its slots, in the order of the forward pass.

    Made by `esper.attach`. Its output, and the gradients of its host, are exactly the host's own until a seed blends.
    """

    def __init__(
        self,
        host: nn.Module,
        survey: Survey,
        *,
        rules: Rules | None = None,
        blueprints: Sequence[str] | None = None,
        budget: int | None = None,
        max_seeds: int | None = None,
        rng_seed: int = 0,
    ) -> None:
        super().__init__()
        self.host = host
        self.seeds = nn.ModuleDict()
        self.survey = survey
        if budget is not None and not _is_whole(budget):
            raise ValueError(f"the budget must be a whole number of parameters, not {budget!r}")
        if max_seeds is not None and not (_is_whole(max_seeds) and max_seeds >= 0):
            raise ValueError(f"max_seeds must be a whole number, 0 or more, not {max_seeds!r}")
        places = [(path, host.get_submodule(path), shape) for path, shape in survey.slots]
        self.lifecycle = Slots([path for path, _, _ in places], rules)
        self.slots = [Slot(i, *place, self.lifecycle) for i, place in enumerate(places)]
        self.blueprints = None if blueprints is None else frozenset(blueprints)
        self.budget = budget
        """Most parameters that the whole network may have; None is no limit."""
        self.max_seeds = max_seeds
        """Most seeds at a time, fossilized ones counted; None is no limit."""
        self.rng_seed = rng_seed
        self.host_parameters = count_parameters(host)
        if budget is not None and budget < self.host_parameters:
            raise ValueError(f"the budget of {budget:,} parameters is smaller than the host, {self.host_parameters:,}")
        self.driven = False
        """Whether a learner makes the passes and measurements by which seeds move on."""
        self.on_planting: Callable[[Seed], None] | None = None
        """Called with every new seed before it joins the host."""
        self.first_weights: Callable[[int], AbstractContextManager[Any]] | None = None
        """(number of the seed, from 1 on) → where it is built, if its weights do not come from `rng_seed`."""
        without_nested_tensors(host)
        self._costs: dict[tuple[int, tuple[str, ...]], dict[str, int]] = {}
        self._recorder = PassRecorder([host.get_submodule(path) for path in survey.taps])

    # -- the forward pass and its variants ----------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.driven and self.training and torch.is_grad_enabled() and self.live:
            self._warn_of_stuck_seed()
        self._recorder.start_pass()
        for slot in self.slots:
            slot.start_pass(keep_output=self._recorder.is_active)
        return self.host(*args, **kwargs)

    def _warn_of_stuck_seed(self) -> None:
        self.driven = True  # said once
        warnings.warn(
            f"the seed at {self.live[0].path} is in training, but nothing trains it, measures it or moves it on: in a "
            "loop of your own use esper.Growth, else esper.grow",
            GrowthWarning,
            stacklevel=5,
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, a forward pass can be followed by replays of it."""
        try:
            with self._recorder.active():
                yield
        finally:
            for slot in self.slots:
                slot.start_pass(keep_output=False)

    def replay(self, changes: dict[Slot, SlotMode], *args: Any, **kwargs: Any) -> Any:
        """The recorded pass again with some slots in another mode, from the first of them on.

        What modules note on themselves is what this pass has noted, until the caller puts it back."""
        with self._switched(changes):
            return self.host(*args, **kwargs)

    @contextmanager
    def shadow(self, slot: Slot, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The recorded pass with an incubating seed at full strength; leaves no trace in host, statistics or RNG.

        Gives the output. Take gradients inside: a block that the host checkpoints runs again then.
        """
        others = [other.seed for other in self.joined if other.seed is not None]
        apart = preserved_rng(self.device, others=self.survey.uses_other_rngs)
        kept = preserved_attributes(self.host)
        with apart, kept, preserved_buffers(*others), self._switched({slot: SlotMode.SHADOW}):
            yield self.host(*args, **kwargs)

    @contextmanager
    def in_shadow(self, slot: Slot) -> Iterator[None]:
        """Within, whole passes of the host have an incubating seed at full strength, and leave no trace but gradients.

        For passes that were not recorded; for others `shadow` is quicker.
        """
        others = [other.seed for other in self.joined if other.seed is not None]
        with (
            preserved_rng(self.device),
            preserved_attributes(self.host),
            preserved_buffers(*others),
            slot.private_buffers(),
        ):
            slot.mode = SlotMode.SHADOW
            try:
                yield
            finally:
                slot.mode = SlotMode.LIVE

    @contextmanager
    def _switched(self, changes: dict[Slot, SlotMode]) -> Iterator[None]:
        first = min(changes, key=lambda slot: slot.index)
        modes = dict.fromkeys(self.slots[: first.index], SlotMode.REPEAT) | changes
        with ExitStack() as stack:
            stack.enter_context(self._recorder.up_to(first.module))
            for slot, mode in changes.items():
                if mode is SlotMode.SHADOW:
                    stack.enter_context(slot.private_buffers())
            try:
                for slot in self.slots:
                    slot.mode, slot.keep_output = modes.get(slot, SlotMode.LIVE), False
                yield
            finally:
                for slot in self.slots:
                    slot.mode = SlotMode.LIVE

    # -- what a controller may do -------------------------------------------------------------------------------

    def germinate(self, slot: Slot, blueprint: str, blend: str, *, epoch: int, reason: str = "") -> list[Transition]:
        """Plant a seed. Its parameters are new; whoever trains the model must take them into the optimizer."""
        refusal = self.why_not_grow(slot, blueprint)
        if refusal:
            raise IllegalTransitionError(refusal)
        with preserved_rng(torch.device("cpu")):
            number = self.lifecycle.born + 1
            torch.default_generator.manual_seed(self.rng_seed * 1_000_003 + number)
            with nullcontext() if self.first_weights is None else self.first_weights(number):
                seed = Seed(blueprint, slot.shape, blend)
        self.place(slot, seed)
        kind = blueprint_names().index(blueprint), BLENDS.index(blend)
        return self.lifecycle.germinate(slot.index, *kind, seed.size, epoch=epoch, reason=reason)

    def place(self, slot: Slot, seed: Seed) -> None:
        """Make a seed that was just built, or loaded, one of this network."""
        host = own_tensors(self.host)[0]
        like = next(slot.module.parameters(), host[0])  # parts may differ in precision
        # In a host in channels-last order, seeds have that order, too.
        by_pixel = any(p.dim() == 4 and not p.is_contiguous() for p in host)
        move_together(seed, like.device, like.dtype, by_pixel=by_pixel)
        if not self.training:
            seed.eval()
        if self.on_planting is not None:
            self.on_planting(seed)
        slot.plant(seed, self.host)
        self.seeds[str(slot.index)] = seed

    def why_not_grow(self, slot: Slot, blueprint: str) -> str:
        """Why this seed does not fit or cannot be afforded; empty when it can be grown."""
        if refusal := slot.life.why_not(Stage.GERMINATED):
            return refusal
        if self.max_seeds is not None and len(self.seeds) >= self.max_seeds:
            return f"the limit of {self.max_seeds} seeds is reached"
        if blueprint not in {candidate.name for candidate in self.candidates(slot)}:
            seen = "" if slot.shape.visibility == "both" else f", {VISIBILITIES[slot.shape.visibility]}"
            return f"blueprint {blueprint!r} does not fit slot {slot.path} ({slot.shape.layout}{seen})"
        size = self.parameter_count + self.cost(slot, blueprint)
        if self.budget is not None and size > self.budget:
            return f"{blueprint} at {slot.path} would make {size:,} parameters; the budget is {self.budget:,}"
        return ""

    def cost(self, slot: Slot, blueprint: str) -> int:
        """Parameters that the budget must have room for: the seed with a gate, so that every blend is affordable."""
        return parameter_count(blueprint, slot.shape, "gated")

    def growable(self, slot: Slot) -> frozenset[str]:
        """The blueprints that may germinate here now: those for which `why_not_grow` finds nothing."""
        full = self.max_seeds is not None and len(self.seeds) >= self.max_seeds
        if slot.stage is not Stage.DORMANT or full:
            return frozenset()
        room = math.inf if self.budget is None else self.budget - self.parameter_count
        return frozenset(name for name, cost in self.costs(slot).items() if cost <= room)

    def costs(self, slot: Slot) -> dict[str, int]:
        """What each candidate costs. Asked after every epoch, so the answer is kept."""
        key = (slot.index, blueprint_names())
        if key not in self._costs:
            self._costs[key] = {candidate.name: self.cost(slot, candidate.name) for candidate in self.candidates(slot)}
        return self._costs[key]

    def candidates(self, slot: Slot) -> list[Blueprint]:
        """The blueprints that fit the slot and that the user allows, whatever they cost."""
        return [b for b in fitting(slot.shape) if self.blueprints is None or b.name in self.blueprints]

    def prune(self, slot: Slot, *, epoch: int, reason: str = "", at_once: bool = False) -> list[Transition]:
        transitions = self.lifecycle.prune(slot.index, epoch=epoch, reason=reason, at_once=at_once)
        self._follow(slot)
        return transitions

    def fossilize(self, slot: Slot, *, epoch: int, reason: str = "") -> list[Transition]:
        return self.lifecycle.fossilize(slot.index, epoch=epoch, reason=reason)

    def begin_epoch(self, epoch: int) -> list[Transition]:
        return self.lifecycle.begin_epoch(epoch)

    def follow(self, epoch: int) -> list[Transition]:
        """Make the network what its columns say after the end of an epoch."""
        transitions = self.lifecycle.changes(epoch)
        for slot in self.slots:
            self._follow(slot)
        return transitions

    def _follow(self, slot: Slot) -> None:
        """Make the network what the slot's life says."""
        if slot.stage is Stage.PRUNED and slot.seed is not None:
            slot.uproot()
            del self.seeds[str(slot.index)]
        elif slot.stage is Stage.BLENDING:
            slot.end_incubation()
        slot.set_alpha()

    def detach(self) -> nn.Module:
        """Take every seed and hook off the host, and give it back: trained, and without anything of Esper's on it."""
        for slot in self.slots:
            slot.uproot()
        self.seeds.clear()
        return self.host

    # -- what there is ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.host.parameters()).device

    @property
    def regions(self) -> list[nn.Module]:
        """The parts of the host that have parameters and no slot inside, as large as can be."""
        slots = {slot.module for slot in self.slots}
        return [
            tap
            for tap in self._recorder.taps
            if next(tap.parameters(), None) is not None and not any(m in slots for m in tap.modules() if m is not tap)
        ]

    @property
    def parameter_count(self) -> int:
        """All parameters of host and seeds, tied ones counted once."""
        return self.host_parameters + sum(slot.seed.size for slot in self.slots if slot.seed is not None)

    @property
    def acting_parameters(self) -> int:
        """Parameters of the host and of the seeds that take part in the output: what a person would take home."""
        return self.host_parameters + sum(slot.seed.size for slot in self.joined if slot.seed is not None)

    @property
    def incubating(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.stage is Stage.TRAINING]

    @property
    def live(self) -> list[Slot]:
        """Slots whose seed is neither kept nor removed yet."""
        return [slot for slot in self.slots if slot.stage in LIVE]

    @property
    def joined(self) -> list[Slot]:
        """Slots whose seed takes part in the output."""
        return [slot for slot in self.slots if slot.seed is not None and slot.strength > 0.0]

    def near_parameters(self, slot: Slot) -> Iterator[list[Tensor]]:
        """The host's parameters around a slot: those of its module, then of each module around that."""
        names = slot.path.split(".")
        for depth in range(len(names), -1, -1):
            yield list(self.host.get_submodule(".".join(names[:depth])).parameters())

    def seed_parameters(self, slot: Slot) -> list[Tensor]:
        """What the optimizer must train."""
        return slot.trained
