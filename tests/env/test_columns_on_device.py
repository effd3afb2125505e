"""A step of the decision process waits for no device and makes no tensor anywhere else than its columns are.

The device is the CPU here: reading a tensor from Python raises, and a tensor that names no device is made on "meta",
where it cannot meet the others.

Covers: R149
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from esper.actions import HEAD_NAMES, Op
from esper.agent.policies import LearnedController
from esper.agent.shipped import shipped_path
from esper.engine.epoch import EpochColumns
from esper.engine.governor_columns import GovernorColumns
from esper.env.observation import encode
from esper.env.reward import Reward, RewardConfig
from esper.env.world import World
from esper.growth.blueprints import blueprint_names
from esper.lifecycle import Rules
from esper.policy.controller import ColumnController, NoGrowth, RandomLegal
from esper.policy.heuristic import Heuristic, HeuristicSettings
from esper.policy.schedule import default_schedule
from esper.slot_columns import SlotColumns

NETWORKS, HORIZON = 40, 12
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy", "unique")


@contextmanager
def nothing_is_read() -> Iterator[None]:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a step reads a tensor from Python: a GPU would have to be waited for")

    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        for name in READS:
            patch.setattr(Tensor, name, refuse)
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")
        yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


def world_of(slots: int, device: torch.device) -> World:
    """Networks of dense slots of 8 channels; every third one has a slot less."""
    counts = [max(0, slots - (row % 3 == 0)) for row in range(NETWORKS)]
    columns = SlotColumns.empty(counts, [Rules()] * NETWORKS, device, slots)
    of_slots = {"dtype": torch.float64, "device": device}
    return World.start(
        columns,
        layout=torch.zeros((NETWORKS, slots), dtype=torch.int64, device=device),
        channels=torch.full((NETWORKS, slots), 8.0, **of_slots),
        position=torch.zeros((NETWORKS, slots), **of_slots),
        costs=torch.full((NETWORKS, slots, len(blueprint_names())), 50.0, **of_slots)
        / columns.present[..., None],  # infinite where there is no slot
        host_parameters=torch.full((NETWORKS,), 1000.0, **of_slots),
        budget=torch.full((NETWORKS,), 2000.0, **of_slots),
        max_seeds=torch.full((NETWORKS,), math.inf, **of_slots),
        horizon=torch.full((NETWORKS,), HORIZON, device=device),
    )


class Pretended:
    """An engine over columns that acts, and makes its measurements up."""

    def __init__(self, world: World) -> None:
        self.world, device = world, world.epoch.device
        made = torch.rand(
            (HORIZON, NETWORKS, 3 + 7 * world.layout.shape[1]), generator=torch.Generator().manual_seed(0)
        )
        self.numbers = iter(made.double().to(device).unbind())
        self.seeds = torch.zeros(NETWORKS, dtype=torch.int64, device=device)
        chance = torch.full((NETWORKS,), 10.0, dtype=torch.float64, device=device)
        self.governor = GovernorColumns(chance, chance / 4)
        self.finite = torch.ones_like(world.over)

    def step(self, action: Tensor) -> EpochColumns:
        v, width, played = self.world.slots, self.world.layout.shape[1], ~self.world.over
        slot, blueprint, blend, op = (action[:, HEAD_NAMES.index(n)] for n in ("slot", "blueprint", "blend", "op"))
        here = torch.arange(width, device=op.device) == slot[:, None]
        at = {one: here & (played & (op == one))[:, None] for one in Op}
        self.seeds = self.seeds + (op == Op.GERMINATE)
        columns = (self.seeds, blueprint, blend, torch.full_like(op, 50))
        v.germinate(at[Op.GERMINATE], *(column[:, None] for column in columns))
        v.prune(at[Op.PRUNE])
        v.fossilize(at[Op.FOSSILIZE])
        v.begin_epoch()
        stage, alpha = v.stage.clone(), v.alpha.clone()
        made = next(self.numbers)
        accuracy, loss, train = 50 + 20 * made[:, 0], 1 + made[:, 1], made[:, 2]
        gradient, shadow, contribution = made[:, 3:].view(NETWORKS, width, 7).split((1, 3, 3), -1)
        fault, seen, limit = self.governor.check(train, self.finite, loss, accuracy, alpha, v.seed)
        self.governor.keep(fault < 0, train, loss, accuracy)
        gradient = gradient.squeeze(-1)
        shadow = torch.where((alpha == 0.0)[..., None], shadow, math.nan)
        contribution = torch.where((alpha > 0.0)[..., None], 9 * contribution - 2, math.nan)
        v.measure(gradient, shadow, contribution)
        v.end_epoch(played)
        return EpochColumns(
            played=played,
            op=torch.where(played, op, -1),
            slot=slot,
            blueprint=blueprint,
            blend=blend,
            changed=played & (op != Op.WAIT),
            train_loss=train,
            host_gradient=loss,
            seed_gradient=gradient,
            accuracy=accuracy,
            loss=loss,
            shadow=shadow,
            contribution=contribution,
            stage=stage,
            alpha=alpha,
            parameters=self.world.parameters,
            fault=fault,
            fault_seen=seen,
            fault_limit=limit,
        )


def controllers() -> dict[str, ColumnController]:
    eager = HeuristicSettings(first_epoch=0, plateau_epochs=1, plateau_gain=200.0, late_margin=0, patience=1)
    return {
        "none": NoGrowth(),
        "random": RandomLegal(),
        "schedule": default_schedule(),
        "heuristic": Heuristic(eager),
        "learned": LearnedController.load(shipped_path("small")),
    }


def play(controller: ColumnController, slots: int, config: RewardConfig, device: torch.device) -> list[Tensor]:
    """A whole episode: rewards by term, and what was done."""
    world, given = world_of(slots, device), []
    engine, reward = Pretended(world), Reward(config, world, [10] * NETWORKS)
    controller.reset(range(NETWORKS))
    encode(world)  # tables are made once per device
    controller.act(world, *encode(world))
    controller.reset(range(NETWORKS))
    for t in range(HORIZON):
        # On a GPU the first step of an episode copies tables there, once.
        with nullcontext() if t == 0 and device.type == "cuda" else nothing_is_read():
            action = controller.act(world, *encode(world))
            before = world.snapshot()
            epoch = engine.step(action)
            world.record(epoch)
            ended = epoch.played & (epoch.undone | (world.epoch >= world.horizon))
            paid = reward.step(before, world, epoch, ended)
            world.end(ended)
        assert before.epoch.tolist() != world.epoch.tolist() or bool(before.over.all())
        assert bool(paid.terms.isfinite().all())
        assert world.bests.shape == (NETWORKS, HORIZON), t
        given += [paid.terms, action]
    assert bool(world.over.all())
    return given


@pytest.mark.parametrize("name", ["none", "random", "schedule", "heuristic", "learned"])
def test_a_step_waits_for_no_device(name: str) -> None:
    controller = controllers()[name]
    for signal in ("contribution", "loss"):
        steps = play(controller, 3, RewardConfig(signal=signal), torch.device("cpu"))  # type: ignore[arg-type]
        done = set(torch.cat(steps[1::2])[:, HEAD_NAMES.index("op")].tolist())
        assert Op.GERMINATE in done or name in ("none", "learned")


@pytest.mark.parametrize("name", ["none", "random", "schedule", "heuristic"])
def test_networks_without_any_slot_are_played_and_paid(name: str) -> None:
    steps = play(controllers()[name], 0, RewardConfig(), torch.device("cpu"))
    assert not torch.stack(steps[1::2]).any()


def test_a_snapshot_stays_as_it_was() -> None:
    world = world_of(2, torch.device("cpu"))
    before = world.snapshot()
    kept = {f.name: getattr(before, f.name) for f in fields(World) if f.name not in ("slots", "paths")}
    copies = {name: tensor.clone() for name, tensor in kept.items()}
    slots = before.slots.clone()
    rule, engine = RandomLegal(), Pretended(world)
    rule.reset(range(NETWORKS))
    for _ in range(5):
        world.record(engine.step(rule.act(world, *encode(world))))
        world.end(world.epoch >= 5)
    assert all(torch.equal(kept[name].nan_to_num(), copy.nan_to_num()) for name, copy in copies.items())
    for field in fields(SlotColumns):
        assert torch.equal(getattr(before.slots, field.name).nan_to_num(), getattr(slots, field.name).nan_to_num())
    assert int(world.tried.sum()) > 0
    assert replace(world).epoch.tolist() == [5] * NETWORKS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["none", "schedule", "heuristic", "learned"])
def test_a_gpu_gives_the_same_episode(name: str) -> None:
    here, there = (play(controllers()[name], 3, RewardConfig(), torch.device(one)) for one in ("cpu", "cuda"))
    for wanted, found in zip(here, there, strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), wanted, rtol=0.0, atol=1e-9)
