"""A healthy series of metrics, and records to store."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from esper.actions import HEAD_NAMES
from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import Decision, EpisodeColumns, Event


def healthy(update: int, updates: int = 60) -> dict[str, float]:
    """A run as it should be: entropy falls slowly, the critic learns, returns rise, everything is noisy."""
    rng, progress = random.Random(update), update / updates

    def noisy(x: float, share: float = 0.3) -> float:
        return x * (1.0 + share * rng.uniform(-1.0, 1.0))

    metrics = {
        "update": float(update),
        "minibatches": 16.0,
        "skipped": 0.0,
        "kl": noisy(0.008),
        "kl_max": noisy(0.02),
        "clip_fraction": noisy(0.06),
        "ratio_max": noisy(1.8),
        "ratio_min": noisy(0.5),
        "explained_variance": noisy(0.8, 0.2) * progress - 0.05,
        "gradient_norm": noisy(0.9, 0.4),
        "gradient_norm_max": noisy(3.0),
        "value_gradient_norm": noisy(0.5),
        "trunk_gradient_norm": noisy(0.6),
        "return_mean": 30.0 + 15.0 * progress + rng.gauss(0.0, 3.0),
        "lstm/hidden_rms": noisy(0.3),
        "lstm/cell_rms": noisy(0.6),
        "lstm/finite": 1.0,
    }
    for head in HEAD_NAMES:
        metrics[f"{head}/entropy"] = noisy(0.9 - 0.5 * progress, 0.1)
        metrics[f"{head}/live_fraction"] = noisy(1.0 if head == "op" else 0.2)
        metrics[f"{head}/gradient_norm"] = noisy(0.1)
    return metrics


TERMS = {"objective": 60.0, "score_shaping": -4.0, "action_cost": -0.5}


def sample_episodes(update: int, *rows: dict[str, object], arm: str = "train") -> EpisodeColumns:
    """An episode for each row, which says what is not as usual."""
    usual: dict[str, object] = {"episode_return": 55.5, "score": 60.0, "accuracy": 65.0, "parameters": 900}
    usual |= {"host_parameters": 700, "length": 25, "governor": None, "rewards": list(TERMS.values())}
    whole = [{"draw": 100 * update + env, **usual, **row} for env, row in enumerate(rows or ({},))]
    columns: Any = {name: [row[name] for row in whole] for name in whole[0]}
    return EpisodeColumns(update=update, terms=list(TERMS), arm=arm, **columns)


def sample_decision(update: int, env: int = 0, epoch: int = 0, **changes: object) -> Decision:
    values: dict[str, object] = {
        "update": update,
        "env": env,
        "epoch": epoch,
        "op": "GERMINATE",
        "slot": "layers.1",
        "blueprint": "depthwise",
        "blend": "linear",
        "probabilities": {"op": 0.25, "slot": 0.5, "blueprint": 0.2, "blend": 0.3},
        "value": 1.5,
        "changed": True,
        "message": "policy",
        "reward": 2.0,
        "rewards": {"objective": 0.0, "score_shaping": 2.0},
    }
    return Decision(**(values | changes))  # type: ignore[arg-type]


def record_update(recorder: RunRecorder, update: int, decisions: int = 5, episodes: Sequence[Any] = ({},)) -> None:
    """A small update, whole."""
    for epoch in range(decisions):
        recorder.decision(sample_decision(update, epoch=epoch))
    recorder.event(Event("governor", update, "the loss diverged", "warning", env=0, epoch=3, data={"seen": 9.0}))
    recorder.episodes(sample_episodes(update, *episodes))
    recorder.metrics(update, {"update": float(update), "kl": 0.01 * update, "entropy": 0.9})
