"""Recorded episodes, played again by the rules over columns; `test_pinned_rules.py` says where they are from."""

from __future__ import annotations

import gzip
import json
import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from esper.actions import BLENDS, Action, Effect, Op
from esper.engine.eager import EpochRecord
from esper.engine.governor import Fault, Verdict
from esper.engine.learner import TrainReport
from esper.engine.measure import Evaluation
from esper.env.epoch_records import epoch_columns
from esper.env.observation import OVERALL_FIELDS, features, legal_actions
from esper.env.reward import Reward, RewardConfig
from esper.env.reward.suspicion import SUSPICION_KINDS
from esper.env.world import World
from esper.growth.blueprints import LAYOUTS, SlotShape, blueprint_names
from esper.lifecycle import LIVE, Contrast, IllegalTransitionError, Transition
from esper.slot_views import Slots

FILE = Path(__file__).with_name("pinned_rules.json.gz")
CONFIGS = [
    (mode, signal) for mode in ("shaped", "simplified", "minimal", "sparse") for signal in ("contribution", "loss")
]
EXACT, CLOSE = 0.0, 1e-9
BROKEN = Verdict(Fault.NON_FINITE, math.nan, math.inf, "")
AFTER_NAN = [OVERALL_FIELDS.index(name) for name in ("train_loss", "generalisation_gap", "host_gradient")]
"""Fields that a broken epoch makes ±1: the sign was that of a NaN."""


@cache
def pinned() -> dict[str, Any]:
    return json.loads(gzip.decompress(FILE.read_bytes()))


def number(value: Any) -> float:
    return math.nan if value is None else float(value)


def assert_close(what: str, found: Any, wanted: Any, limit: float) -> None:
    ours = np.asarray(found, dtype=float)
    theirs = np.vectorize(number, otypes=[float])(np.asarray(wanted, dtype=object))
    np.testing.assert_allclose(ours, theirs, rtol=0.0, atol=limit, err_msg=what)


