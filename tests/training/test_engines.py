"""Which engine plays: chosen once, refused with a reason; stacks of a fixed size give the same run in any process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_family import TinyFamily
from torch import nn

from esper.cli import main
from esper.engine.precision import Precision
from esper.engine.stacked import memory
from esper.env.stacked_env import StackedEnv
from esper.errors import RefusedError
from esper.growth.blueprints import registry
from esper.tasks.family import Family, Together, get_family
from esper.tasks.stacking import stacked_problems
from esper.training.comparison import compare
from esper.training.engines import (
    FEWEST,
    MOST,
    MOST_ON_GPU,
    check_memory,
    choose_engine,
    parts_by_sort,
    players,
    stack_size,
)
from esper.training.evaluation import Job, batch_size, jobs_for, record_job, run_job, run_jobs
from esper.training.fleet import Fleet, PolicyJob, PolicyPlayer, seeds_for
from esper.training.loop import Trainer
from esper.training.results import EpisodeResult
from esper.training.run_folder import RunFolder
from esper.training.train_config import TrainConfig
from short_family import ShortFamily

VECTORS = ShortFamily("mixed/vector")
CONFIG = TrainConfig(task="mixed/vector", envs=20, updates=2, evaluate_every=2, evaluation_episodes=3)
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("name", "device", "engine", "reason"),
    [
        ("mixed/vector", "cpu", "stacked", "all hosts are dense"),
        ("mixed", "cpu", "eager", "conv1d, conv2d, sequence"),
        ("mixed", "cuda", "stacked", "stacked form"),
        ("stories", "cpu", "eager", "GPTHost"),
        ("stories", "cuda", "graphs", "GPTHost"),
    ],
)
def test_auto_chooses_by_hosts_and_device(name: str, device: str, engine: str, reason: str) -> None:
    chosen = choose_engine("auto", get_family(name), device)
    assert chosen.name == engine
    assert reason in str(chosen)


def test_what_a_stack_cannot_do_is_left_to_other_engines() -> None:
    assert choose_engine("auto", VECTORS, "cuda", compiled=True).name == "graphs"
    assert choose_engine("auto", VECTORS, "cuda", precision=Precision.TF32).name == "graphs"
    assert choose_engine("auto", VECTORS, "cuda", precision=Precision.BF16).name == "stacked"
    assert choose_engine("eager", VECTORS, "cuda").name == "eager"


def test_blueprints_of_users_are_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", {name: dict(entry) for name, entry in registry._REGISTRY.items()})

    @registry.blueprint("users", "dense")
    class Users(nn.Module):
        def __init__(self, channels: int, layout: str) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(channels))

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return h * self.scale

    chosen = choose_engine("auto", VECTORS, "cpu")
    assert (chosen.name, chosen.reason) == ("eager", "the blueprints users have no stacked form")
    with pytest.raises(RefusedError, match="users"):
        choose_engine("stacked", VECTORS, "cpu")
    with pytest.raises(ValueError, match="without a stacked form: users"):
        StackedEnv(VECTORS, 2).reset([0, 1])
    assert choose_engine("auto", get_family("mixed/series"), "cuda").name == "stacked"  # it does not grow there


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--task", "stories", "--engine", "stacked"], "stories: its host is"),
        (["--task", "mixed/vector", "--engine", "graphs"], "--engine graphs needs a GPU"),
    ],
)
@pytest.mark.parametrize("command", ["train", "compare", "record", "tune-heuristic"])
def test_an_engine_that_cannot_be_had_is_one_line_and_exit_code_2(
    command: str, words: list[str], said: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, *words, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))


def test_too_many_networks_are_refused_with_the_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "20 networks at a time need about" in check_memory(VECTORS, 20, "cpu")
    found = memory.memory_of([([0], _problems(VECTORS))], torch.device("cpu"))
    monkeypatch.setattr("esper.training.engines.available", lambda device: found.of(50) + 1.0)
    with pytest.raises(RefusedError, match=r"room for \d+ "):
        check_memory(VECTORS, 10_000, "cpu")
    assert found.fits(found.of(50)) == 50
    assert found.fits(0.0) == 0


def _problems(family: Family):  # type: ignore[no-untyped-def]
    from esper.tasks.stacking import stacked_problems

    return stacked_problems(family, range(1), held_out=False)[0][1]


def test_the_size_of_a_stack_follows_from_the_number_of_networks() -> None:
    assert [stack_size(n, "cpu") for n in (1, 96, 512, 5000)] == [FEWEST, FEWEST, 32, MOST]
    assert stack_size(5000, "cuda") == 5000
    assert batch_size("eager", 500, "cpu") == 4
    assert batch_size("stacked", 5000, "cuda") == 1024


# -- training ----------------------------------------------------------------------------------------------------------


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in trainer.agent.network.state_dict().values()]


def trained(workers: int = 1, folder: RunFolder | None = None, stop_at: int = 2) -> Trainer:
    trainer = Trainer(CONFIG, folder, workers=workers, family=VECTORS)
    trainer.resume()
    try:
        trainer.run(stop=lambda: trainer.update >= stop_at)
    finally:
        trainer.close()
    return trainer


@pytest.fixture(scope="module")
def whole() -> Trainer:
    return trained()


def test_workers_change_nothing(whole: Trainer) -> None:
    assert whole.engine.name == "stacked"
    assert all(map(torch.equal, weights(whole), weights(trained(workers=2))))


def test_a_run_in_two_halves_ends_with_the_same_weights(whole: Trainer, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "halves", CONFIG)
    trained(folder=folder, stop_at=1)
    second = trained(folder=folder)
    assert second.update == 2
    assert all(map(torch.equal, weights(whole), weights(second)))


def test_a_gpu_plays_what_can_be_stacked_as_one_job() -> None:
    """Every place once, one stack a job, and no job above the limit."""
    family, draws = get_family("6*grammar+mixed"), [number // 4 for number in range(4096)]
    parts = parts_by_sort(family, draws, held_out=False)
    assert sorted(place for part in parts.values() for place in part) == list(range(4096))
    assert max(map(len, parts.values())) <= MOST_ON_GPU
    assert {name.split(",")[0].split(":")[0] for name in parts} == {"grammar", "mixed"}
    some = [part[:3] for name, part in parts.items() if name.startswith(("grammar: 0", "grammar: 9", "mixed: vector"))]
    for part in some:
        assert len(stacked_problems(family, [draws[place] for place in part], held_out=False)) == 1


def test_several_processes_play_on_a_gpu_only_where_they_need_not_take_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert [players(None, name, "cuda") for name in ("stacked", "graphs")] == [1, 1]
    assert players(None, "stacked", "cpu") == 16
    (tmp_path / "control").touch()
    assert players(None, "stacked", "cuda") == 15
    assert players(None, "graphs", "cuda") == 1
    assert players(4, "stacked", "cuda") == 4


@pytest.mark.parametrize("failures", [1, 2])
def test_a_job_that_runs_out_of_memory_is_played_once_more(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-way through an episode, where the environment has moved on."""
    trainer = Trainer(CONFIG, family=VECTORS)
    player = PolicyPlayer(VECTORS, "stacked", "cpu", reward=CONFIG.reward, slots=VECTORS.slots)
    job = PolicyJob(trainer._policy(), (0, 1), False, 5)
    undisturbed = player(job).episodes
    step, steps = StackedEnv.step, []

    def scarce(self: StackedEnv, *given: Any) -> Any:
        steps.append(self)
        if len(steps) in (3, 6)[:failures]:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return step(self, *given)

    monkeypatch.setattr(StackedEnv, "step", scarce)
    if failures == 2:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            player(job)
        return
    again = player(job).episodes
    assert steps[2] is not steps[3]
    assert torch.equal(undisturbed.action, again.action)
    assert torch.equal(undisturbed.reward, again.reward)


