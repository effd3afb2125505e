"""What `esper.grow` takes for loss and metric when it is not told, by the loss and the shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_own_data import X, Y, loader, once, refused, value_net
from torch import Tensor, nn

YES = (X[:, :1] > 0).float()


def net(outputs: int, *last: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, outputs), *last)


def outputs_of(grown: Any, x: Tensor = X) -> Tensor:
    with torch.no_grad():
        return grown.model(x)


# -- by loss -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.ones(3)), F.cross_entropy, partial(F.cross_entropy, label_smoothing=0.1),
        nn.MultiMarginLoss(), F.multi_margin_loss, nn.NLLLoss(), F.nll_loss,
    ],
)  # fmt: skip
def test_losses_of_classes_are_judged_by_classes_right(loss: Any) -> None:
    last = [nn.LogSoftmax(1)] if "nll" in str(loss).lower() else []
    grown = once(loss=loss, model=net(3, *last), train=(X, Y.int()))
    wanted = 100 * (outputs_of(grown).argmax(1) == Y).float().mean().item()
    assert grown.validation.accuracy == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.BCEWithLogitsLoss(), YES),
        (F.binary_cross_entropy_with_logits, YES),
        (F.binary_cross_entropy_with_logits, YES.long()),
        (nn.MultiLabelSoftMarginLoss(), YES),
        (nn.SoftMarginLoss(), 2 * YES - 1),
    ],
)
@pytest.mark.parametrize("kind", [lambda x, y: (x, y), loader], ids=["tensors", "loader"])
def test_logits_are_judged_by_labels_right(loss: Any, targets: Tensor, kind: Any) -> None:
    grown = once(kind(X, targets), kind(X, targets), loss=loss, model=net(1))
    wanted = 100 * ((outputs_of(grown) > 0) == (targets > 0)).float().mean().item()
    assert grown.validation.accuracy == pytest.approx(wanted)


@pytest.mark.parametrize("loss", [nn.BCELoss(), F.binary_cross_entropy])
def test_probabilities_are_judged_by_labels_right(loss: Any) -> None:
    grown = once((X, YES), (X, YES), loss=loss, model=net(1, nn.Sigmoid()))
    wanted = 100 * ((outputs_of(grown) > 0.5) == (YES > 0)).float().mean().item()
    assert grown.validation.accuracy == pytest.approx(wanted)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), nn.SmoothL1Loss(), F.l1_loss])
def test_values_are_judged_by_the_variance_explained(loss: Any) -> None:
    y = X.prod(1, keepdim=True)
    grown = once((X, y), (X, y), loss=loss, model=net(1))
    wanted = 100 * (1 - (outputs_of(grown) - y).square().mean() / y.var(unbiased=False)).item()
    assert grown.validation.accuracy == pytest.approx(wanted, abs=1e-3)


def test_counts_are_judged_on_their_own_scale() -> None:
    y = torch.poisson(X.abs()[:, :1] * 3)
    grown = once((X, y), (X, y), loss=nn.PoissonNLLLoss(), model=net(1))
    wanted = 100 * (1 - (outputs_of(grown).exp() - y).square().mean() / y.var(unbiased=False)).item()
    assert grown.validation.accuracy == pytest.approx(wanted, abs=1e-3)


def test_the_variance_of_a_loader_is_that_of_all_its_targets() -> None:
    """Sorted targets: the first batch has nearly no variance."""
    y = X.prod(1, keepdim=True).sort(0).values
    grown = once(loader(X, y), loader(X, y), model=net(1))
    wanted = 100 * (1 - (outputs_of(grown) - y).square().mean() / y.var(unbiased=False)).item()
    assert grown.validation.accuracy == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("loss", [nn.HingeEmbeddingLoss(), partial(F.kl_div, reduction="batchmean")])
def test_losses_without_a_notion_of_right_need_a_metric(loss: Any) -> None:
    refused("pass metric=", lambda: once((X, YES), (X, YES), loss=loss, model=value_net()))


@pytest.mark.parametrize("loss", [nn.CTCLoss(), nn.GaussianNLLLoss(), nn.CosineEmbeddingLoss()])
def test_losses_of_more_than_outputs_and_targets_need_a_function(loss: Any) -> None:
    refused(r"wrap the loss in a function .* pass metric=", lambda: once(loss=loss))


def test_a_loss_of_ones_own_on_yes_and_no_needs_a_metric() -> None:
    loss = lambda o, t: F.binary_cross_entropy_with_logits(o, t)  # noqa: E731
    refused("targets are yes or no.*or metric=", lambda: once((X, YES), (X, YES), loss=loss, model=value_net()))


def test_probabilities_of_classes_are_targets_of_cross_entropy() -> None:
    soft = F.one_hot(Y, 3).float() * 0.7 + 0.1
    grown = once((X, soft), (X, soft), loss=nn.CrossEntropyLoss())
    assert grown.validation.accuracy == pytest.approx(100 * (outputs_of(grown).argmax(1) == Y).float().mean().item())


def test_the_class_of_a_loss_is_refused() -> None:
    refused(r"the class MSELoss: pass an object of it, MSELoss\(\)", lambda: once(loss=nn.MSELoss))


def test_a_loss_with_parameters_of_its_own_is_refused() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs * self.scale, targets)

    refused("parameters of its own.*into the model", lambda: once(loss=Learned()))


@pytest.mark.parametrize("kind", [tuple, loader])
def test_integers_that_are_no_classes_of_the_outputs_need_a_metric(kind: Any) -> None:
    """One logit for yes and no, or one less than there are levels."""

    def levels(outputs: Tensor, targets: Tensor) -> Tensor:
        above = (targets[:, None] > torch.arange(outputs.shape[1])).float()
        return F.binary_cross_entropy_with_logits(outputs, above)

    for outputs, y in ((1, (Y > 0).long()), (2, Y)):
        data = loader(X, y) if kind is loader else (X, y)
        refused(
            rf"integers from 0 to {outputs}, and the model has {outputs} outputs.*pass metric=",
            lambda data=data, outputs=outputs: once(data, data, loss=levels, model=net(outputs)),
        )


def test_a_loss_that_shifts_its_targets_in_place_is_refused() -> None:
    def shifted(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets.sub_(1).clamp(min=0))

    y = Y + 1
    refused(
        r"the loss changes the targets in place.*targets\.clone\(\)",
        lambda: once(loss=shifted, metric=lambda outputs, targets: 1.0 * targets, train=(X, y)),
    )
    assert torch.equal(y, Y + 1)


def test_a_loss_that_follows_the_model_of_which_a_copy_is_trained_is_refused() -> None:
    model = net(3)

    def penalised(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 0.01 * sum(p.square().sum() for p in model.parameters())

    refused("the loss follows parameters.*pass in_place=True", lambda: once(loss=penalised, model=model))
    assert once(loss=penalised, model=model, in_place=True)


def test_a_loss_may_read_what_the_model_notes_in_its_pass() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.size = net(3), None

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.net(x)
            self.size = outputs.square().mean()
            return outputs

    def penalised(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + 0.01 * model.size

    model = Noting()
    assert once(loss=penalised, model=model, slots=["net.1"], test_data=(X, Y), in_place=True)


# -- by shape ----------------------------------------------------------------------------------------------------


class Shaped(nn.Module):
    """Numbers per example, in the shape that is wanted."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(2, 6)
        self.out = nn.Linear(6, int(torch.tensor(shape).prod()))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu()).reshape(len(x), *self.shape)


