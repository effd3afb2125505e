"""A replay gives what a full run with the same slots switched would give, and does not do the work before the slot.

Covers: R138 (leave-one-out of seeds, shadow of alpha = 0 seeds)
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from esper.growth.attach import attach
from esper.growth.blueprints import fitting
from esper.growth.model import GrowingModel
from esper.growth.slot import Slot, SlotMode
from esper.lifecycle import Stage
from small_worlds import WORLDS, World, plant


def full_run(model: GrowingModel, changes: dict[Slot, SlotMode], x: Tensor) -> Tensor:
    """The slow, obvious way: the whole host, with the slots switched and nothing remembered."""
    for slot, mode in changes.items():
        slot.mode = mode
    try:
        return model.host(x)
    finally:
        for slot in model.slots:
            slot.mode = SlotMode.LIVE


def grown(world: World, stages: tuple[Stage, ...]) -> GrowingModel:
    model = world.grown()
    for slot, stage in zip(model.slots, itertools.cycle(stages), strict=False):
        candidates = fitting(slot.shape)
        plant(model, slot, candidates[slot.index % len(candidates)].name, stage)
    return model


def combinations(model: GrowingModel) -> list[dict[Slot, SlotMode]]:
    """Every non-empty choice of OFF and SHADOW over the first three slots."""
    slots = model.slots[:3]
    choices = itertools.product((None, SlotMode.OFF, SlotMode.SHADOW), repeat=len(slots))
    changes = [{s: m for s, m in zip(slots, modes, strict=True) if m is not None} for modes in choices]
    return [change for change in changes if change]


@pytest.mark.parametrize(
    "stages", [(Stage.HOLDING,), (Stage.BLENDING, Stage.TRAINING), (Stage.TRAINING, Stage.FOSSILIZED)], ids=str
)
@pytest.mark.parametrize("name", WORLDS)
def test_a_replay_equals_a_full_run_with_the_same_slots_switched(name: str, stages: tuple[Stage, ...]) -> None:
    model = grown(WORLDS[name], stages).eval()
    x = WORLDS[name].examples(5).x
    plain = model(x)
    full_runs = [(changes, full_run(model, changes, x)) for changes in combinations(model)]
    with torch.no_grad(), model.recording():
        assert torch.equal(model(x), plain)
        for changes, expected in full_runs:
            torch.testing.assert_close(model.replay(changes, x), expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(model(x), plain)  # nothing of it stayed


@pytest.mark.parametrize("name", ["mlp", "conv1d", "conv2d", "nested", "tuple", "tangled"])
def test_a_replay_in_training_mode_equals_a_full_run_as_well(name: str) -> None:
    """Batch norms then use the batch; no dropout, so that both runs are the same function."""
    model = grown(WORLDS[name], (Stage.BLENDING, Stage.TRAINING)).train()
    x = WORLDS[name].examples(5).x
    modes = {slot: SlotMode.SHADOW if slot.life.stage is Stage.TRAINING else SlotMode.OFF for slot in model.slots}
    full_runs = {slot: full_run(model, {slot: mode}, x) for slot, mode in modes.items()}
    with model.recording():
        model(x)
        for slot, mode in modes.items():
            torch.testing.assert_close(model.replay({slot: mode}, x), full_runs[slot], atol=1e-6, rtol=1e-5)


class Counting(nn.Module):
    """A linear layer that counts its real work; hooks also run around a remembered answer."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.worked = [0]  # written in place: a replay forgets what a module notes on itself

    def forward(self, x: Tensor) -> Tensor:
        self.worked[0] += 1
        return self.linear(x).tanh()


class Chain(nn.Module):
    def __init__(self, length: int = 6) -> None:
        super().__init__()
        self.front = nn.Sequential(Counting(), Counting())
        self.layers = nn.ModuleList(Counting() for _ in range(length))
        self.head = Counting()

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def work(self) -> list[int]:
        found = [m.worked[0] for m in self.modules() if isinstance(m, Counting)]
        for module in self.modules():
            if isinstance(module, Counting):
                module.worked[0] = 0
        return found


def test_a_replay_skips_the_work_before_its_first_slot() -> None:
    host = Chain()
    model = attach(host, ["layers.1", "layers.3"], torch.randn(2, 4))
    for slot in model.slots:
        plant(model, slot, "mlp", Stage.HOLDING)
    x = torch.randn(3, 4)
    with torch.no_grad(), model.recording():
        host.work()
        model(x)
        assert host.work() == [1] * 9  # front 2, layers 6, head 1
        model.replay({model.slots[1]: SlotMode.OFF}, x)
        assert host.work() == [0, 0, 0, 0, 0, 0, 1, 1, 1]  # layers 4 and 5, head
        model.replay({model.slots[0]: SlotMode.OFF}, x)
        assert host.work() == [0, 0, 0, 0, 1, 1, 1, 1, 1]  # from layer 2 on
        model.replay({model.slots[1]: SlotMode.OFF, model.slots[0]: SlotMode.OFF}, x)
        assert host.work() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    model(x)
    assert host.work() == [1] * 9


