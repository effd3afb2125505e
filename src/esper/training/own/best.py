"""The best epoch of a run: when to stop (`patience`), and which network to keep (`keep_best`).

Best is by the accuracy (the metric) on the validation data, as people expect it; rent has its say in what grows. An
epoch at whose end the strength of a seed changes, because it is being blended in or out, is no candidate: what is kept
must be what was measured.
"""

from __future__ import annotations

import math
from typing import Any

from esper.engine.eager import EpochRecord
from esper.lifecycle import Stage
from esper.training.own.stepper import Stepper

UNDER_WAY = frozenset({Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING})
"""A seed whose worth is not known yet: a run does not stop here."""


class Best:
    """The best epoch of one network so far, and with `keep` a copy of the network as it was then."""

    def __init__(self, stepper: Stepper, *, keep: bool) -> None:
        self._stepper, self.keep = stepper, keep
        self.epochs = 0
        """Looked at."""
        self.epoch = 0
        """How many epochs the best network was trained; 0 where there was no candidate."""
        self.accuracy = -math.inf
        self._state: dict[str, Any] | None = None

    def note(self, record: EpochRecord) -> None:
        """Look at the epoch that has just ended."""
        model = self._stepper.learner.model
        self.epochs += 1
        if record.alphas != tuple(model.lifecycle.alphas):
            return
        if record.measured.accuracy > self.accuracy:
            self.epoch, self.accuracy = self.epochs, record.measured.accuracy
            self._state = self._stepper.network_state() if self.keep else None

    def exhausted(self, patience: int | None) -> bool:
        """Whether no candidate of the last `patience` epochs was better, and no seed is on its way."""
        stages = self._stepper.learner.model.lifecycle.stages
        return patience is not None and self.epochs - self.epoch >= patience and UNDER_WAY.isdisjoint(stages)

    def restore(self) -> int | None:
        """Make the network what it was when it was best; how many epochs it was trained then. None: it is now."""
        if self._state is None or self.epoch == self.epochs:
            return None
        self._stepper.return_to(self._state)
        return self.epoch

    def state_dict(self) -> dict[str, Any]:
        found = {"epochs": self.epochs, "epoch": self.epoch, "accuracy": self.accuracy}
        return {"keep": self.keep, **found, "network": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs, self.epoch, self.accuracy = state["epochs"], state["epoch"], state["accuracy"]
        self._state = state["network"]
