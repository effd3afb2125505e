"""What `--cluster` means, for every command that has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from esper.training.cluster import RayCluster
    from esper.training.pools import Executor

ActorOption = Literal["cpu", "gpu"]


@contextmanager
def opened_cluster(address: str | None, actors: ActorOption, most: int | None) -> Iterator[RayCluster | None]:
    """The cluster that a command uses, connected; None without one."""
    if address is None:
        yield None
        return
    from esper.training.cluster import RayCluster

    cluster = RayCluster(address, actors=actors, most=most)
    try:
        yield cluster
    finally:
        cluster.close()


@contextmanager
def chosen_executor(
    address: str | None, actors: ActorOption, workers: int | None, device: str, console: Console
) -> Iterator[Executor]:
    """The cluster, or else so many processes of this machine; at the end, a line about what each node has done."""
    from esper.cli.options import pick_workers
    from esper.cli.terminal import print_dim
    from esper.training.workers import Processes

    with opened_cluster(address, actors, workers) as cluster:
        if cluster is None:
            yield Processes(pick_workers(workers, device))
            return
        yield cluster
        print_dim(console, cluster.members.progress())


def device_of_jobs(wanted: str, address: str | None, actors: ActorOption) -> torch.device:
    """Where the networks are trained: here, or as the actors of a cluster have it."""
    import torch

    from esper.training.own.grow import pick_device

    if address is None:
        return pick_device(wanted)
    return torch.device("cpu" if actors == "cpu" else "cuda")
