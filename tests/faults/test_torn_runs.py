"""A run's folder after a failure, step by step: the best policy, damaged files, temporary files, locks."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_family import TinyFamily

from esper.agent.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from esper.agent.config import PPOConfig
from esper.cli import main
from esper.training import run_folder
from esper.training.catalogue import make_controller, policy_file
from esper.training.interrupt import ended_by_signals, interruptible
from esper.training.loop import Trainer, TrainingBrokenError
from esper.training.run_folder import RunFolder, RunFolderError
from esper.training.train_config import TrainConfig

SMALL = TrainConfig(
    task="tiny",
    envs=1,
    updates=2,
    seed=0,
    evaluate_every=1,
    evaluation_episodes=2,
    ppo=PPOConfig(epochs=1, minibatches=1),
)
"""Its last update is its best."""


def trainer(folder: RunFolder, config: TrainConfig = SMALL) -> Trainer:
    return Trainer(config, folder, family=TinyFamily(horizon=4))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torn") / "whole"
    assert trainer(RunFolder.create(path, SMALL)).run()
    return path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(whole, tmp_path / "run")))


def files(folder: RunFolder) -> dict[str, bytes]:
    return {str(p.relative_to(folder.path)): p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}


def change(path: Path, **caller: Any) -> None:
    """What the loop kept in a checkpoint; None removes it."""
    checkpoint = load_checkpoint(path)
    kept = {name: v for name, v in {**checkpoint.data["caller"], **caller}.items() if v is not None}
    save_checkpoint(path, checkpoint.tensors, {**checkpoint.data, "caller": kept})


def test_the_best_policy_is_a_copy_of_its_update(run: RunFolder) -> None:
    assert run.best.read_bytes() == run.checkpoint(2).read_bytes()
    assert load_checkpoint(run.best).data["caller"]["best_update"] == 2


@pytest.mark.parametrize("damage", ["missing", "damaged", "older"])
def test_a_torn_best_is_restored_and_meanwhile_found(run: RunFolder, damage: str) -> None:
    """Killed between the checkpoint of an update and the copy of it, in the last update of a run."""
    before = files(run)
    if damage == "missing":
        run.best.unlink()
    elif damage == "damaged":
        run.best.write_bytes(run.best.read_bytes()[:-1] + b"x")
    else:
        shutil.copyfile(run.checkpoint(1), run.best)
    if damage != "damaged":
        assert policy_file(str(run.path)) == run.checkpoint(2)
        make_controller(str(run.path))
    trainer(run).resume()
    assert files(run) == before


def test_a_best_that_is_lost_is_not_replaced_in_silence(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    run.best.unlink()
    change(run.checkpoint(2), best_update=1)
    run.checkpoint(1).unlink()
    with pytest.raises(ValueError, match=r"the best policy of the run .* is lost .* the newest one is .*update-000002"):
        policy_file(str(run.path))
    again = trainer(run, replace(SMALL, updates=3))
    again.resume()
    assert "the best policy so far" in caplog.text
    assert again.run()
    assert again.best_update == 3
    assert run.best.read_bytes() == run.checkpoint(3).read_bytes()


def test_runs_from_before_checkpoints_said_which_was_best(run: RunFolder) -> None:
    change(run.checkpoint(2), best_update=None)
    again = trainer(run)
    again.resume()
    assert again.best_update == 2
    assert policy_file(str(run.path)) == run.best
    run.best.unlink()
    with pytest.raises(ValueError, match="is lost"):
        policy_file(str(run.path))


def test_a_run_without_evaluations_gives_its_newest_policy(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", replace(SMALL, evaluate_every=0))
    with pytest.raises(ValueError, match="no checkpoint yet"):
        policy_file(str(folder.path))
    assert trainer(folder, replace(SMALL, evaluate_every=0)).run()
    assert policy_file(str(folder.path)) == folder.checkpoint(2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def junk(path: Path) -> None:
    change(path, monitor={"detector": 3})


@pytest.mark.parametrize("damage", [flip, junk, lambda path: path.write_bytes(b"")], ids=["flip", "data", "empty"])
def test_a_damaged_newest_checkpoint_falls_back(run: RunFolder, caplog: pytest.LogCaptureFixture, damage: Any) -> None:
    before = files(run)
    damage(run.checkpoint(2))
    again = trainer(run)
    again.resume()
    assert again.update == 1
    assert len(caplog.messages) == 1
    assert "update-000002.safetensors" in caplog.text
    assert "the run goes on from update 1" in caplog.text
    assert again.run()
    assert files(run) == before


def test_with_no_checkpoint_whole_a_run_does_not_begin_again(run: RunFolder) -> None:
    for number in (1, 2):
        flip(run.checkpoint(number))
    with pytest.raises(CheckpointError, match=r"update-000002.* no earlier checkpoint of the run is whole"):
        trainer(run).resume()


def test_temporary_files_of_dead_processes_go(run: RunFolder) -> None:
    before = files(run)
    for name in (".config.json.4711.tmp", "checkpoints/.update-000003.safetensors.4711.tmp"):
        (run.path / name).write_bytes(b"half")
    trainer(run).resume()
    assert files(run) == before


def test_the_configuration_is_written_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands that begin one run: the second changes nothing."""
    folder, locked = RunFolder(tmp_path / "run"), []
    real = run_folder.write_whole

    def write(path: Path, content: bytes | str) -> None:
        with pytest.raises(RunFolderError, match="another process"), folder.lock():
            pass
        locked.append(path.name)
        real(path, content)

    monkeypatch.setattr(run_folder, "write_whole", write)
    RunFolder.create(folder.path, SMALL)
    assert locked == ["config.json"]
    monkeypatch.undo()
    before = folder.config_file.read_bytes()
    with folder.lock():
        assert main(["train", "--resume", str(folder.path), "--updates", "9"]) == 1
    assert folder.config_file.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_polite_signal_ends_a_run_after_its_update(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with ended_by_signals(), interruptible() as interrupt:
        os.kill(os.getpid(), number)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):  # whoever asks twice does not wait
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="cannot lock"):
        RunFolder.create(tmp_path / "run", SMALL)
    assert not (tmp_path / "elsewhere").exists()


def test_weights_that_break_in_the_last_step_are_not_saved(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of an update are from before its last step: they do not show it."""
    again = trainer(run, replace(SMALL, updates=3))
    again.resume()
    step = again.agent.optimizer.step

    def broken(*arguments: Any, **settings: Any) -> Any:
        result = step(*arguments, **settings)
        with torch.no_grad():
            again.agent.network.value_output.bias.fill_(float("nan"))
        return result

    monkeypatch.setattr(again.agent.optimizer, "step", broken)
    with pytest.raises(TrainingBrokenError, match=r"network/.* became non-finite in update 3"):
        again.run()
    assert run.latest() == run.checkpoint(2)
