"""One run of growth: epochs to the end; then settle, export, and look whether the export is what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from esper.engine.counterfactual import SeedValue, seed_values
from esper.engine.eager import EpochRecord
from esper.engine.learner import Learner
from esper.engine.measure import Evaluation, evaluate, gather
from esper.env.rent import RENT_RATE, extra_rent
from esper.errors import first_line
from esper.growth.costs import flops_per_example, seed_flops
from esper.growth.model import GrowingModel, Survey
from esper.growth.plain import ExportError, allowed_gap, as_written, output_gap, plain_model
from esper.growth.probe import call, untouched
from esper.growth.randomness import preserved_rng
from esper.growth.slot import preserved_modes
from esper.lifecycle import Stage, Transition
from esper.policy.controller import Controller, NoGrowth
from esper.tasks.feed import Batch
from esper.training.interrupt import interruptible
from esper.training.own.best import Best
from esper.training.own.checkpoint import Checkpoint
from esper.training.own.gpu import GpuOptions
from esper.training.own.grown import Grown
from esper.training.own.history import History
from esper.training.own.remarks import Outlook, Targets, remarks, still_learning
from esper.training.own.stepper import Stepper
from esper.training.own.verdict import Compared, Verdict

OnEpoch = Callable[[EpochRecord, EpochRecord | None], None]
"""Called after every epoch with what happened to the growing model, and to the control if there is one."""

MOST_ROLLBACKS = 3
"""Epochs in a row that are undone before a run is given up."""


class DivergedError(RuntimeError):
    """Training broke, and there is nothing sensible to go on with."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A run whose training is over."""

    untrained: Evaluation
    records: tuple[EpochRecord, ...]
    control: tuple[float, ...] = ()
    """Validation accuracy of the control, by epoch."""
    kept: int | None = None
    """Epochs after which the network was what it is now, if that was not the last one."""
    interrupted: bool = False


def run_growth(
    learners: list[Learner],
    before: Outlook,
    example: Any,
    test: Callable[[], Iterable[Batch]] | None,
    seed: int,
    on_epoch: OnEpoch | None,
    on_remark: Callable[[str], None],
    checkpoint: str | Path | None,
    *,
    patience: int | None,
    keep_best: bool,
    gpu: GpuOptions,
) -> Grown:
    """Train to the end, or until Ctrl-C, or until nothing gets better. The first learner grows; a second one is the
    control."""
    for remark in before.remarks:
        on_remark(remark)
    epochs = before.epochs
    controllers: list[Controller] = [before.controller, NoGrowth()]
    steppers = [
        Stepper(learner, controller, epochs, rent=before.rent, seed=seed, engine=gpu.engine)
        for learner, controller in zip(learners, controllers, strict=False)
    ]
    growing = steppers[0]
    best = [Best(stepper, keep=keep_best) for stepper in steppers]
    kept = None if checkpoint is None else Checkpoint(Path(checkpoint), steppers, best)
    if kept is not None:
        kept.load()
    with interruptible() as interrupt:
        for stepper in steppers:
            stepper.start()
        while not growing.over and not interrupt.requested and not best[0].exhausted(patience):
            for stepper, tracked in zip(steppers, best, strict=True):
                tracked.note(stepper.run_epoch())
                _check_going_on(stepper.records, min(MOST_ROLLBACKS, epochs), stepper.learner.model)
            if kept is not None:
                kept.save()
            if on_epoch is not None:
                on_epoch(growing.records[-1], steppers[1].records[-1] if len(steppers) > 1 else None)
    if not growing.records:  # stopped before there was anything to keep
        raise KeyboardInterrupt
    for stepper in steppers:
        stepper.close()
        as_written(stepper.learner.model)
    interrupted = not growing.over and not best[0].exhausted(patience)
    kept_epochs = [tracked.restore() for tracked in best]
    trained = Trained(
        untrained=growing.untrained,
        records=tuple(growing.records),
        control=tuple(record.measured.accuracy for record in steppers[1].records) if len(steppers) > 1 else (),
        kept=kept_epochs[0],
        interrupted=interrupted,
    )
    why_ended = _why_ended(trained, epochs, patience, tested=test is not None, goes_on=checkpoint is not None)
    grown = finish_growth(learners, before, trained, example, test, why_ended)
    return replace(grown, remarks=(*grown.remarks, *gpu.remarks))


