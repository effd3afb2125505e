"""Who gets which job on a cluster, without one: an imitation of its actors loses jobs and is slow on request."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import cluster_jobs
import pytest

from esper.training import cluster_members, cluster_pool
from esper.training.cluster_actor import ClusterActor, pack_job, unpack_job
from esper.training.cluster_members import ClusterError, Ended, Member, Members
from esper.training.cluster_pool import RayPool

Fate = Callable[[str, Any], str]


class Imitation:
    """Two actors that do a job in one turn. `fate` says for an actor and a job: done, lost, node-lost or later."""

    def __init__(self, fate: Fate = lambda actor, job: "done") -> None:
        self.fate = fate
        self.actors = [Member(ClusterActor(), f"node-{name}", name) for name in ("a", "b")]
        self.given: list[tuple[str, Any]] = []
        self.refused: list[str] = []
        self.stored: list[bytes] = []
        self.ray = SimpleNamespace(put=lambda value: self.stored.append(value) or value)
        self.sent = self.shared = 0
        self.turn = 0

    def look(self) -> None:
        self.turn += 1
        assert self.turn < 100, "the pool waits for ever"

    def idle(self) -> list[Member]:
        return [actor for actor in self.actors if actor.pending is None and actor.where not in self.refused]

    def assign(self, member: Member, ticket: object, *parts: Any) -> None:
        member.pending, member.ticket, member.since = parts, ticket, self.turn
        self.given.append((member.where, unpack_job(parts[2], parts[3:])))

    def collect(self, seconds: float) -> Iterator[Ended]:
        for member in [actor for actor in self.actors if actor.pending is not None]:
            parts, ticket = member.pending, member.ticket
            fate = self.fate(member.where, unpack_job(parts[2], parts[3:]))
            if fate == "later":
                continue
            member.pending = member.ticket = None
            answer = member.handle.run(*parts) if fate == "done" else None
            if answer is None:  # another starts in its place
                self.actors[self.actors.index(member)] = Member(ClusterActor(), member.node, f"{member.where}'")
            yield Ended(member, ticket, answer, "" if answer else "it was lost", fate == "node-lost")

    def refuse(self, member: Member, why: str) -> None:
        self.refused.append(member.where)


def pool_of(function: Any, fate: Fate = lambda actor, job: "done") -> tuple[RayPool, Imitation]:
    actors = Imitation(fate)
    return RayPool(actors, function), actors  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time passes when a test says so."""
    now = [0.0]
    monkeypatch.setattr(cluster_pool.time, "monotonic", lambda: now[0])
    return now


def test_large_bytes_travel_beside_a_job() -> None:
    large, small = bytes(range(256)) * 1000, b"small"
    packed, beside = pack_job(("a", large, small, large))
    assert len(packed) < 200
    assert beside[0] is large
    assert unpack_job(packed, beside) == ("a", large, small, large)


def test_results_come_back_in_order_and_large_bytes_are_stored_once() -> None:
    policy = bytes(100_000)
    pool, actors = pool_of(cluster_jobs.Lengths())
    answers = pool.map([(policy, bytes(index)) for index in range(5)])
    assert [lengths for lengths, _ in answers] == [[100_000, index] for index in range(5)]
    assert sorted(done for _, done in answers) == [1, 1, 2, 2, 3]  # two copies of the function, with a state each
    assert [len(value) for value in actors.stored[1:]] == [100_000]  # the first is the function


def test_a_lost_job_goes_to_another_actor() -> None:
    pool, actors = pool_of(cluster_jobs.double, lambda actor, job: "lost" if (actor, job) == ("a", 1) else "done")
    assert pool.map([1, 2, 3]) == [2, 4, 6]
    assert [actor for actor, job in actors.given if job == 1] == ["a", "a'"]
    assert pool.played_again == 1


def test_a_job_that_is_always_lost_is_given_up_but_not_for_lost_nodes() -> None:
    pool, actors = pool_of(cluster_jobs.double, lambda actor, job: "lost")
    with pytest.raises(ClusterError, match=r"a job has failed 3 times, the last time on a'': it was lost"):
        pool.map([1])
    assert [job for _, job in actors.given] == [1, 1, 1]
    losses = iter(["node-lost"] * 7)
    pool, _ = pool_of(cluster_jobs.double, lambda actor, job: next(losses, "done"))
    assert pool.map([1]) == [2]