def numbers(below: int, *shape: int) -> Tensor:
    return torch.randint(below, (64, *shape), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("settings", [{}, {"loss": nn.CrossEntropyLoss()}])
@pytest.mark.parametrize("kind", [lambda x, y: (x, y), loader], ids=["tensors", "loader"])
def test_segmentation_has_its_classes_on_axis_1(settings: dict[str, Any], kind: Any) -> None:
    y = numbers(3, 4, 5)
    y[:, 0, 0] = -100
    data = kind(X, y)
    grown = once(data, data, model=Shaped(3, 4, 5), slots=["hidden"], test_data=data, **settings)
    outputs = outputs_of(grown)
    known = y != -100
    assert grown.validation.accuracy == pytest.approx(
        100 * (outputs.argmax(1) == y)[known].float().mean().item(), abs=1e-3
    )
    if kind is not loader:
        assert grown.validation.loss == pytest.approx(F.cross_entropy(outputs, y).item(), abs=1e-5)


def test_shapes_that_fit_both_conventions_are_asked_about() -> None:
    y = numbers(4, 4)
    data = (X, y)
    refused(
        r"\[64, 4, 4\].*axis 1 or the last.*pass loss=", lambda: once(data, data, model=Shaped(4, 4), slots=["hidden"])
    )
    once(data, data, model=Shaped(4, 4), slots=["hidden"], loss=nn.CrossEntropyLoss())  # torch's own convention


def test_language_models_are_judged_by_loss() -> None:
    y = numbers(5, 6)
    y[:, 4:] = -100
    y[3] = -100  # nothing to predict: it does not count
    grown = once((X, y), (X, y), model=Shaped(6, 5), slots=["hidden"])
    logs = outputs_of(grown).log_softmax(-1)
    rows = [i for i in range(64) if i != 3]
    wanted = [100 * torch.exp(logs[i, range(4), y[i, :4]].mean()).item() for i in rows]
    assert grown.validation.accuracy == pytest.approx(sum(wanted) / 63, abs=1e-3)
    refused("0 to 4", lambda: once((X, y + 1), (X, y + 1), model=Shaped(6, 5), slots=["hidden"]))


def test_targets_that_are_the_inputs_teach_copying() -> None:
    symbols = numbers(5, 6)
    model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    refused("targets are the inputs.*shift", lambda: once((symbols, symbols), (symbols, symbols), model=model))
    refused(
        "targets are the inputs.*shift", lambda: once((symbols.int(), symbols), (symbols.int(), symbols), model=model)
    )
    nothing = torch.zeros_like(symbols)
    once((symbols, symbols.roll(1, 1)), (nothing, nothing), model=model)


def test_cross_entropy_of_torch_on_a_language_model_names_the_cure() -> None:
    y = numbers(5, 6)
    model = Shaped(6, 5)
    refused(
        "axis 1.*leave loss= out", lambda: once((X, y), (X, y), model=model, slots=["hidden"], loss=F.cross_entropy)
    )
