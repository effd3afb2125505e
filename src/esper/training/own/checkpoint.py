"""A folder from which `esper.grow` goes on after it was killed: one file, written whole after every epoch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from esper.errors import refused
from esper.files import write_whole
from esper.tasks.feed import Feed, LoaderFeed, TensorFeed
from esper.training.own.best import Best
from esper.training.own.data import length_of
from esper.training.own.stepper import StateError, Stepper

STATE_FILE = "growth.pt"
"""In the folder; in those of other trainers' checkpoints, beside their files."""


class Checkpoint:
    """The state of a run's networks, of their data, and of the best network of each so far."""

    def __init__(self, folder: Path, steppers: Sequence[Stepper], best: Sequence[Best]) -> None:
        self._path, self._steppers, self._best = folder / STATE_FILE, steppers, best
        for stepper in steppers:
            _check_feed(stepper.learner.feed)

    def load(self) -> None:
        """Go on from what is in the folder, if there is something."""
        if not self._path.exists():
            return
        saved = read_state(self._path)
        states, feeds = saved.get("networks", ()), saved.get("data", ())
        if len(states) != len(self._steppers):
            raise StateError(f"{self._path} is of a run {'with' if len(states) > 1 else 'without'} a control")
        if "best" not in saved:
            raise StateError(f"{self._path} is of an older version; remove it to begin anew")
        best = saved["best"]
        if any(found["keep"] != tracked.keep for found, tracked in zip(best, self._best, strict=True)):
            raise StateError(f"{self._path} is of a run {'without' if self._best[0].keep else 'with'} keep_best")
        for stepper, state, feed in zip(self._steppers, states, feeds, strict=True):
            stepper.load_state_dict(state)
            _load_feed(stepper.learner.feed, feed)
        for tracked, found in zip(self._best, best, strict=True):
            tracked.load_state_dict(found)

    def save(self) -> None:
        data = [_feed_state(stepper.learner.feed) for stepper in self._steppers]
        best = [tracked.state_dict() for tracked in self._best]
        networks = [stepper.state_dict() for stepper in self._steppers]
        write_state(self._path, {"networks": networks, "data": data, "best": best})


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Whole or not at all: who is killed meanwhile has the state of the epoch before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.save(state, content)
    write_whole(path, content.getvalue())


def read_state(path: Path) -> dict[str, Any]:
    with refused(StateError, f"{path} cannot be read; remove it to begin anew", Exception):
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return found


def _check_feed(feed: Feed) -> None:
    """A loader can be begun again, but not in the middle of a pass."""
    if isinstance(feed, LoaderFeed):
        length = length_of(feed.train)
        if length is None or feed.updates_per_epoch % length:
            raise StateError(
                "checkpoint= needs epochs that are whole passes over the training loader: leave updates_per_epoch= "
                "out, and give a loader with a length"
            )


def _feed_state(feed: Feed) -> dict[str, Any]:
    if isinstance(feed, TensorFeed):
        return {"generator": feed.generator.get_state(), "drawn": feed.drawn}
    return {"generators": [generator.get_state() for generator in _generators(feed)]}


def _load_feed(feed: Feed, state: dict[str, Any]) -> None:
    if isinstance(feed, TensorFeed):
        feed.generator.set_state(state["generator"])
        feed.drawn = state["drawn"]
        return
    for generator, saved in zip(_generators(feed), state["generators"], strict=True):
        generator.set_state(saved)


def _generators(feed: Feed) -> list[torch.Generator]:
    """Those that a DataLoader and its samplers have of their own."""
    loader = feed.train if isinstance(feed, LoaderFeed) else None
    if not isinstance(loader, DataLoader):
        return []
    batches = loader.batch_sampler
    holders = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
