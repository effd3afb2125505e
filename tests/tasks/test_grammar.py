"""The family `grammar`: the same problem alone and in a batch, no number or kind shared with what is held out, and
hosts that play."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from esper.actions import Action, Op
from esper.engine.eager import EagerEngine
from esper.engine.prepare import task_learner
from esper.env.growth_env import GrowthEnv
from esper.growth.blueprints import fitting
from esper.growth.model import GrowingModel
from esper.growth.seed import Seed
from esper.policy.controller import RandomLegal
from esper.tasks.counted_init import CountedInit, DrawNumbers, scaled_uniform
from esper.tasks.family import Draw, get_family
from esper.tasks.grammar_data import FIRST_TRAINED, make_data, orthogonal_directions
from esper.tasks.grammar_forms import CLASSES, DATA_NAMES, FORMS, LAYOUTS, SIZES
from esper.tasks.grammar_kinds import EXPRESSIONS, STRUCTURES, UNSEEN, ClassRule, Code, Expression, Structure
from esper.tasks.grammar_relations import classes_of, ranks
from esper.tasks.grammar_settings import EXAMPLES, FEATURES, HORIZON, WIDTHS, Settings
from esper.tasks.problems import Problems

MANY = range(2_000)
SPLITS = ("train", "val", "test")


@pytest.fixture(scope="module")
def settings() -> Settings:
    return get_family("grammar").settings(MANY, held_out=False)


@pytest.fixture(scope="module")
def batch() -> list[Problems]:
    return [problems for _, problems in get_family("grammar").problems(range(48))]


def found(problems: list[Problems], draw_id: int) -> tuple[Problems, int]:
    (one,) = (p for p in problems if draw_id in p.draw)
    return one, p_index(one, draw_id)


def p_index(problems: Problems, draw_id: int) -> int:
    return problems.draw.tolist().index(draw_id)


# -- one problem, however it is made -----------------------------------------------------------------------------------


def test_a_draw_is_the_problem_of_the_batch(batch):
    family = get_family("grammar")
    for draw_id in range(24):
        problems, row = found(batch, draw_id)
        draw, features = family.draw(draw_id), int(problems.features[row])
        for name in SPLITS:
            split = getattr(draw.task.splits, name)
            x = getattr(problems, f"{name}_x")[row, : len(split), ..., :features]
            x = x.movedim(-1, 1) if problems.form.layout.startswith("conv") else x
            torch.testing.assert_close(x, split.x, rtol=1e-4, atol=1e-5)
            assert torch.equal(getattr(problems, f"{name}_y")[row, : len(split)], split.y)
        assert len(draw.task.splits.train) == problems.examples[row]
        assert draw.horizon == problems.horizon[row]
        assert float("inf" if draw.budget is None else draw.budget) == problems.budget[row]
        assert float("inf" if draw.max_seeds is None else draw.max_seeds) == problems.max_seeds[row]
        assert draw.task.learning_rate == problems.learning_rate[row]
        assert draw.task.weight_decay == problems.weight_decay[row]
        assert draw.facts == {"number": draw_id, **problems.facts[row]}


def test_a_batch_does_not_depend_on_its_company_and_is_padded_with_zeros(batch):
    fewer = [problems for _, problems in get_family("grammar").problems([40, 3, 17])]
    for draw_id in (40, 3, 17):
        (a, i), (b, j) = found(batch, draw_id), found(fewer, draw_id)
        count, features = int(a.examples[i]), int(a.features[i])
        torch.testing.assert_close(
            a.train_x[i, :count, ..., :features], b.train_x[j, :count, ..., :features], rtol=1e-4, atol=1e-5
        )
        assert torch.equal(a.train_y[i, :count], b.train_y[j, :count])
    for problems in batch:
        form, n = problems.form, len(problems)
        assert problems.train_x.shape[:-1] == (n, int(problems.examples.max()), *SIZES[form.layout])
        assert problems.train_x.shape[-1] == problems.val_x.shape[-1] == int(problems.features.max())
        for row in range(n):
            count, features = int(problems.examples[row]), int(problems.features[row])
            assert not bool(problems.train_x[row, count:].any())
            assert not bool(problems.val_x[row, ..., features:].any())
            assert bool(problems.train_x[row, :count, ..., :features].flatten(0, -2).any(0).all())


def test_hosts_have_the_counted_weights_and_the_parameters_that_the_columns_say(batch):
    for problems in batch:
        draw = get_family("grammar").draw(int(problems.draw[0]))
        host = draw.task.make_host()
        weights = [p for p in host.parameters() if p.dim() > 1]
        size = sum(parameter.numel() for parameter in host.parameters())
        assert size == draw.facts["host_parameters"] == draw.task.host_parameters
        drawn = problems.host_uniforms(torch.tensor([0]), size)[0]
        first = weights[0]
        bound = first[0].numel() ** -0.5
        assert torch.equal(first.flatten(), scaled_uniform(drawn[: first.numel()], -bound, bound))
        assert torch.equal(host.head.bias, draw.task.make_host().head.bias)  # whatever torch's generator has done


def test_minibatches_and_seeds_are_those_of_the_batch(batch):
    for draw_id in (0, 1, 2, 3):
        problems, row = found(batch, draw_id)
        draw = get_family("grammar").draw(draw_id)
        learner = task_learner(draw.task, draw.seed, draw.horizon)
        updates = draw.task.updates_per_epoch
        for epoch in range(2):
            planned = problems.minibatches(torch.tensor([row]), epoch)
            one_by_one = torch.cat([learner.feed.plan(1) for _ in range(updates)])
            assert planned.shape == (updates, 1, problems.form.batch_size)
            assert torch.equal(one_by_one[..., 0], planned[:, 0])
            assert int(planned.max()) < int(problems.examples[row])
        for number, slot in enumerate(learner.model.slots[:2], start=1):
            name = fitting(slot.shape)[-1].name
            learner.model.germinate(slot, name, "gated", epoch=0)
            drawn = problems.seed_uniforms(torch.tensor([row]), torch.tensor([number]), 20_000)[0]
            expected = _filled(name, slot.shape, drawn)
            for a, b in zip(slot.seed.state_dict().values(), expected.state_dict().values(), strict=True):
                assert torch.equal(a, b)


def _filled(name, shape, drawn):
    with CountedInit(lambda first, count: drawn[first : first + count]):
        return Seed(name, shape, "gated")


def test_minibatches_of_rows_with_fewer_updates_are_their_own(batch):
    problems = max(batch, key=len)
    rows = torch.arange(len(problems))
    together = problems.minibatches(rows, 3)
    for row in rows.tolist():
        alone = problems.minibatches(rows[row : row + 1], 3)
        assert torch.equal(together[: len(alone), row : row + 1], alone)


# -- training draws, held-out draws, held-out kinds --------------------------------------------------------------------


def test_training_and_held_out_draws_share_no_key_and_no_example():
    keys, inputs = [], []
    for name in ("grammar", "grammar-unseen"):
        family = get_family(name)
        for held_out in (False, True):
            keys.append(family.settings(range(5_000), held_out).keys)
            drawn = [family.draw(number, held_out=held_out) for number in range(4)]
            inputs.append({row.numpy().tobytes() for d in drawn for row in d.task.splits.train.x})
            assert {d.seed % 2 for d in drawn} == {int(held_out)}
    assert torch.cat(keys).unique().numel() == 20_000
    assert len(set.union(*inputs)) == sum(len(part) for part in inputs)


def test_training_draws_never_have_a_held_out_kind(settings):
    unseen = {repr(kind) for kinds in UNSEEN.values() for kind in kinds}
    assert sum(len(kinds) for kinds in UNSEEN.values()) >= 6
    assert not unseen & {repr(kind) for kind in (*STRUCTURES, *EXPRESSIONS)}
    held_out = get_family("grammar").settings(MANY, held_out=True)
    for drawn in (settings, held_out):
        assert set(drawn.structure.tolist()) == {int(Structure.VECTOR), *map(int, STRUCTURES)}
        assert set(drawn.first.tolist()) == set(drawn.second.tolist()) == set(map(int, EXPRESSIONS))


@pytest.mark.parametrize("part", DATA_NAMES)
def test_unseen_draws_have_nothing_else(part):
    layout = LAYOUTS[DATA_NAMES.index(part)]
    drawn = get_family(f"grammar-unseen/{part}").settings(range(100), held_out=False)
    kinds = drawn.first if layout == "dense" else drawn.structure
    assert set(kinds.tolist()) == {int(kind) for kind in UNSEEN[layout]}


def test_a_part_has_the_draws_of_its_layout_in_the_same_order():
    whole, part = get_family("grammar"), get_family("grammar/series")
    assert part.settings([5], False).keys == whole.settings([4 * 5 + 2], False).keys
    assert part.draw(5).task.make_host().config == whole.draw(22).task.make_host().config
    with pytest.raises(ValueError, match="try grammar/vector, grammar/sequence"):
        get_family("grammar/sound")
    with pytest.raises(ValueError, match="numbered from 0"):
        whole.draw(-1)


# -- how broad they are ------------------------------------------------------------------------------------------------


def test_there_are_hundreds_of_compositions_and_hosts_of_every_form():
    family = get_family("grammar")
    facts = [fact for _, problems in family.problems(range(400)) for fact in problems.facts]
    assert len({fact["kind"] for fact in facts}) > 120
    drawn = family.settings(range(20_000), False)
    kinds = torch.stack([drawn.layout, drawn.structure, drawn.code, drawn.rule, drawn.first, drawn.second], 1)
    assert len(kinds.unique(dim=0)) > 1_000
    assert set(drawn.form.tolist()) == set(range(len(FORMS)))
    assert len(FORMS) <= 24


def test_no_width_rate_or_limit_tells_what_a_host_lacks():
    drawn = get_family("grammar").settings(range(20_000), False)
    for layout in range(len(LAYOUTS)):
        rows = (drawn.layout == layout).nonzero()[:, 0]
        part = drawn.rows(rows)
        columns = {
            "width": part.widths[:, 0],
            "rate": part.learning_rate,
            "examples": part.examples,
            "features": part.features,
            "updates": part.updates,
        }
        for lack in range(3):  # a norm is lacking where gains vary, and nothing else
            lacking = part.lacks[:, lack].double()
            if not 0.01 < float(lacking.mean()) < 0.99:
                continue
            for name, column in columns.items():
                together = torch.stack([lacking, column.double()])
                assert abs(float(torch.corrcoef(together)[0, 1])) < 0.06, (layout, lack, name)


def test_settings_keep_to_their_ranges(settings):
    for layout, (widths, features) in enumerate(zip(WIDTHS, FEATURES, strict=True)):
        rows = settings.layout == layout
        wide = settings.widths[rows]
        assert int(wide[wide > 0].min()) == 3
        assert int(wide.max()) == widths[1]
        assert (int(settings.features[rows].min()), int(settings.features[rows].max())) == features
    assert (int(settings.horizon.min()), int(settings.horizon.max())) == HORIZON
    assert set(settings.max_seeds.tolist()) == {1.0, 2.0, 3.0, torch.inf}
    assert 0.2 < float(settings.budget.isinf().double().mean()) < 0.3
    nothing = float((~settings.lacks.any(1)).double().mean())
    several = float((settings.lacks.sum(1) > 1).double().mean())
    assert 0.25 < nothing < 0.5
    assert several > 0.08


def test_the_budget_has_room_for_the_answer():
    for draw_id in range(40):
        draw = get_family("grammar").draw(draw_id)
        if draw.facts["answer"] == "none":
            continue
        model = task_learner(draw.task, draw.seed, draw.horizon, budget=draw.budget, max_seeds=draw.max_seeds).model
        for part in str(draw.facts["answer"]).split("+"):
            name, slot = part.split("@")
            assert not model.why_not_grow(model.slots[int(slot)], name)
            model.germinate(model.slots[int(slot)], name, "gated", epoch=0)


# -- data --------------------------------------------------------------------------------------------------------------


def only(settings: Settings, **columns: float) -> Settings:
    """The same problems with some columns set, and nothing that hides the signal."""
    quiet = {"noise": 1e-3, "gain": 0.0, "offset": 0.0, "loud": 0.0, "easy": 0.0, "wrong": 0.0} | columns
    made = {name: torch.full_like(getattr(settings, name), value) for name, value in quiet.items()}
    return replace(settings, **made)


def of_layout(layout: str, count: int = 4) -> Settings:
    return get_family(f"grammar/{DATA_NAMES[LAYOUTS.index(layout)]}").settings(range(count), False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_classes_are_balanced_and_inputs_are_finite(layout):
    for unseen in (False, True):
        name = f"grammar{'-unseen' if unseen else ''}/{DATA_NAMES[LAYOUTS.index(layout)]}"
        drawn = get_family(name).settings(range(24), False)
        x, y = make_data(drawn, drawn, layout)
        count = FIRST_TRAINED + (EXAMPLES[1] if layout == "dense" else int(drawn.examples.max()))
        assert x.shape == (24, count, *SIZES[layout], FEATURES[LAYOUTS.index(layout)][1])
        assert bool(x.isfinite().all())
        for labels in y:
            shares = labels.bincount(minlength=CLASSES) / count
            assert float((shares - 0.25).abs().max()) < 0.03


def test_wrong_labels_are_as_many_as_the_ceiling_says():
    drawn = of_layout("conv1d", 8)
    clean, noisy = (make_data(one, one, "conv1d")[1] for one in (only(drawn), only(drawn, wrong=0.1)))
    assert float((clean != noisy).double().mean()) == pytest.approx(0.1 * 0.75, abs=0.01)


def test_hints_are_easy_for_anyone_and_only_for_their_share():
    drawn = of_layout("conv1d", 6)
    for share, least, most in ((0.0, 0.2, 0.31), (1.0, 0.95, 1.01)):
        # An order of symbols: a linear map of the mean over positions knows nothing about it.
        hard = only(drawn, structure=Structure.ORDER, code=Code.DIRECTION, easy=share)
        x, y = make_data(hard, hard, "conv1d")
        for inputs, labels in zip(x.mean(2), y, strict=True):
            assert least < linear_accuracy(inputs, labels) < most


def linear_accuracy(x: torch.Tensor, y: torch.Tensor) -> float:
    """Of least squares on the first half, judged on the second."""
    x = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    half, target = len(x) // 2, torch.nn.functional.one_hot(y, CLASSES).double()
    weights = torch.linalg.lstsq(x[:half].T @ x[:half] + 1e-3 * torch.eye(x.shape[1]), x[:half].T @ target[:half])
    return float(((x[half:] @ weights.solution).argmax(1) == y[half:]).double().mean())


@pytest.mark.parametrize(
    ("structure", "code", "kept"),
    [
        # What a linear map of the mean over positions can know: the direction of a symbol …
        (Structure.ALL, Code.DIRECTION, True),
        (Structure.ONE, Code.DIRECTION, True),
        # … and not the order of heights, what a distribution looks like, or how two symbols are related.
        (Structure.ONE, Code.MOTIF, False),
        (Structure.ALL, Code.SHAPE, False),
        (Structure.RELATION, Code.DIRECTION, False),
        (Structure.ORDER, Code.DIRECTION, False),
        (Structure.ORDER, Code.MOTIF, False),
        (Structure.GAP, Code.DIRECTION, False),
        (Structure.WAVES, Code.DIRECTION, False),
    ],
)
@pytest.mark.parametrize("layout", ["sequence", "conv1d", "conv2d"])
def test_the_mean_over_positions_keeps_or_hides_the_class(layout, structure, code, kept):
    drawn = only(of_layout(layout), structure=structure, code=code, distractors=1)
    x, y = make_data(drawn, drawn, layout)
    accuracy = [linear_accuracy(one.flatten(1, -2).mean(1), labels) for one, labels in zip(x, y, strict=True)]
    assert min(accuracy) > 0.9 if kept else max(accuracy) < 0.6


def test_a_relation_of_two_marks_is_what_it_says():
    """Equal or opposite signs (the lower bit) in one of two channels (the higher bit)."""
    drawn = only(of_layout("conv1d"), structure=Structure.RELATION, code=Code.DIRECTION, distractors=0, noise=0.0)
    settings = replace(drawn, features=torch.full_like(drawn.features, 2))
    x, y = make_data(settings, settings, "conv1d")  # [n, count, 32, 4]
    third = 32 // 3
    early, late = x[:, :, :third, :2].sum(2), x[:, :, -third:, :2].sum(2)  # one mark each
    assert torch.allclose(early.norm(dim=2), torch.tensor(2.5), atol=1e-4)
    same = (early * late).sum(2) > 0
    assert torch.equal(same, y % 2 == 0)


def test_classes_are_what_the_rule_says():
    settings = of_layout("dense", 3)
    points = 2 * torch.rand(3, 400, 4, generator=torch.Generator().manual_seed(0)) - 1

    def classes(rule: ClassRule, first: Expression) -> torch.Tensor:
        return classes_of(only(settings, rule=rule, first=first, dimensions=2), points)

    bands, cycles, bits = (
        classes(rule, Expression.LINEAR) for rule in (ClassRule.BANDS, ClassRule.CYCLES, ClassRule.BITS)
    )
    for made in (bands, cycles, bits):
        assert [row.bincount().tolist() for row in made] == [[100] * 4] * 3
    for row in range(3):  # a linear expression is a direction: the bands lie behind each other, the cycles twice
        order = torch.linalg.lstsq(points[row], bands[row][:, None].float()).solution
        height = ranks((points[row] @ order).T)[0]
        assert float(torch.corrcoef(torch.stack([height.double(), bands[row].double()]))[0, 1]) > 0.9
    assert torch.equal(bits // 2, bands // 2)  # the higher bit is the half of the first expression
    product = classes(ClassRule.BANDS, Expression.PRODUCT)
    assert all(linear_accuracy(points[row], product[row]) < 0.5 for row in range(3))


def test_directions_are_at_right_angles_as_far_as_there_is_room():
    drawn = of_layout("sequence", 8)
    there = (torch.arange(10) < drawn.features[:, None]).float()
    rows = orthogonal_directions(drawn.keys, 7, there)
    for made, features in zip(rows, drawn.features.tolist(), strict=True):
        few = made[: min(features, 7)]
        torch.testing.assert_close(few @ few.T, torch.eye(len(few)), atol=1e-4, rtol=0.0)
        assert not bool(made[:, features:].any())


# -- playing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grammar", "grammar-unseen"])
def test_the_eager_environment_plays_whole_episodes_that_repeat(name):
    def played() -> torch.Tensor:
        env = GrowthEnv(Short(name), 4)
        env.reset([0, 1, 2, 3], held_out=False)
        rng, rule, rewards = random.Random(3), RandomLegal(), []
        while not env.over:
            rewards.append(env.step([rule.rule(situation, rng) for situation in env.situations]).reward)
        assert all(one.accuracy > 0.0 for one in env.evaluate_test())
        return torch.stack(rewards)

    torch.manual_seed(1)
    first = played()
    torch.manual_seed(2)
    assert torch.equal(first, played())
    assert first.shape == (6, 4)


class Short:
    """The same draws, with fewer epochs and updates."""

    def __init__(self, name: str) -> None:
        self.family, self.name = get_family(name), name

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        draw = self.family.draw(number, held_out=held_out)
        return replace(draw, horizon=6, task=replace(draw.task, updates_per_epoch=2))


def test_the_first_weights_of_a_seed_depend_on_its_number_alone():
    draw = get_family("grammar").draw(0)

    def planted(waits: int) -> GrowingModel:
        learner = task_learner(draw.task, 0, draw.horizon)
        engine = EagerEngine([learner])
        torch.rand(waits)
        for slot in range(2):
            engine.step([Action(Op.GERMINATE, slot, "lora", "linear")])
        return learner.model

    one, other = planted(1), planted(2)
    for a, b in zip(one.slots[:2], other.slots[:2], strict=True):
        assert torch.equal(a.seed.body.down.weight, b.seed.body.down.weight)
    with DrawNumbers(draw.task.numbers.key).seed(1):
        first = Seed("lora", one.slots[0].shape, "linear")
    with DrawNumbers(draw.task.numbers.key).seed(2):
        second = Seed("lora", one.slots[0].shape, "linear")
    assert not torch.equal(first.body.down.weight, second.body.down.weight)


def test_every_lack_occurs_in_every_layout_where_a_seed_supplies_it(settings):
    occurs = Counter(
        (int(layout), lack)
        for layout, lacks in zip(settings.layout, settings.lacks.tolist(), strict=True)
        for lack, is_lacking in enumerate(lacks)
        if is_lacking
    )
    for layout, lacks in enumerate(((2, 3), (1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3))):
        assert {lack for where, lack in occurs if where == layout} == set(lacks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_problems_are_the_same_on_a_gpu(batch):
    there = [problems for _, problems in get_family("grammar").problems(range(48), device="cuda")]
    for here, other in zip(batch, there, strict=True):
        assert torch.equal(here.draw, other.draw.cpu())
        for name in SPLITS:
            a, b = (getattr(one, f"{name}_x").cpu() for one in (here, other))
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
            differs = (getattr(here, f"{name}_y") != getattr(other, f"{name}_y").cpu()).double().mean()
            assert float(differs) < 1e-3  # a point on the border of two classes may fall on either side
        rows = torch.arange(len(here))
        assert torch.equal(here.minibatches(rows, 2), other.minibatches(rows.cuda(), 2).cpu())
        assert torch.equal(here.host_uniforms(rows, 50), other.host_uniforms(rows.cuda(), 50).cpu())
