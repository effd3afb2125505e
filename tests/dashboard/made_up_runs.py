"""Runs to look at, made in a second: rows as the training loop writes them, with numbers that tests can predict."""

from __future__ import annotations

import json
from pathlib import Path

from esper.telemetry.recorder import RunRecorder, StoreRecorder
from esper.telemetry.records import Decision, EpisodeColumns, Event, SlotState, StepDetails
from esper.telemetry.store import STORE_NAME, RunStore

EPOCHS = 6
HEADS = ("op", "slot", "blueprint", "blend")
CHANGES = (
    (0, "DORMANT", "GERMINATED", "planted"),
    (0, "GERMINATED", "TRAINING", "starts to learn"),
    (1, "TRAINING", "BLENDING", "shadow benefit 2"),
    (3, "BLENDING", "HOLDING", "alpha 1"),
    (4, "HOLDING", "FOSSILIZED", ""),
)
STAGES = ("TRAINING", "TRAINING", "BLENDING", "BLENDING", "FOSSILIZED", "FOSSILIZED")
"""Of the first slot while each epoch is trained."""


def make_run(
    folder: Path, updates: int = 12, envs: int = 3, *, total: int | None = None, task: str = "mixed/vector"
) -> Path:
    """A run of `updates` updates out of `total` whose score rises by a point an update."""
    folder.mkdir(parents=True, exist_ok=True)
    with RunStore(folder / STORE_NAME) as store:
        config = {"task": task, "envs": envs, "updates": total or updates, "seed": 0, "ppo": {"clip": 0.2}}
        store.describe({"config": config, "engine": "stacked engine: all hosts are dense"})
        store.begin_session(0, "0.1.0", ["esper", "train", f"--task={task}"])
        recorder = StoreRecorder(store)
        for update in range(1, updates + 1):
            add_update(recorder, update, envs)
    return folder


def add_update(recorder: RunRecorder, update: int, envs: int = 3) -> None:
    score = 60.0 + update
    for env in range(envs):
        _episode(recorder, update, env)
    scores = [score + env - 1 for env in range(envs)]
    recorder.episodes(
        EpisodeColumns(
            update=update,
            draw=range(100, 100 + envs),
            episode_return=scores,
            score=scores,
            accuracy=[one + 2 for one in scores],
            parameters=[1200] * envs,
            host_parameters=[1000] * envs,
            length=[EPOCHS] * envs,
            governor=[None] * envs,
            terms=("objective",),
            rewards=[[one] for one in scores],
        )
    )
    metrics = {"episode/score": score, "episode/accuracy": score + 2, "episode/growth": 1.25, "entropy": 0.9}
    metrics |= {"kl": 0.01, "clip_fraction": 0.05, "explained_variance": 0.5, "gradient_norm": 1.5, "env_steps": 75.0}
    metrics |= {"steps_per_second": 50.0, "episode/germinated": 3.0, "episode/fossilized": 2.0, "episode/pruned": 1.0}
    metrics |= {
        f"{head}/{what}": 0.1 * i for i, head in enumerate(HEADS) for what in ("entropy", "kl", "gradient_norm")
    }
    metrics |= {"reward/objective": score, "reward/action_cost": -0.5}
    recorder.metrics(update, metrics)
    if update % 4 == 0:
        recorder.metrics(update, {"evaluation/score": score - 3})
    recorder.flush()


def _episode(recorder: RunRecorder, update: int, env: int) -> None:
    for epoch in range(EPOCHS):
        recorder.decision(_decision(update, env, epoch))
    for epoch, source, target, reason in CHANGES:
        data = {"source": source, "target": target}
        where = {"env": env, "epoch": epoch, "slot": "stages.0", "seed": 1, "data": data}
        recorder.event(Event("lifecycle", update, reason, **where))  # type: ignore[arg-type]


def _decision(update: int, env: int, epoch: int) -> Decision:
    op = {0: "GERMINATE", 4: "FOSSILIZE"}.get(epoch, "WAIT")
    first = SlotState("stages.0", STAGES[epoch], min(1.0, epoch / 4), 3.5 if epoch == 3 else None, 0.5)
    legal = {"WAIT": 0.25, "GERMINATE": 0.75 if epoch == 0 else None, "PRUNE": None, "FOSSILIZE": None}
    choices: dict[str, dict[str, float | None]] = {"op": legal}
    if op == "GERMINATE":
        choices |= {"slot": {"stages.0": 0.6, "stages.1": 0.4}, "blueprint": {"norm": 1.0, "conv": None}}
    if op == "FOSSILIZE":
        choices = {
            "op": {"WAIT": 0.1, "GERMINATE": 0.2, "PRUNE": 0.3, "FOSSILIZE": 0.4},
            "slot": {"stages.0": 1.0, "stages.1": None},
        }
    return Decision(
        update,
        env,
        epoch,
        op,
        None if op == "WAIT" else "stages.0",
        "norm" if op == "GERMINATE" else None,
        "linear" if op == "GERMINATE" else None,
        {"op": 0.75 if op == "GERMINATE" else 0.25},
        7.5 - epoch,
        op != "WAIT",
        "",
        0.5,
        accuracy=50.0 + 5 * epoch,
        parameters=1000 + 200 * (epoch >= 2),
        details=StepDetails([first, SlotState("stages.1", "DORMANT", 0.0)], choices),
    )


def make_bulk_run(folder: Path, episodes: int = 600) -> Path:
    """One update of which most episodes have no steps."""
    folder.mkdir(parents=True)
    with RunStore(folder / STORE_NAME) as store:
        store.describe({"config": {"task": "grammar", "envs": episodes, "updates": 1}, "engine": "stacked engine"})
        store.begin_session(0, "0.1.0")
        recorder = StoreRecorder(store)
        scores = [50.0 + 50.0 * i / episodes for i in range(episodes)]
        recorder.episodes(
            EpisodeColumns(
                update=1,
                draw=range(episodes),
                episode_return=scores,
                score=scores,
                accuracy=scores,
                parameters=[1500] * episodes,
                host_parameters=[1000] * episodes,
                length=[EPOCHS] * episodes,
                governor=[None] * (episodes - 1) + ["the loss diverged"],
                terms=("objective",),
                rewards=[[score] for score in scores],
            )
        )
        for epoch in range(EPOCHS):
            recorder.decision(_decision(1, 5, epoch))
        counts = {"actions/WAIT": 900.0, "actions/GERMINATE": 100.0, "transitions/TRAINING": 100.0}
        recorder.metrics(1, counts | {"sampled_episodes": 1.0, "episode/score": 75.0, "env_steps": 3600.0})
    return folder


def make_comparison(folder: Path) -> Path:
    """A comparison in which `learned` is best."""
    folder.mkdir(parents=True)

    def row(name: str, score: float) -> dict[str, object]:
        estimate = {"value": score, "low": score - 2, "high": score + 2, "count": 4}
        return {
            "name": name,
            "is_control": False,
            "test_accuracy": estimate,
            "parameters_ratio": 1.2,
            "score": estimate,
            "vs_none": None if name == "none" else {**estimate, "value": score - 50},
            "vs_best_rule": None,
            "seeds_kept": 1.0,
            "governed": 0,
            "on_front": name == "learned",
        }

    episode = {"number": 0, "facts": {"kind": "vector scale"}, "score": 61.0}
    told = {
        "task": "mixed/vector",
        "common_draws": [0, 1, 2, 3],
        "best_rule": "none",
        "rows": [row("none", 50.0), row("learned", 71.5)],
        "episodes": {"none": [episode], "learned": [episode]},
    }
    (folder / "comparison.json").write_text(json.dumps(told))
    return folder