def test_a_node_without_its_data_gets_no_more_jobs() -> None:
    pool, actors = pool_of(cluster_jobs.trouble)
    actors.actors[0].handle = SimpleNamespace(
        run=lambda *given: pickle.dumps(FileNotFoundError(2, "No such file", "x"))
    )
    assert pool.map(["1", "2", "3"]) == ["1", "2", "3"]
    assert actors.refused == ["a"]
    assert [actor for actor, _ in actors.given].count("a") == 1


def test_idle_actors_copy_jobs_that_take_too_long_and_late_answers_are_dropped(clock: list[float]) -> None:
    """Actor a never ends job 1. The others take a second each; after two, b gets a copy."""

    def fate(actor: str, job: Any) -> str:
        clock[0] += 1.0
        return "later" if actor == "a" and job == 1 else "done"

    pool, actors = pool_of(cluster_jobs.double, fate)
    assert pool.map([1, 2, 3]) == [2, 4, 6]
    assert [job for actor, job in actors.given if actor == "b"] == [2, 3, 1]
    assert pool.played_twice == 1
    actors.fate = lambda actor, job: "done"  # now a answers, while other jobs are done
    assert pool.map([7, 8]) == [14, 16]


def test_an_actor_keeps_its_function_and_answers_errors() -> None:
    actor, function = ClusterActor(), pickle.dumps(cluster_jobs.Lengths())
    answers = [pickle.loads(actor.run("f", function, pack_job((b"12",))[0])) for _ in range(2)]
    assert answers == [([2], 1), ([2], 2)]
    other = pickle.loads(actor.run("g", pickle.dumps(cluster_jobs.trouble), pack_job("raise")[0]))
    assert isinstance(other, ValueError)
    unsendable = pickle.loads(actor.run("h", pickle.dumps(cluster_jobs.open_file), pack_job("x")[0]))
    assert isinstance(unsendable, RuntimeError)
    assert "TextIOWrapper" in str(unsendable)


def test_a_node_gets_as_many_actors_as_it_has_cores_and_memory_for() -> None:
    gigabyte = 2**30
    for actors, has, room in (
        ("cpu", {"CPU": 16.0, "memory": 8.5 * gigabyte}, 8),
        ("cpu", {"CPU": 4.0, "memory": 64.0 * gigabyte}, 4),
        ("cpu", {"memory": 64.0 * gigabyte}, 0),  # a head that does not play
        ("gpu", {"CPU": 64.0, "GPU": 2.0, "memory": 64.0 * gigabyte}, 2),
    ):
        members = Members(None, actors)  # type: ignore[arg-type]
        assert members._room({"Resources": has}) == room


class Handle:
    """An actor in this process behind Ray's way of calling: a method that it does not have fails here, too."""

    def __init__(self) -> None:
        self.actor = ClusterActor()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *given: Answered(getattr(self.actor, method)(*given)))


class Answered:
    def __init__(self, answer: Any) -> None:
        self.answer = answer


def test_an_actor_introduces_itself_and_is_then_given_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: None)
    monkeypatch.setattr(cluster_members, "import_module", lambda name: strategies)
    node = {"NodeID": "0123456789", "Alive": True, "NodeManagerHostname": "here", "NodeManagerAddress": "127.0.0.1"}
    ray = SimpleNamespace(
        nodes=lambda: [{**node, "Resources": {"CPU": 1.0, "memory": 2.0**31}}],
        remote=lambda kind: SimpleNamespace(options=lambda **settings: SimpleNamespace(remote=Handle)),
        wait=lambda pending, num_returns, timeout: (pending, []),
        get=lambda reference: reference.answer,
        put=lambda value: value,
        exceptions=SimpleNamespace(RayError=OSError),
    )
    assert RayPool(Members(ray), cluster_jobs.double).map([1, 2]) == [2, 4]