def test_jobs_by_sort_give_the_episodes_in_the_order_of_the_draws() -> None:
    """As on a GPU, where what takes longest is begun first."""
    family = Together([VECTORS, ShortFamily("disguised/vector", examples=40)])  # type: ignore[list-item]
    trainer = Trainer(CONFIG, family=family)
    fleet = Fleet(family, 8, reward=CONFIG.reward, slots=family.slots, engine="stacked")
    fleet._on_cpu = False
    draws = list(range(8))
    first = fleet.play(trainer._policy(), draws, seeds=seeds_for(0, 1, 8))
    names = list(fleet._parts(draws, False))
    fleet._took = {name: float(i) for i, name in enumerate(names)}
    assert list(fleet._parts(draws, False)) == names[::-1]
    again = fleet.play(trainer._policy(), draws, seeds=seeds_for(0, 1, 8))
    assert first.draw.tolist() == again.draw.tolist() == draws
    assert torch.equal(first.action, again.action)
    assert torch.equal(first.reward, again.reward)


def test_metrics_say_where_the_time_goes() -> None:
    seen: dict[str, float] = {}
    trainer = Trainer(replace(CONFIG, updates=1, evaluate_every=0), family=VECTORS)
    trainer.run(lambda report: seen.update(report.metrics))
    phases = ("reset", "engine", "reward", "observe", "policy", "update", "telemetry", "environment")
    assert all(seen[f"seconds/{phase}"] > 0.0 for phase in phases)
    assert seen["steps_per_second"] > 0.0


