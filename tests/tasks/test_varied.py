"""`varied`: every sort of data in turn, hosts of every build, other data to judge by than to train on.

Covers: R149 (hosts for seeds to grow in)
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.actions import WAIT, Action, Op
from esper.engine.eager import EagerEngine
from esper.engine.prepare import task_learner
from esper.growth.attach import attach
from esper.lifecycle import Stage
from esper.tasks.family import get_family
from esper.tasks.registry import load_task
from esper.tasks.varied import SORTS
from esper.tasks.varied_data import (
    CLASSES,
    CURVE_SETS,
    FIRST_CURVES,
    PIECES,
    TEST,
    TRAIN,
    VAL,
    bands,
    clusters,
    in_pieces,
    mnist1d_curves,
    regions,
    signs,
    waves,
    write_language,
)

DRAWS = range(8 * len(SORTS))


@pytest.fixture(scope="module")
def drawn():
    family = get_family("varied")
    return {held_out: [family.draw(number, held_out=held_out) for number in DRAWS] for held_out in (False, True)}


def test_the_sorts_take_turns():
    family = get_family("varied")
    assert family.round == len(SORTS)
    assert [family.draw(number).facts["kind"] for number in range(2 * family.round)] == [*SORTS, *SORTS]


def test_a_sort_can_be_had_alone():
    family = get_family("varied/vector")
    assert {family.draw(number).facts["kind"] for number in range(5)} == {"vector"}
    with pytest.raises(ValueError, match="try varied/series, varied/sequence"):
        get_family("varied/vectors")


def test_data_to_judge_by_are_others_than_those_to_train_on(drawn):
    firsts = {held_out: {_first(draw.task.splits.train.x) for draw in drawn[held_out]} for held_out in (False, True)}
    assert not firsts[False] & firsts[True]
    rng = np.random.default_rng
    sets = {
        held_out: {_first(mnist1d_curves(rng(seed), held_out).train.x) for seed in range(40)}
        for held_out in (False, True)
    }
    assert [len(found) for found in sets.values()] == [CURVE_SETS, CURVE_SETS]
    assert not sets[False] & sets[True]
    assert sets[False] == {
        _first(load_task("mnist1d", seed=FIRST_CURVES + i).splits.train.x) for i in range(CURVE_SETS)
    }


def _first(x):
    return tuple(x[0].flatten().tolist())


def test_hosts_and_data_differ_from_draw_to_draw(drawn):
    for sort in SORTS:
        found = [draw for draw in drawn[False] if draw.facts["kind"] == sort]
        described = ("number", "kind", "layout", "data")
        hosts = {tuple((k, v) for k, v in draw.facts.items() if k not in described) for draw in found}
        assert len(hosts) > len(found) // 2
        assert len({(draw.task.updates_per_epoch, draw.task.learning_rate) for draw in found}) > 3 or sort == "text"
    sources = {draw.facts["data"] for draws in drawn.values() for draw in draws}
    assert sources == {"curves", "waves", "signs", "clusters", "regions", "bands", "language"}


@pytest.mark.parametrize("make", [waves, signs, clusters, regions, bands])
def test_every_data_set_has_all_classes_in_three_parts_and_can_be_made_again(make):
    for seed in range(4):
        splits, again = make(np.random.default_rng(seed)), make(np.random.default_rng(seed))
        assert TRAIN[0] <= len(splits.train.y) < TRAIN[1]
        assert (len(splits.val.y), len(splits.test.y)) == (VAL, TEST)
        for part, same in zip(
            (splits.train, splits.val, splits.test), (again.train, again.val, again.test), strict=True
        ):
            assert part.x.dtype == torch.float32
            assert torch.isfinite(part.x).all()
            assert torch.equal(part.x, same.x)
            assert len(torch.unique(part.y)) == CLASSES
        assert not torch.equal(splits.val.x[:100], splits.test.x[:100])


@pytest.mark.parametrize("make", [waves, signs, clusters, regions, bands])
def test_data_can_be_learnt_and_some_are_harder_than_others(make):
    """A linear map of the inputs and their squares knows more than chance, and not always the same."""
    found = []
    for seed in range(10):
        splits = make(np.random.default_rng(seed))
        x, y = splits.train.x.flatten(1), splits.train.y
        features = torch.cat([x, x**2, torch.ones(len(x), 1)], 1)
        target = torch.nn.functional.one_hot(y, CLASSES).float()
        weights = torch.linalg.solve(features.T @ features + 10 * torch.eye(features.shape[1]), features.T @ target)
        test = splits.test.x.flatten(1)
        said = (torch.cat([test, test**2, torch.ones(len(test), 1)], 1) @ weights).argmax(1)
        found.append(float((said == splits.test.y).float().mean()))
    assert max(found) > 0.3
    assert max(found) - min(found) > 0.1


def test_there_is_room_to_grow_or_little_and_hosts_of_every_depth(drawn):
    everything = [*drawn[False], *drawn[True]]
    unlimited = sum(draw.budget is None for draw in everything) / len(everything)
    assert 0.2 < unlimited < 0.6
    assert {draw.max_seeds for draw in everything} == {1, 2, 3}
    others = {len(draw.task.slots) for draw in everything if draw.facts["kind"] not in ("text", "vector")}
    assert others == {2, 3, 4}
    assert {len(get_family("varied/vector").draw(number).task.slots) for number in range(60)} == set(range(2, 9))
    assert {len(draw.task.slots) for draw in everything if draw.facts["kind"] == "text"} == {1, 2, 3}
    for draw in everything:
        size = sum(parameter.numel() for parameter in draw.task.make_host().parameters())
        assert 100 <= size <= 20_000
        assert draw.budget is None or 1.29 * size <= draw.budget <= 5 * size


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("held_out", [False, True])
def test_every_sort_builds_a_host_that_trains_and_grows_a_seed(sort, held_out, drawn):
    draw = next(d for d in drawn[held_out] if d.facts["kind"] == sort)
    task = replace(draw.task, updates_per_epoch=1)
    learner = task_learner(task, draw.seed, draw.horizon, budget=None, max_seeds=draw.max_seeds)
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    engine = EagerEngine([learner])
    slot = learner.model.slots[-1]
    blueprint = sorted(learner.model.growable(slot))[0]
    (planted,) = engine.step([Action(Op.GERMINATE, slot.index, blueprint, "linear")])
    (trained,) = engine.step([WAIT])
    assert planted.effect.changed
    assert slot.seed is not None
    assert slot.seed.blueprint == blueprint
    assert slot.life.stage in (Stage.TRAINING, Stage.BLENDING)
    for record in (planted, trained):
        assert record.verdict is None
        assert 0.0 < record.trained.loss < 10.0
    after = learner.model.state_dict()
    assert any(not torch.equal(value, after[name]) for name, value in before.items() if value.is_floating_point())


@pytest.mark.parametrize("sort", SORTS)
def test_every_slot_of_a_host_can_be_attached_to(sort, drawn):
    for draw in drawn[False]:
        if draw.facts["kind"] == sort:
            model = attach(draw.task.make_host(), draw.task.slots, draw.task.splits.train.x[:2])
            assert [slot.path for slot in model.slots] == list(draw.task.slots)  # in the order of the forward pass
            assert all(model.growable(slot) for slot in model.slots)


def test_pieces_are_in_order_and_each_knows_its_place():
    series = torch.arange(40.0).reshape(1, 1, 40)
    pieces = in_pieces(series.repeat(2, 1, 1))
    assert pieces.shape == (2, PIECES, 5)
    assert pieces[1, :, :-1].flatten().tolist() == list(range(40))
    assert pieces[0, 0, -1] == -1.0
    assert pieces[0, -1, -1] == 1.0


def test_a_language_is_stable_and_its_lines_keep_to_their_words():
    state = random.getstate()
    text = write_language(400, 3)
    assert random.getstate() == state
    assert text == write_language(400, 3) != write_language(400, 4)
    lines = [line.split() for line in text.splitlines()]
    assert len(lines) == 400
    assert all(6 <= len(line) <= 10 for line in lines)
    assert all(len(set(line[::2])) <= 4 for line in lines)  # every other word is what the line is about
    assert len({word for line in lines for word in line}) >= 20