def _why_ended(trained: Trained, epochs: int, patience: int | None, *, tested: bool, goes_on: bool) -> tuple[str, ...]:
    """Why a run ended before its last epoch, and which of its networks is kept."""
    found, made = [], len(trained.records)
    if trained.interrupted:
        more = "; the same call goes on from there" if goes_on else ""
        found.append(f"The run was interrupted after {made} of {epochs} epochs; what was grown so far is kept{more}.")
    elif made < epochs:
        found.append(
            f"The run ended after {made} of {epochs} epochs: {patience} in a row had no better validation accuracy "
            "(patience)."
        )
    if trained.kept is not None:
        honest = "" if tested else "; pass test_data= for a figure by which nothing was chosen"
        after = trained.records[trained.kept :]
        later = any(change.target is Stage.GERMINATED for record in after for change in record.transitions)
        found.append(
            f"Kept is the network after epoch {trained.kept} of {made}, which had the best validation accuracy "
            f"(keep_best){', without what was planted later' * later}. That figure, the best of {made}, is "
            f"optimistic{honest}."
        )
    return tuple(found)


def _check_going_on(past: Sequence[EpochRecord], most_rollbacks: int, model: nn.Module) -> None:
    """An epoch that breaks is undone and training goes on; when that does not help either, give up."""
    undone = [record for record in past[-most_rollbacks:] if record.verdict is not None]
    verdict = past[-1].verdict
    if verdict is not None and len(undone) == most_rollbacks:
        raise DivergedError(
            f"training broke and was undone {most_rollbacks} times in a row; in epoch {past[-1].epoch + 1}, "
            f"{verdict.message}: {_remedy(model)}"
        )


def _remedy(model: nn.Module) -> str:
    if any(parameter.dtype is torch.float16 for parameter in model.parameters()):
        return (
            "the model is in float16, in which small gradients become 0 and large ones infinite, and Adam divides by 0 "
            "(its eps of 1e-8 is 0): train it in single precision, model.float(), or in model.bfloat16()"
        )
    return "lower the learning rate, or look for extreme values in the data"


@contextmanager
def given_back(model: GrowingModel) -> Iterator[None]:
    """However the run inside ends, its host is its owner's again: as written, without seeds and gradients, in its
    modes."""
    with preserved_modes(model.host):
        try:
            yield
        finally:
            as_written(model.detach()).zero_grad(set_to_none=True)


def finish_growth(
    learners: list[Learner],
    before: Outlook,
    trained: Trained,
    example: Any,
    test: Callable[[], Iterable[Batch]] | None,
    why_ended: tuple[str, ...] = (),
) -> Grown:
    """Decide about unfinished seeds, export, and look whether the export gives what was measured."""
    grown = learners[0]
    model = grown.model
    acted = {slot.path for slot in model.joined}
    settled = settle(grown, before.rent)
    lost = sorted(acted - {slot.path for slot in model.joined})
    if trained.kept is not None and lost:
        why_ended += (
            f"In the network of that epoch unfinished seeds acted ({', '.join(lost)}), which the end of a run removes: "
            "what came back is that network without them, and was measured anew.",
        )
    values, problem = _seed_values(grown)
    exported = plain_model(model, share=True).eval()  # the growing model ends here, so its tensors can be shared
    host_flops, uncounted = _host_flops(model, exported, example)
    history = History(
        controller=before.controller.name,
        slots=tuple(slot.path for slot in model.slots),
        host_parameters=model.host_parameters,
        records=trained.records,
        settled=tuple(settled),
        rent=before.rent,
        values=values,
        shapes=tuple(slot.shape for slot in model.slots),
        host_flops=host_flops,
        untrained=trained.untrained.accuracy,
        control=trained.control,
        metric=before.metric,
        kept=trained.kept,
    )
    held_out, untested = _held_out(learners, test)
    targets = Targets(grown.feed.validation, before)
    validation = [_evaluate_export(grown, exported, targets)]
    validation += [_evaluate(one, one.feed.validation) for one in learners[1:]]
    verdict = None
    if len(learners) > 1 and model.joined:
        networks = (exported, learners[1].model)
        sets = [(validation, grown.feed.validation), *([(held_out, test)] if held_out and test else [])]
        compared = [Compared.of(found, networks, batches, grown.score) for found, batches in sets]
        verdict = Verdict(
            compared[0],
            compared[1] if len(compared) > 1 else None,
            (model.acting_parameters, model.host_parameters),
            before.rent,
            before.metric,
        )
    gained = verdict is not None and verdict.validation.gain > 0.0
    return Grown(
        model=exported,
        history=history,
        validation=validation[0],
        test=held_out[0] if held_out else None,
        control=(held_out or validation)[1] if len(learners) > 1 else None,
        ungrown=plain_model(learners[1].model, share=True).eval() if len(learners) > 1 else None,
        paid=None if verdict is None else verdict.paid,
        verdict="" if verdict is None else verdict.text,
        control_validation=validation[1] if len(learners) > 1 else None,
        example=example,
        interrupted=trained.interrupted,
        remarks=(
            *remarks(before, history, validation[0].accuracy, trained.untrained.accuracy, targets),
            *why_ended,
            *untested,
            *([verdict.text] if verdict is not None and not verdict.paid else []),
            *filter(None, [still_learning(trained.control, before.metric) if gained else ""]),
            *problem,
            *uncounted,
        ),
    )


