"""Small hosts with data for them, built in and foreign, and short ways to grow them: for the tests of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from esper.actions import Action, Op
from esper.engine.eager import EagerEngine, EpochRecord, move_on
from esper.engine.learner import Learner, TrainReport
from esper.engine.measure import Evaluation
from esper.engine.optimizer import GrowingOptimizer
from esper.growth.attach import attach
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot
from esper.lifecycle import Contrast, Rules, Stage, Transition
from esper.slot_columns import RULE_NAMES
from esper.tasks.data import Split
from esper.tasks.feed import TensorFeed
from esper.tasks.hosts import Conv1dHost, Conv2dHost, GPTHost, MLPHost
from esper.tasks.registry import cross_entropy, percent_correct

CLASSES = 3


def stages_of(host: nn.Module) -> list[str]:
    """Paths of the stages, or blocks, of a built-in host: its tasks have slots at them."""
    name = "blocks" if hasattr(host, "blocks") else "stages"
    return [f"{name}.{i}" for i in range(len(host.get_submodule(name)))]  # type: ignore[arg-type]


class SpectralHost(nn.Module):
    """Spectral norm (buffers that change in training) and a buffer of its own that counts and averages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Conv2d(2, 4, 3, padding=1))
        self.second = spectral_norm(nn.Conv2d(4, 4, 3, padding=1))
        self.head = spectral_norm(nn.Linear(4, CLASSES))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        x = x.flatten(2).mean(2)
        if self.training:
            self.passes += 1  # in place
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # replaced
        return self.head(x - self.mean)


class InPlaceHost(nn.Module):
    """In-place activations right after slots, in-place skip connections, dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4))
        self.second = nn.Conv1d(4, 4, 3, padding=1)
        self.third = nn.Sequential(nn.ReLU(), nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.first(x))
        y = self.second(x)
        y += x
        y = F.relu(y, inplace=True)
        z = self.third(y)
        z += y
        return self.head(self.drop(F.relu_(z)).mean(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class NestedHost(nn.Module):
    """Slots inside of slots: a block, and a layer of it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(torch.tanh(self.stem(x))))


class PairBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), x.mean(1, keepdim=True)


class TupleHost(nn.Module):
    """Blocks that return a tuple whose later members are used as well."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.a, self.b = PairBlock(8), PairBlock(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.a(self.stem(x))
        x, second = self.b(x + first)
        return self.head(x * second.sigmoid())


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"left": self.left(x), "both": [self.right(x).tanh(), 2.0], "name": "features"}


class Opaque:
    """An output that no recorder can vouch for."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(self.linear(x))


class TangledHost(nn.Module):
    """Dicts and foreign objects between modules, a layer called twice upstream, and one module at two paths."""

    def __init__(self) -> None:
        super().__init__()
        self.features = Features()
        self.shared = nn.Linear(8, 8)
        self.alias = self.shared
        self.wrapping = Wrapping()
        self.middle = nn.Linear(8, 8)
        self.late = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = self.features(x)
        x = self.shared(found["left"]).tanh() + found["both"][0] * found["both"][1]
        x = self.alias(x).tanh()
        x = self.middle(self.wrapping(x).value).tanh()
        return self.head(self.late(x).tanh() + found["left"])


@dataclass(frozen=True)
class World:
    """A host, where it can grow, and examples for it."""

    make: Callable[[], nn.Module]
    slots: tuple[str, ...]
    inputs: Callable[[int], Tensor]
    symbols: int = 0
    """Above 0: inputs are symbols and every position has a target."""

    def examples(self, count: int, seed: int = 0) -> Split:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + seed)
            if self.symbols:
                text = torch.randint(self.symbols, (count, 7))
                return Split(text[:, :-1], text[:, 1:])
            return Split(self.inputs(count), torch.randint(CLASSES, (count,)))

    def host(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()

    def grown(self, seed: int = 0, **settings: Any) -> GrowingModel:
        return attach(self.host(seed), self.slots, self.examples(4).x, rng_seed=seed, **settings)


def flat(count: int) -> Tensor:
    return torch.randn(count, 6)


BUILT_IN = {
    "mlp": World(lambda: MLPHost(6, [8, 5], CLASSES), ("stages.*",), flat),
    "conv1d": World(lambda: Conv1dHost(1, [4, 6], [3, 3], CLASSES), ("stages.*",), lambda n: torch.randn(n, 1, 8)),
    "conv2d": World(lambda: Conv2dHost(2, [4, 6], [3, 1], CLASSES), ("stages.*",), lambda n: torch.randn(n, 2, 6, 6)),
    "plain conv2d": World(
        lambda: Conv2dHost(2, [4, 4], [3, 3], CLASSES, norm=False), ("stages.*",), lambda n: torch.randn(n, 2, 6, 6)
    ),
    "gpt": World(lambda: GPTHost(7, 6, 8, 2, 2, dropout=0.3), ("blocks.*",), flat, symbols=7),
}
FOREIGN = {
    "spectral": World(SpectralHost, ("first", "second"), lambda n: torch.randn(n, 2, 5, 5)),
    "in-place": World(InPlaceHost, ("first", "second", "third"), lambda n: torch.randn(n, 1, 8)),
    "nested": World(NestedHost, ("blocks.*", "blocks.*.up"), flat),
    "tuple": World(TupleHost, ("a", "b"), flat),
    "tangled": World(TangledHost, ("middle", "late"), flat),
}
WORLDS = BUILT_IN | FOREIGN

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps, **kw: torch.optim.SGD(ps, lr=0.05, momentum=0.9, **kw),
    "adam": lambda ps, **kw: torch.optim.Adam(ps, lr=0.01, **kw),
    "adamw": lambda ps, **kw: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.01, **kw),
}


