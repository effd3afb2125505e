"""Training a controller: the same weights however it is run, killed and resumed; what it records; what it refuses.

Covers: R002, R027, R066, R103, R110, R115, R157
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_family import TinyFamily
from torch import Tensor

from esper.actions import HEAD_NAMES, Op
from esper.agent.actor import PolicyActor
from esper.agent.checkpoints import load_checkpoint
from esper.agent.config import PPOConfig
from esper.agent.policies import unpack_policy
from esper.cli import main
from esper.engine.precision import Precision
from esper.env.growth_env import GrowthEnv
from esper.env.reward import RewardConfig
from esper.env.reward.suspicion import SUSPICION_KINDS, SuspicionKind
from esper.env.spaces import ActionMasks
from esper.env.world import World
from esper.rollout.episodes import map_tensors
from esper.telemetry.recorder import RunRecorder, StoreRecorder
from esper.telemetry.records import Event
from esper.telemetry.store import STORE_NAME, RunStore
from esper.training.catalogue import make_controller
from esper.training.fleet import Fleet, PolicyJob, PolicyPlayer, seeds_for
from esper.training.loop import Trainer
from esper.training.own.grow import grow_task
from esper.training.run_folder import RunFolder, RunFolderError
from esper.training.train_config import PRESETS, TrainConfig, read_train_config

TINY = TrainConfig(task="digits", envs=2, updates=4, evaluate_every=2, evaluation_episodes=2)
ESPER = [sys.executable, "-m", "esper"]
TINY_WORDS = ["train", "--task", "digits", "--envs", "2", "--updates", "4", "--compare-episodes", "0", "--workers", "1"]
Capture = pytest.CaptureFixture[str]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.agent.network.state_dict().items()}


def saved_weights(run: Path) -> dict[str, torch.Tensor]:
    latest = RunFolder(run).latest()
    assert latest is not None
    start = "network/"  # as they are kept: a controller gives no weight to a rent that never varied
    tensors = load_checkpoint(latest).tensors
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole run, recorded and saved."""
    path = tmp_path_factory.mktemp("run") / "whole"
    trainer = Trainer(TINY, RunFolder.create(path, TINY), StoreRecorder(RunStore(path / STORE_NAME)))
    assert trainer.run()
    trainer.close()
    return path


def test_a_run_in_two_halves_ends_with_the_same_weights(uninterrupted: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "halves", TINY)
    first = Trainer(TINY, folder)
    first.run(stop=lambda: first.update >= 2)
    first.close()
    second = Trainer(TINY, folder)
    second.resume()
    assert second.update == 2
    second.run()
    assert same(weights(second), saved_weights(uninterrupted))


@pytest.mark.slow
def test_worker_processes_change_nothing(uninterrupted: Path) -> None:
    trainer = Trainer(TINY, workers=2)
    try:
        trainer.run()
        assert same(weights(trainer), saved_weights(uninterrupted))
    finally:
        trainer.close()