def test_a_shadow_pass_skips_the_work_before_its_slot_too() -> None:
    host = Chain()
    model = attach(host, ["layers.4"], torch.randn(2, 4))
    plant(model, model.slots[0], "mlp", Stage.TRAINING)
    with model.recording():
        model(torch.randn(3, 4))
        host.work()
        with model.shadow(model.slots[0], torch.randn(3, 4)):
            pass
    assert host.work() == [0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_a_value_that_was_changed_in_place_is_computed_afresh() -> None:
    class Spoiling(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.front(x)
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == 1:
                    x.mul_(2.0)
            return self.head(x)

    host = Spoiling()
    model = attach(host, ["layers.1", "layers.3"], torch.randn(2, 4))
    for slot in model.slots:
        plant(model, slot, "mlp", Stage.HOLDING)
    x = torch.randn(3, 4)
    full_runs = [(changes, full_run(model, changes, x)) for changes in combinations(model)]
    with torch.no_grad(), model.recording():
        model(x)
        for changes, expected in full_runs * 2:  # a replay must not spoil the memory of the next one either
            torch.testing.assert_close(model.replay(changes, x), expected, atol=1e-6, rtol=1e-5)


def test_a_module_that_is_called_twice_only_in_training_is_not_answered_from_its_last_call() -> None:
    """The probe sees evaluation mode; what a pass really does is what counts."""

    class Twice(Chain):
        def forward(self, x: Tensor) -> Tensor:
            skip = self.front(x)
            x = self.front(-2.0 * x) if self.training else skip
            for layer in self.layers:
                x = layer(x)
            return self.head(x + skip)  # the first call is needed behind the slot

    model = attach(Twice(), ["layers.3"], torch.randn(2, 4)).train()
    plant(model, model.slots[0], "mlp", Stage.HOLDING)
    x = torch.randn(3, 4)
    changes = {model.slots[0]: SlotMode.OFF}
    expected = full_run(model, changes, x)
    with torch.no_grad(), model.recording():
        model(x)
        torch.testing.assert_close(model.replay(changes, x), expected)


def test_a_slot_that_a_pass_skipped_can_still_be_asked_for() -> None:
    """Layer drop: in training some layers are not called at all."""

    class Dropping(Chain):
        skip = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.front(x)
            for i, layer in enumerate(self.layers):
                x = x if self.skip and i == 3 else layer(x)
            return self.head(x)

    host = Dropping()
    model = attach(host, ["layers.1", "layers.3"], torch.randn(2, 4)).train()
    for slot in model.slots:
        plant(model, slot, "mlp", Stage.TRAINING)
    host.skip = True
    x = torch.randn(3, 4)
    with model.recording():
        plain = model(x)
        with model.shadow(model.slots[1], x) as outputs:
            assert torch.equal(outputs, plain)
        with model.shadow(model.slots[0], x) as outputs:
            assert not torch.equal(outputs, plain)


def test_a_forward_that_the_user_set_on_an_instance_is_still_there_afterwards() -> None:
    """As wrappers and compilers do: `module.forward = something`."""
    host = Chain()
    own = host.layers[0].forward
    host.layers[0].forward = lambda x: 10.0 * own(x)  # type: ignore[method-assign]
    mine = host.layers[0].forward
    model = attach(host, ["layers.2"], torch.randn(2, 4))
    plant(model, model.slots[0], "mlp", Stage.HOLDING)
    x = torch.randn(3, 4)
    with torch.no_grad(), model.recording():
        before = model(x)
        model.replay({model.slots[0]: SlotMode.OFF}, x)
    assert host.layers[0].forward is mine
    assert torch.equal(model(x), before)


def test_outputs_of_inference_mode_are_computed_afresh() -> None:
    class Frozen(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                x = self.front(x)
            x = x.clone()
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = attach(Frozen(), ["layers.2"], torch.randn(2, 4))
    plant(model, model.slots[0], "mlp", Stage.HOLDING)
    x = torch.randn(3, 4)
    changes = {model.slots[0]: SlotMode.OFF}
    expected = full_run(model, changes, x)
    with torch.no_grad(), model.recording():
        model(x)
        torch.testing.assert_close(model.replay(changes, x), expected)


def test_an_error_inside_a_replay_leaves_the_host_usable() -> None:
    host = Chain()
    model = attach(host, ["layers.2"], torch.randn(2, 4))
    plant(model, model.slots[0], "mlp", Stage.TRAINING)
    x = torch.randn(3, 4)
    with model.recording():
        before = model(x)
        real, host.head = host.head, nn.Linear(99, 1)
        with pytest.raises(RuntimeError), model.shadow(model.slots[0], x):
            pass
        host.head = real
        assert torch.equal(model(x), before)
    assert model.slots[0].mode is SlotMode.LIVE
    assert all("forward" not in vars(module) for module in host.modules())


def test_a_replay_without_a_recorded_pass_is_refused() -> None:
    model = attach(Chain(), ["layers.2"], torch.randn(2, 4))
    plant(model, model.slots[0], "mlp", Stage.HOLDING)
    with pytest.raises(RuntimeError, match="replay needs a recorded forward pass"):
        model.replay({model.slots[0]: SlotMode.OFF}, torch.randn(3, 4))
    with model.recording(), pytest.raises(RuntimeError, match="replay needs a recorded forward pass"):
        model.replay({model.slots[0]: SlotMode.OFF}, torch.randn(3, 4))
    with model.recording(), pytest.raises(RuntimeError, match="recorded already"), model.recording():
        pass
