"""One learner among many: its own trajectory, honest effects, limits that hold, and legality that means what it says.

Covers: R149, R137 (nothing depends on how many models run side by side)
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from esper.actions import BLENDS, WAIT, Action, Op
from esper.engine.eager import EagerEngine
from esper.engine.learner import Learner, TrainReport, add_shadow_gradients
from esper.engine.measure import Evaluation, gather
from esper.env.situation import Situation, observe
from esper.growth.blueprints import SlotShape, blueprint_names, fitting
from esper.growth.seed import Seed
from esper.lifecycle import Contrast, Rules, Stage
from small_worlds import BUILT_IN, EAGER, PATIENT, WORLDS, end_epoch, germinate, learner_for, plant, run_epoch, same

QUICK = Rules(training_epochs=1, blending_epochs=1, prune_age=1, ramp_out_epochs=1, embargo_epochs=1)


def play(name: str, seed: int) -> list[Action]:
    """A fixed game for one learner, with everything that can be done."""
    blueprints = [b.name for b in fitting(WORLDS[name].grown().slots[0].shape)]
    return [
        WAIT,
        germinate(0, blueprints[seed % len(blueprints)], BLENDS[seed % 3]),
        germinate(1, blueprints[-1], "linear"),
        WAIT,
        Action(Op.PRUNE, 1),
        Action(Op.FOSSILIZE, 0),
        WAIT,
        germinate(1, blueprints[0], "gated"),
    ]


def trajectory(learners: list[Learner], games: list[list[Action]]) -> Iterator[list[float]]:
    engine = EagerEngine(learners, [None] * len(learners))
    for actions in zip(*games, strict=True):
        records = engine.step(actions)
        yield [number for r in records[:1] for number in (r.trained.loss, r.measured.loss, r.trained.host_gradient)]


@pytest.mark.parametrize("name", ["mlp", "conv2d", "gpt", "spectral", "in-place"])
def test_a_learner_goes_its_own_way_whatever_its_neighbours_do(name: str) -> None:
    torch.manual_seed(1)
    alone = learner_for(WORLDS[name], seed=3, rules=EAGER)
    expected = list(trajectory([alone], [play(name, 3)]))
    for neighbours in (["gpt", "conv1d"], ["in-place"], [name, name]):
        torch.manual_seed(len(neighbours))  # the global random state is nobody's
        mine = learner_for(WORLDS[name], seed=3, rules=EAGER)
        others = [learner_for(WORLDS[n], seed=i, rules=EAGER) for i, n in enumerate(neighbours)]
        games = [play(name, 3), *(play(n, i) for i, n in enumerate(neighbours))]
        assert list(trajectory([mine, *others], games)) == expected
        assert same(mine.model.state_dict().values(), alone.model.state_dict().values())
        assert torch.equal(mine.rng_state, alone.rng_state)


def test_another_seed_is_another_run() -> None:
    first, second = (list(trajectory([learner_for(WORLDS["gpt"], seed=s)], [play("gpt", 0)])) for s in (0, 1))
    assert first != second


def test_training_does_not_touch_the_global_random_numbers() -> None:
    learner = learner_for(WORLDS["gpt"])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    run_epoch(learner, germinate(0, "mlp"))
    assert torch.equal(torch.get_rng_state(), before)


def test_effects_of_what_is_impossible_say_why_and_change_nothing() -> None:
    learner = learner_for(WORLDS["mlp"], max_seeds=1)

    def refused(action: Action) -> str:
        before = fingerprint(learner)
        effect = learner.apply(action)
        assert not effect.changed
        assert effect.transitions == ()
        assert effect.action is action
        assert fingerprint(learner) == before
        return effect.message

    assert refused(Action(Op.PRUNE, 0)) == "slot stages.0: a DORMANT slot has nothing to prune"
    assert refused(Action(Op.FOSSILIZE, 0)) == "slot stages.0 is DORMANT: only a HOLDING seed can fossilize"
    assert refused(germinate(0, "conv")) == "blueprint 'conv' does not fit slot stages.0 (dense)"
    assert refused(germinate(0, "nonsense")) == "blueprint 'nonsense' does not fit slot stages.0 (dense)"
    assert learner.apply(germinate(0, "mlp")).changed
    assert refused(germinate(0, "mlp")) == "slot stages.0 is GERMINATED: only an empty slot can germinate"
    assert refused(germinate(1, "mlp")) == "the limit of 1 seeds is reached"
    assert refused(Action(Op.PRUNE, 0)) == "slot stages.0: the seed is 0 epochs old and may be pruned from 3"
    assert refused(WAIT) == "wait"
    with pytest.raises(IndexError, match="there is no slot 2: this model has 2"):
        learner.apply(Action(Op.PRUNE, 2))


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_trainable_parameter_gets_gradient_while_a_seed_blends(name: str, blend: str) -> None:
    for candidate in fitting(BUILT_IN[name].grown().slots[0].shape):
        learner = learner_for(BUILT_IN[name], rules=PATIENT)
        model = learner.model
        plant(model, model.slots[0], candidate.name, Stage.BLENDING, blend)
        learner.optimizer.add(0, model.seed_parameters(model.slots[0]))
        learner.gradients(learner.feed.next_batch(), [])
        silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert silent == [], candidate.name
        dead = [n for n, p in model.seeds["0"].named_parameters() if p.grad is not None and not p.grad.any()]
        if name not in ("mlp", "plain conv2d"):  # a ReLU may be off for all of eight examples there
            assert dead == [], candidate.name


@pytest.mark.parametrize("name", ["wide", "bottleneck", "norm", "attention"])
def test_gradients_of_an_incubating_seed_lie_in_memory_as_its_parameters(name: str) -> None:
    """Fused optimizers on CPUs take that for granted: other orders were added to the wrong weights, without a word."""
    shape = SlotShape("conv2d", 6, (5, 4), channels_last=True)  # in there, maps are in torch's channels-last order
    seed, h = Seed(name, shape), shape.example(3)
    parameters = list(seed.parameters())
    add_shadow_gradients(parameters, seed(h).square().sum())
    assert all(p.grad is not None and p.grad.stride() == p.stride() for p in parameters)


def test_the_report_of_an_epoch_by_hand() -> None:
    """One weight, loss = weight · x, batches all the same: gradient = mean of x, loss = weight · mean of x."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1, bias=False)
            nn.init.constant_(self.layer.weight, 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    class Same:
        updates_per_epoch = 2

        def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.full((4, 1), 3.0), torch.zeros(4)

        def validation(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [self.next_batch()]

    from esper.engine.optimizer import GrowingOptimizer
    from esper.growth.attach import attach

    model = attach(Weight(), ["layer"], torch.zeros(2, 1))
    optimizer = GrowingOptimizer(torch.optim.SGD(model.host.parameters(), lr=0.1))
    learner = Learner(model, optimizer, Same(), lambda o, t: o.mean(), lambda o, t: o.squeeze(1))
    report = gather([learner.train()])[0]
    # Weight 2, then 2 − 0.1·3 = 1.7, then 1.4. Losses 6 and 5.1.
    assert report.loss == pytest.approx(5.55)
    assert report.host_gradient == pytest.approx(3.0)
    assert gather([learner.evaluate()])[0].accuracy == pytest.approx(1.4 * 3)

    learner.apply(germinate(0, "mlp"))
    learner.begin_epoch()
    report = gather([learner.train()])[0]
    seed = learner.model.seed_parameters(learner.model.slots[0])
    squares = sum(float(p.grad.square().sum()) for p in seed if p.grad is not None)
    assert report.seed_gradients == {0: pytest.approx(math.sqrt(squares / sum(p.numel() for p in seed)))}
    assert set(report.shadow_losses) == {0}


# -- legality -----------------------------------------------------------------------------------------------------


def fingerprint(learner: Learner) -> tuple:
    """All that an action can change."""
    groups = tuple((g.get("slot"), tuple(id(p) for p in g["params"])) for g in learner.optimizer.optimizer.param_groups)
    lives = tuple((s.life.stage, s.life.alpha, s.life.seed, s.life.retiring, s.life.dwell) for s in learner.model.slots)
    seeds = tuple((k, id(v)) for k, v in learner.model.seeds.items())
    return groups, lives, seeds, learner.model.lifecycle.born, learner.model.parameter_count, learner.epoch


def all_actions(slots: int) -> list[Action]:
    plants = [germinate(s, b, k) for s in range(slots) for b in (*blueprint_names(), "nonsense") for k in BLENDS]
    return [WAIT, *plants, *(Action(op, s) for op in (Op.PRUNE, Op.FOSSILIZE) for s in range(slots))]


def pretend_epoch(learner: Learner, gradient: float, worth: float) -> None:
    """An epoch without training, with numbers of our choice: legality hangs on measurements only."""
    learner.begin_epoch()
    seeded = [slot for slot in learner.model.slots if slot.seed is not None]
    contrast = Contrast(worth, worth / 10)
    shadows = {s.index: contrast for s in seeded if s.life.stage is Stage.TRAINING}
    contributions = {s.index: contrast for s in seeded if s.life.alpha > 0.0}
    trained = TrainReport(1.0, 1.0, {s.index: gradient for s in seeded}, {})
    end_epoch(learner, trained, Evaluation(1.0, 50.0, contributions, shadows))


def after(game: list[tuple[Action, float, float]], budget: int | None, max_seeds: int | None) -> Learner:
    learner = learner_for(BUILT_IN["mlp"], rules=QUICK, budget=budget, max_seeds=max_seeds)
    for action, gradient, worth in game:
        learner.apply(action)
        pretend_epoch(learner, gradient, worth)
    return learner


numbers = st.sampled_from([0.0, 1.0]), st.sampled_from([-1.0, 0.0, 1.0])


@given(data=st.data(), room=st.none() | st.integers(0, 400), max_seeds=st.none() | st.integers(0, 2))
def test_a_situation_allows_exactly_what_the_learner_then_does(
    data: st.DataObject, room: int | None, max_seeds: int | None
) -> None:
    """After any history: each forbidden action is refused without a trace, each allowed one takes effect."""
    budget = None if room is None else BUILT_IN["mlp"].grown().host_parameters + room
    game: list[tuple[Action, float, float]] = []
    learner = after(game, budget, max_seeds)
    actions = all_actions(2)
    for _ in range(8):
        situation: Situation = observe(learner, 20, [])
        allowed = [action for action in actions if situation.allows(action)]
        for action in actions:
            if action not in allowed:
                before = fingerprint(learner)
                effect = learner.apply(action)
                assert not effect.changed
                assert effect.message
                assert fingerprint(learner) == before
        for op in Op:
            assert [s.index for s in situation.slots_for(op)] == sorted(
                {a.slot for a in allowed if a.op is op and a.slot is not None}
            )
        # Waiting least of all, so that lives get long; plants with a germination now and then.
        choice = data.draw(st.sampled_from(sorted(allowed, key=lambda a: (-a.op, a.slot or 0))))
        effect = learner.apply(choice)
        assert effect.changed == (choice.op is not Op.WAIT)
        gradient, worth = data.draw(st.tuples(*numbers))
        pretend_epoch(learner, gradient, worth)
        game.append((choice, gradient, worth))
        assert budget is None or learner.model.parameter_count <= budget
        assert max_seeds is None or len(learner.model.seeds) <= max_seeds
        assert learner.model.parameter_count == sum(p.numel() for p in learner.model.parameters())
    # Every allowed action of the final situation, each on a learner of its own.
    final = observe(learner, 20, [])
    possible = [a for a in actions if final.allows(a) and (a.blend in (None, "gated"))]
    for action in possible:
        effect = after(game, budget, max_seeds).apply(action)
        assert effect.changed == (action.op is not Op.WAIT), effect.message


def test_a_view_of_an_empty_slot_shows_nothing_of_the_seed_before() -> None:
    learner = learner_for(BUILT_IN["mlp"], rules=QUICK)
    learner.apply(germinate(0, "mlp"))
    for _ in range(4):
        pretend_epoch(learner, 1.0, 2.0)
    learner.apply(Action(Op.PRUNE, 0))
    for _ in range(5):
        pretend_epoch(learner, 1.0, 2.0)
    view = observe(learner, 20, []).slots[0]
    assert view.stage is Stage.DORMANT
    assert (view.blueprint, view.gradient, view.shadow_benefit, view.contribution) == (None, None, None, None)
    assert (view.alpha, view.age, view.dwell, view.staleness, view.parameters) == (0.0, 0, 0, 0, 0)
    learner.apply(germinate(0, "norm"))
    assert observe(learner, 20, []).slots[0].staleness == 0


def test_an_engine_whose_learners_another_one_took_over_says_so() -> None:
    learner = learner_for(BUILT_IN["mlp"])
    first = EagerEngine([learner], [None])
    EagerEngine([learner], [None]).step([WAIT])
    with pytest.raises(RuntimeError, match="another engine has taken this learner over"):
        first.step([WAIT])
