"""The actors of a Ray cluster: which nodes there are, who is idle, what came back, who was lost.

Nodes may join and leave during a run: a new one gets actors, and what a lost one was doing is reported as lost. Nodes
whose code would give other results are refused by name.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, Literal, NamedTuple

from esper.errors import first_line
from esper.telemetry.records import Severity
from esper.training import cluster_actor
from esper.training.cluster_actor import NodeFacts

log = logging.getLogger(__name__)

ActorKind = Literal["cpu", "gpu"]
"""What an actor has for itself: a core, or a GPU."""
ACTOR_MEMORY = 2**30
"""Bytes that an actor reserves: a node with less memory than cores × this gets fewer actors."""
LOOK_SECONDS = 1.0
"""How often the driver looks for new nodes."""
LOG_SECONDS = 20.0
"""In which a node must hand over the log of an actor that it has lost."""
PATIENCE_SECONDS = 30.0
"""Without any actor, after which a line says what the driver waits for."""
UNUSABLE = "has no Esper that can be imported"
MOST_DEATHS = 3
"""Actors of one node that may end before they have done a job; then it is left out."""


class ClusterError(RuntimeError):
    """The cluster cannot do the work, with the reason in one line."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened in the cluster, for the record of a run."""

    message: str
    severity: Severity = "info"
    log: str = ""
    """The last lines that a lost actor wrote."""


@dataclass(eq=False, slots=True)
class Member:
    """An actor, as the driver sees it."""

    handle: Any
    node: str
    """Id of its node."""
    where: str
    """The node's name, for people."""
    pending: Any = None
    """What it works on: a reference of Ray's, or None."""
    ticket: object = None
    """Whose job that is; None while it introduces itself."""
    facts: NodeFacts | None = None
    """None until it has introduced itself."""
    since: float = field(default_factory=time.monotonic)


class Ended(NamedTuple):
    """A job that came back: its answer as a pickle, or the actor that was lost with it."""

    member: Member
    ticket: Any
    answer: bytes | None
    lost: str
    """Why, where there is no answer."""
    by_node: bool
    """The whole node was lost."""


