"""The epochs of one growing network: decide, train, measure, move on; and its state, to go on from.

`esper.grow` runs on it as it is: the engine trains an epoch. In a loop of a person's own (`esper.Growth`) somebody else
makes the updates: `loop_updates.py`.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from esper.actions import Effect
from esper.engine.eager import EagerEngine, EpochRecord, EpochUnderWay
from esper.engine.governor import Governor
from esper.engine.learner import Learner, TrainReport
from esper.engine.measure import Evaluation
from esper.env.rent import RENT_RATE
from esper.env.situation import Observer
from esper.errors import refused
from esper.growth.blueprints import Style
from esper.growth.randomness import OtherRngs
from esper.growth.seed import Seed
from esper.lifecycle import Stage
from esper.plain_data import as_data, from_data
from esper.policy.controller import Controller, decisions_of
from esper.slot_columns import COLUMNS

FORMAT = 1

MakeEngine = Callable[[Sequence[Learner], Sequence[Governor | None]], EagerEngine]


class StateError(ValueError):
    """A saved state that is not of this run, or cannot be made."""


class Stepper:
    """A learner and its controller. `start` or `load_state_dict` comes first."""

    def __init__(
        self,
        learner: Learner,
        controller: Controller,
        epochs: int,
        *,
        rent: float = RENT_RATE,
        seed: int = 0,
        engine: MakeEngine = EagerEngine,
    ) -> None:
        self.learner, self.controller = learner, controller
        self.epochs, self.rent, self._seed = epochs, rent, seed
        self.records: list[EpochRecord] = []
        """What happened, by epoch."""
        self.untrained = Evaluation(math.nan, math.nan)
        self._observer = Observer(learner, epochs, rent)
        self._engine = engine([learner], [None])
        self._epoch: EpochUnderWay | None = None

    # -- one epoch, in this order ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Measure the untrained network."""
        if self._engine.governors[0] is not None:
            return
        self.untrained = self._measure()
        if math.isnan(self.untrained.accuracy):
            raise ValueError(
                "the metric is nan on the validation data before the training: it must be a number for every example, "
                "or for the whole set, whatever a model predicts"
            )
        self._engine.governors = [Governor(self.learner, chance=self.untrained)]
        self.controller.reset([self._seed])

    def begin_epoch(self) -> Effect:
        """The controller decides, and its decision is carried out."""
        if self._epoch is None:
            if self.over:
                raise RuntimeError(f"the run has had its {self.epochs} epochs: finish() it, or pass more epochs=")
            self.start()
            (action,) = decisions_of(self.controller, [self._observer.observe(self.records)])
            self._epoch = EpochUnderWay.begin(self.learner, self._engine.governors[0], action)
        return self._epoch.effect

    def run_epoch(self) -> EpochRecord:
        """A whole epoch, trained and measured by the engine on the learner's own data."""
        self.begin_epoch()
        ((trained, measured),) = self._engine.run([self.learner])
        return self._judge(trained, measured)

    def _judge(self, trained: TrainReport, measured: Evaluation) -> EpochRecord:
        """Undo a broken epoch, let the seeds move on, note what happened."""
        assert self._epoch is not None
        self._epoch.judge(trained, measured)
        (record,) = self._engine.end([self._epoch])
        self.records.append(record)
        self._epoch = None
        self.learner.optimizer.zero_grad()
        return record

    def _measure(self) -> Evaluation:
        return self._engine.measure([self.learner])[0]

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self.learner.epoch

    @property
    def between_epochs(self) -> bool:
        """Whether a state can be taken now."""
        return self._epoch is None

    @property
    def over(self) -> bool:
        return self.learner.epoch >= self.epochs

    def close(self) -> None:
        """The training is over."""
        self._engine.close()

    # -- to go on after a stop ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain data and tensors, between two epochs; `load_state_dict` goes on exactly from there."""
        if self._epoch is not None:
            raise StateError("a state is taken between two epochs: call growth.state_dict() after growth.end_epoch()")
        self.start()
        learner = self.learner
        for verb in ("state_dict", "load_state_dict"):
            if not callable(getattr(self.controller, verb, None)):
                raise StateError(
                    f"the controller {self.controller.name} has no {verb}(), so it could not go on where it was: give "
                    "it state_dict() and load_state_dict(state) (of one that remembers nothing: {} and no effect)"
                )
        _check_readable(learner.model.host)
        governor = self._engine.governors[0]
        assert governor is not None
        return {
            "format": FORMAT,
            "run": self._identity(),
            **self.network_state(),
            "optimizer": learner.optimizer.state(),
            "governor": governor.state(),
            "controller": self.controller.state_dict(),  # type: ignore[attr-defined]
            "untrained": as_data(self.untrained),
            "records": as_data(self.records),
            "rng": _rng_state(learner),
        }

    def network_state(self) -> dict[str, Any]:
        """The part of a state that is the network itself: host, seeds and slots."""
        model = self.learner.model
        return {
            "epoch": self.learner.epoch,
            "host": _copies(model.host.state_dict()),
            "buffers": _copies(_left_out(model.host)),
            "seeds": [
                {
                    "slot": slot.index,
                    "blueprint": slot.seed.blueprint,
                    "blend": slot.seed.blend,
                    "style": slot.seed.shape.style.data(),
                    "source": slot.seed.shape.source,
                    "tensors": _copies(slot.seed.state_dict()),
                    "shadow": [buffer.clone() for buffer in slot.shadow_buffers],
                }
                for slot in model.slots
                if slot.seed is not None
            ],
            "slots": {name: getattr(model.lifecycle.columns, name).clone() for name in COLUMNS},
            "born": model.lifecycle.born,
            "why_retiring": list(model.lifecycle._why_retiring),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, in a fresh object over a fresh model of the same architecture."""
        if self._epoch is not None or self.records:  # a network that only was measured is still as it was
            raise StateError("this growth has begun: load the state into a new one, before its first update")
        if state.get("format") != FORMAT:
            raise StateError(f"this is no state of a growth that this version reads (format {state.get('format')!r})")
        for name, value in self._identity().items():
            if state["run"].get(name) != value:
                raise StateError(
                    f"the state is of another run: its {name} is {state['run'].get(name)!r}, not {value!r} (a "
                    "new run needs another place for its state, or that one without the old files)"
                )
        learner, model = self.learner, self.learner.model
        self._set_network(state)
        for group in state["optimizer"]["optimizer"]["param_groups"]:  # one for each seed, in the order of then
            if (index := group.get("slot")) is not None:
                slot = model.slots[index]
                learner.optimizer.add(index, model.seed_parameters(slot), model.near_parameters(slot))
        learner.optimizer.load(state["optimizer"])
        self.untrained = from_data(Evaluation, state["untrained"])
        self.records = [from_data(EpochRecord, record) for record in state["records"]]
        governor = Governor(learner)
        governor.load(state["governor"])
        self._engine.governors = [governor]
        self.controller.reset([self._seed])
        self.controller.load_state_dict(state["controller"])  # type: ignore[attr-defined]
        _set_rng_state(learner, state["rng"])

    def return_to(self, network: Mapping[str, Any]) -> None:
        """The network as `network_state` gave it, to be finished. No training can follow: the optimizer is not."""
        self.close()
        self.learner.model.detach()
        self._set_network(network)

    def _set_network(self, state: Mapping[str, Any]) -> None:
        """Host, seeds and slots as they were."""
        model = self.learner.model
        model.host.load_state_dict(state["host"])
        _set_buffers(model.host, state.get("buffers", {}))
        self.learner.epoch = state["epoch"]
        for saved in state["seeds"]:
            slot = model.slots[saved["slot"]]
            with torch.random.fork_rng(devices=[]):
                style = Style(**saved.get("style", {}))  # of older states, a seed's own
                slot.shape = replace(slot.shape, style=style, source=saved.get("source", 0))
                seed = Seed(saved["blueprint"], slot.shape, saved["blend"])
            model.place(slot, seed)
            seed.load_state_dict(saved["tensors"])
            for buffer, value in zip(slot.shadow_buffers, saved["shadow"], strict=False):
                buffer.copy_(value)
        for name, values in state["slots"].items():
            getattr(model.lifecycle.columns, name).copy_(values)
        model.lifecycle.born = state["born"]
        model.lifecycle._why_retiring = list(state["why_retiring"])
        model.lifecycle.stages = [Stage(number) for number in model.lifecycle.columns.stage[0].tolist()]
        model.lifecycle.alphas = model.lifecycle.columns.alpha[0].tolist()
        for slot in model.slots:
            if slot.seed is not None:
                model._follow(slot)

    def _identity(self) -> dict[str, Any]:
        """What a state and the object that loads it must have in common."""
        model = self.learner.model
        return {
            "slots": [slot.path for slot in model.slots],
            "host": [[n, list(v.shape)] for n, v in model.host.state_dict().items() if isinstance(v, Tensor)],
            "epochs": self.epochs,
            "controller": self.controller.name,
            "rent": self.rent,
            "seed": self._seed,
        }


def _copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """A state must not change with the training that goes on. Some values are what a module says of itself
    (`get_extra_state`), which may be anything."""
    return {n: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for n, v in values.items()}


def _left_out(host: nn.Module) -> dict[str, Tensor]:
    """Buffers that are no part of `state_dict()`: a model may count or average in them all the same."""
    saved = host.state_dict().keys()
    return {name: buffer for name, buffer in host.named_buffers() if name not in saved}


def _set_buffers(host: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Those that this host has; of a table that grows with what it is used for, the size is that of then."""
    own = dict(host.named_buffers())
    for name, value in values.items():
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)
        elif name in own:
            place, _, last = name.rpartition(".")
            setattr(host.get_submodule(place), last, value.to(own[name].device, copy=True))


def _check_readable(host: nn.Module) -> None:
    """A state is read as data alone, and what a module says of itself could be more: known before it is needed."""
    extra = {name: value for name, value in host.state_dict().items() if not isinstance(value, Tensor)}
    if extra:
        content = io.BytesIO()
        with refused(
            StateError, f"{next(iter(extra))} of the model is no plain data, so no state can be kept", Exception
        ):
            torch.save(extra, content)
            torch.load(io.BytesIO(content.getvalue()), weights_only=True)


def _rng_state(learner: Learner) -> dict[str, Any]:
    device = learner.model.device
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    own = {"learner": learner.rng_state.clone(), "other_rngs": learner.other_rngs.data()}
    return {"torch": torch.get_rng_state(), "cuda": cuda, **own}


def _set_rng_state(learner: Learner, saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(saved["torch"].cpu())
    learner.rng_state = saved["learner"].cpu()
    if "other_rngs" in saved:  # not in older states
        learner.other_rngs = OtherRngs.from_data(saved["other_rngs"])
    if saved["cuda"] is not None and learner.model.device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"].cpu(), learner.model.device)
