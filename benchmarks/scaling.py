"""How far a run scales: what a job costs on a cluster, what limits it, and where the knee is.

    python benchmarks/scaling.py measure [docs/scaling.json] [--nodes 1 2 4] [--jobs 16] [--repeats 2]
    python benchmarks/scaling.py model [docs/scaling.json]

`measure` plays the same episodes in worker processes and on local Ray nodes of one core each, in turn, and makes an
update with them. On a busy machine wall times say little, so each figure is there twice: by the clock, and by process
time, where the time of a play phase is the CPU time of the actor that had most to do. `model` computes from these
figures what an update takes on other numbers of cores, beside what was measured here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import tyro

from esper.rollout.episodes import join
from esper.training.cluster import RayCluster
from esper.training.fleet import PolicyJob, PolicyPlayer, seeds_for
from esper.training.loop import make_agent
from esper.training.pools import Pool
from esper.training.train_config import TrainConfig
from esper.training.workers import ProcessPool

TASK = "mixed/vector"
STORE = 80 * 2**20
CANNED = 300
"""Jobs without work, by which the driver's own time is measured."""
NODE_CORES = 32
"""Cores of a node, as the model assumes it: a policy goes to each node once."""
GIGABIT = 125e6
"""Bytes a second of the driver's network, as the model assumes it."""


class Timed:
    """A player that also says which process played, and for how long its core was busy."""

    def __init__(self, player: PolicyPlayer) -> None:
        self.player = player

    def __call__(self, job: PolicyJob) -> tuple[Any, int, float]:
        began = time.process_time()
        played = self.player(job)
        return played, os.getpid(), time.process_time() - began


class Canned:
    """Answers every job with the same episode: what is left is what sending and receiving cost."""

    def __init__(self, played: Any) -> None:
        self.played = played

    def __call__(self, job: PolicyJob) -> Any:
        return self.played


@dataclass(frozen=True, slots=True)
class Phase:
    """One play phase."""

    arm: str
    actors: int
    wall: float
    busiest: float
    """CPU seconds of the actor that had most to do: the wall time, had every actor a core for itself."""
    busy: float
    """CPU seconds of all actors, in jobs."""
    driver: float
    """CPU seconds of the driver."""
    around: float
    """CPU seconds of Ray's own processes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the model is made of."""

    steps: float
    """Env-steps of an episode, mean."""
    step_seconds: float
    """CPU seconds of a step on an actor's core."""
    driver_seconds: float
    """Of the driver, for an episode: to send its job and to take in its answer."""
    learner_seconds: float
    """Of the learner, for a step that was played: all epochs of PPO over it."""
    episode_bytes: float
    job_bytes: float
    policy_bytes: float


def config_of(jobs: int) -> TrainConfig:
    return TrainConfig(task=TASK, envs=jobs, engine="eager", updates=1)


def jobs_of(config: TrainConfig) -> tuple[Any, Timed, list[PolicyJob]]:
    from esper.agent.policies import pack_policy  # noqa: PLC0415

    agent, family = make_agent(config), config.family()
    policy = pack_policy(agent.network, agent.observation_normaliser)
    player = PolicyPlayer(family, "eager", "cpu", reward=config.reward, slots=family.slots)
    draws, seeds = config.draw_ids(1), seeds_for(0, 1, config.envs)
    return agent, Timed(player), [PolicyJob(policy, (d,), False, s) for d, s in zip(draws, seeds, strict=True)]


# -- playing -----------------------------------------------------------------------------------------------------------


@contextmanager
def pools(arm: str, actors: int, player: Timed, address: str) -> Iterator[tuple[Pool, RayCluster | None]]:
    if arm == "processes":
        pool: Pool = ProcessPool(player, actors)
        yield pool, None
        pool.close()
        return
    cluster = RayCluster(address, most=actors)
    yield cluster.pool(player, actors), cluster
    cluster.close()


def phase(
    arm: str, actors: int, player: Timed, jobs: list[PolicyJob], address: str
) -> tuple[Phase, list[Any], Counter[str]]:
    with pools(arm, actors, player, address) as (pool, cluster):
        while len({pid for _, pid, _ in pool.map(jobs[:1] * 2 * actors)}) < actors:
            pass  # until everybody has started
        if cluster is not None:
            members = cluster.members
            members.sent = members.shared = members.received = 0
        before, driver, began = ray_seconds(), time.process_time(), time.perf_counter()
        answers = pool.map(jobs)
        wall, driver, around = time.perf_counter() - began, time.process_time() - driver, ray_seconds() - before
        sizes = Counter() if cluster is None else Counter(sent=members.sent, received=members.received)
    by_actor: Counter[int] = Counter()
    for _, pid, seconds in answers:
        by_actor[pid] += seconds  # type: ignore[assignment]
    busy = float(sum(by_actor.values()))
    around = max(0.0, around - busy) if arm == "ray" else 0.0  # the actors are Ray's children
    return Phase(arm, actors, wall, max(by_actor.values()), busy, driver, around), answers, sizes


def ray_seconds() -> float:
    """CPU seconds of all processes of Ray that this process has started, actors among them."""
    ticks, found = os.sysconf("SC_CLK_TCK"), 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
            name = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if b"ray" in name and int(stat.parent.name) != os.getpid():
            found += (int(words[11]) + int(words[12])) / ticks
    return found