class Replay:
    """One recorded episode, played again by the rules over columns."""

    def __init__(self, episode: dict[str, Any]) -> None:
        self.e, self.x = episode, episode["expected"]
        self.slots = Slots(episode["paths"])
        places = zip(episode["layout"], episode["channels"], strict=True)
        shapes = [SlotShape(list(LAYOUTS)[layout], channels) for layout, channels in places]
        costs = [
            {name: cost for name, cost in zip(blueprint_names(), row, strict=False) if cost is not None}
            for row in episode["costs"]
        ]
        self.model = SimpleNamespace(
            host_parameters=episode["host"],
            budget=None if episode["budget"] == "inf" else episode["budget"],
            max_seeds=None if episode["max_seeds"] == "inf" else episode["max_seeds"],
            slots=[
                SimpleNamespace(shape=shape, index=i, path=path)
                for i, (shape, path) in enumerate(zip(shapes, episode["paths"], strict=True))
            ],
            costs=lambda slot: costs[slot.index],
        )
        self.world = World.of_models([self.model], self.slots.columns, [episode["horizon"]])  # type: ignore[list-item]
        self.history: list[EpochRecord] = []
        self.rewards = {
            (mode, signal): Reward(RewardConfig(mode=mode, signal=signal), self.world, [episode["classes"]])  # type: ignore[arg-type]
            for mode, signal in CONFIGS
        }

    def look(self, t: int) -> None:
        """Everything that can be seen before step `t`."""
        x, columns = self.x, self.world.slots
        assert columns.stage[0].tolist() == x["stage"][t]
        assert_close("alpha", columns.alpha[0], x["alpha"][t], EXACT)
        assert (columns.blueprint[0] + 1).tolist() == x["blueprints"][t]
        overall, slots, costs = (part[0].numpy() for part in features(self.world))
        wanted = np.array([number(value) for value in x["overall"][t]])
        if t and self.e["trained"][t - 1][0] is None:
            overall[AFTER_NAN], wanted[AFTER_NAN] = abs(overall[AFTER_NAN]), abs(wanted[AFTER_NAN])
        # The recordings are of schema 1: all but the last field, the rent.
        assert_close("overall", overall[:-1], wanted, CLOSE)
        assert_close("rent", overall[-1], math.log(6) / math.log(21), CLOSE)
        assert_close("slots", slots, x["slots"][t], CLOSE)
        assert_close("costs", costs, x["costs"][0], CLOSE)
        masks = legal_actions(self.world)
        for head in ("op", "slot", "blueprint", "blend"):
            assert getattr(masks, head)[0].tolist() == x[f"mask_{head}"][t], head

    def step(self, t: int) -> None:
        before, (op, slot, blueprint, blend) = self.world.snapshot(), self.e["action"][t]
        made = (blueprint_names()[blueprint], BLENDS[blend]) if op == Op.GERMINATE else (None, None)
        action = Action(Op(op), None if op == Op.WAIT else slot, *made, reason="at random")
        done = self.act(action, blueprint, blend, t)
        assert (done is not None) == self.e["changed"][t]
        transitions = [*(done or []), *self.slots.begin_epoch(t)]
        record = self.train(t, action, done is not None, transitions)
        self.history.append(record)
        shown = epoch_columns([record], self.world.slots)
        self.world.record(shown)
        ended = torch.tensor([t + 1 == len(self.e["action"])])
        for (mode, signal), reward in self.rewards.items():
            found, key = reward.step(before, self.world, shown, ended), f"{mode}_{signal}"
            assert_close(f"terms_{key}", found.terms[0], self.x[f"terms_{key}"][t], CLOSE)
            assert_close(f"potential_{key}", found.potential[0], self.x[f"potential_{key}"][t], CLOSE)
            suspected = sorted([SUSPICION_KINDS[kind], place] for place, kind in found.suspicions[0].nonzero().tolist())
            assert suspected == sorted(one[:2] for one in self.x[f"findings_{key}"][t])
            if bool(ended):
                assert_close("score", found.score[0], self.x[f"score_{key}"], CLOSE)
        self.world.end(ended)

    def act(self, action: Action, blueprint: int, blend: int, t: int) -> list[Transition] | None:
        if action.slot is None:
            return None
        try:
            if action.op is Op.GERMINATE:
                size = self.e["size"][t]
                return self.slots.germinate(action.slot, blueprint, blend, size, epoch=t, reason=action.reason)
            change = self.slots.prune if action.op is Op.PRUNE else self.slots.fossilize
            return change(action.slot, epoch=t, reason=action.reason)
        except IllegalTransitionError:
            return None

    def train(self, t: int, action: Action, changed: bool, transitions: list[Transition]) -> EpochRecord:
        """The epoch as it was measured then."""
        e, stages, alphas = self.e, tuple(self.slots.stages), tuple(self.slots.alphas)
        gradients = {i: g for i, g in enumerate(e["gradients"][t]) if g is not None}
        shadows, contributions = (
            {i: Contrast(*map(number, c)) for i, c in enumerate(e[name][t]) if c[2] is not None}
            for name in ("shadow", "contribution")
        )
        undone = e["undone"][t]
        if undone:
            for i, stage in enumerate(stages):
                if stage in LIVE:
                    transitions += self.slots.prune(i, epoch=t, reason="governor", at_once=True)
        else:
            self.slots.measure(gradients, shadows, contributions)
        if undone or t + 1 < e["horizon"]:  # in the last epoch seeds stay what they were when they were measured
            transitions += self.slots.end_epoch(t)
        self.compare(t, transitions, undone)
        accuracy, loss = map(number, e["measured"][t])
        trained = TrainReport(*map(number, e["trained"][t]), gradients, {})
        seen = Evaluation(loss, accuracy, contributions, shadows)
        effect = Effect(action, changed, "")
        return EpochRecord(t, effect, trained, seen, tuple(transitions), 0, stages, alphas, BROKEN if undone else None)

    def compare(self, t: int, transitions: list[Transition], undone: bool) -> None:
        """Also the reasons; those of a rollback name the governor's verdict, which is not replayed."""
        names = self.e["paths"]
        found = [
            [names.index(c.slot), c.seed, int(c.source), int(c.target), c.reason][: 4 if undone else 5]
            for c in transitions
        ]
        assert sorted(found) == sorted(one[: 4 if undone else 5] for one in self.x["transitions"][t])