def test_on_a_gpu_one_process_plays_all_environments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others would only wait: whatever number of workers is asked for, none is started, and a line says so."""
    monkeypatch.setattr("esper.training.workers.start_workers", lambda functions: pytest.fail("a worker was started"))
    family = TINY.family()
    Fleet(family, 4, reward=TINY.reward, slots=family.slots, device="cuda", workers=4).close()
    assert caplog.messages == ["on a GPU one process plays all environments: of 4 workers, none is started"]
    Fleet(family, 4, reward=TINY.reward, slots=family.slots, device="cuda").close()
    assert len(caplog.messages) == 1


def test_precision_and_compilation_reach_the_environments_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoticedError(Exception):
        pass

    def notice(*arguments: object, precision: Precision, compiled: bool, **settings: object) -> None:
        raise NoticedError(precision, compiled)

    sent: list[PolicyPlayer] = []
    monkeypatch.setattr("esper.training.workers.start_workers", lambda players: sent.extend(players) or [])
    monkeypatch.setattr("esper.training.engines.GrowthEnv", notice)
    Trainer(replace(TINY, precision=Precision.BF16, compiled=True), workers=2).close()
    assert len(sent) == 2
    for player in sent:
        with pytest.raises(NoticedError) as noticed:
            pickle.loads(pickle.dumps(player))(PolicyJob(b"", (0,), False, None))
        assert noticed.value.args == (Precision.BF16, True)


def test_many_environments_are_many_single_ones() -> None:
    """The episodes of a rollout do not know of each other: each equals the same draw played alone."""
    config = replace(TINY, envs=3, updates=1, evaluate_every=0)
    numbers, actions = config.draw_ids(1), torch.zeros(3, 4, dtype=torch.int64)
    together = GrowthEnv(config.family(), 3)
    together.reset(numbers)
    all_rewards = [together.step(actions).reward for _ in range(5)]
    alone = GrowthEnv(config.family(), 1)
    for row, number in enumerate(numbers):
        alone.reset([number])
        rewards = [alone.step(actions[:1]).reward[0] for _ in range(5)]
        assert torch.equal(torch.stack(rewards), torch.stack(all_rewards)[:, row])


def test_what_was_played_elsewhere_is_what_the_agent_learns_from() -> None:
    """The probabilities of the actions that a copy of it took are its own: the replay agrees with the playing."""
    config = replace(TINY, envs=3, updates=1, evaluate_every=0)
    trainer = Trainer(config)
    seeds = seeds_for(config.seed, 1, 3)
    episodes = trainer.fleet.play(trainer._policy(), config.draw_ids(1), seeds=seeds)
    assert episodes.action.shape[:2] == (3, config.family().horizon)
    assert [len(row) for row in episodes.reports] == episodes.lengths.tolist()
    actor = PolicyActor(*unpack_policy(trainer._policy()), seeds[1])
    actor.reset([0])
    for t in range(episodes.action.shape[1]):
        seen, masks = (map_tensors(r, lambda x, t=t: x[1:2, t]) for r in (episodes.observation, episodes.masks))
        assert torch.equal(actor.act((), seen, masks).action, episodes.action[1:2, t])
    alone = trainer.fleet.play(trainer._policy(), config.draw_ids(1)[1:2], seeds=seeds[1:2])
    assert torch.equal(alone.reward[0], episodes.reward[1])
    assert len(set(seeds)) == 3
    assert trainer.agent.update(episodes)["first_ratio_gap"] < 1e-5


def test_an_evaluation_masks_what_a_frozen_policy_may_not_do_and_a_rollout_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def only_waiting(masks: ActionMasks, world: World) -> ActionMasks:
        op = torch.zeros_like(masks.op)
        op[:, Op.WAIT] = len(world.epoch) == len(op)
        return replace(masks, op=op)

    trainer = Trainer(replace(TINY, envs=3, updates=1, evaluate_every=0))
    policy, draws = trainer._policy(), trainer.config.draw_ids(1)
    monkeypatch.setattr("esper.training.fleet.without_costly_removals", only_waiting)
    op = HEAD_NAMES.index("op")
    assert (trainer.fleet.play(policy, draws, held_out=True).action[..., op] == Op.WAIT).all()
    assert (trainer.fleet.play(policy, draws, seeds=[0, 1, 2]).action[..., op] != Op.WAIT).any()


def test_everything_is_in_the_store(uninterrupted: Path) -> None:
    with sqlite3.connect(uninterrupted / STORE_NAME) as store:
        one = lambda sql: store.execute(sql).fetchone()[0]  # noqa: E731
        assert one("SELECT count(*) FROM episodes WHERE arm = 'train'") == 2 * 4
        assert one("SELECT count(*) FROM episodes WHERE arm = 'evaluation'") == 2 * 2
        steps = one("SELECT sum(length) FROM episodes WHERE arm = 'train'")
        assert one("SELECT count(*) FROM decisions WHERE arm = 'train'") == steps
        assert one("SELECT count(*) FROM metrics WHERE name = 'kl'") == 4
        assert one("SELECT count(*) FROM metrics WHERE name = 'evaluation/score'") == 2
        gap = one(
            "SELECT max(abs(e.episode_return - (SELECT sum(value) FROM episode_rewards r WHERE r.update_number = "
            "e.update_number AND r.env = e.env AND r.arm = e.arm))) FROM episodes e"
        )
        assert gap < 1e-6


@pytest.mark.parametrize("kind", ["reward_hacking", "ransomware"])
def test_suspicions_about_seeds_reach_the_record(kind: SuspicionKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the slot, the seed and the episode that they are about (R115); here every measured seed is suspected."""

    def suspect(contribution: Tensor, *others: Tensor) -> Tensor:
        return torch.tensor([one == kind for one in SUSPICION_KINDS]).expand(*contribution.shape, len(SUSPICION_KINDS))

    class Events(RunRecorder):
        def event(self, event: Event) -> None:
            seen.append(event)

    seen: list[Event] = []
    monkeypatch.setattr("esper.env.reward.reward.suspicious", suspect)
    config = TrainConfig(task="tiny", envs=2, updates=1, evaluate_every=0)
    assert Trainer(config, recorder=Events(), family=TinyFamily(horizon=12)).run()
    found = [event for event in seen if event.kind == kind]
    assert found
    assert {event.slot for event in found} <= {"stages.0", "stages.1"}
    assert all(event.seed is not None and event.epoch is not None and event.env in (0, 1) for event in found)
    assert {(event.severity, event.update, event.arm) for event in found} == {("warning", 1, "train")}
    assert re.search(
        r"claims [+-]\d+\.\d points; the network gained [+-]\d+\.\d since it was planted", found[0].message
    )


