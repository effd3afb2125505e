"""A pretended growing network for tests of rewards, and the policies that try to earn without deserving.

The lifecycle is the real one; only training is pretended: the host's accuracy rises on a curve, and a seed adds points
in proportion to its alpha. A policy is a function of a `Situation`, so it can play the real environment too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from esper.actions import BLENDS, WAIT, Action, Effect, Op
from esper.engine.eager import EpochRecord
from esper.engine.learner import TrainReport
from esper.engine.measure import Evaluation
from esper.env.epoch_records import epoch_columns
from esper.env.reward import TERMS, Reward, RewardConfig
from esper.env.reward.reward import shaping_share
from esper.env.reward.suspicion import SUSPICION_KINDS as KINDS_OF_SUSPICIONS
from esper.env.situation import Situation, SlotView
from esper.env.world import World
from esper.growth.blueprints import SlotShape
from esper.lifecycle import Contrast, IllegalTransitionError, Rules, Stage
from esper.slot_views import SlotLife, Slots

Policy = Callable[[Situation], Action]
HOST = 1000
CLASSES = 10


@dataclass(frozen=True)
class Kind:
    """What seeds of a blueprint do once they act at full strength."""

    parameters: int
    gain: float
    """Accuracy points."""
    dependence: float = 0.0
    """Points that the host would lose besides, because it came to rely on the seed."""


KINDS: Mapping[str, Kind] = {
    "useful": Kind(parameters=300, gain=12.0, dependence=3.0),
    "dud": Kind(parameters=300, gain=0.3),
    "huge": Kind(parameters=4000, gain=14.0, dependence=3.0),
    "ransom": Kind(parameters=100, gain=-4.0, dependence=9.0),
}


def host_accuracy(epoch: int) -> float:
    """10 % at the start, towards 60 %."""
    return 10.0 + 50.0 * (1.0 - math.exp(-(epoch + 1) / 4.0))


class Network:
    """What `World.of_models` asks of a model."""

    budget = max_seeds = None

    def __init__(self, slots: int) -> None:
        self.host_parameters = HOST
        self.slots = [SimpleNamespace(shape=SlotShape("conv1d", 8), path=f"stage{i}") for i in range(slots)]

    def costs(self, slot: object) -> dict[str, int]:
        return {}


@dataclass
class Pretended:
    """One pretended learner."""

    slots: int = 2
    horizon: int = 25
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    rules: Rules = field(default_factory=Rules)
    host: Callable[[int], float] = host_accuracy
    spoil: Callable[[Evaluation], Evaluation] = lambda measured: measured
    """What becomes of a measurement before anyone sees it: noise, gaps, NaN."""

    def __post_init__(self) -> None:
        self.lifecycle = Slots([f"stage{i}" for i in range(self.slots)], self.rules)
        self.world = World.of_models([Network(self.slots)], self.lifecycle.columns, [self.horizon])  # type: ignore[list-item]
        self.history: list[EpochRecord] = []

    # -- one epoch ------------------------------------------------------------------------------------------------

    def step(self, action: Action) -> EpochRecord:
        epoch, slots = len(self.history), self.lifecycle
        effect = self._apply(action, epoch)
        begun = slots.begin_epoch(epoch)
        measured = self.spoil(self._measure(epoch))
        parameters, stages, alphas = int(self.world.parameters), tuple(slots.stages), tuple(slots.alphas)
        slots.measure(dict.fromkeys(range(self.slots), 1.0), measured.shadow_benefits, measured.contributions)
        transitions = (*effect.transitions, *begun, *slots.end_epoch(epoch))
        trained = TrainReport(measured.loss, 1.0, {}, {})
        record = EpochRecord(epoch, effect, trained, measured, transitions, parameters, stages, alphas)
        self.history.append(record)
        self.world.record(epoch_columns([record], self.world.slots))
        return record

    def _apply(self, action: Action, epoch: int) -> Effect:
        if action.slot is None:
            return Effect(action, False, "wait")
        try:
            if action.op is Op.GERMINATE:
                kind, size = list(self.kinds).index(str(action.blueprint)), self.kinds[str(action.blueprint)].parameters
                blend = BLENDS.index(str(action.blend))
                done = self.lifecycle.germinate(action.slot, kind, blend, size, epoch=epoch)
            elif action.op is Op.PRUNE:
                done = self.lifecycle.prune(action.slot, epoch=epoch)
            else:
                done = self.lifecycle.fossilize(action.slot, epoch=epoch)
        except IllegalTransitionError as error:
            return Effect(action, False, str(error))
        return Effect(action, True, "", tuple(done))

    # -- what training is pretended to do ---------------------------------------------------------------------------

    def _measure(self, epoch: int) -> Evaluation:
        alphas, stages = self.lifecycle.alphas, self.lifecycle.stages
        accuracy = self.host(epoch) + sum(self._gain(i) for i in range(self.slots))
        acting = [i for i in range(self.slots) if alphas[i] > 0.0 and stages[i] is not Stage.FOSSILIZED]
        left_out = {i: self._gain(i) + alphas[i] * self._kind(i).dependence for i in acting}
        shadows = {i: self._kind(i).gain for i in range(self.slots) if stages[i] is Stage.TRAINING}
        return Evaluation(
            as_loss(100.0 - accuracy),
            accuracy,
            {i: Contrast(points, as_loss(points)) for i, points in left_out.items()},
            {i: Contrast(points, as_loss(points)) for i, points in shadows.items()},
        )

    def _kind(self, index: int) -> Kind:
        return list(self.kinds.values())[int(self.lifecycle.columns.blueprint[0, index])]

    def _gain(self, index: int) -> float:
        """What leaving the seed out costs besides: what the host forgot to do by itself."""
        alpha = self.lifecycle.alphas[index]
        return alpha * self._kind(index).gain if alpha else 0.0

    # -- what a policy sees -----------------------------------------------------------------------------------------

    def situation(self) -> Situation:
        views = tuple(self._view(i, life) for i, life in enumerate(self.lifecycle.lives))
        parameters = int(self.world.parameters)
        return Situation(len(self.history), self.horizon, tuple(self.history), parameters, HOST, None, None, views)

    def _view(self, index: int, life: SlotLife) -> SlotView:
        columns, names = self.lifecycle.columns, list(self.kinds)
        blueprint = int(columns.blueprint[0, index])
        return SlotView(
            index=index,
            path=life.name,
            layout="conv1d",
            channels=8,
            position=index / max(1, self.slots - 1),
            stage=life.stage,
            blueprint=None if blueprint < 0 else names[blueprint],
            blend=None,
            alpha=life.alpha,
            age=life.age,
            dwell=life.dwell,
            retiring=life.retiring,
            seeds_before=int(columns.pruned[0, index]),
            parameters=int(columns.size[0, index]),
            gradient=life.gradient,
            shadow_benefit=life.shadow_benefit,
            contribution=life.contribution,
            staleness=life.age - int(columns.measured_age[0, index]),
            costs={name: kind.parameters for name, kind in self.kinds.items()},
            growable=frozenset(self.kinds) if life.stage is Stage.DORMANT else frozenset(),
            prunable=life.prunable,
            fossilizable=life.fossilizable,
        )


def as_loss(points: float) -> float:
    """A loss that says the same as the points, so that both families judge the same story."""
    return math.log(CLASSES) * points / 100.0


# -- playing and paying ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of a story: what `Reward.step` reads, and views of before and after."""

    start: World
    record: EpochRecord
    end: World
    terminal: bool
    before: Situation
    after: Situation


