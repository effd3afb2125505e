"""The plain and the stacked environment side by side, on draws that were made small. What they must have in common.

`python -m pytest --noconftest tests/engine/stacked` runs these tests on a machine that has torch, numpy and pytest
alone. There the stacked networks are on the GPU as well; the plain ones stay on the CPU, as the reference.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from esper.actions import BLENDS, Op
from esper.engine.stacked.parameters import Table
from esper.env.growth_env import GrowthEnv
from esper.env.spaces import ActionMasks
from esper.env.stacked_env import StackedEnv
from esper.env.steps import EnvStep
from esper.growth.blueprints import LAYOUTS, Layout, blueprint_names
from esper.lifecycle import IN_FORWARD, Rules, Stage
from esper.tasks.data import Split, Splits
from esper.tasks.disguised import Disguised
from esper.tasks.family import Draw, Family
from esper.tasks.mixed import Mixed
from esper.tasks.registry import Task
from esper.tasks.varied import Varied

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
LAYOUT_NAMES: tuple[Layout, ...] = tuple(LAYOUTS)
ON_CUDA = 1e-6
"""Absolute tolerance of float64 on a GPU: other kernels, and sums in another order."""
OPEN = Rules(
    training_epochs=2, gradient_activity=0.0, shadow_benefit=-1e9, blending_epochs=2, contribution=-1e9, prune_age=1
)
"""Gates open as soon as they can, so that a short episode has whole lives of seeds; two can incubate at a time."""


def doubled(task: Task) -> Task:
    """The task in float64: what the plain environment plays."""
    make = task.make_host
    parts = (Split(part.x.double(), part.y) for part in (task.splits.train, task.splits.val, task.splits.test))
    return replace(task, splits=Splits(*parts, check=False), make_host=lambda: make().double())


class Small:
    """Draws of a family with fewer examples, updates and epochs; every second one without limits on growth."""

    def __init__(
        self,
        family: Family,
        *,
        updates: Callable[[int], int] = lambda number: 2,
        train: int = 64,
        val: int = 32,
        horizon: int = 12,
        change: Callable[[int, Draw], Draw] = lambda number, draw: draw,
    ) -> None:
        """`updates` per epoch of a draw; `change` is made last."""
        self.name, self._family, self._updates, self._change = family.name, family, updates, change
        self._train, self._val, self._horizon = train, val, horizon
        self._made: dict[int, Draw] = {}

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        if number not in self._made:
            self._made[number] = self._cut(number, self._family.draw(number, held_out=held_out))
        return self._made[number]

    def _cut(self, number: int, draw: Draw) -> Draw:
        splits = draw.task.splits
        sizes = (self._train + number % 3, self._val, self._val)  # training sets differ in size
        parts = (
            Split(part.x[:size], part.y[:size])
            for part, size in zip((splits.train, splits.val, splits.test), sizes, strict=True)
        )
        task = replace(draw.task, splits=Splits(*parts, check=False), updates_per_epoch=self._updates(number))
        task = replace(task, batch_size=task.batch_size // 4)  # 16 and 25
        draw = replace(draw, task=task, horizon=self._horizon - number % 3)
        free = {"budget": None, "max_seeds": None} if number % 2 else {}
        return self._change(number, replace(draw, **free))


class Turns:
    """The draws of some families in turn."""

    def __init__(self, *families: Family) -> None:
        self.name, self._families = "+".join(family.name for family in families), families

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        turn, place = divmod(number, len(self._families))
        return self._families[place].draw(turn, held_out=held_out)


class Doubled:
    """The same draws in float64."""

    def __init__(self, family: Family) -> None:
        self.name, self._family = family.name, family

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        draw = self._family.draw(number, held_out=held_out)
        return replace(draw, task=doubled(draw.task))


EVERYTHING = Turns(Mixed(), Disguised(), Varied(sorts=["series", "sequence", "image", "vector"]))


def with_nan(draw: Draw) -> Draw:
    """One training example is not a number: the one that is met last."""
    task, train = draw.task, draw.task.splits.train
    shape = (draw.horizon, task.updates_per_epoch * min(task.batch_size, len(train)))
    plan = torch.randint(len(train), shape, generator=torch.Generator().manual_seed(draw.seed))  # as the feed draws it
    met = [int((plan == example).any(1).int().argmax()) for example in range(len(train))]  # epochs
    x = train.x.clone()
    x[max(range(len(train)), key=lambda example: met[example])] = torch.nan
    splits = Splits(Split(x, train.y), task.splits.val, task.splits.test, check=False)
    return replace(draw, task=replace(task, splits=splits))


# -- what was played --------------------------------------------------------------------------------------------------


class RandomPlay:
    """Legal actions: an operation by its weight, any slot, and of blueprints with blends the least used so far, so that
    few episodes show them all."""

    def __init__(self, layouts: Sequence[str], seed: int = 0, weights: Sequence[float] = (2.0, 4.0, 1.0, 1.0)) -> None:
        """`layouts` [N]; `weights` of WAIT, GERMINATE, PRUNE, FOSSILIZE."""
        self._layouts, self._weights = layouts, weights
        self._rng, self._used = random.Random(seed), Counter[tuple[str, int, int]]()

    def __call__(self, masks: ActionMasks) -> Tensor:
        """[N, heads]"""
        return torch.tensor([self._action(masks, row) for row in range(len(masks.op))])

    def _action(self, masks: ActionMasks, row: int) -> list[int]:
        ops = masks.op[row].nonzero().flatten().tolist()
        op = self._rng.choices(ops, [self._weights[op] for op in ops])[0]
        if op == Op.WAIT:
            return [0, 0, 0, op]
        slot = self._rng.choice(masks.slot[row, op].nonzero().flatten().tolist())
        if op != Op.GERMINATE:
            return [slot, 0, 0, op]
        legal = [
            (self._layouts[row], blueprint, blend)
            for blueprint in masks.blueprint[row, slot].nonzero().flatten().tolist()
            for blend in masks.blend[row, slot].nonzero().flatten().tolist()
        ]
        chosen = min(legal, key=lambda seed: (self._used[seed], self._rng.random()))
        self._used[chosen] += 1
        return [slot, *chosen[1:], op]


@dataclass(slots=True)
class Coverage:
    """What has occurred in the plain environment."""

    seeds: set[tuple[str, str, str, str]] = field(default_factory=set)
    """(layout, blueprint, blend, "incubating" or "acting")"""
    events: Counter[str] = field(default_factory=Counter)
    kinds: set[str] = field(default_factory=set)

    def note(self, env: GrowthEnv, before: Tensor, step: EnvStep) -> None:
        """`before` [N, S]: stages when the action was taken."""
        assert step.facts is not None
        epoch, slots = step.facts.epoch, env.world.slots
        names = blueprint_names()
        for row in epoch.played.nonzero().flatten().tolist():
            op = Op(int(epoch.op[row]))
            if bool(epoch.changed[row]) and op in (Op.PRUNE, Op.FOSSILIZE):
                self.events[f"{op.name} {Stage(int(before[row, epoch.slot[row]])).name}"] += 1
            stages = [Stage(int(stage)) for stage in epoch.stage[row]]
            incubating = [i for i, stage in enumerate(stages) if stage is Stage.TRAINING]
            acting = [i for i, stage in enumerate(stages) if stage in IN_FORWARD]
            self.events["several incubating"] += len(incubating) > 1
            self.events["several acting"] += len(acting) > 1
            self.events["incubating before acting"] += any(i < j for i in incubating for j in acting)
            self.events["acting before incubating"] += any(j < i for i in incubating for j in acting)
            self.events["part of a seed"] += any(0.0 < float(epoch.alpha[row, i]) < 1.0 for i in acting)
            if int(epoch.fault[row]) >= 0:
                self.events["undone"] += 1
                continue  # its seeds are gone
            layout = env.draws[row].facts["layout"]
            for place, life in ((incubating, "incubating"), (acting, "acting")):
                for i in place:
                    if int(slots.blueprint[row, i]) >= 0:  # else it has left at the end of the epoch
                        seed = names[int(slots.blueprint[row, i])], BLENDS[int(slots.blend[row, i])]
                        self.seeds.add((str(layout), *seed, life))

    def add(self, other: Coverage) -> None:
        self.seeds |= other.seeds
        self.events += other.events
        self.kinds |= other.kinds


# -- what is compared -------------------------------------------------------------------------------------------------


def columns_of(found: object, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of nested dataclasses, by name."""
    assert is_dataclass(found)
    for one in fields(found):
        value = getattr(found, one.name)
        if isinstance(value, Tensor):
            yield prefix + one.name, value.cpu()
        elif is_dataclass(value):
            yield from columns_of(value, f"{prefix}{one.name}.")


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Absolute; of numbers above 1, relative. NaN equals NaN; from any number it is infinitely far."""
    assert a.shape == b.shape, (a.shape, b.shape)
    same = (a == b) | (a.isnan() & b.isnan())
    size = torch.maximum(a.abs(), b.abs()).clamp(min=1.0).double()
    far = torch.where(same, 0.0, ((a.double() - b.double()).abs() / size).nan_to_num(torch.inf, torch.inf))
    return float(far.max()) if far.numel() else 0.0


@dataclass(slots=True)
class Differences:
    """The largest of each column so far. Whole numbers and flags must be equal at once."""

    worst: dict[str, float] = field(default_factory=dict)

    def compare(self, plain: object, stacked: object, prefix: str, where: str) -> None:
        for (name, a), (_, b) in zip(columns_of(plain, prefix), columns_of(stacked, prefix), strict=True):
            if a.is_floating_point():
                self.worst[name] = max(self.worst.get(name, 0.0), largest_difference(a, b))
            else:
                rows = (a != b).reshape(len(a), -1).any(1).nonzero().flatten().tolist()
                assert not rows, f"{name} differs {where} in rows {rows}"

    def check(self, limit: float, looser: Mapping[str, float] | None = None) -> None:
        """`looser`: limits of columns by the end of their names."""
        looser = looser or {}
        for name, value in self.worst.items():
            allowed = max([limit, *(other for end, other in looser.items() if name.endswith(end))])
            assert value <= allowed, f"{name} differs by {value:.1e}, more than {allowed:.0e}: {self.worst}"


def compare_episodes(
    family: Family,
    ids: Sequence[int],
    *,
    device: str = "cpu",
    rules: Rules | None = None,
    seed: int = 0,
) -> tuple[Differences, Coverage]:
    """Whole episodes in float64, free-running: each environment goes on from its own weights."""
    plain = GrowthEnv(Doubled(family), len(ids), rules=rules)
    stacked = StackedEnv(family, len(ids), rules=rules, dtype=torch.float64, device=device)
    found = Differences()
    shown, other = plain.reset(ids), stacked.reset(ids)
    play = RandomPlay([str(draw.facts["layout"]) for draw in plain.draws], seed)
    coverage = Coverage(kinds=set(plain.kinds))
    assert stacked.kinds == plain.kinds
    while True:
        where = f"after epoch {int(plain.world.epoch.max())}"
        found.compare(shown[0], other[0], "observation.", where)
        found.compare(shown[1], other[1], "masks.", where)
        if plain.over:
            break
        before = plain.world.slots.stage.clone()
        actions = play(shown[1])
        a, b = plain.step(actions), stacked.step(actions)
        coverage.note(plain, before, a)
        found.compare(a.facts, b.facts, "", where)
        assert torch.equal(a.terminated, b.terminated.cpu())
        assert torch.equal(a.acted, b.acted.cpu())
        found.worst["reward"] = max(found.worst.get("reward", 0.0), largest_difference(a.reward, b.reward.cpu()))
        shown, other = (a.observation, a.masks), (b.observation, b.masks)
    assert stacked.over
    accuracy, loss = stacked.engine.evaluate_test()
    tests = plain.evaluate_test()
    for name, own, theirs in (
        ("test accuracy", [test.accuracy for test in tests], accuracy),
        ("test loss", [test.loss for test in tests], loss),
    ):
        found.worst[name] = largest_difference(torch.tensor(own, dtype=torch.float64), theirs.cpu())
    return found, coverage


# -- weights ----------------------------------------------------------------------------------------------------------


def pack(table: Table, row: int, tensors: Mapping[str, Tensor], into: Tensor) -> None:
    """Write the tensors of one network, as its plain module has them, into its row of [N, P]."""
    flat = [tensors[one.name].detach().flatten() for one in table.parameters if one.name in tensors]
    real = table.real[row].to(into.device)
    into[row, : table.width][real] = torch.cat(flat).to(into)


def seed_tensors(tensors: Mapping[str, Tensor], gated: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of a plain seed, by the names of its table: those of the body, and those of its gate."""
    inner = "body.body." if gated else "body."
    body = {name.removeprefix(inner): value for name, value in tensors.items() if name.startswith(inner)}
    gate = {name.removeprefix("body."): value for name, value in tensors.items() if not name.startswith(inner)}
    return body, gate


def scrambled(module: nn.Module, seed: int) -> nn.Module:
    """In float64, with parameters far from their first values: no output layer is zero any more."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return module
