"""Where networks are trained: options that several commands have, and what `--cluster` means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from esper.config import EngineOption

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from esper.training.cluster import RayCluster
    from esper.training.pools import Executor

ActorKind = Literal["cpu", "gpu"]
DeviceOption = Annotated[str, arg(help="cpu, cuda, cuda:1, …; auto is a GPU if there is one.")]
EngineChoice = Annotated[
    EngineOption,
    arg(help="What trains the growing networks: auto is the fastest engine that can train all of the family's."),
]
ClusterOption = Annotated[
    str | None,
    arg(
        help="Work on the nodes of a Ray cluster: auto is the one that this machine is in, HOST:PORT names its head. "
        "--workers is then the most actors. The results do not change."
    ),
]
ActorOption = Annotated[ActorKind, arg(help="What each actor of a cluster has for itself: a core, or a GPU.")]


@contextmanager
def opened_cluster(address: str | None, actors: ActorKind, most: int | None) -> Iterator[RayCluster | None]:
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
    address: str | None, actors: ActorKind, workers: int | None, device: str, console: Console
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


def device_of_jobs(wanted: str, address: str | None, actors: ActorKind) -> torch.device:
    """Where the networks are trained: here, or as the actors of a cluster have it."""
    import torch

    from esper.training.own.grow import pick_device

    if address is None:
        return pick_device(wanted)
    return torch.device("cpu" if actors == "cpu" else "cuda")