def driver_seconds(played: Any, jobs: list[PolicyJob], address: str) -> float:
    """CPU seconds of the driver for a job: packing, sending, receiving, unpacking."""
    cluster = RayCluster(address)
    pool = cluster.pool(Canned(played), CANNED)
    many = (jobs * CANNED)[:CANNED]
    pool.map(many)  # everybody has started
    began = time.process_time()
    pool.map(many)
    seconds = (time.process_time() - began) / CANNED
    cluster.close()
    return seconds


def measure(nodes: Sequence[int], count: int, repeats: int) -> dict[str, Any]:
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)])
    config = config_of(count)
    agent, player, jobs = jobs_of(config)
    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(max(nodes)):
        made.add_node(num_cpus=1, object_store_memory=STORE)
    phases, answers, sizes = [], [], Counter[str]()
    try:
        for _ in range(repeats):
            for actors in nodes:
                for arm in ("processes", "ray"):
                    one, answers, bytes_of = phase(arm, actors, player, jobs, made.address)
                    phases.append(one)
                    sizes = bytes_of or sizes
                    print(one, file=sys.stderr, flush=True)
        driver = driver_seconds(answers[0][0], jobs, made.address)
    finally:
        made.shutdown()
    episodes = join([played.episodes for played, _, _ in answers])
    began = time.process_time()
    agent.update(episodes)
    learner = (time.process_time() - began) / episodes.steps
    found = Measured(
        steps=episodes.steps / count,
        step_seconds=median(one.busy for one in phases) / episodes.steps,
        driver_seconds=driver,
        learner_seconds=learner,
        episode_bytes=sizes["received"] / count,
        job_bytes=sizes["sent"] / count,
        policy_bytes=float(len(jobs[0].policy)),
    )
    return {
        "jobs": count,
        "cores": os.cpu_count(),
        "measured": asdict(found),
        "phases": [asdict(one) for one in phases],
    }


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Predicted:
    """An update on so many actors."""

    actors: int
    episodes: int
    play: float
    driver: float
    network: float
    learner: float

    @property
    def total(self) -> float:
        """Answers are taken in while others play: the slowest of the three decides; the learner comes after."""
        return max(self.play, self.driver, self.network) + self.learner

    @property
    def limit(self) -> str:
        parts = {
            "playing": self.play,
            "driver": self.driver,
            "network": self.network,
            "learner": self.learner,
        }
        return max(parts, key=lambda name: parts[name])


def predict(m: Measured, actors: int, episodes: int, *, learner: float = 1.0) -> Predicted:
    """`learner`: how many times faster than a core it is.

    The last jobs leave actors idle: with equal jobs the phase takes as many rounds as there are jobs for an actor.
    """
    rounds = -(-episodes // actors)
    return Predicted(
        actors,
        episodes,
        play=rounds * m.steps * m.step_seconds,
        driver=episodes * m.driver_seconds,
        network=(episodes * (m.episode_bytes + m.job_bytes) + -(-actors // NODE_CORES) * m.policy_bytes) / GIGABIT,
        learner=episodes * m.steps * m.learner_seconds / learner,
    )


def knee(m: Measured, learner: float = 1.0) -> int:
    """Actors beyond which an update of as many episodes as one likes spends less than half its time playing."""
    return round(m.step_seconds * m.steps / (m.driver_seconds + m.steps * m.learner_seconds / learner))


def model(data: dict[str, Any]) -> str:
    return "\n".join([*_checked(data), "", *_extended(Measured(**data["measured"]))])


def _checked(data: dict[str, Any]) -> Iterator[str]:
    """Predicted beside measured."""
    m, count = Measured(**data["measured"]), int(data["jobs"])
    yield "| nodes | play, predicted | Ray, process time | Ray, clock | processes, process time | clock |"
    yield "|---|---|---|---|---|---|"
    for actors in sorted({one["actors"] for one in data["phases"]}):
        cells = [f"{predict(m, actors, count).play:.1f}"]
        for arm in ("ray", "processes"):
            mine = [one for one in data["phases"] if one["actors"] == actors and one["arm"] == arm]
            cells += [f"{fmean(one[what] for one in mine):.1f}" for what in ("busiest", "wall")]
        yield f"| {actors} | {' | '.join(cells)} |"


def _extended(m: Measured) -> Iterator[str]:
    yield "| cores | episodes | playing | driver | network | learner | update | limit | learner ×20: update | limit |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for actors in (8, 64, 512, 4096):
        for episodes in sorted({max(96, actors), 4096}):
            slow, fast = predict(m, actors, episodes), predict(m, actors, episodes, learner=20.0)
            yield (
                f"| {actors:,} | {episodes:,} | {slow.play:.1f} | {slow.driver:.1f} | {slow.network:.2f} | "
                f"{slow.learner:.1f} | {slow.total:.1f} | {slow.limit} | {fast.total:.1f} | {fast.limit} |"
            )
    yield ""
    yield f"knee: {knee(m):,} cores; with a learner 20 times as fast: {knee(m, 20.0):,}"


def main(
    what: tyro.conf.Positional[Literal["measure", "model"]],
    file: tyro.conf.Positional[Path] = Path("docs/scaling.json"),
    nodes: tuple[int, ...] = (1, 2, 4),
    jobs: int = 16,
    repeats: int = 2,
) -> int:
    if what == "measure":
        file.write_text(json.dumps(measure(nodes, jobs, repeats), indent=1) + "\n")
    print(model(json.loads(file.read_text())))
    return 0


if __name__ == "__main__":
    # The players are pickled by the name of this module, which for the actors is not __main__.
    import scaling

    raise SystemExit(tyro.cli(scaling.main, description=__doc__))
