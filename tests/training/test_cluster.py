"""Jobs on a Ray cluster: the results of one machine, whoever is lost or slow; and what is said when it cannot be."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cluster_jobs
import pytest
import ray_nodes
import torch
from tiny_family import TinyFamily

from esper.cli import main
from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import Event
from esper.telemetry.sinks import PackageMissingError
from esper.training import cluster, cluster_actor, cluster_members
from esper.training.cluster import RayCluster
from esper.training.cluster_actor import NodeFacts
from esper.training.cluster_members import ClusterError
from esper.training.evaluation import jobs_for, run_jobs
from esper.training.loop import Trainer
from esper.training.train_config import TrainConfig

pytest.importorskip("ray", reason="Ray is large and in the extra [cluster] only")

CONFIG = TrainConfig(task="digits", envs=4, updates=2, evaluate_every=2, evaluation_episodes=2)


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """A driver that waits for ever fails its test instead of blocking the suite."""

    def late(number: int, frame: object) -> None:
        pytest.fail("the driver waited for ever")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    """One node with room for four actors, and this process connected to it."""
    import ray

    with ray_nodes.local_cluster(cpus=4) as made:
        ray.init(made.address, log_to_driver=False, logging_level="ERROR")
        yield made
        ray.shutdown()


@pytest.fixture(scope="module")
def ready(session: Any) -> Iterator[RayCluster]:
    """Actors that tests share, because each takes a second or two to start."""
    made = RayCluster("auto", most=2)  # the session that is there; others need room, too
    yield made
    made.close()


# -- the same results -------------------------------------------------------------------------------------------------


def test_jobs_share_what_they_hold_in_common(ready: RayCluster) -> None:
    policy = bytes(1_000_000)
    before = ready.members.shared
    pool = ready.pool(cluster_jobs.Lengths(), 6)
    answers = pool.map([(policy, bytes(index)) for index in range(6)])
    assert [lengths for lengths, _ in answers] == [[1_000_000, index] for index in range(6)]
    assert sorted(done for _, done in answers)[-1] > 1  # an actor keeps its copy of the function
    assert ready.members.shared - before < 1_000_000 + 1_000  # and the policy went there once
    assert sum(ready.members.done.values()) >= 6
    assert "actors" in ready.members.progress()


def test_training_gives_the_weights_of_one_machine(ready: RayCluster) -> None:
    family, config = TinyFamily(horizon=6), replace(CONFIG, updates=1, evaluate_every=1)
    runs = [Trainer(config, family=family), Trainer(config, family=family, cluster=ready)]
    for trainer in runs:
        trainer.run()
        trainer.fleet.close()
    here, there = (trainer.agent.network.state_dict() for trainer in runs)
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert runs[0].best_score == runs[1].best_score


def test_comparing_gives_the_results_of_one_machine(ready: RayCluster) -> None:
    jobs = jobs_for(TinyFamily(horizon=6), {"none": "none", "random": "random"}, range(3), batch=1)
    here, there = run_jobs(jobs), run_jobs(jobs, executor=ready)
    for name, results in here.items():
        assert {n: replace(r, seconds=0.0) for n, r in results.items()} == {
            n: replace(r, seconds=0.0) for n, r in there[name].items()
        }


def test_stopping_returns_what_is_complete(ready: RayCluster) -> None:
    found = []
    for index, _ in ready.pool(cluster_jobs.double, 9).as_they_finish(list(range(9)), stop=lambda: len(found) >= 3):
        found.append(index)
    assert 3 <= len(found) < 9


# -- losses and stragglers --------------------------------------------------------------------------------------------


def test_a_job_that_was_lost_with_its_actor_is_done_again(ready: RayCluster, tmp_path: Path) -> None:
    ready.members.take_notes()
    pool = ready.pool(cluster_jobs.trouble, 3)
    jobs = ["a", f"die-once {tmp_path / 'died'}", "b"]
    assert pool.map(jobs) == jobs
    assert pool.played_again + pool.played_twice >= 1  # a copy, where the machine is so busy that the loss is seen late
    lost = None
    while lost is None:  # the loss is noticed while other jobs are done
        assert pool.map(["c"]) == ["c"]
        lost = next((note for note in ready.members.take_notes() if note.severity == "warning"), None)
    assert "lost an actor on" in lost.message
    assert "its process was killed" in lost.message
    assert "about to die" in lost.log


def test_a_slow_job_is_played_twice_and_the_first_answer_counts(ready: RayCluster, tmp_path: Path) -> None:
    pool = ready.pool(cluster_jobs.trouble, 4)
    jobs = [f"slow-once {tmp_path / 'slow'}", *"abc"]
    assert pool.map(jobs) == jobs  # the first copy sleeps for a minute
    assert pool.played_twice == 1
    assert pool.map(["d"]) == ["d"]  # its late answer is taken for nobody's


def test_what_a_job_raises_is_raised_here_and_the_actors_go_on(ready: RayCluster) -> None:
    pool = ready.pool(cluster_jobs.trouble, 2)
    with pytest.raises(ValueError, match="this job is bad"):
        pool.map(["raise"])
    assert pool.map(["x"]) == ["x"]


@pytest.mark.slow
def test_a_job_that_ends_every_actor_is_given_up(session: Any) -> None:
    made = RayCluster("auto", most=1)
    events: list[Event] = []

    class Recorder(RunRecorder):
        def event(self, event: Event) -> None:
            events.append(event)

    trainer = Trainer(CONFIG, recorder=Recorder(), family=TinyFamily(horizon=6), cluster=made)
    try:
        with pytest.raises(ClusterError, match=r"a job has failed 3 times, the last time on .*its process was killed"):
            made.pool(cluster_jobs.trouble, 1).map(["die"])
        trainer.close()
    finally:
        made.close()
    logs = [event.data["log"] for event in events if event.kind == "cluster" and "log" in event.data]
    assert len(logs) == 3  # in the run's store, with what the actors wrote last
    assert all("about to die" in str(log) for log in logs)


@pytest.mark.parametrize(
    ("job", "line"),
    [
        ("no-file", r"no node of the cluster can be used: .* lacks what a job needs: .*/nowhere/data.bin"),
        ("no-memory", r"a job has failed 3 times, the last time on .*: out of memory \(Unable to allocate 1 TiB\)"),
    ],
)
def test_a_node_without_the_data_or_the_memory_is_named(session: Any, job: str, line: str) -> None:
    made = RayCluster("auto", most=1)
    try:
        with pytest.raises(ClusterError, match=line):
            made.pool(cluster_jobs.trouble, 1).map([job])
    finally:
        made.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("torch", "1.0.0"),
        pytest.param("source", "0123456789ab", marks=pytest.mark.slow),
        pytest.param("esper", "0.0.9", marks=pytest.mark.slow),
    ],
)
def test_a_node_with_another_version_is_refused_by_name(
    session: Any, monkeypatch: pytest.MonkeyPatch, field: str, value: str
) -> None:
    """The driver's facts are changed, which is the same as changing the node's."""
    real = cluster_actor.node_facts()
    monkeypatch.setattr(cluster_actor, "node_facts", lambda: replace(real, **{field: value}))
    made = RayCluster("auto", most=1)
    try:
        with pytest.raises(ClusterError, match=rf"no node of the cluster can be used: .*here it is .*{value}"):
            made.pool(cluster_jobs.double, 1).map([1])
    finally:
        made.close()


def test_other_instructions_are_a_warning(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real: NodeFacts = cluster_actor.node_facts()
    monkeypatch.setattr(cluster_actor, "node_facts", lambda: replace(real, instructions="ABACUS"))
    made = RayCluster("auto", most=1)
    try:
        assert made.pool(cluster_jobs.double, 1).map([1]) == [2]
        assert any("this machine ABACUS" in note.message for note in made.members.take_notes())
    finally:
        made.close()


# -- addresses --------------------------------------------------------------------------------------------------------


def test_addresses_that_cannot_be_used(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = {
        "somewhere": "--cluster must be auto or HOST:PORT, not somewhere",
        "ray://127.0.0.1:10001": "is an address of Ray's client",
        f"127.0.0.1:{port}": f"no Ray cluster answers at 127.0.0.1:{port} (Connection refused)",
    }
    for address, line in words.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ray.is_initialized", lambda: False)
            run = str(tmp_path / "run")
            assert main(["train", "--task", "digits", "--run", run, "--cluster", address]) == 1
        said = capsys.readouterr().err
        assert line in said
        assert said.count("\n") == 1
        assert not Path(run).exists()


def test_without_ray_a_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(cluster, "import_module", missing)
    with pytest.raises(PackageMissingError, match=r"pip install 'esper\[cluster\]'"):
        RayCluster("auto")


def test_the_driver_waits_for_nodes_and_says_so(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_members, "PATIENCE_SECONDS", 0.0)
    made = RayCluster("auto", actors="gpu")
    asked = iter([False, False, True])
    assert list(made.pool(cluster_jobs.double, 1).as_they_finish([1], stop=lambda: next(asked))) == []
    assert "waiting for the cluster: no node has a GPU for an actor" in [n.message for n in made.members.take_notes()]
    made.close()