def play(policy: Policy, world: Pretended | None = None) -> list[Step]:
    world = world or Pretended()
    steps: list[Step] = []
    while len(steps) < world.horizon:
        before, start = world.situation(), world.world.snapshot()
        record = world.step(policy(before))
        last = len(steps) + 1 == world.horizon
        steps.append(Step(start, record, world.world.snapshot(), last, before, world.situation()))
    return steps


@dataclass(frozen=True)
class Paid:
    """The reward of one step."""

    terms: dict[str, float]
    events: tuple[tuple[str, int, int], ...]
    """Kind, slot and seed of each suspicion that begins."""
    potential: float
    score: float | None
    shaping_share: float

    @property
    def total(self) -> float:
        return sum(self.terms.values())


def pay(model: Reward, step: Step, *, terminal: bool | None = None) -> Paid:
    end = torch.tensor([step.terminal if terminal is None else terminal])
    found = model.step(step.start, step.end, epoch_columns([step.record], step.end.slots), end)
    seeds = step.end.slots.seed[0].tolist()
    events = tuple(
        (KINDS_OF_SUSPICIONS[kind], slot, seeds[slot]) for slot, kind in found.suspicions[0].nonzero().tolist()
    )
    score = float(found.score[0])
    return Paid(
        dict(zip(TERMS, found.terms[0].tolist(), strict=True)),
        events,
        float(found.potential[0]),
        None if math.isnan(score) else score,
        float(shaping_share(found.terms)[0]),
    )


