"""What `esper.grow` returns: the network, how it came to be, and what can be done with it."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from esper.engine.measure import Evaluation
from esper.env.rent import score
from esper.growth.export import Saved, save
from esper.growth.folder import ARCHITECTURE, FILES
from esper.growth.probe import call, untouched
from esper.growth.seeds import save_seeds
from esper.growth.tensors import count_parameters
from esper.plain_data import as_json
from esper.tables import Report
from esper.training.own.history import History
from esper.training.own.summary import acting_seeds, one_line, summary_of
from esper.training.plots import plot_history
from esper.training.speed import stopwatch

VIEWS = ("growth.png", "report.html")
"""What commands make of a saved result, beside it."""
WARM_UP, PASSES = 3, 20
"""Forward passes that are not timed, and those whose median is the latency."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A grown model and how it came to be."""

    model: nn.Module
    """Plain PyTorch: your modules under their names, and the seeds as parts of them; train it further, deploy it, keep
    it. In evaluation mode, in which it was measured; `model.train()` to train on."""
    history: History
    validation: Evaluation
    test: Evaluation | None
    """On the test data, if there are any. Nothing was decided by them."""
    control: Evaluation | None
    """The same host without growth, trained as long, on the same test (else validation) data."""
    ungrown: nn.Module | None
    """The control's network, plain and in evaluation mode."""
    paid: bool | None
    """Whether the score on the validation data is above the control's; if not, `ungrown` is the better network. None
    without a control, and where nothing grew."""
    example: Any
    interrupted: bool
    """The run was stopped before its last epoch."""
    remarks: tuple[str, ...] = ()
    """A sentence each: why nothing grew, that the run ended at chance, …"""
    verdict: str = ""
    """Whether growing paid, with the figures of all data and their noise; empty where `paid` is None."""
    control_validation: Evaluation | None = None
    """The control on the validation data, also where there are test data."""
    ended: float = field(default_factory=time.time, repr=False)
    """When the run ended, in seconds since 1970: a picture in a folder that is older shows another run."""

    @property
    def parameters(self) -> int:
        return count_parameters(self.model)

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

    @property
    def flops(self) -> int | None:
        """Floating-point operations of one example's forward pass; None where they could not be counted."""
        host, acting = self.history.host_flops, acting_seeds(self.history)
        return None if host is None else host + sum(story.flops or 0 for story in acting)

    def latency(self, example: Any = None) -> float:
        """Milliseconds of one forward pass of `example` (else of two examples of the data) on this machine, now.

        On request alone: wall-clock times belong to a machine, not to a model.
        """
        device, seconds = next(self.model.parameters()).device, []
        inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), self.example if example is None else example)
        with untouched(self.model):
            for _ in range(WARM_UP + PASSES):
                with stopwatch(device) as spent:
                    call(self.model, inputs)
                seconds += spent
        return 1000.0 * median(seconds[WARM_UP:])

    def summary(self) -> Report:
        """What grew where and why, what it is worth and costs, and the remarks, as tables that print."""
        return summary_of(self)

    def plot(self, path: str | Path | None = None) -> Any:
        """Accuracy and the stages of each slot over the epochs, into a file if one is named; a figure of matplotlib."""
        title = f"{type(self.model).__name__}; controller: {self.history.controller}"
        return plot_history(None if path is None else Path(path), self.history, title=title)

    def __repr__(self) -> str:
        return one_line(self)

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def save(self, directory: str | Path) -> Saved:
        """Write the model in its portable forms, and its history, into `directory`; where growing did not pay, also the
        network without growth, into `directory`/ungrown. All files of a result that was saved there before are
        replaced or removed; no others."""
        folder = Path(directory)
        used = any((folder / name).exists() for name in (ARCHITECTURE, *FILES))
        saved = save(self.model, folder, self.example, history={**self.history.to_json(), "result": self.result()})
        other = folder / "ungrown"
        if self.paid is False and self.ungrown is not None:
            save(self.ungrown, other, self.example)
        elif (other / ARCHITECTURE).exists():
            for name in (ARCHITECTURE, *FILES):
                (other / name).unlink(missing_ok=True)
            with suppress(OSError):  # somebody's own files are in it
                other.rmdir()
        for view in VIEWS if used else ():
            if (folder / view).is_file() and (folder / view).stat().st_mtime < self.ended:
                (folder / view).unlink()
        return saved

    def result(self) -> dict[str, Any]:
        """What was measured at the end, as data of JSON, which has no NaN."""
        found: dict[str, Any] = as_json(
            {
                "validation_accuracy": self.validation.accuracy,
                "test_accuracy": None if self.test is None else self.test.accuracy,
                "control_accuracy": None if self.control is None else self.control.accuracy,
                "score": self.score,
                "control_score": self.control_score,
                "paid": self.paid,
                "parameters": self.parameters,
                "host_parameters": self.history.host_parameters,
                "interrupted": self.interrupted,
                "remarks": self.remarks,
            }
        )
        return found

    def save_seeds(self, directory: str | Path) -> Path:
        """Write the seeds alone, without their host; `esper.load_seeds(host, directory)` puts them into one again."""
        return save_seeds(self.model, directory)
