"""A pretended growing network for tests of rewards, and the policies that try to earn without deserving.

The lifecycle is the real one; only training is pretended: the host's accuracy rises on a curve, and a seed adds points
in proportion to its alpha. A policy is a function of a `Situation`, so it can play the real environment too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from esper.actions import WAIT, Action, Effect, Op
from esper.engine.eager import EpochRecord
from esper.engine.learner import TrainReport
from esper.engine.measure import Evaluation
from esper.env.reward import LossScale, RewardConfig, RewardModel, RewardStep
from esper.env.situation import Situation, SlotView
from esper.lifecycle import Contrast, IllegalTransitionError, Rules, SlotLife, Stage, Transition

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


@dataclass
class World:
    """One pretended learner."""

    slots: int = 2
    horizon: int = 25
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    rules: Rules = field(default_factory=Rules)
    host: Callable[[int], float] = host_accuracy
    spoil: Callable[[Evaluation], Evaluation] = lambda measured: measured
    """What becomes of a measurement before anyone sees it: noise, gaps, NaN."""

    def __post_init__(self) -> None:
        self.lives = [SlotLife(f"stage{i}", self.rules) for i in range(self.slots)]
        self.history: list[EpochRecord] = []
        self.born = 0

    # -- one epoch ------------------------------------------------------------------------------------------------

    def step(self, action: Action) -> EpochRecord:
        epoch = len(self.history)
        effect = self._apply(action, epoch)
        begun = [t for life in self.lives for t in life.begin_epoch(epoch)]
        measured = self.spoil(self._measure(epoch))
        parameters, stages = self._parameters, tuple(life.stage for life in self.lives)
        alphas = tuple(life.alpha for life in self.lives)
        ended: list[Transition] = []
        for index, life in enumerate(self.lives):
            shadow, contribution = measured.shadow_benefits.get(index), measured.contributions.get(index)
            life.measure(gradient=1.0, shadow_benefit=shadow, contribution=contribution)
            ended += life.end_epoch(epoch)
        transitions = (*effect.transitions, *begun, *ended)
        trained = TrainReport(measured.loss, 1.0, {}, {})
        record = EpochRecord(epoch, effect, trained, measured, transitions, parameters, stages, alphas)
        self.history.append(record)
        return record

    def _apply(self, action: Action, epoch: int) -> Effect:
        if action.slot is None:
            return Effect(action, False, "wait")
        life = self.lives[action.slot]
        try:
            if action.op is Op.GERMINATE:
                done = [life.germinate(epoch, self.born + 1, str(action.blueprint), str(action.blend), "")]
                self.born += 1
            elif action.op is Op.PRUNE:
                done = life.prune(epoch, "")
            else:
                done = [life.fossilize(epoch, "")]
        except IllegalTransitionError as error:
            return Effect(action, False, str(error))
        return Effect(action, True, "", tuple(done))

    # -- what training is pretended to do ---------------------------------------------------------------------------

    def _measure(self, epoch: int) -> Evaluation:
        accuracy = self.host(epoch) + sum(self._gain(i) for i in range(self.slots))
        left_out = {i: self._without(i) for i, life in enumerate(self.lives) if life.alpha > 0.0 and self._unkept(i)}
        shadows = {i: self._kind(i).gain for i, life in enumerate(self.lives) if life.stage is Stage.TRAINING}
        return Evaluation(
            as_loss(100.0 - accuracy),
            accuracy,
            {i: Contrast(points, as_loss(points)) for i, points in left_out.items()},
            {i: Contrast(points, as_loss(points)) for i, points in shadows.items()},
        )

    def _kind(self, index: int) -> Kind:
        return self.kinds[str(self.lives[index].blueprint)]

    def _gain(self, index: int) -> float:
        life = self.lives[index]
        return life.alpha * self._kind(index).gain if life.alpha else 0.0

    def _without(self, index: int) -> float:
        """What leaving the seed out costs: what it gives, and what the host forgot to do by itself."""
        return self._gain(index) + self.lives[index].alpha * self._kind(index).dependence

    def _unkept(self, index: int) -> bool:
        return self.lives[index].stage is not Stage.FOSSILIZED

    # -- what a policy sees -----------------------------------------------------------------------------------------

    @property
    def _parameters(self) -> int:
        return HOST + sum(self._size(life) for life in self.lives)

    def _size(self, life: SlotLife) -> int:
        planted = life.stage not in (Stage.DORMANT, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
        return self.kinds[str(life.blueprint)].parameters if planted else 0

    def situation(self) -> Situation:
        views = tuple(self._view(i, life) for i, life in enumerate(self.lives))
        return Situation(
            len(self.history), self.horizon, tuple(self.history), self._parameters, HOST, None, None, views
        )

    def _view(self, index: int, life: SlotLife) -> SlotView:
        return SlotView(
            index=index,
            path=life.name,
            layout="conv1d",
            channels=8,
            position=index / max(1, self.slots - 1),
            stage=life.stage,
            blueprint=life.blueprint,
            blend=life.blend,
            alpha=life.alpha,
            age=life.age,
            dwell=life.dwell,
            retiring=life.retiring,
            seeds_before=sum(t.target is Stage.PRUNED for t in life.history),
            parameters=self._size(life),
            gradient=life.gradient,
            shadow_benefit=life.shadow_benefit,
            contribution=life.contribution,
            staleness=life.age - life.measured_age,
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
    """One step of a story: what `RewardModel.step` is told."""

    before: Situation
    record: EpochRecord
    after: Situation
    terminal: bool


def play(policy: Policy, world: World | None = None) -> list[Step]:
    world = world or World()
    steps: list[Step] = []
    while len(steps) < world.horizon:
        before = world.situation()
        record = world.step(policy(before))
        steps.append(Step(before, record, world.situation(), terminal=len(steps) + 1 == world.horizon))
    return steps


def rewards(config: RewardConfig, steps: list[Step]) -> list[RewardStep]:
    model = RewardModel(config)
    model.reset(HOST, LossScale.for_classes(CLASSES))
    return [model.step(s.before, s.record, s.after, terminal=s.terminal) for s in steps]


def discounted(values: list[float], discount: float) -> float:
    return math.fsum(value * discount**t for t, value in enumerate(values))


def episode_return(config: RewardConfig, policy: Policy, world: World | None = None, discount: float = 1.0) -> float:
    return discounted([step.total for step in rewards(config, play(policy, world))], discount)


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