# -- judging -----------------------------------------------------------------------------------------------------------

INTEGERS = ("number", "facts", "host_parameters", "host_flops", "host_widths", "examples", "epochs", "horizon")


@pytest.mark.parametrize("make", [lambda: ShortFamily("mixed", examples=64), lambda: VECTORS])
def test_both_engines_give_the_same_facts(make: Callable[[], Family]) -> None:
    """The random numbers of both are the same; what is learnt differs by rounding."""
    family = make()
    draws = tuple(range(24 if family.name == "mixed" else 5))
    stacked, eager = (run_job(Job("plan", family, "schedule", draws, engine=name)) for name in ("stacked", "eager"))
    alike = 0
    for ours, theirs in zip(stacked, eager, strict=True):
        assert [getattr(ours, name) for name in INTEGERS] == [getattr(theirs, name) for name in INTEGERS]
        assert ours.planted == theirs.planted
        alike += _same_growth(ours, theirs)
    assert alike >= len(draws) - 2  # a gate that sits on a tie may open an epoch later


def _same_growth(ours: EpisodeResult, theirs: EpisodeResult) -> bool:
    names = ("kept", "unfinished", "parameters", "flops", "training_flops")
    return all(getattr(ours, name) == getattr(theirs, name) for name in names)


@pytest.mark.slow
def test_processes_do_not_change_results_of_stacks() -> None:
    jobs = jobs_for(VECTORS, {"none": "none", "random": "random"}, range(6), batch=3, engine="stacked")
    one, two = run_jobs(jobs), run_jobs(jobs, workers=2)
    assert one.keys() == two.keys()
    for label, results in one.items():
        for number, result in results.items():
            assert replace(result, seconds=0.0) == replace(two[label][number], seconds=0.0)


def test_a_comparison_plays_stacks_and_trains_its_controls_one_by_one() -> None:
    found = compare(VECTORS, {"none": "none", "plan": "schedule"}, range(3), engine="stacked")
    assert sorted(found.controllers["plan"]) == [0, 1, 2]
    assert any("from scratch" in name for name in found.controls)


def test_a_recording_of_stacks_is_legal() -> None:
    from esper.offline.recording import check, growth_schema

    episodes = record_job(Job("random", VECTORS, "random", (0, 1, 2), held_out=False, noise=0.3, engine="stacked"))
    check(episodes, growth_schema())
    assert episodes.facts is None


def test_a_family_without_a_round_is_judged_by_some_draws() -> None:
    assert choose_engine("auto", TinyFamily(), "cpu").name == "eager"
    assert choose_engine("stacked", TinyFamily(), "cpu").name == "stacked"
