"""Jobs on a Ray cluster (extra `cluster`), with the results of one machine.

Every core (or GPU) of every node gets an actor (`cluster_actor.py`). Nodes may join and leave during a run
(`cluster_members.py`): what a lost one was doing is done again elsewhere, to the same result (`cluster_pool.py`).
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from importlib import import_module
from typing import Any

from esper.errors import first_line
from esper.telemetry.sinks import PackageMissingError
from esper.training.cluster_members import ActorKind, ClusterError, Members
from esper.training.cluster_pool import RayPool
from esper.training.interrupt import handled

CONNECT_SECONDS = 5.0


class RayCluster:
    """An `Executor`: the pools of a command share its actors."""

    def __init__(self, address: str, *, actors: ActorKind = "cpu", most: int | None = None) -> None:
        """`address` is HOST:PORT of the head, or "auto": the cluster that this machine is in. `most` limits the actors
        in all. A session of Ray that this process has already is used, and left as it is."""
        self._ray = load_ray()
        self._owns_session = not self._ray.is_initialized()
        if self._owns_session:
            _connect(self._ray, address)
        self.members = Members(self._ray, actors, most)

    @property
    def device(self) -> str:
        """Of an actor."""
        return "cpu" if self.members.actors == "cpu" else "cuda"

    def pool(self, function: Callable[[Any], Any], jobs: int) -> RayPool:
        return RayPool(self.members, function)

    def close(self) -> None:
        self.members.close()
        if self._owns_session:
            self._ray.shutdown()


# -- the connection ----------------------------------------------------------------------------------------------------


def load_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    try:
        return import_module("ray")
    except ImportError as error:
        raise PackageMissingError("Ray is not installed: pip install 'esper[cluster]'") from error


def _connect(ray: Any, address: str) -> None:
    if address.startswith("ray://"):
        raise ClusterError(
            f"{address} is an address of Ray's client, which cannot be used: make this machine a node "
            "(ray start --address HOST:6379 --num-cpus 0), then --cluster auto"
        )
    if address != "auto":
        _check_that_it_answers(address)
    _silence()
    try:
        # Ray takes SIGTERM for itself; a command stops at the end of an update instead, and keeps what it has.
        with handled(signal.getsignal(signal.SIGTERM), [signal.SIGTERM]):
            ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, AssertionError) as error:
        if address == "auto":
            raise ClusterError(
                "this machine is in no Ray cluster: begin one with ray start --head, join one with ray start --address "
                f"HOST:6379, or name it with --cluster HOST:6379 ({first_line(error)})"
            ) from error
        raise ClusterError(f"cannot join the Ray cluster at {address}: {' '.join(str(error).split())[:300]}") from error


def _check_that_it_answers(address: str) -> None:
    """At once; Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ClusterError(f"--cluster must be auto or HOST:PORT, not {address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster answers at {address} ({error.strerror or error}): is its head running (ray start --head "
            f"--port {port}), and may this machine connect to it?"
        ) from error


def _silence() -> None:
    """Ray prints pages about lost nodes to the standard output, which may be JSON; the lines here say the same."""
    worker: Any = import_module("ray._private.worker")
    worker.print_to_stdstream = lambda *given, **named: None
