"""Break one learner among three, in every way we could think of: it recovers, and the others never notice.

Covers: R109, R146, R157
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable

import pytest
import torch
from learnable import breakable_learner, resident_bytes, waves
from torch import Tensor, nn

import esper
from esper.actions import WAIT, Action, Op
from esper.engine.eager import EagerEngine, EpochRecord
from esper.engine.governor import Fault, Governor
from esper.engine.learner import Learner
from esper.engine.measure import gather
from esper.lifecycle import Rules, Stage
from esper.tasks.registry import cross_entropy
from esper.training.own.run import DivergedError
from small_worlds import EAGER, germinate

SLOW_BLEND = Rules(training_epochs=1, gradient_activity=0.0, shadow_benefit=-1e9, blending_epochs=6)
FAULT_AT = 8
"""By then the hosts have learnt, and the seed that is germinated two epochs before is blending, at alpha 1/3."""


def nan_in_weights(learner: Learner) -> None:
    with torch.no_grad():
        next(learner.model.host.parameters()).view(-1)[3] = math.nan


def nan_in_running_statistics(learner: Learner) -> None:
    for name, buffer in learner.model.host.named_buffers():
        if name.endswith("running_var"):
            buffer[0] = math.nan


def nan_in_data(learner: Learner) -> None:
    learner.feed.poisoned = True  # type: ignore[attr-defined]


def nan_from_the_loss(learner: Learner) -> None:
    learner.loss.broken = True  # type: ignore[attr-defined]


def exploding_seed(learner: Learner) -> None:
    assert learner.model.slots[1].life.stage is Stage.BLENDING
    with torch.no_grad():
        for parameter in learner.model.seed_parameters(learner.model.slots[1]):
            parameter.mul_(1e6)


def diverging_rate(learner: Learner) -> None:
    for group in learner.optimizer.optimizer.param_groups:
        group["lr"] *= 1e4


def dead_units(learner: Learner) -> None:
    """All activations of the last stage are 0: a constant answer, a loss like at the start, nothing infinite."""
    with torch.no_grad():
        last = learner.model.host.stages[-1]  # type: ignore[index, union-attr]
        layer = next(m for m in reversed(list(last.modules())) if getattr(m, "bias", None) is not None)
        layer.bias.fill_(-1e4)
        learner.model.host.head.bias.zero_()  # type: ignore[union-attr]


FAULTS: dict[str, tuple[Callable[[Learner], None], set[Fault]]] = {
    "NaN in weights": (nan_in_weights, {Fault.NON_FINITE}),
    "NaN in data": (nan_in_data, {Fault.NON_FINITE}),
    "NaN from the loss": (nan_from_the_loss, {Fault.NON_FINITE}),
    "exploding seed": (exploding_seed, {Fault.DIVERGENCE}),
    "diverging rate": (diverging_rate, {Fault.DIVERGENCE, Fault.RETURN_TO_CHANCE}),
    "dead units": (dead_units, {Fault.DIVERGENCE, Fault.RETURN_TO_CHANCE}),
}


def run(host: str, fault: Callable[[Learner], None] | None, epochs: int = FAULT_AT + 4) -> tuple[EagerEngine, list]:
    """Three learners that each grow a seed; the middle one is broken before epoch FAULT_AT."""
    learners = [breakable_learner(host, seed, SLOW_BLEND) for seed in range(3)]
    untrained = gather([learner.evaluate() for learner in learners])
    engine = EagerEngine(
        learners, [Governor(one, chance=chance) for one, chance in zip(learners, untrained, strict=True)]
    )
    blueprint = "mlp" if host == "mlp" else "conv"
    records = []
    for epoch in range(epochs):
        if fault is not None and epoch == FAULT_AT:
            fault(engine.learners[1])
        records.append(engine.step([germinate(1, blueprint) if epoch == FAULT_AT - 2 else WAIT] * 3))
        if fault is diverging_rate and epoch == FAULT_AT:
            for group in engine.learners[1].optimizer.optimizer.param_groups:
                group["lr"] = 0.01
    return engine, records


@pytest.fixture(scope="module", params=["mlp", "conv with batch norm"])
def healthy(request: pytest.FixtureRequest) -> tuple[str, EagerEngine, list[list[EpochRecord]]]:
    return request.param, *run(request.param, None)


def everything_of(learner: Learner) -> list[Tensor]:
    """All tensors that decide the learner's future."""
    state = learner.optimizer.optimizer.state
    moments = [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
    generator = learner.feed.generator.get_state()  # type: ignore[attr-defined]
    return [*learner.model.state_dict().values(), *moments, generator, learner.rng_state]


@pytest.mark.parametrize("name", FAULTS)
def test_the_governor_acts_within_one_step(name: str, healthy: tuple[str, EagerEngine, list]) -> None:
    host, untouched, reference = healthy
    fault, kinds = FAULTS[name]
    engine, records = run(host, fault)

    # It acts in the step in which the fault happened, and only there.
    verdicts = [record.verdict for step in records for record in step]
    assert [i for i, verdict in enumerate(verdicts) if verdict is not None] == [3 * FAULT_AT + 1]
    broken: EpochRecord = records[FAULT_AT][1]
    assert broken.verdict is not None
    assert broken.verdict.kind in kinds, broken.verdict

    # The host's loss is what it was before the fault; exactly, when what the unfinished seed did is left out.
    before: EpochRecord = records[FAULT_AT - 1][1]
    without_seed = before.measured.loss + before.measured.contributions[1].loss
    assert broken.measured.loss == pytest.approx(without_seed, rel=1e-4)
    assert broken.measured.loss < 1.2 * before.measured.loss
    assert min(step[1].measured.loss for step in records[FAULT_AT + 1 :]) < 1.05 * before.measured.loss

    # The unfinished seed is gone, and the story says why.
    assert engine.learners[1].model.slots[1].seed is None
    removal = next(t for t in broken.transitions if t.target is Stage.PRUNED)
    assert removal.reason == f"governor: {broken.verdict.message}"
    assert broken.parameters == engine.learners[1].model.host_parameters

    # The others are, bit for bit, those of a run without the fault.
    for other in (0, 2):
        assert [step[other] for step in records] == [step[other] for step in reference]
        pairs = zip(everything_of(engine.learners[other]), everything_of(untouched.learners[other]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_running_statistics_are_watched_too() -> None:
    _, records = run("conv with batch norm", nan_in_running_statistics)
    assert records[FAULT_AT][1].verdict.kind is Fault.NON_FINITE
    assert math.isfinite(records[-1][1].measured.loss)


def test_a_seed_fossilized_in_the_breaking_epoch_survives() -> None:
    learner = breakable_learner(rules=EAGER)
    engine = EagerEngine([learner])
    engine.step([germinate(0, "mlp")])
    while learner.model.slots[0].life.stage is not Stage.HOLDING:
        engine.step([WAIT])
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    objects = list(learner.model.parameters())
    nan_from_the_loss(learner)
    record = engine.step([Action(Op.FOSSILIZE, 0)])[0]
    assert record.verdict is not None
    assert learner.model.slots[0].life.stage is Stage.FOSSILIZED
    after = dict(learner.model.named_parameters())
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(a is b for a, b in zip(learner.model.parameters(), objects, strict=True))
    in_optimizer = {id(p) for group in learner.optimizer.optimizer.param_groups for p in group["params"]}
    assert in_optimizer == {id(p) for p in objects}


def test_a_learner_that_is_not_active_stays_as_it_is() -> None:
    engine = EagerEngine([breakable_learner(seed=seed) for seed in range(2)])
    alone = EagerEngine([breakable_learner(seed=1)])
    engine.step([WAIT, WAIT])
    alone.step([WAIT])
    frozen = [tensor.clone() for tensor in everything_of(engine.learners[0])]
    records = engine.step([germinate(0, "mlp"), WAIT], [False, True])
    assert records[0] is None
    assert engine.learners[0].epoch == 1
    assert all(torch.equal(a, b) for a, b in zip(frozen, everything_of(engine.learners[0]), strict=True))
    assert records[1] == alone.step([WAIT])[0]


def test_an_unwatched_learner_is_left_alone() -> None:
    engine = EagerEngine([breakable_learner()], [None])
    nan_in_weights(engine.learners[0])
    record = engine.step([WAIT])[0]
    assert record.verdict is None
    assert math.isnan(record.measured.loss)
    with pytest.raises(ValueError, match="as many governors"):
        EagerEngine([breakable_learner()], [])


@pytest.mark.slow
def test_hundreds_of_rollbacks_need_no_more_memory() -> None:
    learner = breakable_learner("conv with batch norm", rules=EAGER)
    engine = EagerEngine([learner])
    governor = engine.governors[0]
    assert governor is not None

    def cycles(count: int) -> int:
        """So many times a healthy epoch, then a broken one; returns the number of tensors alive afterwards."""
        for _ in range(count):
            empty = learner.model.slots[0].life.stage is Stage.DORMANT
            engine.step([germinate(0, "norm") if empty else WAIT])
            nan_from_the_loss(learner)
            assert engine.step([WAIT])[0].verdict is not None
        gc.collect()
        return sum(type(thing) in (Tensor, nn.Parameter) for thing in gc.get_objects())

    learner.feed.updates_per_epoch = 1
    period = 12  # of the slot's life, in cycles: the same stage at the end of each count
    tensors, size = cycles(period), governor._snapshot.bytes
    places = [copy.data_ptr() for copy in governor._snapshot._copies.values()]
    assert cycles(25 * period) == tensors
    assert governor._snapshot.bytes == size
    assert [copy.data_ptr() for copy in governor._snapshot._copies.values()] == places


@pytest.mark.slow
def test_a_thousand_episodes_stay_within_fifty_megabytes() -> None:
    """R157: every episode a new host that grows, is broken, and is rolled back."""

    def episode(number: int) -> None:
        learner = breakable_learner("conv with batch norm", number, EAGER)
        learner.feed.updates_per_epoch = 2
        engine = EagerEngine([learner])
        for epoch in range(8):
            if epoch == 5 and number % 2:
                nan_in_weights(learner)
            engine.step([germinate(epoch % 2, "conv") if epoch in (0, 1) else WAIT])

    for number in range(50):
        episode(number)
    before = resident_bytes()
    for number in range(50, 1050):
        episode(number)
    grown = resident_bytes() - before
    assert grown < 50e6, f"{grown / 1e6:.0f} MB"


# -- one run, as a person sees it --------------------------------------------------------------------------------------


def grow_with(loss: Callable[[Tensor, Tensor], Tensor], epochs: int = 8) -> esper.Grown:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
    train, val = waves(256, 1), waves(128, 2)
    return esper.grow(
        net,
        (train.x, train.y),
        (val.x, val.y),
        slots=["2"],
        controller="none",
        epochs=epochs,
        batch_size=32,
        loss=loss,
        device="cpu",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )


def nan_in_updates(updates: range) -> Callable[[Tensor, Tensor], Tensor]:
    done = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal done
        value = cross_entropy(outputs, targets)
        if value.requires_grad:
            done += 1
            return value * math.nan if done - 1 in updates else value
        return value

    return loss


def test_a_run_goes_on_after_a_rollback_and_tells_of_it() -> None:
    grown = grow_with(nan_in_updates(range(20, 21)))  # eight updates an epoch: the third one breaks
    story = json.loads(json.dumps(grown.history.to_json(), allow_nan=False))
    verdicts = [epoch["verdict"] for epoch in story["epochs"]]
    assert [verdict is not None for verdict in verdicts] == [False, False, True, False, False, False, False, False]
    assert verdicts[2] == {
        "kind": "non-finite",
        "seen": None,
        "limit": None,
        "message": "the training loss became nan",
    }
    assert story["epochs"][2]["train_loss"] is None
    assert story["epochs"][2]["val_loss"] == story["epochs"][1]["val_loss"]
    assert grown.validation.accuracy > 75


def test_a_run_gives_up_after_three_rollbacks_in_a_row() -> None:
    with pytest.raises(DivergedError, match="undone 3 times in a row; in epoch 5"):
        grow_with(nan_in_updates(range(16, 1000)))
    with pytest.raises(DivergedError, match="undone 2 times in a row"):  # a run of two epochs: nothing was trained
        grow_with(nan_in_updates(range(1000)), epochs=2)
    assert len(grow_with(nan_in_updates(range(16, 32))).history.records) == 8  # two in a row are survived
