"""Training runs on growing networks with a constructed fault: the right alarm. And none without a fault.

Covers: R019, R026, R058, R110, R111, R133, R145
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_family import TinyFamily

from esper.actions import Op
from esper.agent.config import PPOConfig
from esper.agent.ppo import PPOAgent
from esper.telemetry.recorder import RunRecorder, StoreRecorder
from esper.telemetry.records import Event
from esper.telemetry.store import RunStore, open_readonly
from esper.training.loop import Trainer, UpdateReport
from esper.training.train_config import TrainConfig

LEARNING_RATE = PPOConfig().learning_rate


class Events(RunRecorder):
    def __init__(self) -> None:
        self.seen: list[Event] = []

    def event(self, event: Event) -> None:
        self.seen.append(event)

    @property
    def anomalies(self) -> set[str]:
        return {str(event.data["name"]) for event in self.seen if event.kind == "anomaly"}


def train(updates: int, fault: Callable[[PPOAgent], None] | None = None, *, envs: int, at: int = 2) -> set[str]:
    """Names of the anomalies of a run on real, growing networks; the fault is made before update `at`."""
    config = TrainConfig(task="tiny", envs=envs, updates=updates, evaluate_every=0)
    recorder = Events()
    trainer = Trainer(config, recorder=recorder, family=TinyFamily(horizon=12))

    def on_update(report: UpdateReport) -> None:
        assert "episode/score" in report.metrics  # what the detector takes for the objective
        if fault is not None and report.update == at - 1:
            fault(trainer.agent)

    assert trainer.run(on_update)
    return recorder.anomalies


def set_learning_rate(factor: float) -> Callable[[PPOAgent], None]:
    def fault(agent: PPOAgent) -> None:
        agent.config = replace(agent.config, learning_rate=factor * LEARNING_RATE)

    return fault


def freeze(agent: PPOAgent) -> None:
    for parameter in agent.network.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.0)


def spoil_gradients(agent: PPOAgent) -> None:
    next(agent.network.parameters()).register_hook(lambda gradient: gradient * float("nan"))


def reverse_entropy(agent: PPOAgent) -> None:
    agent.config = replace(agent.config)
    object.__setattr__(agent.config, "entropy_coefficient", -1.0)  # no configuration may ask for it


def always_wait(agent: PPOAgent) -> None:
    with torch.no_grad():
        agent.network.op_head.out.bias[Op.WAIT] += 20.0


@pytest.mark.parametrize(
    ("fault", "updates", "expected"),
    [
        (set_learning_rate(100.0), 3, {"kl_spike", "kl_extreme"}),
        (set_learning_rate(0.0), 5, {"kl_stalled"}),
        (freeze, 5, {"gradient_vanishing", "kl_stalled"}),
        (spoil_gradients, 3, {"skipped_steps"}),
        pytest.param(reverse_entropy, 16, {"entropy_collapse"}, marks=pytest.mark.slow),
        (always_wait, 6, {"head_starved"}),
    ],
    ids=[
        "learning rate x 100",
        "learning rate 0",
        "frozen weights",
        "NaN gradient",
        "negative entropy coefficient",
        "always WAIT",
    ],
)
def test_a_fault_is_found(fault: Callable[[PPOAgent], None], updates: int, expected: set[str]) -> None:
    found = train(updates, fault, envs=4 if fault is reverse_entropy else 2)  # a collapse takes more steps
    assert found & expected, f"reported {found}"


@pytest.mark.slow
def test_a_healthy_run_of_sixty_updates_is_silent() -> None:
    """It learns what to plant and stops exploring other blueprints, which is a decision and no collapse."""
    assert train(60, envs=8) == set()


# -- what a run records of a fault -------------------------------------------------------------------------------------


def recorded(store: Path, fault: Callable[[PPOAgent], None], updates: int = 3) -> list[UpdateReport]:
    """A run whose first update is faulty, in a store."""
    config = TrainConfig(task="tiny", envs=4, updates=updates, evaluate_every=0)
    recorder = StoreRecorder(RunStore(store))
    trainer = Trainer(config, recorder=recorder, family=TinyFamily(horizon=12))
    fault(trainer.agent)
    reports: list[UpdateReport] = []
    trainer.run(reports.append)
    trainer.close()
    return reports


def ask(store: Path, sql: str) -> list[tuple[object, ...]]:
    with open_readonly(store) as connection:
        return connection.execute(sql).fetchall()


def test_a_gradient_that_is_not_finite_names_its_parameters_in_the_record(tmp_path: Path) -> None:
    store, names = tmp_path / "run.sqlite", []

    def spoil_first(agent: PPOAgent) -> None:
        name, parameter = next(agent.network.named_parameters())
        parameter.register_hook(lambda gradient: gradient * float("nan"))
        names.append(name)

    reports = recorded(store, spoil_first)
    events = ask(
        store,
        "SELECT update_number, severity, json_extract(data, '$.bad_gradients[0]'), "
        "json_extract(data, '$.gradient_norm') FROM events WHERE kind = 'skipped_steps'",
    )
    assert events == [(update, "error", names[0], "nan") for update in (1, 2, 3)]
    printed = [message for message in reports[0].anomalies if f"gradient of {names[0]}" in message]
    assert len(printed) == 1  # beside the alarm
    assert not any("gradient of" in message for message in reports[1].anomalies)  # which is raised once


def test_steps_whose_ratio_explodes_are_in_the_record_with_their_decisions(tmp_path: Path) -> None:
    store = tmp_path / "run.sqlite"

    def far_too_fast(agent: PPOAgent) -> None:
        agent.config = replace(agent.config, learning_rate=0.3, target_kl=None)

    reports = recorded(store, far_too_fast, updates=1)
    assert reports[0].metrics["ratio_explosions"] > 0
    ((message, count, head, rows, actions),) = ask(
        store,
        "SELECT message, json_extract(data, '$.count'), json_extract(data, '$.worst_head'), "
        "json_array_length(data, '$.rows'), json_array_length(data, '$.actions[0]') FROM events "
        "WHERE kind = 'ratio_explosion'",
    )
    assert (count, rows, actions) == (reports[0].metrics["ratio_explosions"], min(count, 32), 4)
    assert f"of head {head} in row " in str(message)
    assert message in reports[0].anomalies


def test_the_gradient_of_every_parameter_is_recorded_at_the_detailed_level(tmp_path: Path) -> None:
    store, counts = tmp_path / "run.sqlite", []

    def far_too_fast(agent: PPOAgent) -> None:
        agent.config = replace(agent.config, learning_rate=0.3, target_kl=None)
        counts.append(len(list(agent.network.parameters())))

    assert recorded(store, far_too_fast)[0].anomalies  # so that the next updates are detailed
    sql = "SELECT update_number, count(*) FROM metrics WHERE name LIKE 'gradient/%' GROUP BY update_number"
    assert ask(store, sql) == [(2, counts[0]), (3, counts[0])]
    assert ask(store, "SELECT count(*) FROM metrics WHERE name = 'gradients_vanishing'") == [(2,)]
    assert ask(store, "SELECT DISTINCT update_number FROM step_rewards") == [(2,), (3,)]
