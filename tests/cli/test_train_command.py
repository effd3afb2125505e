"""`esper train` from the shell's side: configuration files, data files, other sinks, and what it refuses.

Covers: R092, R103, R141
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console

from esper.agent.config import PPOConfig
from esper.agent.policies import load_policy
from esper.cli import main
from esper.cli.train import TrainWatch
from esper.engine.precision import Precision
from esper.tasks.family import TaskFamily
from esper.telemetry.store import STORE_NAME
from esper.training.journal import RolloutSummary
from esper.training.loop import UpdateReport
from esper.training.run_folder import RunFolder
from esper.training.train_config import TrainConfig, read_train_config

SHARED = Path(__file__).parents[3] / "shared" / "data"
SMALL = ["--envs", "1", "--updates", "1", "--evaluate-every", "0", "--compare-episodes", "0", "--workers", "1"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and episodes of one epoch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ESPER_DATA_DIR", raising=False)
    monkeypatch.setattr(TaskFamily.__init__, "__kwdefaults__", {**TaskFamily.__init__.__kwdefaults__, "horizon": 1})


def events(run: str) -> list[tuple[str, str]]:
    with sqlite3.connect(Path(run) / STORE_NAME) as store:
        return store.execute("SELECT kind, message FROM events WHERE severity != 'info'").fetchall()


# -- configuration files -----------------------------------------------------------------------------------------------

CONFIG = """
task = "digits"
envs = 3
updates = 1
run = "from-file"
reward = "sparse"
workers = 1
compare-episodes = 0
floor = 0.02

