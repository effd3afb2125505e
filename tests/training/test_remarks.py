"""What `esper.grow` says about a run: why nothing grew, and that it ended at chance.

Covers: R149
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.actions import Action, Op
from esper.env.situation import Situation
from esper.lifecycle import Contrast, Rules, Stage
from esper.training.own import remarks
from esper.training.own.remarks import _harmful

Data = tuple[Tensor, Tensor]


def signs(count: int, seed: int) -> Data:
    """The class is the sign of x0 · x1: no linear model can learn it."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return x, (x.prod(1) > 0).long()


def halves(count: int, seed: int) -> Data:
    """The class is the sign of x0: every model can learn it."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def grow(train: Data, val: Data, width: int = 8, outputs: int = 2, **changes: object) -> esper.Grown:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, width), nn.Linear(width, outputs))
    settings: dict[str, object] = {"slots": ["0"], "epochs": 20, "device": "cpu"}
    return esper.grow(net, train, val, **{**settings, **changes})  # type: ignore[arg-type]


def easy(**changes: object) -> esper.Grown:
    return grow(halves(512, 0), halves(256, 1), **changes)


class Waiting:
    """Does the same in every epoch."""

    name = "mine"

    def __init__(self, action: Action) -> None:
        self.action = action

    def reset(self, seeds: Sequence[int]) -> None: ...

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        return [self.action] * len(situations)


# -- why nothing can grow: before the training -------------------------------------------------------------------------

HOST = 3 * 8 + 9 * 2
"""Parameters of the host."""


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"max_seeds": 0}, "Nothing can grow: max_seeds is 0."),
        ({"blueprints": []}, "Nothing can grow: no blueprint that is allowed (none) fits a slot (0 is dense)."),
        (
            {"blueprints": ["conv", "wide"]},
            "Nothing can grow: no blueprint that is allowed (conv, wide) fits a slot (0 is dense).",
        ),
        (
            {"budget": HOST + 1},
            "Nothing can grow: the budget leaves room for 1 parameter, and the smallest seed, norm at 0, needs 65.",
        ),
        (
            {"epochs": 4},
            "The run is too short for a seed: it has 4 epochs, and a seed needs 5 (2 of incubation, 3 of blending).",
        ),
        (
            {"epochs": 1, "rules": Rules(training_epochs=1, blending_epochs=1)},
            "The run is too short for a seed: it has 1 epoch, and a seed needs 2 (1 of incubation, 1 of blending).",
        ),
    ],
)
@pytest.mark.parametrize("controller", ["small", "heuristic"])
def test_what_makes_growth_impossible_is_warned_of_and_remarked(
    controller: str, changes: dict[str, object], remark: str
) -> None:
    started: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grown = easy(
            **{"controller": controller, "epochs": 6, **changes}, on_epoch=lambda *_: started.append(len(caught))
        )
    assert grown.remarks == (remark,)
    (warning,) = [one for one in caught if issubclass(one.category, esper.GrowthWarning)]
    assert str(warning.message) == remark
    assert warning.filename == __file__, "the line that called esper.grow"
    assert started[0] == 1, "before the first epoch"


def test_a_run_as_long_as_a_seeds_life_can_keep_one() -> None:
    """The bound is tight: planted in the first epoch, a seed works at full strength in the last."""
    plants = Waiting(Action(Op.GERMINATE, 0, "mlp", "linear", "at once"))
    lenient = Rules(shadow_benefit=-100.0)
    grown = grow(signs(2048, 0), signs(512, 1), controller=plants, epochs=5, rules=lenient, batch_size=16)
    (story,) = grown.history.seeds()
    assert (story.fate, grown.history.records[-1].alphas) == (Stage.BLENDING, (1.0,))
    assert grown.parameters > HOST
    assert not any("too short" in remark for remark in grown.remarks)


def test_a_seed_that_a_short_run_keeps_in_part_is_remarked_on_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remarks, "_harmful", lambda history: "It harms.")
    plants = Waiting(Action(Op.GERMINATE, 0, "mlp", "linear", "at once"))
    lenient = Rules(shadow_benefit=-100.0)
    grown = grow(signs(2048, 0), signs(512, 1), controller=plants, epochs=4, rules=lenient, batch_size=16)
    (story,) = grown.history.seeds()
    assert (story.fate, grown.history.records[-1].alphas) == (Stage.BLENDING, (2 / 3,))
    assert [one for one in grown.remarks if "too short" in one or "harms" in one] == [grown.remarks[0], "It harms."]


def test_a_controller_that_never_grows_on_purpose_needs_no_remark() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert easy(controller="none", epochs=2, max_seeds=0).remarks == ()
        assert grow(signs(256, 0), signs(128, 1), controller="none", epochs=6).remarks == ()


# -- why nothing was grown: at the end ---------------------------------------------------------------------------------


def test_a_rule_gives_its_own_reasons() -> None:
    (remark,) = easy(controller="heuristic", epochs=10).remarks
    assert remark == (
        "The controller heuristic chose to wait in every epoch: fewer than 8 epochs remain, too few for a seed "
        "(in 7 epochs); it plants after 3 epochs at the earliest (in 3 epochs)."
    )


def test_a_learned_controller_gives_its_probabilities() -> None:
    grown = easy(controller="small", epochs=12, rent=50.0)  # at which nothing is worth its size
    (remark,) = grown.remarks
    sure = [record.effect.action.probability for record in grown.history.records]
    least = min(range(12), key=lambda epoch: sure[epoch] or 0.0)
    assert remark == (
        f"The controller small chose to wait in every epoch. It was least sure in epoch {least + 1}: "
        f"{grown.history.records[least].effect.action.reason}."
    )
    assert " % sure (next: " in remark


def test_a_controller_of_ones_own_is_quoted() -> None:
    (remark,) = easy(controller=Waiting(Action()), epochs=6).remarks
    assert remark == "The controller mine chose to wait in every epoch, and gave no reason."
    (remark,) = easy(controller=Waiting(Action(reason="it is Sunday")), epochs=6).remarks
    assert remark == "The controller mine chose to wait in every epoch: it is Sunday (in 6 epochs)."
    (remark,) = easy(controller=Waiting(Action(Op.GERMINATE, 0, "conv", "linear")), epochs=6).remarks
    assert remark == (
        "The controller mine tried to plant in 6 epochs and was refused: blueprint 'conv' does not fit slot 0 (dense)."
    )


def test_a_run_that_was_stopped_says_when() -> None:
    def interrupt(record: object, control: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    why, stopped = grow(signs(256, 0), signs(128, 1), controller="heuristic", on_epoch=interrupt).remarks
    assert why == (
        "The controller heuristic chose to wait until the run was stopped, after 1 of 20 epochs: it plants after 3 "
        "epochs at the earliest (in 1 epoch)."
    )
    assert stopped == "The run was interrupted after 1 of 20 epochs; what was grown so far is kept."


def test_a_run_in_which_something_grew_and_learnt_has_no_remarks() -> None:
    grown = grow(signs(2048, 0), signs(512, 1), controller="heuristic")
    assert grown.validation.accuracy > 70.0
    assert grown.remarks == ()


# -- size --------------------------------------------------------------------------------------------------------------


class PlantsAndRemoves:
    """One mlp_small, which is removed in the tenth epoch."""

    name = "mine"

    def reset(self, seeds: Sequence[int]) -> None: ...

    def decide(self, situations: Sequence[Situation]) -> list[Action]:
        script = {0: Action(Op.GERMINATE, 0, "mlp_small", "linear"), 10: Action(Op.PRUNE, 0)}
        return [script.get(situation.epoch, Action()) for situation in situations]


@pytest.mark.parametrize(("rent", "dear"), [(5.0, True), (0.0, False)])
def test_a_seed_that_helped_and_was_too_dear_is_remarked(rent: float, dear: bool) -> None:
    grown = grow(signs(1024, 0), signs(512, 1), 16, controller=PlantsAndRemoves(), rent=rent, epochs=14)
    (story,) = grown.history.seeds()
    assert story.fate is Stage.PRUNED
    gain = grown.history.records[9].measured.contributions[0].accuracy
    assert gain > 10.0
    due = 5.0 * (story.parameters or 0) / grown.history.host_parameters
    expected = f"mlp_small at 0 was removed although it added {gain:.1f} points: it has {story.parameters:,} parameters"
    found = [remark for remark in grown.remarks if remark.startswith(expected)]
    assert len(found) == dear
    assert all(f"at a rent of 5 so many must add {due:.1f}." in remark for remark in found)


def test_a_kept_seed_that_the_final_network_would_better_lose_is_remarked() -> None:
    grown = grow(signs(512, 0), signs(256, 1), 8, controller="heuristic", rent=0)
    (story,) = [one for one in grown.history.seeds() if one.value is not None]
    assert story.value is not None
    assert not [remark for remark in grown.remarks if "better without" in remark]
    for points, error, said in ((-9.0, 1.5, True), (-9.0, 5.0, False), (-1.0, 0.1, False)):
        values = {story.slot: replace(story.value, contribution=Contrast(points, 0.0, error))}
        found = _harmful(replace(grown.history, values=values))
        assert bool(found) is said
    values = {story.slot: replace(story.value, contribution=Contrast(-9.0, 0.0, 1.5))}
    assert f"better without {story.blueprint} at {story.slot}: by 9.0 ± 1.5 points" in _harmful(
        replace(grown.history, values=values)
    )


@pytest.mark.parametrize("decision", [Action(), [], [None], [Action(), Action()]])
def test_what_is_no_action_for_each_network_is_an_error_that_names_the_controller(decision: object) -> None:
    class Wrong(Waiting):
        def decide(self, situations: Sequence[Situation]) -> list[Action]:
            return decision  # type: ignore[return-value]

    with pytest.raises(ValueError, match=r"the controller 'mine' must answer decide\(\) with a list of one Action"):
        easy(controller=Wrong(Action()))
    with pytest.raises(ValueError, match=r"the controller is the class Wrong: pass an object of it, Wrong\("):
        easy(controller=Wrong)


# -- chance ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 16, 64])
def test_the_default_controller_on_a_linear_host_is_said_to_end_at_chance(width: int) -> None:
    grown = grow(signs(2000, 0), signs(1000, 1), width)
    assert grown.validation.accuracy < 55.0
    assert grown.remarks[-1].startswith(
        f"The run ended at chance: the validation accuracy is {grown.validation.accuracy:.1f} %"
    )
    assert grown.remarks[-1].endswith(
        "Seeds that could be planted were not tried, such as mlp at 0 and mlp_small at 0: "
        'try a rent of 0 (accuracy at any size), controller "heuristic", more epochs, smaller batches or a larger '
        "learning rate."
    )


@pytest.mark.parametrize("width", [16, 64])
def test_the_default_controller_separates_the_classes_where_size_is_free(width: int) -> None:
    """With the rule of `agent/removals.py`; without it, the seed is removed after it was measured to help."""
    grown = grow(signs(2000, 0), signs(1000, 1), width, rent=0.0)
    assert grown.validation.accuracy > 90.0
    assert grown.remarks == ()


def test_real_targets_far_from_zero_are_named_where_a_run_ends_at_chance() -> None:
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    y = 150.0 + 75.0 * x[:, :1]
    data = (x[:200], y[:200]), (x[200:], y[200:])
    said = grow(*data, outputs=1, controller="heuristic", epochs=6).remarks[-1]
    assert said.startswith("The run ended at chance: the validation R² is -")
    mean, deviation = float(y[200:].mean()), float(y[200:].std(correction=0))
    assert f"The targets have a mean of {mean:.3g} and a standard deviation of {deviation:.3g}, which is far" in said
    near = [(inputs, (targets - 150.0) / 75.0) for inputs, targets in data]
    assert not [remark for remark in grow(*near, outputs=1, epochs=6).remarks if "standard deviation" in remark]


def test_loaders_are_counted_without_another_pass() -> None:
    passes = 0

    class Counting(DataLoader):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            nonlocal passes
            passes += 1
            return super().__iter__()

    def rare(count: int, seed: int) -> TensorDataset:
        """Noise, a quarter of it in class 1."""
        generator = torch.Generator().manual_seed(seed)
        return TensorDataset(torch.randn(count, 2, generator=generator), (torch.arange(count) % 4 == 0).long())

    train, val = DataLoader(rare(256, 0), batch_size=64), Counting(rare(250, 1), batch_size=100)
    grown = grow(train, val, controller=Waiting(Action()), epochs=6)  # type: ignore[arg-type]
    assert "the most frequent class alone gives 74.8 %" in grown.remarks[-1]
    assert passes == 1 + 1 + 6 + 1  # its first batch, the untrained network, six epochs, the end


def test_chance_in_a_regression_is_no_variance_explained() -> None:
    def pairs(function: Callable[[Tensor], Tensor]) -> tuple[Data, Data]:
        x, other = signs(512, 0)[0], signs(512, 1)[0]
        return (x, function(x)[:, None]), (other, function(other)[:, None])

    fast = lambda parameters: torch.optim.AdamW(parameters, lr=0.02)  # noqa: E731
    settings: dict[str, object] = {"outputs": 1, "controller": Waiting(Action()), "epochs": 10, "optimizer": fast}
    train, val = pairs(lambda x: x.prod(1))
    assert "predicting the mean gives 0.0 %" in grow(train, val, **settings).remarks[-1]
    assert len(grow(*pairs(lambda x: x.sum(1)), **settings).remarks) == 1  # that nothing was grown


def test_a_metric_of_ones_own_is_compared_with_the_untrained_network() -> None:
    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        return 10.0 * (outputs.argmax(1) == targets).float()  # a perfect one is far below the most frequent class

    train, val = halves(512, 0), halves(256, 1)
    fast = lambda parameters: torch.optim.AdamW(parameters, lr=0.02)  # noqa: E731
    settings: dict[str, object] = {"metric": metric, "controller": Waiting(Action()), "epochs": 8, "optimizer": fast}
    assert len(grow(train, val, **settings).remarks) == 1
    still = grow(train, val, **{**settings, "optimizer": lambda p: torch.optim.SGD(p, lr=1e-12)})
    assert still.remarks[-1].startswith("The run did not clearly improve the network: the validation metric is ")


def test_a_network_that_was_trained_before_is_not_said_to_be_at_chance() -> None:
    train, val = halves(512, 0), halves(256, 1)
    fast = lambda parameters: torch.optim.AdamW(parameters, lr=0.02)  # noqa: E731
    first = grow(train, val, controller="none", epochs=10, optimizer=fast)
    settings: dict[str, object] = {"slots": ["0"], "epochs": 6, "controller": Waiting(Action()), "device": "cpu"}
    again = esper.grow(first.model, train, val, **settings)  # type: ignore[arg-type]
    assert first.validation.accuracy > 90.0
    assert again.remarks[-1].startswith("The run did not clearly improve the network: the validation accuracy is ")
    assert f"and was {first.validation.accuracy:.1f} % before training. " in again.remarks[-1]


def test_nothing_is_said_of_chance_when_all_was_tried_or_nothing_could_be() -> None:
    for changes in ({"max_seeds": 0}, {"budget": HOST}):
        with pytest.warns(esper.GrowthWarning):
            (remark,) = grow(signs(256, 0), signs(128, 1), epochs=6, **changes).remarks
        assert remark.startswith("Nothing can grow")
    plants = Waiting(Action(Op.GERMINATE, 0, "norm", "linear", "at once"))
    assert grow(signs(256, 0), signs(128, 1), epochs=6, controller=plants, blueprints=["norm"]).remarks == ()


def test_targets_that_only_ones_own_loss_understands_do_no_harm() -> None:
    """-100 is torch's mark for what is not to be learnt; remarks must not lose a trained model over it."""
    x, y = signs(256, 0)
    y[::3] = -100
    own = nn.CrossEntropyLoss()
    assert grow((x, y), (x, y), loss=own, epochs=6, controller="heuristic").validation.accuracy < 100.0


def test_the_class_that_is_left_out_is_not_the_most_frequent_one() -> None:
    x, y = signs(512, 0)
    void = torch.where(torch.arange(512) % 4 > 0, 255, y)  # three of four
    loss = torch.nn.CrossEntropyLoss(ignore_index=255)
    grown = grow((x, void), (x, void), loss=loss, controller=Waiting(Action()), epochs=8)
    assert "alone gives 75.0 %" not in "".join(grown.remarks)


def test_one_hot_targets_have_no_most_frequent_class() -> None:
    x, y = halves(512, 0)
    hot = torch.nn.functional.one_hot(y, 2).float()
    fast = lambda parameters: torch.optim.AdamW(parameters, lr=0.02)  # noqa: E731
    settings: dict[str, object] = {
        "loss": torch.nn.CrossEntropyLoss(),
        "controller": Waiting(Action()),
        "optimizer": fast,
    }
    assert not [r for r in grow((x, hot), (x, hot), epochs=10, **settings).remarks if "chance" in r]
