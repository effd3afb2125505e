"""How jobs are handed to the actors of a cluster, so that lost and slow ones do not matter.

A job that was lost with its actor goes to another. When nothing is left to hand out, idle actors play copies of the
jobs that take too long; the first answer counts. All answers to a job are the same, so none of this can be seen in a
result.
"""

from __future__ import annotations

import pickle
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from esper.errors import first_line
from esper.rollout.play import never
from esper.training.cluster_actor import pack_job
from esper.training.cluster_members import ClusterError, Ended, Members
from esper.training.pools import Pool

POLL_SECONDS = 0.2
"""How often the driver looks whether it is to stop."""
MOST_ATTEMPTS = 3
"""How often a job may end its actor. A job that was lost with its whole node does not count."""
SLOW = 2.0
"""A job is played a second time once it has taken this many times the median,"""
SLOW_SECONDS = 1.0
"""and at least this long."""


class Ticket(NamedTuple):
    """Which job of which call: answers to an earlier call are of no use."""

    call: str
    job: int


class RayPool(Pool):
    """A function on all actors."""

    def __init__(self, members: Members, function: Callable[[Any], Any]) -> None:
        self.members = members
        self._key = uuid.uuid4().hex
        self._function = self._put(pickle.dumps(function))
        self._seconds: deque[float] = deque(maxlen=256)
        """What the last jobs took."""
        self.played_twice = self.played_again = 0
        """Copies of slow jobs, and jobs that were lost."""

    def as_they_finish(self, jobs: Sequence[Any], stop: Callable[[], bool] = never) -> Iterator[tuple[int, Any]]:
        members, call = self.members, _Call(self, jobs)
        while not stop() and call.unanswered:
            members.look()
            for member in members.idle():
                index = call.next()
                if index is None:
                    break
                members.assign(member, Ticket(call.key, index), self._key, self._function, *call.packed(index))
            for ended in members.collect(POLL_SECONDS):
                if ended.ticket.call != call.key:  # a copy of a job that another actor has answered
                    continue
                answer = self._answer(call, ended)
                if answer is not None:
                    yield answer

    def close(self) -> None:
        """The actors stay, for the next function."""
        self._function = None

    def _answer(self, call: _Call, ended: Ended) -> tuple[int, Any] | None:
        index = ended.ticket.job
        call.end(index)
        if index not in call.unanswered:
            return None
        if ended.answer is None:
            call.again(index, ended.member.where, ended.lost, counted=not ended.by_node)
            return None
        result = pickle.loads(ended.answer)
        if isinstance(result, OSError | ImportError):  # the driver could read the data, or import it: this node cannot
            self.members.refuse(ended.member, f"lacks what a job needs: {first_line(result)}")
            call.again(index, ended.member.where, first_line(result), counted=False)
            return None
        if _is_out_of_memory(result):
            call.again(index, ended.member.where, f"out of memory ({first_line(result)})", counted=True)
            return None
        if isinstance(result, BaseException):
            raise result
        self._seconds.append(time.monotonic() - ended.member.since)
        call.unanswered.discard(index)
        return index, result

    def slow_after(self) -> float:
        """Seconds."""
        return max(SLOW_SECONDS, SLOW * median(self._seconds)) if self._seconds else float("inf")

    def _put(self, value: bytes) -> Any:
        self.members.shared += len(value)
        return self.members.ray.put(value)

    def share(self, value: bytes, known: dict[int, tuple[bytes, Any]]) -> Any:
        """A reference to bytes that may have been put into the object store before."""
        if id(value) not in known:
            known[id(value)] = (value, self._put(value))  # the value itself, too: its id must not be used again
        return known[id(value)][1]


class _Call:
    """The state of one call of `as_they_finish`."""

    def __init__(self, pool: RayPool, jobs: Sequence[Any]) -> None:
        self.key = uuid.uuid4().hex
        self._pool, self._jobs = pool, jobs
        self.unanswered = set(range(len(jobs)))
        self._waiting = deque(range(len(jobs)))
        self._players: Counter[int] = Counter()
        self._since: dict[int, float] = {}
        """When a job was first handed out."""
        self._attempts: Counter[int] = Counter()
        self._shared: dict[int, tuple[bytes, Any]] = {}

    def packed(self, index: int) -> list[Any]:
        job, large = pack_job(self._jobs[index])
        self._pool.members.sent += len(job)
        return [job, *(self._pool.share(value, self._shared) for value in large)]

    def next(self) -> int | None:
        """The job that an idle actor should do now; None if there is nothing to do."""
        index = self._waiting.popleft() if self._waiting else self._slow()
        if index is not None:
            self._players[index] += 1
            self._since.setdefault(index, time.monotonic())
        return index

    def _slow(self) -> int | None:
        """The job that one actor has been doing for longest, if that is too long."""
        alone = [index for index in self.unanswered if self._players[index] == 1]
        index = min(alone, key=lambda index: self._since[index], default=None)
        if index is None or time.monotonic() - self._since[index] < self._pool.slow_after():
            return None
        self._pool.played_twice += 1
        return index

    def end(self, index: int) -> None:
        self._players[index] -= 1

    def again(self, index: int, where: str, why: str, *, counted: bool) -> None:
        """The job goes to another actor, unless it has ended too many."""
        self._attempts[index] += counted
        if self._attempts[index] >= MOST_ATTEMPTS:
            raise ClusterError(f"a job has failed {MOST_ATTEMPTS} times, the last time on {where}: {why}")
        self._pool.played_again += 1
        if not self._players[index]:  # else a copy of it is still being played
            self._waiting.appendleft(index)
            self._since.pop(index, None)


def _is_out_of_memory(result: object) -> bool:
    return isinstance(result, MemoryError | torch.OutOfMemoryError) or (
        isinstance(result, RuntimeError) and "can't allocate memory" in str(result)
    )
