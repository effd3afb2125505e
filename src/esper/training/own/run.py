"""One run of growth: epochs to the end; then settle, export, and look whether the export is what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from esper.env.rent import RENT_RATE, extra_rent, score
from esper.errors import first_line
from esper.growth.export import Saved, save
from esper.growth.model import GrowingModel, Survey
from esper.growth.plain import ExportError, allowed_gap, output_gap, plain_model
from esper.growth.probe import call, untouched
from esper.growth.slot import preserved_rng
from esper.lifecycle import Stage, Transition
from esper.policy.controller import Controller, NoGrowth
from esper.tasks.feed import Batch
from esper.training.interrupt import interruptible
from esper.training.own.checkpoint import Checkpoint
from esper.training.own.history import History
from esper.training.own.remarks import Outlook, Targets, remarks
from esper.training.own.stepper import Stepper

OnEpoch = Callable[[EpochRecord, EpochRecord | None], None]
"""Called after every epoch with what happened to the growing model, and to the control if there is one."""

MOST_ROLLBACKS = 3
"""Epochs in a row that are undone before a run is given up."""


class DivergedError(RuntimeError):
    """Training broke, and there is nothing sensible to go on with."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A grown model and how it came to be."""

    model: nn.Module
    """Plain PyTorch: no hooks, nothing of Esper's machinery; train it further, deploy it, keep it. In evaluation mode,
    in which it was measured; `model.train()` to train on."""
    history: History
    validation: Evaluation
    test: Evaluation | None
    """On the test data, if there are any. Nothing was decided by them."""
    control: Evaluation | None
    """The same host without growth, trained as long, on the same test (else validation) data."""
    example: Any
    interrupted: bool
    """The run was stopped before its last epoch."""
    remarks: tuple[str, ...] = ()
    """A sentence each: why nothing grew, that the run ended at chance, …"""

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def rent(self) -> float:
        """Points that one more host-size of parameters had to earn."""
        return self.history.rent

    @property
    def score(self) -> float:
        """Accuracy on the test (else validation) data minus the rent of the model's size, in points."""
        found = self.test or self.validation
        return score(found.accuracy, self.parameters, self.history.host_parameters, self.rent)

    @property
    def control_score(self) -> float | None:
        """The same for the control, whose size costs nothing."""
        host = self.history.host_parameters
        return None if self.control is None else score(self.control.accuracy, host, host, self.rent)

    def save(self, directory: str | Path) -> Saved:
        """Write the model in its portable forms, and its history, into `directory`."""
        return save(self.model, directory, self.example, history={**self.history.to_json(), "result": self.result()})

    def result(self) -> dict[str, Any]:
        """What was measured at the end, as data of JSON, which has no NaN."""
        found: dict[str, Any] = {
            "validation_accuracy": self.validation.accuracy,
            "test_accuracy": None if self.test is None else self.test.accuracy,
            "control_accuracy": None if self.control is None else self.control.accuracy,
            "score": self.score,
            "control_score": self.control_score,
        }
        found = {name: None if v is None or not math.isfinite(v) else v for name, v in found.items()}
        sizes = {"parameters": self.parameters, "host_parameters": self.history.host_parameters}
        return found | sizes | {"interrupted": self.interrupted, "remarks": list(self.remarks)}


def run_growth(
    learners: list[Learner],
    before: Outlook,
    example: Any,
    test: Callable[[], Iterable[Batch]] | None,
    seed: int,
    on_epoch: OnEpoch | None,
    on_remark: Callable[[str], None],
    checkpoint: str | Path | None = None,
) -> Grown:
    """Train to the end, or until Ctrl-C. The first learner grows; a second one is the control."""
    for remark in before.remarks:
        on_remark(remark)
    epochs = before.epochs
    controllers: list[Controller] = [before.controller, NoGrowth()]
    steppers = [
        Stepper(learner, controller, epochs, rent=before.rent, seed=seed)
        for learner, controller in zip(learners, controllers, strict=False)
    ]
    growing = steppers[0]
    kept = None if checkpoint is None else Checkpoint(Path(checkpoint), steppers)
    if kept is not None:
        kept.load()
    with interruptible() as interrupt:
        for stepper in steppers:
            stepper.start()
        while not growing.over and not interrupt.requested:
            for stepper in steppers:
                _make_updates(stepper)
            for stepper in steppers:
                stepper.end_epoch()
                _check_going_on(stepper.records, min(MOST_ROLLBACKS, epochs), stepper.learner.model)
            if kept is not None:
                kept.save()
            if on_epoch is not None:
                on_epoch(growing.records[-1], steppers[1].records[-1] if len(steppers) > 1 else None)
    if not growing.records:  # stopped before there was anything to keep
        raise KeyboardInterrupt
    for stepper in steppers:
        stepper.close()
    grown = finish_growth(learners, before, growing.untrained, growing.records, example, test)
    control = tuple(record.measured.accuracy for stepper in steppers[1:] for record in stepper.records)
    return replace(grown, history=replace(grown.history, control=control))


def _make_updates(stepper: Stepper) -> None:
    """An epoch of the learner's own data, with its own random numbers."""
    learner = stepper.learner
    with learner.own_rng(), learner.arithmetic():
        for _ in range(learner.feed.updates_per_epoch):
            stepper.backward(learner.feed.next_batch())
            learner.optimizer.step()
            learner.updated()


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


def finish_growth(
    learners: list[Learner],
    before: Outlook,
    untrained: Evaluation,
    records: Sequence[EpochRecord],
    example: Any,
    test: Callable[[], Iterable[Batch]] | None,
) -> Grown:
    """Decide about unfinished seeds, export, and look whether the export gives what was measured."""
    grown = learners[0]
    settled = settle(grown, before.rent)
    model = grown.model
    slots = tuple(slot.path for slot in model.slots)
    values, problem = _seed_values(grown)
    history = History(
        before.controller.name, slots, model.host_parameters, tuple(records), tuple(settled), before.rent, values
    )
    exported = plain_model(model, share=True).eval()  # the growing model ends here, so its tensors can be shared
    held_out = [_evaluate(learner, test) for learner in learners] if test else []
    targets = Targets(grown.feed.validation, before)
    validation = [_evaluate_export(grown, exported, targets)]
    validation += [_evaluate(one, one.feed.validation) for one in learners[1:]]
    return Grown(
        model=exported,
        history=history,
        validation=validation[0],
        test=held_out[0] if held_out else None,
        control=(held_out or validation)[1] if len(learners) > 1 else None,
        example=example,
        interrupted=len(records) < before.epochs,
        remarks=remarks(before, history, validation[0].accuracy, untrained.accuracy, targets) + problem,
    )


def _seed_values(learner: Learner) -> tuple[dict[str, SeedValue], tuple[str, ...]]:
    """By slot, what the seeds of the final network contribute; and a remark, if that could not be measured."""
    model = learner.model
    if not model.joined:
        return {}, ()
    try:
        values = gather([seed_values(model, learner.feed.validation, learner.loss, learner.score)])[0]
    except Exception as error:  # the person's metric, for networks that it never saw: no reason to lose the grown model
        detail = first_line(error)
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
            reason = "the run ended first"
            if 0.0 < worth <= owed:
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
