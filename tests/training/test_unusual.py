"""Mistakes that a call of `esper.grow` shows before the training: the cure in one line, or a remark.

Covers: R149
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_own_data import X, Y, loader, once, refused
from torch import Tensor, nn

import esper

OTHER = (X + 1.0, Y)
"""To validate on."""


def net(*last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3), *last)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.1}, r"no argument 'lr': it belongs to the optimizer, such as optimizer=lambda .* lr=0\.1\)$"),
        ({"learning_rate": 0.1}, r"no argument 'learning_rate': it belongs .* lr=0\.1\)$"),
        ({"epoch": 3}, r"esper\.grow has no argument 'epoch': did you mean 'epochs'\?$"),
        ({"zzz": 3}, r"has no argument 'zzz': help\(esper\.grow\) lists all arguments$"),
    ],
)
def test_unknown_arguments_are_answered_with_the_one_that_is_meant(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        esper.grow(net(), (X, Y), OTHER, **settings)


def test_data_that_are_missing_or_not_in_pairs_are_asked_for() -> None:
    with pytest.raises(TypeError, match="val_data is missing: pass data to validate on"):
        esper.grow(net(), (X, Y))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"as esper\.grow\(model, \(x, y\), \(x_val, y_val\)\), and all else by name$"):
        esper.grow(net(), X, Y, X, Y)  # type: ignore[misc]
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"esper\.Growth: validate= is missing"):
        esper.Growth(net(), optimizer, epochs=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="belongs to the optimizer, which your loop makes"):
        esper.Growth(net(), optimizer, validate=(X, Y), epochs=3, lr=0.1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "mse"}, r"such as torch\.nn\.MSELoss\(\), or a function of \(outputs, targets\), not 'mse'$"),
        ({"loss": "cross_entropy"}, r"such as torch\.nn\.CrossEntropyLoss\(\),"),
        ({"loss": nn.CrossEntropyLoss(torch.ones(3).double())}, r"weight of the loss is float64 .* pass it as float32"),
        ({"loss": partial(F.cross_entropy, weight=torch.ones(3).double())}, "pass it as float32"),
        ({"train": (X, Y.float()), "val": (X, Y.float())}, r"if they are class numbers, .* y\.long\(\)$"),
        (
            {"train": (X, Y.float()), "val": (X, Y.float()), "loss": nn.CrossEntropyLoss()},
            r"class numbers must be integers: pass the targets as y\.long\(\)\)$",
        ),
        ({"train": (X, F.one_hot(Y).float()), "val": (X, F.one_hot(Y).float())}, r"one-hot form, pass targets\.argmax"),
        ({"train": (X.double(), Y), "val": (X.double(), Y)}, r"the model's weights are float32: pass x\.float\(\)"),
        ({"train": (X.byte(), Y), "val": (X.byte(), Y)}, r"the model's weights are float32: pass x\.float\(\)"),
        ({"visibility": "all"}, "^unknown visibility 'all': choose one of"),
        ({"visibility": "all", "slots": "auto"}, "^unknown visibility 'all': choose one of"),
        ({"blueprints": "mlp"}, r"^blueprints must be a list of names, such as \['mlp'\]$"),
        ({"seed": "a"}, "^seed must be a whole number, not 'a'$"),
    ],
)
def test_what_cannot_be_meant_is_answered_with_the_cure(settings: dict[str, Any], message: str) -> None:
    refused(message, lambda: once(model=net(), **settings))


def test_the_shape_of_classes_is_not_blamed_for_weights_of_another_length() -> None:
    with pytest.raises(ValueError, match="weight tensor") as caught:
        once(model=net(), loss=nn.CrossEntropyLoss(torch.ones(4)))
    assert "axis 1" not in str(caught.value)


# -- remarked ---------------------------------------------------------------------------------------------------------


def remarks_of(run: Callable[[], esper.Grown]) -> tuple[tuple[str, ...], list[str]]:
    """Remarks, and those of them that were warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        remarks = run().remarks
    return remarks, [str(one.message) for one in caught if issubclass(one.category, esper.GrowthWarning)]


def frozen() -> nn.Module:
    model = net()
    model[1].eval()  # type: ignore[index]
    return model


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": loader(X, Y), "val": loader(*OTHER), "batch_size": 7}, "batch_size=7 has no effect"),
        ({"model": frozen()}, "The batch norm 1 is in evaluation mode, and will be trained again (1 such)"),
        ({"model": net(nn.Softmax(1))}, "The outputs of the model are probabilities, and cross-entropy applies"),
        ({"model": net(nn.Softmax(1)), "loss": nn.CrossEntropyLoss()}, "The outputs of the model are probabilities"),
    ],
)
def test_what_is_seldom_meant_is_warned_of(settings: dict[str, Any], said: str) -> None:
    remarks, warned = remarks_of(lambda: once(**{"model": net(), "val": OTHER, "batch_size": 16, **settings}))
    assert [one for one in remarks if one.startswith(said)] == warned
    assert len(warned) == 1


OWN = net()


@pytest.mark.parametrize("what", ["loss", "metric"])
def test_a_function_that_reads_the_model_of_which_a_copy_is_trained_is_warned_of(what: str) -> None:
    functions: dict[str, Any] = {
        "loss": lambda outputs, targets: F.cross_entropy(outputs, targets) + 0.0 * float(OWN.training),
        "metric": lambda outputs, targets: 100.0 * (outputs.argmax(1) == targets) * OWN.training,
    }
    remarks, warned = remarks_of(lambda: once(model=OWN, val=OTHER, **{what: functions[what]}))
    assert list(remarks) == warned
    assert [one[:44] for one in warned] == [f"The {what} reads the model that you passed, and"[:44]]
    assert remarks_of(lambda: once(model=net(), val=OTHER, **{what: functions[what]})) == ((), [])  # another model
    assert remarks_of(lambda: once(model=OWN, val=OTHER, in_place=True, **{what: functions[what]})) == ((), [])


def test_a_function_may_name_what_is_only_set_later() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with suppress(NameError):
            later.append(outputs)
        return F.cross_entropy(outputs, targets)

    assert remarks_of(lambda: once(model=net(), val=OTHER, loss=loss)) == ((), [])
    later: list[Tensor] = []


def test_what_is_meant_is_not_remarked() -> None:
    assert remarks_of(lambda: once(model=net(), val=OTHER, batch_size=7)) == ((), [])
    assert remarks_of(lambda: once(loader(X, Y), loader(*OTHER), model=net(), batch_size=128)) == ((), [])
    assert remarks_of(lambda: once(model=net().eval(), val=OTHER)) == ((), [])
    logarithms = {"model": net(nn.LogSoftmax(1)), "loss": nn.NLLLoss()}
    assert remarks_of(lambda: once(val=OTHER, **logarithms)) == ((), [])


@pytest.mark.parametrize("data", [(X, Y), loader(X, Y)], ids=["tensors", "loader"])
def test_validation_on_the_training_data_is_remarked(data: Any) -> None:
    remarks, warned = remarks_of(lambda: once(data, data, model=net(), batch_size=128))
    assert [remark[:48] for remark in remarks] == ["Training and validation data are the same: the f"]
    assert not warned
