"""Clusters of several nodes on this machine, for tests: small object stores, no dashboard, nothing reported."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

STORE = 80 * 2**20
"""Bytes of an object store, near the least that Ray allows."""
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""So that a killed node is noticed within seconds."""


@contextmanager
def local_cluster(*, cpus: int = 0, config: dict[str, Any] | None = None) -> Iterator[Any]:
    """A cluster whose head has so many cores. Its processes can import the modules of this folder."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, str(Path(__file__).parent))))
    head = {"num_cpus": cpus, "object_store_memory": STORE, "include_dashboard": False}
    cluster = _started(Cluster, {**head, "_system_config": {**QUICK, **(config or {})}})
    try:
        yield cluster
    finally:
        cluster.shutdown()
        os.environ["PYTHONPATH"] = before


def _started(kind: Any, head: dict[str, Any], attempts: int = 3) -> Any:
    """Ray gives a node half a minute to start, which a machine with many other jobs may not manage."""
    for _ in range(attempts - 1):
        with suppress(Exception):
            return kind(initialize_head=True, head_node_args=head)
    return kind(initialize_head=True, head_node_args=head)


def add_node(cluster: Any, **settings: Any) -> Any:
    return cluster.add_node(**{"num_cpus": 1, "object_store_memory": STORE, **settings})


def kill_node(node: Any) -> None:
    """As if its power was cut: the raylet and all workers at once, by SIGKILL."""
    raylet = node.all_processes["raylet"][0].process.pid
    for pid in (raylet, *_children(raylet)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent:
            found.append(int(stat.parent.name))
    return found