def _held_out(
    learners: Sequence[Learner], test: Callable[[], Iterable[Batch]] | None
) -> tuple[list[Evaluation], tuple[str, ...]]:
    """Every network on the test data; and a remark, if a batch of these could not be measured."""
    if test is None:
        return [], ()
    try:
        return [_evaluate(learner, test) for learner in learners], ()
    except Exception as error:  # of the person's data or metric: no reason to lose what was grown
        return [], (f"The test data could not be measured: {first_line(error).rstrip('.')}.",)


def _host_flops(model: GrowingModel, exported: nn.Module, example: Any) -> tuple[int | None, tuple[str, ...]]:
    """Of one example's pass through the host alone; and a remark, if they could not be counted."""
    try:
        added = [seed_flops(s.seed.blueprint, s.shape, s.seed.blend) for s in model.joined if s.seed is not None]
        return flops_per_example(exported, example) - sum(added), ()
    except Exception as error:  # of a pass that the user's model does not make alone: no reason to lose what was grown
        return None, (f"The FLOPs of the network could not be counted: {first_line(error).rstrip('.')}.",)


def _seed_values(learner: Learner) -> tuple[dict[str, SeedValue], tuple[str, ...]]:
    """By slot, what the seeds of the final network contribute; and a remark, if that could not be measured."""
    model = learner.model
    if not model.joined:
        return {}, ()
    try:
        values = gather([seed_values(model, learner.feed.validation, learner.loss, learner.score)])[0]
    except Exception as error:  # the person's metric, for networks that it never saw: no reason to lose the grown model
        detail = first_line(error).rstrip(".")
        return {}, (f"What each seed contributes to the final network could not be measured: {detail}.",)
    return {model.slots[index].path: value for index, value in values.items()}, ()


def settle(learner: Learner, rent: float = RENT_RATE) -> list[Transition]:
    """End of the run: an unfinished seed stays if it was measured to help, and goes if it was not.

    Above the default rent, it must also contribute more than what its size costs beyond that.
    """
    transitions: list[Transition] = []
    model = learner.model
    for slot in model.live:
        life = slot.life
        worth = -math.inf if life.contribution is None else life.contribution.accuracy
        owed = 0.0 if slot.seed is None else max(0.0, extra_rent(rent, slot.seed.size, model.host_parameters))
        if life.fossilizable and (owed == 0.0 or worth > owed):
            transitions += model.fossilize(slot, epoch=learner.epoch, reason="the run ended, and it contributes")
        elif not (life.stage is Stage.BLENDING and worth > owed and not life.retiring):
            reason = life.why_retiring if life.retiring else "the run ended first"
            if not life.retiring and 0.0 < worth <= owed:
                reason = (
                    f"the run ended, and it contributes {worth:+.1f} points, less than the {owed:.1f} of its extra rent"
                )
            transitions += model.prune(slot, epoch=learner.epoch, reason=reason, at_once=True)
    return transitions


def _evaluate_export(learner: Learner, exported: nn.Module, batches: Callable[[], Iterable[Batch]]) -> Evaluation:
    """The exported model on the validation data, which must give what the grown one gives, batch by batch."""

    def compared() -> Iterator[Batch]:
        for batch in batches():
            outputs = []
            for model in (learner.model, exported):
                with untouched(model):  # and with the same random numbers
                    outputs.append(call(model, batch[0]))
            gap = output_gap(*outputs)
            if not gap <= allowed_gap(exported):
                if any(bool(leaf.isnan().any()) for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)):
                    raise ExportError(
                        "the model gives NaN for an example of the validation data (one that is all padding, say): "
                        "leave it out"
                    )
                raise ExportError(
                    f"the exported model does not give what the grown one gives: outputs differ by {gap:.2g} on the "
                    "validation data, so nothing is returned; please report it, with the model"
                )
            yield batch

    with preserved_rng(learner.model.device):
        alone = GrowingModel(exported, Survey((), ())).eval()
        measured = evaluate(alone, compared(), learner.loss, learner.score)
        return gather([measured])[0]


def _evaluate(learner: Learner, batches: Callable[[], Iterable[Batch]]) -> Evaluation:
    with preserved_rng(learner.model.device):
        return gather([evaluate(learner.model, batches(), learner.loss, learner.score)])[0]