def test_a_trained_controller_grows_a_model(uninterrupted: Path) -> None:
    from esper.tasks import load_task

    grown = grow_task(load_task("digits"), controller=str(uninterrupted), epochs=6)
    assert grown.history.controller == "learned"
    assert len(grown.history.records) == 6


def test_a_controller_serves_hosts_with_more_slots_than_it_was_trained_on(uninterrupted: Path) -> None:
    from esper.tasks.family import get_family

    draw = get_family("mixed/vector").draw(1, held_out=True)
    assert len(draw.task.slots) > get_family("digits").slots
    grown = grow_task(draw.task, controller=str(uninterrupted), epochs=3, seed=draw.seed, budget=draw.budget)
    assert len(grown.history.records) == 3


def test_a_controller_for_other_blueprints_is_refused(
    uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    """By its numbers: it must never plant one kind and mean another. And more kinds than it has room for."""
    from esper.agent import policies

    names = policies.blueprint_names()
    learned = make_controller(str(uninterrupted))
    monkeypatch.setattr(policies, "blueprint_names", lambda: (*names, "mine"))
    make_controller(str(uninterrupted)).reset([0])  # there is room for a few that came later
    monkeypatch.setattr(policies, "blueprint_names", lambda: (*names, *(f"mine {i}" for i in range(9))))
    with pytest.raises(ValueError, match=r"has room for \d+ kinds of seed and \d+ are registered"):
        learned.reset([0])
    monkeypatch.setattr(policies, "blueprint_names", lambda: ("mine", *names))
    monkeypatch.chdir(tmp_path)
    assert main(["grow", "--task", "digits", "--controller", str(uninterrupted)]) == 1
    said = capsys.readouterr().err
    assert f"seed kind 0 was '{names[0]}'; here it is 'mine'" in said
    assert said.count("\n") == 1


def test_old_checkpoints_go_and_the_best_stays(uninterrupted: Path) -> None:
    names = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert names == ["best.safetensors", *(f"update-{n:06d}.safetensors" for n in (2, 3, 4))]


def test_the_configuration_survives_its_file(uninterrupted: Path) -> None:
    assert read_train_config(uninterrupted / "config.json") == TINY
    for config in (*PRESETS.values(), TrainConfig(precision=Precision.BF16, compiled=True)):
        assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_runs_from_before_there_was_a_choice_of_precision_can_be_read() -> None:
    older = {name: value for name, value in TINY.to_json().items() if name not in ("precision", "compiled")}
    assert TrainConfig.from_json(older) == TINY
    with pytest.raises(ValueError, match="fp8"):
        TrainConfig.from_json({**older, "precision": "fp8"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(envs=0), "envs must be at least 1"),
        (lambda: TrainConfig(envs=8, draws=4), "at least as many problems"),
        (lambda: TrainConfig(reward=RewardConfig(discount=0.9)), "set both to the same value"),
        (lambda: TrainConfig(ppo=PPOConfig(epochs=0)), "epochs must be"),
    ],
)
def test_impossible_configurations_are_refused(make: Callable[[], TrainConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_run_is_neither_overwritten_nor_shared(uninterrupted: Path) -> None:
    with pytest.raises(RunFolderError, match="--resume"):
        RunFolder.create(uninterrupted, TINY)
    folder, _ = RunFolder.open(uninterrupted)
    with folder.lock(), pytest.raises(RunFolderError, match="another process"), folder.lock():
        pass
    with folder.lock():
        pass  # it was let go


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--task", "mixd"], "did you mean 'mixed'"),
        (["train", "--resume", "nowhere"], "holds no training run"),
        (["train", "--run", "/proc/esper"], "choose another folder"),
        (["train", "--envs", "0"], "envs must be at least 1"),
        (["checkpoint", "inspect", "nothing.safetensors"], "no checkpoint"),
    ],
)
def test_bad_input_ends_with_one_clear_line(
    words: list[str], message: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*ESPER, *words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path, uninterrupted: Path) -> None:
    process = start(*TINY_WORDS, "--evaluate-every", "0", "--run", "r", cwd=tmp_path)
    assert process.stdout is not None
    while "update 1" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "esper train --resume r" in output
    assert main(["train", "--resume", str(tmp_path / "r"), "--compare-episodes", "0", "--workers", "1"]) == 0


