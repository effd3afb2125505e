"""Epochs whose updates somebody else makes: a loop of a person's own, or a Trainer.

An epoch is: `backward` and an update as often as the loop wants, then `end_epoch`, in which the network is measured.
The controller decides when the next epoch begins. What would leave a seed untrained is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from esper.actions import Effect
from esper.engine.eager import EpochRecord
from esper.engine.learner import Learner, Updates, norms_of
from esper.engine.measure import Evaluation, gather
from esper.policy.controller import Controller
from esper.tasks.feed import Batch
from esper.training.own.stepper import Stepper


class LoopUpdates(Stepper):
    """A stepper that counts the updates of its optimizer, whoever makes them."""

    def __init__(self, learner: Learner, controller: Controller, epochs: int, *, rent: float, seed: int) -> None:
        super().__init__(learner, controller, epochs, rent=rent, seed=seed)
        self._updates = Updates(learner)
        self._recording = ExitStack()
        self._stepped = True
        """The gradients that are there have been used."""
        self._last: list[list[Tensor]] = []
        """Gradients of the last update: their norms are needed of the epoch's last one only."""
        self._versions: list[int] = []
        self._seen_shadows = False
        learner.optimizer.hook(self._updated)

    # -- one epoch, in this order ---------------------------------------------------------------------------------

    def begin_epoch(self) -> Effect:
        """The controller decides, and its decision is carried out. The first `backward` of an epoch calls this."""
        if self._epoch is not None:
            return self._epoch.effect
        effect = super().begin_epoch()
        self.learner.model.train()
        self._updates, self._stepped = Updates(self.learner), True
        self._recording.enter_context(self._updates.recording())
        return effect

    @property
    def updates_made(self) -> int:
        """Since the last `end_epoch`."""
        return 0 if self._epoch is None else self._updates.made

    def backward(self, batch: Batch, **settings: Any) -> Tensor:
        """Add the gradients of the host's pass, and those of each incubating seed's shadow pass; gives the losses."""
        self.before_gradients()
        losses = self._updates.backward(batch, **settings)
        self._seen_shadows = True
        return losses

    def shadows(self, loss: Callable[[], Tensor], scale: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        """The shadow passes alone, each of them made by `loss`; gives their losses."""
        slots = self._updates.incubating
        found = [self.learner.add_shadow_gradients_of(loss, slot, scale) for slot in slots]
        self._seen_shadows = True
        return found

    def add_losses(self, losses: Sequence[Tensor]) -> None:
        """Of the host's pass, and of each shadow pass."""
        self._updates.add(torch.stack([loss.detach().float() for loss in losses]))

    def before_gradients(self) -> None:
        """What an update has used is forgotten."""
        self.begin_epoch()
        if self._stepped:
            self.learner.optimizer.zero_grad()
            self._last, self._versions, self._stepped = [], [], False

    def _updated(self) -> None:
        """After every update, whoever made it."""
        if self._epoch is None:
            return
        if self._updates.incubating and not self._seen_shadows:
            slot = self._updates.incubating[0]
            raise RuntimeError(
                f"an update was made without growth.backward(), so the seed at {slot.path} learns nothing: call "
                "growth.backward(batch) in place of loss.backward()"
            )
        self._updates.made += 1
        self._seen_shadows, self._stepped = False, True
        self._last = self.learner.held_gradients()
        self._versions = [gradient._version for found in self._last for gradient in found]

    def end_epoch(self) -> EpochRecord:
        """Measure the network and its seeds, undo a broken epoch, and let the seeds move on."""
        if self._epoch is None or not self._updates.made:
            raise RuntimeError("no update was made in this epoch: call growth.backward(batch) and growth.step() first")
        if self._versions != [gradient._version for found in self._last for gradient in found]:
            raise RuntimeError(
                "the gradients of the last update were overwritten in place: call zero_grad(set_to_none=True), which "
                "is torch's default"
            )
        self.keep_norms()
        self._recording.close()
        (trained,) = gather([self._updates.report()])
        record = self._judge(trained, self._measure())
        self._last, self._versions = [], []
        return record

    def keep_norms(self) -> None:
        """Of the last update's gradients. Needed before the end of an epoch where a scaler may leave updates out."""
        if self._last:
            self._updates.norms = norms_of(self._last, self.learner.model.device)

    def casting(self) -> AbstractContextManager[Any]:
        """The context of every pass."""
        return nullcontext()

    def _measure(self) -> Evaluation:
        with self.casting():
            return super()._measure()

    def close(self) -> None:
        """No more updates are counted."""
        super().close()
        self._recording.close()
        self.learner.optimizer.unhook()