[ppo]
learning-rate = 2e-3
discount = 0.9
head_entropy_weights = [1, 2, 1, 1]
"""


def test_a_config_file_decides_and_options_override_it(capsys: Capture) -> None:
    Path("my.toml").write_text(CONFIG)
    assert main(["train", "--config", "my.toml", "--envs", "1"]) == 0
    config = read_train_config(Path("from-file/config.json"))
    assert (config.task, config.envs, config.updates, config.reward.mode) == ("digits", 1, 1, "sparse")
    assert (config.ppo.learning_rate, config.ppo.discount) == (2e-3, 0.9)
    assert config.reward.discount == 0.9  # the two must agree, so one word sets both
    assert config.ppo.head_entropy_weights == (1.0, 2.0, 1.0, 1.0)
    assert config.floor == 0.02
    latest = RunFolder(Path("from-file")).latest()
    assert latest is not None
    assert load_policy(latest)[0].config.floor == 0.02  # what the agent acted and learnt with
    assert config.ppo.epochs == TrainConfig().ppo.epochs
    assert "esper grow --task digits --controller from-file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('tsak = "digits"', "did you mean 'task'"),
        ("[ppo]\nlearning_rat = 1", "ppo: unknown setting 'learning_rat'; did you mean 'learning_rate'?"),
        ("[ppo]\nepochs = 1.5", "ppo: epochs must be a whole number"),
        ("[ppo]\nepochs = 0", "epochs must be a whole number of at least 1, not 0"),
        ("floor = 1.5", "floor must be a number from 0 to 1, not 1.5"),
        ("[ppo]\nmax_grad_norm = -0.5", "max_grad_norm must be a number above 0, not -0.5"),
        ("[ppo]\nclip = nan", "clip must be a number above 0, not nan"),
        ("[ppo]\nlearning_rate = inf", "learning_rate must be a number of at least 0, not inf"),
        ("[ppo]\nlearning_rate_end = 1e-5", "learning_rate_end is never reached: set anneal_updates"),
    ],
)
def test_a_mistake_in_a_config_file_is_one_line_and_no_folder(text: str, message: str, capsys: Capture) -> None:
    Path("my.toml").write_text(text)
    assert main(["train", "--config", "my.toml", "--run", "r"]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not Path("r").exists()


# -- what only a GPU can do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--precision", "bf16"], "--precision bf16 is for GPUs, and cpu is none: leave it out, or name a GPU"),
        (["--compiled"], "--compiled is for GPUs, and cpu is none: leave it out, or name a GPU"),
    ],
)
def test_a_cpu_has_no_fast_path(words: list[str], message: str, capsys: Capture) -> None:
    assert main(["train", "--task", "digits", "--device", "cpu", *SMALL, "--run", "r", *words]) == 1
    assert capsys.readouterr().err == f"esper train: {message}\n"
    assert not Path("r").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a GPU, because a resumed run keeps its configuration"),
        (["--precision", "fp32"], "a resumed run keeps its configuration; only --updates"),
        (["--compiled"], "a resumed run keeps its configuration; only --updates"),
        (["--preset", "demo", "--run", "elsewhere"], "a resumed run keeps its configuration: leave out --preset"),
        (["--run", "elsewhere", "--seed", "1"], "may be given, not --run, --seed"),
        (["--teacher-kl", "1", "--reward.mode", "sparse"], "may be given, not --ppo.teacher-kl, --reward.mode"),
    ],
)
def test_a_resumed_run_keeps_its_precision(words: list[str], message: str, capsys: Capture) -> None:
    RunFolder.create(Path("r"), TrainConfig(task="digits", precision=Precision.BF16))
    assert main(["train", "--resume", "r", "--device", "cpu", *words]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_the_fast_path_is_kept_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.cli.train.check_gpu_options", lambda *arguments, **words: None)  # as if on a GPU
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function, **words: compiled.append(function) or function)
    Path("my.toml").write_text('precision = "bf16"\ncompiled = true\n')
    assert main(["train", "--config", "my.toml", "--task", "digits", "--device", "cpu", *SMALL, "--run", "r"]) == 0
    assert compiled
    config = read_train_config(Path("r/config.json"))
    assert (config.precision, config.compiled) == (Precision.BF16, True)
    again = ["train", "--resume", "r", "--device", "cpu", "--updates", "2", "--compare-episodes", "0", "--workers", "1"]
    assert main(again) == 0


# -- a resumed run ----------------------------------------------------------------------------------------------------


def test_a_resumed_run_compares_and_reports_as_it_was_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    run, asked = FakeRun(), []
    module = ModuleType("wandb")
    module.init = lambda **words: asked.append(words["project"]) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    boards: list[str] = []
    board = SimpleNamespace(SummaryWriter=lambda folder: boards.append(folder) or MagicMock())
    monkeypatch.setattr("esper.telemetry.sinks.tensorboard", lambda: board)
    assert main(["train", "--task", "digits", *SMALL, "--run", "r", "--wandb", "growing", "--tensorboard"]) == 0
    assert main(["train", "--resume", "r", "--updates", "2", "--workers", "1"]) == 0
    assert asked == ["growing", "growing"]
    assert boards == [str(Path("r/tensorboard").absolute())] * 2
    assert not Path("r/comparison").exists()
    capsys.readouterr()
    assert main(["train", "--resume", "r", "--workers", "1"]) == 0  # the second update is kept, too: nothing to do
    assert "Trained 2 updates" in capsys.readouterr().out


def test_a_resumed_run_remembers_what_it_was_told(capsys: Capture) -> None:
    assert main(["train", "--task", "digits", *SMALL, "--run", "r"]) == 0
    words = ["train", "--resume", "r", "--updates", "2", "--workers", "1"]
    assert main([*words, "--compare-episodes", "1"]) == 0
    assert Path("r/comparison").exists()
    config = read_train_config(Path("r/config.json"))
    assert (config.updates, config.compare_episodes) == (2, 1)
    capsys.readouterr()
    assert main(["train", "--resume", "r", "--updates", "1", "--workers", "1"]) == 1
    assert capsys.readouterr().err == "esper train: --updates 1 is too few: the run has made 2 already\n"
    assert read_train_config(Path("r/config.json")) == config


def test_options_are_the_fields_of_the_configuration_and_help_shows_the_values_that_will_be_used(
    capsys: Capture,
) -> None:
    said = []
    for preset in ("mixed", "demo"):
        with pytest.raises(SystemExit):
            main(["train", "--preset", preset, "--help"])
        said.append(capsys.readouterr().out)
    for name in (*(field.name for field in fields(TrainConfig) if field.name not in ("ppo", "reward")), "ppo.clip"):
        assert f"--{name.replace('_', '-')} " in said[0].replace(",", " "), name
    values = [" ".join(text.split()) for text in said]
    assert "--ppo.learning-rate FLOAT" in values[0]
    assert ["(default: 0.0003)" in text for text in values] == [True, False]
    assert ["(default: 0.001)" in text for text in values] == [False, True]


def test_an_option_changes_a_setting_of_the_agent_and_of_the_reward() -> None:
    words = [
        "--ppo.epochs",
        "1",
        "--ppo.discount",
        "0.9",
        "--reward.prune-cost",
        "0.5",
        "--reward=sparse",
        "--keep",
        "1",
    ]
    assert main(["train", "--task", "digits", *SMALL, "--run", "r", *words]) == 0
    config = read_train_config(Path("r/config.json"))
    assert (config.ppo.epochs, config.reward.prune_cost, config.reward.mode, config.keep) == (1, 0.5, "sparse", 1)
    assert config.ppo.discount == config.reward.discount == 0.9


def test_the_reward_follows_the_discount_of_the_agent_and_another_one_is_refused(capsys: Capture) -> None:
    """Covers: R103."""
    assert TrainConfig(ppo=PPOConfig(discount=0.9)).reward.discount == 0.9
    words = ["train", "--task", "digits", *SMALL, "--run", "r", "--ppo.discount", "0.9", "--reward.discount", "0.8"]
    assert main(words) == 1
    assert "shapes with discount 0.8 but the agent discounts with 0.9" in capsys.readouterr().err
    assert not Path("r").exists()


def test_a_run_from_before_the_discount_had_one_name_can_be_resumed() -> None:
    kept = TrainConfig(task="digits", ppo=PPOConfig(discount=0.9)).to_json()
    kept["reward"]["gamma"] = kept["reward"].pop("discount")
    assert TrainConfig.from_json(kept) == TrainConfig(task="digits", ppo=PPOConfig(discount=0.9))


def test_a_run_from_before_these_were_kept_can_be_resumed() -> None:
    kept = TrainConfig(task="digits").to_json()
    older = {name: kept[name] for name in kept if name not in ("compare_episodes", "tensorboard", "wandb")}
    assert TrainConfig.from_json(older) == TrainConfig(task="digits")


# -- data files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--preset", "cifar10"], "no CIFAR-10 binary files"),
        (["train", "--preset", "text"], "name one with --text-file"),
        (["train", "--task", "mixed", "--data-dir", "."], "leave out --data-dir"),
        (["train", "--task", "digits", "--text-file", "a.txt"], "has no option 'text_file'"),
        (["compare", "--task", "text"], "name one with --text-file"),
        (["compare", "--task", "text", "--text-file", "nowhere.txt"], "nowhere.txt"),
        (["compare", "--task", "natural", "--data-dir", "."], "leave out --data-dir"),
        (["train", "--task", "digits", "--wandb", "p"], "pip install 'esper[wandb]'"),
        (["train", "--task", "digits", "--tensorboard"], "pip install 'esper[tensorboard]'"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_written(
    words: list[str], message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)  # an import of None is an ImportError
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert list(Path().iterdir()) == []


@pytest.mark.skipif(not (SHARED / "cifar10-jpeg.npz").exists(), reason="shared/data is not on this machine")
@pytest.mark.slow
def test_cifar_trains_resumes_and_compares(tmp_path: Path, capsys: Capture) -> None:
    script = [sys.executable, str(SHARED / "unpack_cifar10.py"), str(tmp_path / "c"), "--train", "400", "--test", "100"]
    subprocess.run(script, check=True, capture_output=True)
    assert main(["train", "--preset", "cifar10", "--data-dir", "c", *SMALL, "--run", "r"]) == 0
    config = read_train_config(Path("r/config.json"))
    assert config.data_dir == str(tmp_path / "c")  # absolute: a run is resumed from anywhere
    assert f"--data-dir {tmp_path / 'c'}" in capsys.readouterr().out
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    assert main(["train", "--resume", "../r", "--updates", "2", "--compare-episodes", "0", "--workers", "1"]) == 0
    words = ["compare", "--task", "cifar10", "--data-dir", "../c", "--controllers", "none,mine=../r"]
    assert main([*words, "--episodes", "1", "--workers", "2", "--no-controls"]) == 0
    facts = json.loads(Path("compared/cifar10-0/comparison.json").read_text())
    assert list(facts["episodes"]) == ["none", "mine"]


def test_a_text_trains_and_compares() -> None:
    Path("my.txt").write_text("".join(f"{i} times {i} is {i * i}. " for i in range(400)))
    assert main(["train", "--preset", "text", "--text-file", "my.txt", *SMALL, "--run", "r"]) == 0
    words = ["compare", "--task", "text", "--text-file", "my.txt", "--controllers", "none", "--no-controls"]
    assert main([*words, "--episodes", "1", "--workers", "1"]) == 0


# -- other sinks, and what is worth an event ---------------------------------------------------------------------------


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.finished = False

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append(values)

    def alert(self, **words: str) -> None:
        pass

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = FakeRun(), {}
    module = ModuleType("wandb")
    module.init = lambda **words: asked.update(words) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert main(["train", "--task", "digits", *SMALL, "--run", "r", "--wandb", "growing"]) == 0
    assert (asked["project"], asked["name"], asked["config"]["task"]) == ("growing", "r", "digits")
    assert asked["mode"] is None  # the variable WANDB_MODE decides
    assert "kl" in run.logged[0]
    assert run.finished


def test_wandb_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def fail(**words: object) -> None:
        raise Exception("api_key not configured")  # its own kinds of error are no built-in ones

    module = ModuleType("wandb")
    module.init = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert main(["train", "--task", "digits", *SMALL, "--run", "r", "--wandb", "growing"]) == 1
    said = capsys.readouterr().err
    assert "api_key not configured" in said
    assert said.count("\n") == 1
    assert list(Path().iterdir()) == []  # the same command can be given again


def test_a_network_that_cannot_be_compiled_is_an_event_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no compiler\nand a long trace")

    settings: dict[str, object] = {}
    monkeypatch.setattr(torch, "compile", lambda network, **words: settings.update(words) or broken)
    Path("my.toml").write_text("[ppo]\ncompile = true\n")
    assert main(["train", "--config", "my.toml", "--task", "digits", *SMALL, "--run", "r"]) == 0
    assert settings["dynamic"] is True
    told = [message for kind, message in events("r") if kind == "compile"]
    assert told == ["torch.compile failed, and the network runs uncompiled from now on: RuntimeError: no compiler"]


# -- what a person sees ------------------------------------------------------------------------------------------------


def report(update: int, evaluation: float | None) -> UpdateReport:
    rollout = RolloutSummary((0,), [-110.25], [59.5], [100.0], [11.24], 25, Counter(), 0)
    seeds = {"episode/germinated": 169.0, "episode/fossilized": 33.0, "episode/pruned": 50.0}
    learning = {"entropy": 2.95, "kl": 0.0111, "explained_variance": -0.51}
    return UpdateReport(update, rollout, rollout.metrics() | seeds | learning, ("kl_spike: look",), evaluation, True)


def test_the_live_table_fits_a_terminal_of_eighty_columns() -> None:
    console = Console(width=80, force_terminal=True, color_system=None, file=io.StringIO())
    trainer = SimpleNamespace(update=0, config=TrainConfig(updates=1000), cluster=None)
    with TrainWatch(console, trainer) as watch:  # type: ignore[arg-type]
        watch(report(998, None))
        watch(report(999, 100.0))
        console.file.truncate(0)  # type: ignore[attr-defined]
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in said.replace("update 1 of 1000 …", "")
    for part in ("update 999 of 1000", "-110.2", "×11.24", "0.0111", "-0.51", "169/33/50", "100.0 *"):
        assert part in said, said


def test_a_file_gets_a_line_per_update(capsys: Capture) -> None:
    console = Console(width=80, color_system=None)
    trainer = SimpleNamespace(update=0, config=TrainConfig(updates=2), cluster=None)
    with TrainWatch(console, trainer) as watch:  # type: ignore[arg-type]
        watch(report(1, None))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "update 1: kl_spike: look"
    assert lines[1].startswith("update 1, return -110.2, score 59.5")
    assert lines[1].endswith("left")