class Members:
    """The actors of a run, on all nodes."""

    def __init__(self, ray: Any, actors: ActorKind = "cpu", most: int | None = None) -> None:
        """`ray` is the module, connected; `most` limits the actors in all."""
        self.ray, self.actors, self._most = ray, actors, most
        self._members: list[Member] = []
        self._refused: dict[str, str] = {}
        """By node id: why it is left out, in words that begin with its name."""
        self._deaths: Counter[str] = Counter()
        self._warned: set[str] = set()
        """Nodes whose results have other last bits."""
        self._known: dict[str, str] = {}
        """Names of the nodes that are there."""
        self._notes: list[tuple[Note, Any]] = []
        """Each with a reference to a log that is being fetched, or None."""
        self._looked, self._waiting_since = 0.0, time.monotonic()
        self.done: Counter[str] = Counter()
        """Jobs by the name of the node that did them."""
        self.sent = self.shared = self.received = 0
        """Bytes: jobs, what went through the object store (once; each node fetches it), answers."""

    def close(self) -> None:
        for member in self._members:
            self._kill(member)
        self._members.clear()

    def _kill(self, member: Member) -> None:
        with suppress(Exception):  # it is gone already
            self.ray.kill(member.handle)

    # -- what people see -----------------------------------------------------------------------------------------------

    def note(self, message: str, severity: Severity = "info", fetched: Any = None) -> None:
        self._notes.append((Note(message, severity), fetched))
        (log.info if severity == "info" else log.warning)("%s", message)

    def take_notes(self) -> list[Note]:
        """What happened since the last call."""
        notes, self._notes = self._notes, []
        return [note if fetched is None else replace(note, log=self._lines(fetched)) for note, fetched in notes]

    def progress(self) -> str:
        """The nodes with their actors and the jobs that they have done."""
        ready = Counter(member.where for member in self._members if member.facts is not None)
        names = sorted(ready | self.done)
        return "; ".join(f"{name}: {ready[name]} actors, {self.done[name]} jobs" for name in names)

    # -- who is there --------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Start actors on nodes that have room for more; notice nodes that are gone."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        alive = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
        for node in self._known.keys() - alive.keys():
            self.note(f"{self._known.pop(node)} has left the cluster", "warning")
        for node, facts in alive.items():
            if (room := self._room(facts)) and node not in self._known:
                self._known[node] = _name(facts)
                self.note(f"{_name(facts)} is in the cluster, with room for {room} actors")
            present = sum(member.node == node for member in self._members)
            for _ in range(0 if node in self._refused else room - present):
                if self._most is None or len(self._members) < self._most:
                    self._members.append(self._start(node, _name(facts)))
        self._check_for_usable_nodes(alive)

    def _room(self, node: dict[str, Any]) -> int:
        has = node["Resources"]
        units = int(has.get("CPU" if self.actors == "cpu" else "GPU", 0))
        return min(units, int(has.get("memory", 0) // ACTOR_MEMORY))

    def _start(self, node: str, where: str) -> Member:
        strategies = import_module("ray.util.scheduling_strategies")
        resources = {"num_cpus": 1} if self.actors == "cpu" else {"num_cpus": 1, "num_gpus": 1}
        here = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        kind = self.ray.remote(cluster_actor.ClusterActor)
        handle = kind.options(**resources, memory=ACTOR_MEMORY, max_restarts=0, scheduling_strategy=here).remote()
        return Member(handle, node, where, pending=handle.node_facts.remote())

    def _check_for_usable_nodes(self, alive: dict[str, Any]) -> None:
        """Nodes may still come, unless all that could work were refused."""
        usable = [node for node, facts in alive.items() if self._room(facts)]
        if usable and all(node in self._refused for node in usable):
            raise ClusterError("no node of the cluster can be used: " + "; ".join(self._refused.values()))
        if any(member.facts is not None for member in self._members):
            self._waiting_since = time.monotonic()
        elif time.monotonic() - self._waiting_since > PATIENCE_SECONDS:
            self._waiting_since = time.monotonic()
            missing = f"no node has a {'core and 1 GB of memory' if self.actors == 'cpu' else 'GPU'} for an actor"
            what = "its actors do not start, others may be using its cores" if self._members else missing
            self.note(f"waiting for the cluster: {what}", "warning")

    # -- what they do --------------------------------------------------------------------------------------------------

    def idle(self) -> list[Member]:
        return [one for one in self._members if one.facts and one.pending is None and one.node not in self._refused]

    def assign(self, member: Member, ticket: object, key: str, *parts: Any) -> None:
        """`parts`: the function, the job, and what it shares with others, as `ClusterActor.run` takes them."""
        member.pending, member.ticket = member.handle.run.remote(key, *parts), ticket
        member.since = time.monotonic()

    def collect(self, seconds: float) -> Iterator[Ended]:
        """Jobs that have ended, after at most so many seconds. Introductions are dealt with on the way."""
        busy = {member.pending: member for member in self._members if member.pending is not None}
        if not busy:
            time.sleep(seconds)
            return
        ready, _ = self.ray.wait(list(busy), num_returns=len(busy), timeout=0)
        if not ready:
            ready, _ = self.ray.wait(list(busy), num_returns=1, timeout=seconds)
        for reference in ready:
            member, ticket = busy[reference], busy[reference].ticket
            member.pending = member.ticket = None
            try:
                answer = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:
                lost, by_node = self._lose(member, error)
                if ticket is not None:
                    yield Ended(member, ticket, None, lost, by_node)
                continue
            if ticket is None:
                self._welcome(member, answer)
                continue
            self.received += len(answer)
            self.done[member.where] += 1
            self._deaths[member.node] = 0
            yield Ended(member, ticket, answer, "", False)

    def _welcome(self, member: Member, said: dict[str, Any]) -> None:
        """Let it work if its code is the driver's. Another Esper may say less about itself."""
        known: dict[str, Any] = {one.name: said.get(one.name) for one in fields(NodeFacts)}
        here, there = cluster_actor.node_facts(), NodeFacts(**known)
        ours = {"esper": f"{here.esper} ({here.source})", "torch": here.torch}
        theirs = {"esper": f"{there.esper} ({there.source})", "torch": there.torch}
        if wrong := [f"{name} {theirs[name]}, here it is {ours[name]}" for name in ours if ours[name] != theirs[name]]:
            self.refuse(member, f"has {' and '.join(wrong)}: install the same version on all nodes")
            return
        member.facts = there
        if there.instructions != here.instructions and self.actors == "cpu" and member.node not in self._warned:
            self._warned.add(member.node)
            self.note(
                f"{member.where} has {there.instructions} instructions, this machine {here.instructions}: results will "
                "not be equal bit for bit to those of one machine",
                "warning",
            )

    def refuse(self, member: Member, why: str) -> None:
        """Use its node no longer."""
        if member.node not in self._refused:
            self._refused[member.node] = f"{member.where} {why}"
            self.note(f"a node is left out: {self._refused[member.node]}", "warning")
        for other in [one for one in self._members if one.node == member.node and one.pending is None]:
            self._members.remove(other)
            self._kill(other)
        self._looked = 0.0  # whether an actor is left is found out now

    def _lose(self, member: Member, error: Exception) -> tuple[str, bool]:
        """Strike an actor off; why it ended, and whether its node ended with it."""
        if member in self._members:
            self._members.remove(member)
        self._kill(member)  # where it was only out of reach, it must not go on
        why, by_node = _cause(error)
        fetched = None if by_node or member.facts is None else self._fetch_log(member, member.facts.log)
        self.note(f"lost an actor on {member.where}: {why}", "warning", fetched)
        if not by_node:
            self._deaths[member.node] += 1
            if UNUSABLE in why:
                self.refuse(member, why)
            elif self._deaths[member.node] >= MOST_DEATHS:
                self.refuse(member, f"has lost {MOST_DEATHS} actors in a row: {why}")
        return why, by_node

    def _fetch_log(self, member: Member, path: str | None) -> Any:
        """Its last lines, read on its own node; they are not waited for yet."""
        if path is None:
            return None
        strategies = import_module("ray.util.scheduling_strategies")
        there = strategies.NodeAffinitySchedulingStrategy(member.node, soft=False)
        return self.ray.remote(cluster_actor.last_lines).options(num_cpus=0, scheduling_strategy=there).remote(path)

    def _lines(self, fetched: Any) -> str:
        try:
            return str(self.ray.get(fetched, timeout=LOG_SECONDS))
        except self.ray.exceptions.RayError:
            return ""


def _name(node: dict[str, Any]) -> str:
    """Several nodes may be on one machine, so the id is a part of it."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, node {node['NodeID'][:6]})"


def _cause(error: Exception) -> tuple[str, bool]:
    """Why an actor was lost, in a few words, and whether its node was."""
    text = " ".join(str(error).split())
    if "node has died" in text or "doesn't exist any more" in text or "node was terminated" in text:
        return "its node was lost", True
    if "out of memory" in text.lower() or "OutOfMemory" in type(error).__name__ or "memory monitor" in text:
        return "its node ran out of memory (use fewer actors there: ray start --num-cpus, or --workers)", False
    if "ModuleNotFoundError" in text or "ImportError" in text:
        missing = text[text.rfind("Error: ") + 7 :][:200]
        return f"{UNUSABLE} ({missing}): install the same version on all nodes", False
    if "worker process has died" in text or "connection error" in text:
        return "its process was killed (by the kernel, if memory ran out) or crashed", False
    return first_line(error), False
