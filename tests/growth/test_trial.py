"""What a seed's own passes rely on is tried before they are made, and refused in one line where it does not hold.

Covers: R149
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import esper
from esper.growth.attach import AttachError, attach
from esper.growth.plain import check_exportable
from esper.growth.slot import SlotMode
from esper.lifecycle import Stage
from small_worlds import plant

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


KINDS = (Tensor, nn.Parameter)


class Net(nn.Module):
    """Its pass may do something else before and after it is made."""

    def __init__(self, before: Callable[[Net, Tensor], None] | None = None) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.codes = nn.Parameter(3 * torch.ones(8), requires_grad=False)
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            self.before(self, x)
        h: Tensor = self.head(self.first(x).relu() + self.codes)
        return h


def scales_its_input(net: Net, x: Tensor) -> None:
    x.mul_(2.0)


def adds_noise_in_training(net: Net, x: Tensor) -> None:
    if net.training:
        x.add_(torch.randn_like(x))


def averages(net: Net, x: Tensor) -> None:
    if net.training:
        net.codes.data.mul_(0.9).add_(0.1 * float(x.mean()))


def replaces(net: Net, x: Tensor) -> None:
    if net.training:
        net.codes = nn.Parameter(0.9 * net.codes + 0.1, requires_grad=False)


def limits_its_norm(net: Net, x: Tensor) -> None:
    net.codes.data = torch.renorm(net.codes.data[None], 2, 0, 1.0)[0]


@pytest.mark.parametrize("before", [scales_its_input, adds_noise_in_training])
def test_a_model_that_writes_into_its_inputs_is_refused(before: Callable[[Net, Tensor], None]) -> None:
    x = X.clone()
    with pytest.raises(AttachError, match=r"Net changes its inputs in place.*x = x\.clone\(\)"):
        esper.grow(Net(before), (x[:20], Y[:20]), (x[20:], Y[20:]), slots=["first"], epochs=1)
    assert torch.equal(x, X)  # the data are as they were


def follows_another(net: Net, x: Tensor) -> None:
    if net.training:
        net.codes.data.lerp_(net.first.bias.data, 0.1)


@pytest.mark.parametrize("before", [averages, replaces, follows_another])
def test_a_model_whose_pass_moves_its_parameters_is_refused(before: Callable[[Net, Tensor], None]) -> None:
    net = Net(before)
    own = dict(net.named_parameters())
    with pytest.raises(AttachError, match=r"itself changes the parameter 'codes'.*register_buffer"):
        attach(net, ["first"], X[:2])
    assert all(value is own[name] for name, value in net.named_parameters())
    assert torch.equal(net.codes, 3 * torch.ones(8))


def test_a_copy_that_follows_its_original_is_seen_where_both_are_equal_at_first() -> None:
    net = Net(follows_another)
    net.codes.data = net.first.bias.data.clone()
    with pytest.raises(AttachError, match="itself changes the parameter 'codes'"):
        attach(net, ["first"], X[:2])
    assert torch.equal(net.codes, net.first.bias)


def test_a_plain_tensor_that_a_pass_writes_into_is_refused() -> None:
    def counts(net: Net, x: Tensor) -> None:
        net.seen += len(x)

    net = Net(counts)
    net.seen = torch.zeros(())
    with pytest.raises(AttachError, match=r"writes into the tensor 'seen', which is no buffer.*register_buffer"):
        attach(net, ["first"], X[:2])
    del net.seen
    net.register_buffer("seen", torch.zeros(()))
    assert attach(net, ["first"], X[:2]).slots
    assert net.seen == 0


def test_one_copy_of_the_parameters_is_made_at_a_time() -> None:
    held = []

    def averages_and_counts(net: Net, x: Tensor) -> None:
        net.table.data.mul_(0.9 if net.training else 1.0)
        pieces = {one.data_ptr() for one in gc.get_objects() if type(one) in KINDS and one.shape == (37,)}
        held.append(len(pieces))

    net = Net(averages_and_counts)
    net.table = nn.Parameter(torch.ones(37), requires_grad=False)
    with pytest.raises(AttachError, match="itself changes the parameter 'table'"):
        attach(net, ["first"], X[:2])
    assert max(held) == 3  # the network's own, those that are tried, and the copy


@pytest.mark.parametrize("how", ["where there is none", "noted in a number"])
def test_parts_that_a_first_pass_builds_are_built_once(how: str) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.built = nn.Linear(4, 8), 0
            self.head: nn.Module | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.head is None if how == "where there is none" else not self.built:
                self.head, self.built = nn.Linear(8, 2), 1
            assert self.head is not None
            h: Tensor = self.head(self.first(x).relu())
            return h

    model = Lazy()
    growing = attach(model, ["first"], X)
    head = model._modules["head"]
    growing(X)
    assert model._modules["head"] is model.head is head


class Cut(nn.Module):
    """A body through which no gradient goes, and a layer after it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "checkpoint":
            h = checkpoint(self.body, x, use_reentrant=True)
        else:
            with torch.set_grad_enabled(self.how == "detached" and torch.is_grad_enabled()):
                h = self.body(x).detach()
        return self.head(self.first(h).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["no_grad", "detached", "checkpoint"])