def learner_for(world: World, *, seed: int = 0, optimizer: str = "adamw", warmup: int = 3, **settings: Any) -> Learner:
    """A learner with 24 training and 12 validation examples, three updates an epoch."""
    model = world.grown(seed, **settings)
    feed = TensorFeed(world.examples(24), world.examples(12, 1), batch_size=8, updates_per_epoch=3, seed=seed)
    growing = GrowingOptimizer(OPTIMIZERS[optimizer](model.host.parameters()), warmup_updates=warmup)
    return Learner(model, growing, feed, cross_entropy, percent_correct, seed=seed)


def run_epoch(learner: Learner, action: Action | None = None) -> EpochRecord:
    return EagerEngine([learner], [None]).step([action or Action()])[0]


def germinate(slot: int, blueprint: str, blend: str = "linear") -> Action:
    return Action(Op.GERMINATE, slot, blueprint, blend, "test")


EAGER = Rules(training_epochs=1, gradient_activity=0.0, shadow_benefit=-1e9, blending_epochs=2, contribution=-1e9)
"""Every gate opens as soon as it can."""
PATIENT = Rules(training_epochs=10_000)
"""Seeds incubate for ever."""


def force(slot: Slot, **columns: object) -> None:
    """Write into the columns of a slot, past all rules."""
    slots = slot.life.slots
    for name, value in columns.items():
        if isinstance(value, Contrast):
            value = torch.tensor([value.accuracy, value.loss, value.error], dtype=torch.float64)
        getattr(slots.columns, name)[0, slot.index] = value
    slots.stages[slot.index], slots.alphas[slot.index] = slot.life.stage, slot.life.alpha


def advance(slot: Slot) -> None:
    """A good epoch of this slot alone: whatever its rules are, the other slots stay what they are."""
    slots, good = slot.life.slots, Contrast(1.0, 1.0)
    slots.begin_epoch(0)
    before = slots.columns.clone()
    slots.columns.rules.copy_(torch.tensor([[getattr(EAGER, name) for name in RULE_NAMES]], dtype=torch.float64))
    slots.measure({slot.index: 1.0}, {slot.index: good}, {slot.index: good})
    slots.columns.end_epoch()
    for field in fields(slots.columns):
        now, then = getattr(slots.columns, field.name), getattr(before, field.name)
        if field.name == "rules":
            now.copy_(then)
        else:
            others = [i for i in range(now.shape[1]) if i != slot.index]
            now[:, others] = then[:, others]
    slots.changes(0)


def end_epoch(learner: Learner, trained: TrainReport, measured: Evaluation) -> list[Transition]:
    """The end of an epoch in which this was measured."""
    move_on(learner.model.lifecycle.columns, [learner], {learner: (trained, measured)})
    return learner.end_epoch()


def plant(model: GrowingModel, slot: Slot, blueprint: str, stage: Stage, blend: str = "linear") -> None:
    """Bring a new seed to `stage` without training, with parameters that are far from birth."""
    model.germinate(slot, blueprint, blend, epoch=0)
    scramble(slot)
    while slot.life.stage is not stage:
        if slot.life.stage is Stage.HOLDING:
            force(slot, stage=Stage.FOSSILIZED)
        elif stage is Stage.TRAINING:
            force(slot, stage=Stage.TRAINING)
        else:
            advance(slot)
    model._follow(slot)


def scramble(slot: Slot) -> None:
    """Random parameters, so that whatever leaks from the seed is seen."""
    assert slot.seed is not None
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(77 + slot.index)
        for parameter in slot.seed.parameters():
            parameter.normal_(0.0, 0.5)


def same(a: Iterable[Tensor | None], b: Iterable[Tensor | None]) -> bool:
    """Bit for bit; None equals None."""
    return all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )
