"""The rule-based controllers: only legal acts, reproducible, and the heuristic really keeps and really prunes.

Covers: R149 (growth under control; the baselines that a learned policy must beat)
"""

from __future__ import annotations

import random
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.actions import WAIT, Action, Effect, Op
from esper.engine.eager import EagerEngine, EpochRecord
from esper.engine.learner import Learner, TrainReport
from esper.engine.measure import Evaluation
from esper.engine.optimizer import GrowingOptimizer
from esper.env.situation import Observer, observe
from esper.growth.attach import attach
from esper.lifecycle import Contrast, Rules, Stage
from esper.policy.controller import Controller, decisions_of
from esper.policy.heuristic import Heuristic, HeuristicSettings
from esper.policy.schedule import parse_schedule
from esper.tasks import load_task
from esper.tasks.feed import TensorFeed
from esper.training.catalogue import RULES, make_controller
from small_worlds import BUILT_IN, EAGER, end_epoch, learner_for

HORIZON = 30


def pretend(learner: Learner, action: Action, accuracy: float, worth: float, promise: float) -> EpochRecord:
    """One epoch with measurements of our choice instead of training."""
    effect = learner.apply(action)
    transitions = (*effect.transitions, *learner.begin_epoch())
    lives = [slot.life for slot in learner.model.slots]
    seeded = [slot for slot in learner.model.slots if slot.seed is not None]
    trained = TrainReport(1.0, 1.0, {slot.index: 1.0 for slot in seeded}, {})
    measured = Evaluation(
        1.0,
        accuracy,
        {s.index: Contrast(worth, 0.0) for s in seeded if s.life.alpha > 0.0},
        {s.index: Contrast(promise, 0.0) for s in seeded if s.life.stage is Stage.TRAINING},
    )
    stages, alphas = tuple(life.stage for life in lives), tuple(life.alpha for life in lives)
    epoch = learner.epoch
    transitions += tuple(end_epoch(learner, trained, measured))
    return EpochRecord(epoch, effect, trained, measured, transitions, learner.model.parameter_count, stages, alphas)


def run(
    controller: Controller, learner: Learner, numbers: list[tuple[float, float, float]], seed: int = 0
) -> list[tuple[Action, Effect]]:
    """A whole episode of pretended epochs. Whatever the controller does must be allowed and take effect."""
    controller.reset([seed])
    history: list[EpochRecord] = []
    for accuracy, worth, promise in numbers:
        situation = observe(learner, len(numbers), history)
        (action,) = controller.decide([situation])
        assert situation.allows(action)
        record = pretend(learner, action, accuracy, worth, promise)
        assert record.effect.changed == (action.op is not Op.WAIT), record.effect.message
        assert action.op is Op.WAIT or action.reason, "an act has a reason"
        history.append(record)
    return [(record.effect.action, record.effect) for record in history]


rows = st.lists(
    st.tuples(st.floats(0, 100), st.sampled_from([-9.0, -1.0, 0.2, 4.0]), st.sampled_from([-2.0, 0.0, 3.0])),
    min_size=10,
    max_size=HORIZON,
)


@pytest.mark.parametrize("world", BUILT_IN)
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=2)
@given(rows=rows, seed=st.integers(0, 100))
def test_a_controller_only_does_what_is_allowed(
    name: str, world: str, rows: list[tuple[float, float, float]], seed: int
) -> None:
    host = BUILT_IN[world].grown().host_parameters
    learner = learner_for(BUILT_IN[world], budget=3 * host, max_seeds=1 + seed % 2)
    run(make_controller(name), learner, rows, seed)
    assert learner.model.parameter_count <= 3 * host
    assert len(learner.model.seeds) <= 1 + seed % 2


@pytest.mark.parametrize("answer", [[], None, WAIT, [None], ["wait"], [WAIT, WAIT]])
def test_an_answer_that_is_not_one_action_for_each_network_is_refused_by_name(answer: object) -> None:
    class Mine:
        name = "mine"

        def reset(self, seeds: object) -> None: ...

        def decide(self, situations: object) -> object:
            return answer

    one = observe(learner_for(BUILT_IN["mlp"]), HORIZON, [])
    with pytest.raises(ValueError, match=r"^the controller 'mine' must answer decide\(\) with a list of one Action"):
        decisions_of(Mine(), [one])  # type: ignore[arg-type]


def test_no_growth_grows_nothing() -> None:
    acts = run(make_controller("none"), learner_for(BUILT_IN["mlp"]), [(50.0, 1.0, 1.0)] * 10)
    assert all(action == WAIT for action, _ in acts)


def test_random_play_is_the_same_for_the_same_seed_and_uses_every_operation() -> None:
    def actions(seed: int) -> list[Action]:
        learner = learner_for(BUILT_IN["conv1d"], rules=EAGER)
        return [action for action, _ in run(make_controller("random"), learner, [(50.0, 1.0, 1.0)] * 60, seed)]

    assert actions(1) == actions(1)
    assert actions(1) != actions(2)
    assert {action.op for seed in range(4) for action in actions(seed)} == set(Op)


def test_each_learner_has_a_memory_of_its_own_and_reset_forgets_it() -> None:
    controller = make_controller("random")
    situation = observe(learner_for(BUILT_IN["mlp"]), HORIZON, [])
    controller.reset([5, 5, 6])
    rounds = [controller.decide([situation] * 3) for _ in range(12)]
    assert [r[0] for r in rounds] == [r[1] for r in rounds]
    assert [r[0] for r in rounds] != [r[2] for r in rounds]
    controller.reset([5])
    assert [controller.decide([situation])[0] for _ in range(12)] == [r[0] for r in rounds]
    with pytest.raises(ValueError, match="random was reset for 1 learners, not 2"):
        controller.decide([situation] * 2)


def test_an_observer_of_many_epochs_sees_what_a_new_one_sees_of_the_same_past() -> None:
    controller, rng = make_controller("random"), random.Random(0)
    learner = learner_for(BUILT_IN["conv1d"], rules=EAGER)
    controller.reset([2])
    observer = Observer(learner, 60)
    history: list[EpochRecord] = []
    for _ in range(60):
        seen, anew = observer.observe(history), observe(learner, 60, history)
        assert seen.source is not None
        assert anew.source is not None
        one, other = seen.source[0], anew.source[0]
        for part, same in ((one, other), (one.slots, other.slots)):
            for field in fields(part):
                if isinstance(value := getattr(part, field.name), torch.Tensor):
                    torch.testing.assert_close(value, getattr(same, field.name), rtol=0, atol=0, equal_nan=True)
        (action,) = controller.decide([seen])
        history.append(pretend(learner, action, rng.uniform(20, 90), 3.0, 2.0))
    assert {Op.WAIT, Op.GERMINATE, Op.FOSSILIZE} <= {record.effect.action.op for record in history}


# -- the heuristic ------------------------------------------------------------------------------------------------


def story(numbers: list[tuple[float, float, float]], rules: Rules | None = None, **changes: object) -> list[str]:
    controller = Heuristic(HeuristicSettings(**changes))  # type: ignore[arg-type]
    learner = learner_for(BUILT_IN["conv1d"], rules=rules or Rules())
    return [
        f"{epoch} {action.op.name} {action.slot} {action.blueprint or ''}".strip()
        for epoch, (action, _) in enumerate(run(controller, learner, numbers))
        if action.op is not Op.WAIT
    ]


def test_the_heuristic_keeps_a_seed_that_helps() -> None:
    """Flat accuracy: plants at 3 (two epochs of plateau), 2 epochs incubate, 3 blend, then it holds and is kept."""
    acts = story([(50.0, 2.0, 1.0)] * 14)
    assert acts[0] == "3 GERMINATE 0 conv"
    assert acts[1] == "8 FOSSILIZE 0"


def test_the_heuristic_gives_up_on_a_seed_that_promises_nothing() -> None:
    acts = story([(50.0, 2.0, -1.0)] * 20)
    assert acts[:2] == ["3 GERMINATE 0 conv", "7 PRUNE 0"]  # four epochs of patience
    assert acts[2].split()[1:] == ["GERMINATE", "1", "conv"], "then it tries elsewhere"


def test_the_heuristic_prunes_a_seed_that_holds_and_idles_or_that_harms_while_blending() -> None:
    assert story([(50.0, 0.2, 1.0)] * 16)[:2] == ["3 GERMINATE 0 conv", "12 PRUNE 0"]  # held from 8, four epochs
    assert story([(50.0, -9.0, 1.0)] * 16)[:2] == ["3 GERMINATE 0 conv", "6 PRUNE 0"]  # blending since 5


def test_the_heuristic_does_not_disturb_progress_and_does_not_start_what_it_cannot_finish() -> None:
    assert story([(4.0 * i, 2.0, 1.0) for i in range(14)]) == []
    assert story([(50.0, 2.0, 1.0)] * 9) == []  # fewer than eight epochs remain from the first plateau on


def test_the_heuristic_fossilizes_and_prunes_in_a_real_run() -> None:
    """Real training on the default task; patience is short so that a quick run shows both."""
    task = load_task("mnist1d")
    seen: set[Stage] = set()
    for seed in range(2):
        torch.manual_seed(seed)
        model = attach(task.make_host(), task.slots, task.splits.train.x[:4], rng_seed=seed)
        optimizer = GrowingOptimizer(torch.optim.AdamW(model.host.parameters(), lr=task.learning_rate))
        feed = TensorFeed(task.splits.train, task.splits.val, batch_size=50, updates_per_epoch=10, seed=seed)
        learner = Learner(model, optimizer, feed, task.loss, task.score, seed=seed)
        engine = EagerEngine([learner])
        controller = Heuristic(HeuristicSettings(keep_above=4.0, plateau_gain=10.0, patience=2))
        controller.reset([seed])
        history: list[EpochRecord] = []
        for _ in range(32):
            situation = observe(learner, 32, history)
            (action,) = controller.decide([situation])
            assert situation.allows(action)
            history += engine.step([action])
        seen |= {t.target for record in history for t in record.transitions}
    assert {Stage.FOSSILIZED, Stage.PRUNED, Stage.DORMANT} <= seen


# -- schedules ----------------------------------------------------------------------------------------------------

ENTRY = '[[grow]]\nepoch = 2\nslot = "*"\nblueprint = "norm"\n'


def test_a_schedule_plants_what_it_says_when_it_says_and_keeps_what_passes() -> None:
    text = """
    name = "mine"
    [[grow]]
    epoch = 1
    slot = 1
    blueprint = { conv1d = "conv", dense = "mlp" }
    blend = "gated"
    [[grow]]
    epoch = 3
    slot = "stages.0"
    blueprint = "depthwise"
    """
    controller = parse_schedule(tomllib.loads(text), "test", "unnamed")
    assert controller.name == "mine"
    acts = run(controller, learner_for(BUILT_IN["conv1d"]), [(50.0, 1.0, 1.0)] * 14)
    done = [
        (epoch, a.op.name, a.slot, a.blueprint, a.blend) for epoch, (a, _) in enumerate(acts) if a.op is not Op.WAIT
    ]
    assert done == [
        (1, "GERMINATE", 1, "conv", "gated"),
        (3, "GERMINATE", 0, "depthwise", "linear"),
        (6, "FOSSILIZE", 1, None, None),
        (8, "FOSSILIZE", 0, None, None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "test needs at least one [[grow]] entry"),
        ("grow = 3", "test needs at least one [[grow]] entry"),
        ("grow = [3]", "test, entry 1: "),
        ("grow = ['conv']", "test, entry 1: "),
        ("epochs = 4\n" + ENTRY, "test: unknown key 'epochs'; the keys are grow, name"),
        (ENTRY + "when = 3", "test, entry 1: unknown key 'when'; the keys are blend, blueprint, epoch, slot"),
        (ENTRY.replace("2", "-1"), "test, entry 1: epoch must be a whole number from 0, not -1"),
        (ENTRY.replace("2", "2.5"), "test, entry 1: epoch must be a whole number from 0, not 2.5"),
        (ENTRY.replace("2", "true"), "test, entry 1: epoch must be a whole number from 0, not True"),
        (ENTRY + ENTRY.replace("epoch = 2", ""), "test, entry 2: epoch must be a whole number from 0, not None"),
        (ENTRY.replace('slot = "*"', ""), "test, entry 1: slot must be a path, a pattern or an index, not None"),
        (ENTRY.replace('"*"', "-1"), "test, entry 1: slot must be a path, a pattern or an index, not -1"),
        (ENTRY.replace("norm", "norn"), "test, entry 1: unknown blueprint 'norn'; there are "),
        (ENTRY.replace('"norm"', '["norm"]'), "test, entry 1: unknown blueprint ['norm']; there are "),
        (ENTRY.replace('"norm"', "{}"), "test, entry 1: blueprint names no layout"),
        (ENTRY.replace('"norm"', '{ dense = "conv" }'), "test, entry 1: blueprint 'conv' does not fit a dense slot"),
        (ENTRY.replace('"norm"', '{ cube = "norm" }'), "test, entry 1: unknown layout 'cube'; the layouts are "),
        (ENTRY + 'blend = "cubic"', "test, entry 1: unknown blend 'cubic'; choose one of linear, sigmoid, gated"),
    ],
)
def test_a_bad_schedule_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as refusal:
        parse_schedule(tomllib.loads(text), "test", "unnamed")
    assert "\n" not in str(refusal.value)


def test_a_schedule_is_read_from_a_file_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "early.toml"
    path.write_text(ENTRY)
    assert make_controller(str(path)).name == "early"
    with pytest.raises(ValueError, match="cannot read"):
        make_controller(str(tmp_path / "absent.toml"))
    path.write_text("name = ")
    with pytest.raises(ValueError, match=r"early\.toml is not valid TOML: "):
        make_controller(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot read") as refusal:
        make_controller(str(path))
    assert "\n" not in str(refusal.value)


def test_an_unknown_controller_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"unknown controller 'heuristik': .*did you mean 'heuristic'\?"):
        make_controller("heuristik")
    with pytest.raises(ValueError, match=r"there is no run or policy runs/gone; the controllers that come by name: "):
        make_controller("runs/gone")


@pytest.mark.parametrize("world", BUILT_IN)
def test_the_built_in_schedule_grows_every_slot_of_every_kind_of_host(world: str) -> None:
    learner = learner_for(BUILT_IN[world])
    run(make_controller("schedule"), learner, [(50.0, 1.0, 1.0)] * 16)
    assert [slot.life.stage for slot in learner.model.slots] == [Stage.FOSSILIZED] * len(learner.model.slots)