def reward_of(config: RewardConfig, step: Step) -> Reward:
    """For the episode that begins with this step."""
    return Reward(config, step.start, [CLASSES])


def rewards(config: RewardConfig, steps: list[Step]) -> list[Paid]:
    model = reward_of(config, steps[0])
    return [pay(model, step) for step in steps]


def discounted(values: list[float], gamma: float) -> float:
    return math.fsum(value * gamma**t for t, value in enumerate(values))


def episode_return(config: RewardConfig, policy: Policy, world: Pretended | None = None, gamma: float = 1.0) -> float:
    return discounted([step.total for step in rewards(config, play(policy, world))], gamma)


# -- policies ----------------------------------------------------------------------------------------------------------


def plant(blueprint: str, slot: int = 0) -> Action:
    return Action(Op.GERMINATE, slot, blueprint, "linear")


def sensible(blueprint: str, slot: int = 0, *, first_epoch: int = 2, watch: int = 2) -> Policy:
    """Let the host start, plant one seed, watch it at full strength, keep it if it pays its rent, else remove it."""

    def decide(s: Situation) -> Action:
        view = s.slots[slot]
        if view.growable and s.epoch >= first_epoch and not view.seeds_before:
            return plant(blueprint, slot)
        if view.stage is not Stage.HOLDING or view.dwell < watch or view.contribution is None:
            return WAIT
        seed_rent = 5.0 * view.parameters / s.host_parameters
        if view.fossilizable and view.contribution.accuracy > seed_rent:
            return Action(Op.FOSSILIZE, slot)
        return Action(Op.PRUNE, slot) if view.prunable else WAIT

    return decide


def wait_for_ever(s: Situation) -> Action:
    return WAIT


def germinate_at_once_and_wait(blueprint: str, slot: int = 0) -> Policy:
    """Live on the seed without ever answering for it."""
    return lambda s: plant(blueprint, slot) if s.slots[slot].growable and s.epoch == 0 else WAIT


def grow_and_prune(blueprint: str, slot: int = 0) -> Policy:
    """Plant, remove as soon as it is allowed, plant again."""

    def decide(s: Situation) -> Action:
        view = s.slots[slot]
        if view.growable:
            return plant(blueprint, slot)
        return Action(Op.PRUNE, slot) if view.prunable else WAIT

    return decide


def grow_everything(blueprint: str) -> Policy:
    """Fill every slot and keep everything."""

    def decide(s: Situation) -> Action:
        for view in s.slots:
            if blueprint in view.growable:
                return plant(blueprint, view.index)
            if view.fossilizable:
                return Action(Op.FOSSILIZE, view.index)
        return WAIT

    return decide


def fossilize_at_the_first_legal_moment(blueprint: str, slot: int = 0) -> Policy:
    """Plant whatever it is and keep it the moment that the gate opens."""

    def decide(s: Situation) -> Action:
        view = s.slots[slot]
        if view.growable:
            return plant(blueprint, slot)
        return Action(Op.FOSSILIZE, slot) if view.fossilizable else WAIT

    return decide


def scripted(actions: Mapping[int, Action]) -> Policy:
    """The given actions in the given epochs, and waiting in between."""
    return lambda s: actions.get(s.epoch, WAIT)
