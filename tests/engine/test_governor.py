"""When the governor calls an epoch broken, by hand-worked numbers; what its snapshot holds; that it keeps quiet.

Covers: R109, R146
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learnable import breakable_learner
from torch import nn

from esper.actions import WAIT
from esper.engine.eager import EagerEngine
from esper.engine.governor import Fault, Governor, Snapshot, permanent_tensors
from esper.engine.learner import Learner, TrainReport
from esper.engine.measure import Evaluation, gather
from esper.engine.prepare import task_learner
from esper.env.situation import observe
from esper.lifecycle import Stage
from esper.tasks import load_task
from esper.tasks.feed import TensorFeed
from esper.training.catalogue import make_controller
from small_worlds import EAGER, FOREIGN, WORLDS, force, germinate, learner_for, plant, run_epoch

FINE = TrainReport(loss=1.0, host_gradient=1.0, seed_gradients={}, shadow_losses={})
ROSE = replace(FINE, loss=1.26)
"""A training loss over 1.25 times the usual one: the second witness."""
UNTRAINED = Evaluation(loss=2.3, accuracy=10.0)


def governor_after(*levels: tuple[float, float], chance: Evaluation | None = UNTRAINED) -> Governor:
    """A governor that has seen healthy epochs with these validation losses and accuracies."""
    governor = Governor(breakable_learner(), chance=chance)
    for loss, accuracy in levels:
        assert governor.check(FINE, Evaluation(loss, accuracy)) is None
        governor.keep(FINE, Evaluation(loss, accuracy))
    return governor


# -- verdicts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_a_fault_from_the_first_epoch_on(value: float) -> None:
    governor = governor_after()
    for trained, measured in [
        (replace(FINE, loss=value), UNTRAINED),
        (FINE, replace(UNTRAINED, loss=value)),
        (replace(FINE, finite=False), UNTRAINED),
    ]:
        verdict = governor.check(trained, measured)
        assert verdict is not None
        assert verdict.kind is Fault.NON_FINITE
        assert verdict.limit == math.inf


def test_divergence_is_far_above_the_recent_level_and_worse_than_knowing_nothing() -> None:
    # Losses 1.0, 1.2, 0.8: median 1, median deviation 0.2, robust spread 0.2965, six of them 1.779.
    # Limits: 3 x 1 = 3; 1 + 1.779 = 2.779; 1.5 x 2.3 = 3.45. The largest counts.
    governor = governor_after((1.0, 25.0), (1.2, 25.0), (0.8, 25.0))
    assert governor.check(ROSE, Evaluation(3.44, 12.0)) is None
    verdict = governor.check(ROSE, Evaluation(3.46, 12.0))
    assert verdict is not None
    assert verdict.kind is Fault.DIVERGENCE
    assert verdict.limit == pytest.approx(3.45)
    assert verdict.message == "the validation loss jumped from about 1 to 3.46 (limit 3.45)"


def test_a_validation_loss_alone_is_believed_only_beyond_doubt() -> None:
    """Running statistics may lag behind while training goes well. The level 0.5, the limit 3.45: certain at 30."""
    governor = governor_after((0.5, 90.0))
    for calm in (FINE, replace(FINE, loss=1.25)):
        assert governor.check(calm, Evaluation(29.9, 10.0)) is None
        assert governor.check(calm, Evaluation(30.1, 10.0)) is not None
    assert governor.check(ROSE, Evaluation(3.5, 10.0)) is not None


def test_a_loss_that_a_few_examples_carry_away_is_no_divergence() -> None:
    # 90 % is 80 points above chance; with half of them left, 50 %, the network is still a network.
    # The limit is 3.45, which is 3.15 above the level; ten times that, 31.8, is beyond doubt.
    governor = governor_after((0.3, 90.0))
    assert governor.check(ROSE, Evaluation(31.7, 50.0)) is None
    assert governor.check(ROSE, Evaluation(31.7, 49.0)) is not None
    assert governor.check(ROSE, Evaluation(31.9, 90.0)) is not None
    # Nothing learnt yet: half of the 20 points that count as having learnt, so 20 %.
    governor = governor_after((2.2, 12.0))
    assert governor.check(ROSE, Evaluation(30.0, 20.0)) is None
    assert governor.check(ROSE, Evaluation(30.0, 19.0)) is not None


def test_noisy_training_has_a_wider_limit() -> None:
    # Losses 4, 2, 6: median 4, median deviation 2, so 4 + 6 x 2.9652 = 21.79 is beyond 3 x 4 and 1.5 x 2.3.
    governor = governor_after((2.0, 25.0), (4.0, 25.0), (6.0, 25.0))
    assert governor.check(ROSE, Evaluation(21.7, 10.0)) is None
    verdict = governor.check(ROSE, Evaluation(21.9, 10.0))
    assert verdict is not None
    assert verdict.limit == pytest.approx(4 + 6 * 1.4826 * 2)


def test_losses_may_be_negative() -> None:
    # A log-density: median -5, so -5 + 2 x 5 = 5 lies above the start, 1 + 0.5 x 1 = 1.5.
    governor = governor_after((-5.0, 0.0), chance=Evaluation(1.0, 0.0))
    assert governor.check(ROSE, Evaluation(4.9, 0.0)) is None
    verdict = governor.check(ROSE, Evaluation(5.1, 0.0))
    assert verdict is not None
    assert verdict.limit == pytest.approx(5.0)


def test_an_epoch_can_diverge_before_anything_was_learnt() -> None:
    """The untrained network stands for the level that is not known yet: 3 x 2.3 is 4.6 above, ten times that 48.3."""
    assert governor_after().check(ROSE, Evaluation(48.2, 10.0)) is None
    assert governor_after().check(ROSE, Evaluation(48.4, 10.0)) is not None
    assert governor_after(chance=None).check(ROSE, Evaluation(1e9, 10.0)) is None  # nothing to compare with
    assert governor_after(chance=Evaluation(math.inf, 0.0)).check(ROSE, UNTRAINED) is None


def test_return_to_chance_means_that_nine_tenths_of_both_gains_are_lost() -> None:
    # Learnt: 90 - 10 = 80 points and 2.3 - 0.5 = 1.8 of loss. Lost: at most 90 - 72 = 18 %, at least 0.5 + 1.62 = 2.12.
    governor = governor_after((0.6, 88.0), (0.5, 90.0), (0.4, 92.0))
    assert governor.check(ROSE, Evaluation(2.2, 19.0)) is None
    assert governor.check(ROSE, Evaluation(2.1, 12.0)) is None
    verdict = governor.check(ROSE, Evaluation(2.2, 17.0))
    assert verdict is not None
    assert verdict.kind is Fault.RETURN_TO_CHANCE
    assert verdict.limit == pytest.approx(2.12)
    assert "from about 90.0 % to 17.0 % (chance 10.0 %)" in verdict.message


def test_what_was_never_learnt_cannot_be_lost() -> None:
    for level in [(1.0, 29.0), (1.8, 60.0)]:  # under 20 points; under a quarter of the loss
        assert governor_after(level).check(ROSE, Evaluation(2.3, 10.0)) is None


def test_without_a_chance_level_the_first_evaluation_stands_for_it() -> None:
    governor = governor_after((2.0, 20.0), (0.5, 90.0), (0.5, 90.0), (0.5, 90.0), chance=None)
    assert governor.chance == Evaluation(2.0, 20.0)
    verdict = governor.check(ROSE, Evaluation(1.9, 21.0))
    assert verdict is not None
    assert verdict.kind is Fault.RETURN_TO_CHANCE


def test_the_level_is_that_of_the_last_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.engine.governor.WINDOW", 3)
    governor = Governor(breakable_learner(), chance=Evaluation(0.01, 0.0))
    for loss in (0.1, 0.1, 0.1, 1.0, 1.0, 1.0):
        governor.keep(FINE, Evaluation(loss, 0.0))
    assert governor.check(ROSE, Evaluation(2.9, 0.0)) is None
    assert governor.check(ROSE, Evaluation(3.1, 0.0)) is not None


def test_after_a_rollback_the_restored_network_sets_the_level() -> None:
    governor = governor_after((0.1, 95.0), chance=Evaluation(0.2, 40.0))
    assert governor.check(ROSE, Evaluation(1.0, 60.0)) is not None
    governor.resume(Evaluation(0.9, 60.0))  # the host without its unfinished seeds
    assert governor.check(ROSE, Evaluation(1.0, 42.0)) is None
    assert governor.check(ROSE, Evaluation(2.8, 42.0)) is not None
    governor.resume(Evaluation(math.nan, 0.0))  # not even that helped: the untrained level is left, 3 x 0.2
    assert governor.check(ROSE, Evaluation(0.5, 42.0)) is None
    assert governor.check(ROSE, Evaluation(0.7, 42.0)) is not None


def test_taking_a_seed_out_is_no_fault() -> None:
    """A host that stands at chance without its seed falls back there when the seed is pruned, by decision."""
    learner = breakable_learner(rules=EAGER)
    plant(learner.model, learner.model.slots[0], "mlp", Stage.HOLDING)
    governor = Governor(learner, chance=UNTRAINED)
    for _ in range(5):
        assert governor.check(ROSE, Evaluation(0.2, 95.0)) is None
        governor.keep(FINE, Evaluation(0.2, 95.0))
    collapsed = Evaluation(9.0, 10.0)  # sure of itself and wrong, as networks are that lose a part
    life = learner.model.slots[0].life
    force(learner.model.slots[0], age=100)
    learner.model.prune(learner.model.slots[0], epoch=0)
    assert 0.0 < life.alpha < 1.0
    assert governor.check(ROSE, collapsed) is None  # on its way out
    governor.keep(FINE, collapsed)
    learner.model.prune(learner.model.slots[0], epoch=1, at_once=True)
    assert governor.check(ROSE, collapsed) is None  # gone
    governor.keep(FINE, collapsed)
    for _ in range(3):  # the host learns it without the seed: from now on that is normal
        assert governor.check(ROSE, Evaluation(0.2, 95.0)) is None
        governor.keep(FINE, Evaluation(0.2, 95.0))
    assert governor.check(ROSE, collapsed) is not None


def test_a_metric_without_a_number_is_no_fault() -> None:
    governor = governor_after((0.5, math.nan))
    assert governor.check(ROSE, Evaluation(2.3, math.nan)) is None


@given(st.lists(st.tuples(st.floats(0.0, 3.4), st.floats(20.0, 100.0)), min_size=1, max_size=30))
def test_noise_short_of_worse_than_knowing_nothing_is_never_a_fault(levels: list[tuple[float, float]]) -> None:
    """Whatever the losses do below 1.5 times the untrained one, while a tenth of what there is to learn is known."""
    governor = Governor(_idle, chance=UNTRAINED)
    for loss, accuracy in levels:
        assert governor.check(ROSE, Evaluation(loss, accuracy)) is None
        governor.keep(FINE, Evaluation(loss, accuracy))


_idle = breakable_learner()


# -- the flag that training reports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["host", "seed", "buffer"])
def test_training_reports_whether_all_weights_are_finite(where: str) -> None:
    learner = learner_for(FOREIGN["spectral"])
    run_epoch(learner, germinate(0, "conv"))
    assert gather([learner.train()])[0].finite
    if where == "buffer":
        learner.model.host.register_buffer("unused", torch.tensor([1.0, math.nan]))
    else:
        module = learner.model.host if where == "host" else learner.model.seeds["0"]
        module.register_parameter("unused", nn.Parameter(torch.tensor([1.0, math.inf])))
    assert not gather([learner.train()])[0].finite


def test_infinities_in_a_mask_and_empty_tensors_are_no_fault() -> None:
    learner = learner_for(FOREIGN["tuple"])
    learner.model.host.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    learner.model.host.register_parameter("none", nn.Parameter(torch.zeros(0)))
    learner.model.host.register_buffer("wide", torch.ones(2, dtype=torch.float64))
    assert gather([learner.train()])[0].finite


# -- snapshot and rollback ---------------------------------------------------------------------------------------------


def changed(learner: Learner) -> None:
    with torch.no_grad():
        for tensor in (*learner.model.parameters(), *learner.model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(1.0)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_rollback_restores_hosts_of_any_kind(name: str) -> None:
    """In place: parameters stay the objects that the optimizer holds. The spectral host replaces a buffer."""
    learner = learner_for(FOREIGN[name], rules=EAGER)
    run_epoch(learner)
    governor = Governor(learner)
    before = {n: t.detach().clone() for n, t in permanent_tensors(learner.model).items()}
    objects = list(learner.model.host.parameters())
    learner.apply(germinate(0, learner.model.candidates(learner.model.slots[0])[0].name))
    learner.begin_epoch()
    trained = gather([learner.train()])[0]
    changed(learner)
    verdict = governor.check(replace(trained, loss=math.nan), UNTRAINED)
    assert verdict is not None
    transitions = governor.roll_back(verdict)
    after = permanent_tensors(learner.model)
    assert {n: after[n].tolist() for n in after} == {n: before[n].tolist() for n in before}
    assert all(a is b for a, b in zip(learner.model.host.parameters(), objects, strict=True))
    assert [t.target for t in transitions] == [Stage.PRUNED]
    assert not learner.optimizer.optimizer.state
    assert [group.get("slot") for group in learner.optimizer.optimizer.param_groups] == [None]
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    run_epoch(learner)
    assert all(p in learner.optimizer.optimizer.state for p in objects)


def test_random_numbers_and_minibatches_go_on_after_a_rollback() -> None:
    learner = learner_for(FOREIGN["in-place"])
    assert isinstance(learner.feed, TensorFeed)
    governor = Governor(learner)
    gather([learner.train()])
    stream, dropout = learner.feed.generator.get_state(), learner.rng_state
    verdict = governor.check(replace(FINE, loss=math.nan), UNTRAINED)
    assert verdict is not None
    governor.roll_back(verdict)
    assert torch.equal(learner.feed.generator.get_state(), stream)
    assert torch.equal(learner.rng_state, dropout)


def test_a_snapshot_is_one_copy_in_cpu_memory_that_is_written_over() -> None:
    learner = learner_for(FOREIGN["spectral"])
    snapshot = Snapshot(learner.model)
    size = sum(t.numel() * t.element_size() for t in (*learner.model.parameters(), *learner.model.buffers()))
    assert snapshot.bytes == size
    places = [copy.data_ptr() for copy in snapshot._copies.values()]
    for _ in range(3):
        run_epoch(learner)
        snapshot.take()
    assert [copy.data_ptr() for copy in snapshot._copies.values()] == places
    own = {tensor.data_ptr() for tensor in permanent_tensors(learner.model).values()}
    assert own.isdisjoint(places)
    assert all(not copy.is_cuda and not copy.requires_grad for copy in snapshot._copies.values())


@pytest.mark.parametrize("name", WORLDS)
def test_permanent_tensors_are_found_as_torch_finds_them(name: str) -> None:
    model = learner_for(WORLDS[name], rules=EAGER).model
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    plant(model, model.slots[-1], model.candidates(model.slots[-1])[0].name, Stage.TRAINING)
    found = permanent_tensors(model)
    assert list(found) == list(wanted)  # in the same order; a seed that may go again is not among them
    assert all(found[path] is tensor for path, tensor in wanted.items())


def test_unfinished_seeds_are_not_in_the_snapshot_and_fossilized_ones_are() -> None:
    learner = learner_for(FOREIGN["tuple"], rules=EAGER)
    engine = EagerEngine([learner])
    governor = engine.governors[0]
    assert governor is not None
    host_only = governor._snapshot.bytes
    engine.step([germinate(0, "lora")])
    while learner.model.slots[0].life.stage is not Stage.HOLDING:
        engine.step([WAIT])
    assert governor._snapshot.bytes == host_only
    learner.model.fossilize(learner.model.slots[0], epoch=learner.epoch)
    governor.fossilized(learner.model.slots[0].path)
    seed = sum(4 * parameter.numel() for parameter in learner.model.seed_parameters(learner.model.slots[0]))
    assert governor._snapshot.bytes == host_only + seed


def test_a_buffer_that_appears_or_changes_its_shape_does_not_break_the_rollback() -> None:
    learner = learner_for(FOREIGN["tuple"])
    learner.model.host.register_buffer("cache", torch.ones(3))
    governor = Governor(learner)
    learner.model.host.cache = torch.zeros(5)
    learner.model.host.register_buffer("late", torch.ones(2))
    verdict = governor.check(replace(FINE, loss=math.nan), UNTRAINED)
    assert verdict is not None
    governor.roll_back(verdict)
    assert torch.equal(learner.model.host.cache, torch.ones(3))
    assert torch.equal(learner.model.host.late, torch.ones(2))


# -- quiet in ordinary training ----------------------------------------------------------------------------------------


def verdicts_in_a_run(task_name: str, controller_name: str, seed: int, epochs: int) -> list[str]:
    learner = task_learner(load_task(task_name), seed, epochs)
    controller = make_controller(controller_name)
    controller.reset([seed])
    engine, records = EagerEngine([learner]), []
    for _ in range(epochs):
        records += engine.step([controller.decide([observe(learner, epochs, records)])[0]])
    return [record.verdict.message for record in records if record.verdict is not None]


def test_no_alarm_in_ordinary_training() -> None:
    assert verdicts_in_a_run("digits", "random", 0, 20) == []


@pytest.mark.slow
@pytest.mark.parametrize("controller", ["random", "heuristic"])
@pytest.mark.parametrize("task", ["digits", "mnist1d"])
def test_no_alarm_in_many_runs(task: str, controller: str) -> None:
    assert [message for seed in range(4) for message in verdicts_in_a_run(task, controller, seed, 40)] == []
