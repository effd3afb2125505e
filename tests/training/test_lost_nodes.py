"""Runs on clusters that lose nodes, have wrong ones, or lose their driver: the numbers of one machine, a line each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cluster_jobs
import pytest
import ray_nodes
from tiny_family import TinyFamily

import esper
from esper.telemetry.recorder import StoreRecorder
from esper.telemetry.store import STORE_NAME, RunStore, open_readonly
from esper.training.cluster import RayCluster
from esper.training.cluster_members import ClusterError
from esper.training.loop import Trainer, UpdateReport
from esper.training.run_folder import RunFolder
from esper.training.train_config import TrainConfig

pytest.importorskip("ray", reason="Ray is large and in the extra [cluster] only")
pytestmark = pytest.mark.slow

ESPER = [sys.executable, "-m", "esper"]
CONFIG = TrainConfig(task="digits", envs=6, updates=6, evaluate_every=3, evaluation_episodes=3)


def final_checkpoint(run: Path) -> bytes:
    path = RunFolder(run).latest()
    assert path is not None
    return path.read_bytes()


def trained(path: Path, config: TrainConfig, cluster: RayCluster | None = None, **given: Any) -> Path:
    folder = RunFolder.create(path, config)
    recorder = StoreRecorder(RunStore(path / STORE_NAME))
    trainer = Trainer(config, folder, recorder, family=TinyFamily(horizon=10), cluster=cluster)
    try:
        assert trainer.run(**given)
    finally:
        trainer.close()
    return path


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without cores, to which nodes are added."""
    with ray_nodes.local_cluster() as made:
        yield made


@pytest.fixture
def connect(cluster: Any) -> Iterator[Any]:
    opened: list[RayCluster] = []

    def connect() -> RayCluster:
        opened.append(RayCluster(cluster.address))
        return opened[-1]

    yield connect
    for one in opened:
        one.close()


def test_a_node_is_killed_and_one_is_added_and_the_checkpoint_is_that_of_one_machine(
    cluster: Any, connect: Any, tmp_path: Path
) -> None:
    alone = trained(tmp_path / "alone", CONFIG)
    nodes = [ray_nodes.add_node(cluster) for _ in range(3)]
    there = connect()
    pool, play = there.pool, []

    def killing_pool(function: Any, jobs: int) -> Any:
        """Its second call loses a node as soon as that has begun a job."""
        made = pool(function, jobs)
        assign, calls = there.members.assign, []

        def assign_and_kill(member: Any, *given: Any) -> None:
            assign(member, *given)
            calls.append(member.node)
            if len(calls) > CONFIG.envs and not play:
                play.append(next(node for node in nodes if node.node_id == member.node))
                time.sleep(0.1)  # it is in the middle of a job
                ray_nodes.kill_node(play[0])

        there.members.assign = assign_and_kill  # type: ignore[method-assign]
        return made

    there.pool = killing_pool  # type: ignore[method-assign]

    def add(report: UpdateReport) -> None:
        if report.update == 3:
            ray_nodes.add_node(cluster)

    run = trained(tmp_path / "there", CONFIG, there, on_update=add)
    assert len(play) == 1  # it was killed
    assert final_checkpoint(run) == final_checkpoint(alone)
    assert len([name for name in there.members.done if there.members.done[name]]) == 4  # the new one has played, too
    with open_readonly(run) as store:
        events = [row[0] for row in store.execute("SELECT message FROM events WHERE kind = 'cluster'")]
    assert sum("is in the cluster" in event for event in events) == 4
    assert any("has left the cluster" in event for event in events)
    assert any("lost an actor on" in event for event in events)