@pytest.mark.slow
def test_kill_dash_nine_at_any_moment_changes_nothing(tmp_path: Path) -> None:
    words = [*TINY_WORDS, "--seed", "5", "--updates", "6"]
    assert subprocess.run([*ESPER, *words, "--run", "whole"], cwd=tmp_path, check=False).returncode == 0
    rng = random.Random(0)
    process = start(*words, "--run", "killed", cwd=tmp_path)
    while not (tmp_path / "killed" / "config.json").exists():
        time.sleep(0.05)
    for _ in range(5):
        time.sleep(rng.uniform(0.5, 6.0))
        process.kill()
        process.communicate()
        process = start("train", "--resume", "killed", "--compare-episodes", "0", "--workers", "1", cwd=tmp_path)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert same(saved_weights(tmp_path / "whole"), saved_weights(tmp_path / "killed"))
    with sqlite3.connect(tmp_path / "killed" / STORE_NAME) as a, sqlite3.connect(tmp_path / "whole" / STORE_NAME) as b:
        history = "SELECT * FROM episodes ORDER BY update_number, arm, env"
        assert a.execute(history).fetchall() == b.execute(history).fetchall()


@pytest.mark.slow
def test_a_full_disk_ends_with_a_clear_line_and_a_whole_checkpoint(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the first checkpoint that does not fit fails to be written."""

    def little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then fails with an error, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    result = subprocess.run(
        [*ESPER, *TINY_WORDS, "--evaluate-every", "0", "--run", "r"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=little_room,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().count("\n") == 0
    assert not list((tmp_path / "r" / "checkpoints").glob("update-*"))  # nothing half-written under a good name
    resumed = ["train", "--resume", str(tmp_path / "r"), "--compare-episodes", "0", "--workers", "1", "--updates", "1"]
    assert main(resumed) == 0
    assert os.listdir(tmp_path / "r" / "checkpoints")