def test_slots_that_no_gradient_reaches_are_refused_by_name_and_left_out_by_the_rule(how: str) -> None:
    with pytest.raises(AttachError, match=r"no gradient reaches slot 'body\.0'.*use_reentrant=False"):
        attach(Cut(how), ["body.0", "first"], X[:2])
    assert [slot.path for slot in attach(Cut(how), "auto", X[:2]).slots] == ["first"]


class Statistics:
    """Of a person's own: nothing that a module would know of."""

    def __init__(self) -> None:
        self.means: list[float] = []


def test_trying_a_model_does_not_move_what_it_notes_in_an_object_of_its_own() -> None:
    def note(model: Net, x: Tensor) -> None:
        if model.training:
            model.statistics.means.append(float(x.mean()))  # type: ignore[union-attr, operator]

    model = Net(note)
    model.statistics = Statistics()  # type: ignore[assignment]
    assert attach(model, ["first"], X[:2]).slots
    assert model.statistics.means == []  # type: ignore[union-attr, comparison-overlap]
    model(X)
    assert len(model.statistics.means) == 1  # type: ignore[union-attr, arg-type]


def test_a_limit_on_norms_is_no_reason_to_refuse() -> None:
    assert attach(Net(limits_its_norm), ["first"], X[:2]).slots


class Down(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        skips.append(self.conv(x).relu())
        return F.max_pool2d(skips[-1], 2)


class ListOfSkips(nn.Module):
    """A U-Net whose way down hands its maps to the way up in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deeper, self.up = Down(1), Down(4), nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        h = self.deeper(self.down(x, skips), skips)
        h = self.up(torch.cat([F.interpolate(h, scale_factor=2), skips.pop()], 1)).relu()
        return self.head(torch.cat([F.interpolate(h, scale_factor=2), skips.pop()], 1))  # type: ignore[no-any-return]


def test_what_is_handed_on_by_other_ways_than_outputs_is_computed_again() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 8, 8)
    model = attach(ListOfSkips(), ["deeper", "up"], x, layouts={"deeper": "conv2d"})
    assert model.survey.taps == ()
    for slot in model.slots:
        plant(model, slot, "conv", Stage.TRAINING)
    with torch.no_grad(), model.recording():
        plain = model(x)
        assert torch.equal(model.replay({model.slots[1]: SlotMode.OFF}, x), plain)
        with model.shadow(model.slots[0], x) as shadow:
            assert not torch.equal(shadow, plain)


def test_other_models_are_replayed_from_their_slots_on() -> None:
    assert attach(Net(), ["first"], X[:2]).survey.taps


@dataclass
class Answer:
    logits: Tensor


def test_outputs_in_which_no_tensor_can_be_seen_are_refused() -> None:
    class Wrapped(Net):
        def forward(self, x: Tensor) -> Answer:  # type: ignore[override]
            return Answer(super().forward(x))

    with pytest.raises(AttachError, match=r"Wrapped returns a Answer, in which no tensor can be seen: return a tensor"):
        attach(Wrapped(), ["first"], X[:2])


def test_what_is_counted_in_every_pass_is_no_difference_of_the_exported_model() -> None:
    class Observed(Net):
        """As with fake quantisation: what is seen, in evaluation too, decides what is given."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("most", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.most.mul_(0.5).add_(x.abs().max())
            h: Tensor = super().forward(x) / self.most
            return h

    model = attach(Observed(), ["first"], X[:2])
    check_exportable(model, X[:2])