def test_a_node_with_another_esper_is_refused_and_the_others_play(cluster: Any, connect: Any, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(Path(esper.__file__).parent, other / "esper", ignore=shutil.ignore_patterns("__pycache__"))
    init = other / "esper" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{esper.__version__}"', '"9.9.9"'))
    path = os.pathsep.join((str(other), str(Path(__file__).parent)))
    wrong = ray_nodes.add_node(cluster, env_vars={"PYTHONPATH": path})
    there = connect()
    with pytest.raises(ClusterError, match=rf"node {wrong.node_id[:6]}\) has esper 9\.9\.9 \(.*here it is"):
        there.pool(cluster_jobs.double, 1).map([1])
    ray_nodes.add_node(cluster)
    assert there.pool(cluster_jobs.double, 3).map([1, 2, 3]) == [2, 4, 6]
    assert sum(there.members.done.values()) == 3


def test_a_node_without_esper_is_refused_by_name(cluster: Any, connect: Any, tmp_path: Path) -> None:
    """A module of the same name stands before it, which cannot be imported."""
    (tmp_path / "esper.py").write_text("raise ImportError(\"No module named 'esper'\")")
    wrong = ray_nodes.add_node(cluster, env_vars={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(ClusterError, match=rf"node {wrong.node_id[:6]}\) has no Esper that can be imported"):
        connect().pool(cluster_jobs.double, 1).map([1])


def test_a_node_out_of_memory_is_named() -> None:
    """Ray ends workers of a node that is above its threshold; here that is below what any machine uses."""
    with ray_nodes.local_cluster(config={"memory_usage_threshold": 0.001, "memory_monitor_refresh_ms": 100}) as made:
        ray_nodes.add_node(made)
        there = RayCluster(made.address)
        try:
            with pytest.raises(ClusterError, match="its node ran out of memory"):
                there.pool(cluster_jobs.trouble, 1).map(["sleep"])
        finally:
            there.close()


# -- commands ---------------------------------------------------------------------------------------------------------

WORDS = [
    "train",
    "--task",
    "digits",
    "--envs",
    "4",
    "--updates",
    "4",
    "--evaluate-every",
    "0",
    "--compare-episodes",
    "0",
]


def test_a_driver_that_is_killed_resumes_on_the_cluster(cluster: Any, tmp_path: Path) -> None:
    ray_nodes.add_node(cluster, num_cpus=2)
    subprocess.run([*ESPER, *WORDS, "--workers", "1", "--run", "alone"], cwd=tmp_path, check=True, capture_output=True)
    words = [*ESPER, *WORDS, "--run", "there", "--cluster", cluster.address]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.startswith("update 2"):
                driver.send_signal(signal.SIGKILL)
                break
    resume = [*ESPER, "train", "--resume", "there", "--cluster", cluster.address]
    done = subprocess.run(resume, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "2 actors" in done.stdout
    assert final_checkpoint(tmp_path / "there") == final_checkpoint(tmp_path / "alone")


def test_an_interrupted_driver_stops_after_its_update_and_says_how_to_go_on(cluster: Any, tmp_path: Path) -> None:
    ray_nodes.add_node(cluster)
    words = [*ESPER, *WORDS, "--run", "there", "--cluster", cluster.address]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if line.startswith("update 1"):
                driver.send_signal(signal.SIGTERM)
                break
        rest = driver.stdout.read()
    assert driver.returncode == 143
    assert "continue with: esper train --resume there" in rest


def test_comparing_recording_and_tuning_give_what_one_machine_gives(cluster: Any, tmp_path: Path) -> None:
    ray_nodes.add_node(cluster, num_cpus=2)
    env = {**os.environ, "RAY_ADDRESS": cluster.address}  # what auto finds
    for where, how in (("here", ["--workers", "1"]), ("there", ["--cluster", "auto"])):
        (tmp_path / where).mkdir()
        for command in (
            "compare --task digits --controllers none,heuristic --episodes 2 --no-controls",
            "record --task digits --episodes 2 --noise 0.5",
            "tune-heuristic --task digits --episodes 2 --budget-steps 400",
        ):
            words = [*ESPER, *command.split(), *how]
            done = subprocess.run(words, cwd=tmp_path / where, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert ("2 actors" in done.stdout) == (where == "there")
    compared = [json.loads((tmp_path / w / "compared/digits-0/comparison.json").read_text()) for w in ("here", "there")]
    assert len({json.dumps(one["rows"]) for one in compared}) == 1
    assert len({(tmp_path / where / "heuristic.toml").read_text() for where in ("here", "there")}) == 1
    assert same_recordings(tmp_path / "here/recording", tmp_path / "there/recording")


def same_recordings(one: Path, other: Path) -> bool:
    import torch

    from esper.offline.recording import growth_schema, read

    first, second = (read(folder, growth_schema()).episodes.tensors() for folder in (one, other))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_a_sweep_on_the_cluster_is_the_sweep_of_one_machine(cluster: Any, tmp_path: Path) -> None:
    ray_nodes.add_node(cluster, num_cpus=2)
    common = '[common]\ntask = "digits"\nenvs = 2\nupdates = 2\nevaluate_every = 0\n'
    (tmp_path / "s.toml").write_text(f"seeds = [0, 1]\n{common}[settings.plain]\n")
    for where, how in (("here", ["--workers", "1"]), ("there", ["--cluster", cluster.address])):
        words = [*ESPER, "sweep", "s.toml", "--episodes", "2", "--out", where, *how]
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    for run in ("plain-0", "plain-1"):
        assert final_checkpoint(tmp_path / "here" / run) == final_checkpoint(tmp_path / "there" / run)
    assert len({(tmp_path / where / "comparison.json").read_text() for where in ("here", "there")}) == 1


def test_auto_without_a_cluster_says_how_to_begin_one(tmp_path: Path) -> None:
    env = {**os.environ, "RAY_TMPDIR": str(tmp_path / "ray")}
    env.pop("RAY_ADDRESS", None)
    words = [*ESPER, *WORDS, "--run", "there", "--cluster", "auto"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "this machine is in no Ray cluster: begin one with ray start --head" in line
    assert not (tmp_path / "there").exists()
