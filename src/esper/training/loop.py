"""`esper train`, without the shell: collect episodes, update, record, save; every so often, judge the frozen policy.

The state of a run between two updates is its agent and nothing else: episodes start afresh from numbers that follow
from the configuration. So a checkpoint after every update is enough to continue a killed run to the very same weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from esper.agent.checkpoints import DamagedCheckpointError, first_non_finite
from esper.agent.normalisers import ObservationNormaliser
from esper.agent.policies import growth_network_config, pack_policy, start_from
from esper.agent.ppo import PPOAgent
from esper.growth.blueprints import blueprint_names
from esper.policy.network import FactoredRecurrentActorCritic
from esper.rollout.episodes import Episodes
from esper.rollout.play import never
from esper.tasks.draws import FIRST_EVALUATED
from esper.tasks.family import BoundedFamily
from esper.telemetry.alarms import rules_with
from esper.telemetry.gradients import GradientWatch
from esper.telemetry.health import AnomalyDetector, HealthMonitor
from esper.telemetry.profiler import PhaseTimers
from esper.telemetry.recorder import RunRecorder
from esper.telemetry.records import Event, Level
from esper.training.bulk import BULK, EPISODES_IN_FULL
from esper.training.engines import Engine, choose_engine
from esper.training.fleet import Fleet, seeds_for
from esper.training.journal import Journal, RolloutSummary
from esper.training.run_folder import RunFolder
from esper.training.train_config import TrainConfig

if TYPE_CHECKING:
    from esper.training.cluster import RayCluster

log = logging.getLogger(__name__)
EVALUATION = "evaluation"
"""The arm under which evaluations of the frozen policy are recorded."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update, for whoever watches."""

    update: int
    rollout: RolloutSummary
    metrics: dict[str, float]
    anomalies: tuple[str, ...]
    evaluation: float | None
    """Mean score of the frozen policy on the held-out problems, if it was judged after this update."""
    best: bool


class TrainingBrokenError(RuntimeError):
    """The agent itself broke; the last good checkpoint is intact."""


class Trainer:
    """One run: made from its configuration, continued from its folder."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder | None = None,
        recorder: RunRecorder | None = None,
        *,
        workers: int = 1,
        device: str = "cpu",
        family: BoundedFamily | None = None,
        cluster: RayCluster | None = None,
    ) -> None:
        """`family` stands in for the one that the configuration names, for problems that have no name. `workers` are
        processes that play episodes; the actors of a `cluster` play in their place, and its owner closes it. The agent
        learns on `device`."""
        self.config = config
        self.folder = folder
        self.recorder = recorder or RunRecorder()
        self.timers = PhaseTimers()
        family = family or config.family()
        self.cluster = cluster
        plays_on = device if cluster is None else cluster.device
        self.engine = engine_of(config, family, plays_on)
        self.fleet = Fleet(
            family,
            config.envs,
            reward=config.reward,
            slots=family.slots,
            device=plays_on,
            workers=workers,
            engine=self.engine.name,
            precision=config.precision,
            compiled=config.compiled,
            rent=config.rent,
            executor=cluster,
        )
        self.agent = make_agent(config, device)
        if config.init is not None:
            start_from(self.agent, config.init if folder is None else folder.start)
        if config.envs > BULK:
            log.warning(
                "more than %d environments: every episode is recorded, decisions and events only of %d an update",
                BULK,
                EPISODES_IN_FULL,
            )
        self.monitor = HealthMonitor(
            self.recorder, AnomalyDetector(config.ppo.max_grad_norm, rules_with(config.gradient_limits))
        )
        self.best_score = -math.inf
        self.best_update: int | None = None
        """The update whose policy scored that."""
        self.update = 0
        """Updates done."""

    def resume(self) -> None:
        """Continue from the newest checkpoint of the folder that is whole, if there is one.

        What a process that died left behind is put in order: its temporary files go, the copy of the best policy is
        made if it is missing, old checkpoints are dropped.
        """
        if self.folder is None:
            return
        self.folder.remove_temporaries()
        damage: list[DamagedCheckpointError] = []
        for path in self.folder.saved():
            try:
                self._take_over(path, self.agent.load(path))
            except DamagedCheckpointError as error:
                damage.append(error)
                continue
            for message in damage:
                log.warning("%s; the run goes on from update %d", message, self.update)
            self._find_best(self.folder)
            self.folder.drop_old(self.update, self.config.keep)
            return
        if damage:
            raise DamagedCheckpointError(f"{damage[0]}; no earlier checkpoint of the run is whole") from damage[0]

    def _take_over(self, path: Path, kept: Mapping[str, Any]) -> None:
        """What the loop itself kept in a checkpoint."""
        try:
            update, score, best = int(kept["update"]), float(kept["best_score"]), kept.get("best_update")
            if path.stem != f"update-{update:06d}" or math.isnan(score) or not isinstance(best, int | None):
                raise ValueError("update, best_score or best_update makes no sense")
            self.monitor.load(kept["monitor"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(
                f"{path} is damaged: what the training loop kept in it cannot be used ({error!r:.100})"
            ) from error
        self.update, self.best_score, self.best_update = update, score, best

    def _find_best(self, folder: RunFolder) -> None:
        """Have a copy of the best policy, or begin to look for one anew."""
        if self.best_update is None and self.best_score > -math.inf:  # a checkpoint from before it said which
            self.best_update = folder.best_update()
        if self.best_score == -math.inf or (self.best_update is not None and folder.restore_best(self.best_update)):
            return
        log.warning(
            "the best policy so far (%.2f points) is lost: %s is missing or damaged; the next evaluation decides anew",
            self.best_score,
            folder.best,
        )
        self.best_score, self.best_update = -math.inf, None

    def run(
        self,
        on_update: Callable[[UpdateReport], None] | None = None,
        stop: Callable[[], bool] = never,
    ) -> bool:
        """Train to the last update; False when `stop` said so first (what was done is saved)."""
        while self.update < self.config.updates:
            if stop():
                return False
            report = self._one_update()
            if on_update is not None:
                on_update(report)
        return True

    def close(self) -> None:
        self.fleet.close()
        self._note_cluster(self.update)  # of the update that failed: what rewinding to this one would keep
        self.recorder.close()

    # -- one update ---------------------------------------------------------------------------------------------------

    def _one_update(self) -> UpdateReport:
        update, began = self.update + 1, perf_counter()
        episodes = self.collect(update)
        with self.timers("telemetry"):
            assert episodes.value is not None
            values = self.agent.value_normaliser.to_returns(episodes.value)  # before the update moves these units
            rollout = Journal(self.recorder, update, explain=self.agent.policy_of).note(episodes, values)
        agent, detailed = self.agent, self.recorder.level is Level.DETAILED
        clip_norm, limits = self.config.ppo.max_grad_norm, self.config.gradient_limits
        watch = GradientWatch(agent.optimizer, agent.network, clip_norm, enabled=detailed, limits=limits)
        with self.timers("update"), watch:
            learnt = agent.update(episodes)
        diagnostics = learnt.events(update)
        for event in diagnostics:
            self.recorder.event(event)
        metrics = learnt | watch.metrics() | rollout.metrics() | self.timers.drain() | self.fleet.seconds()
        metrics["steps_per_second"] = rollout.steps / (perf_counter() - began)
        if not all(math.isfinite(metrics[name]) for name in ("policy_loss", "value_loss")):
            raise TrainingBrokenError(f"the agent's loss became non-finite in update {update}; lower its learning rate")
        broken = first_non_finite(self.agent.state_dict())  # the losses are from before the last step
        if broken is not None:
            raise TrainingBrokenError(f"{broken} became non-finite in update {update}; lower the learning rate")
        with self.timers("telemetry"):
            self.recorder.metrics(update, metrics)
            self._note_compile_failure(update)
            self._note_cluster(update)
            anomalies = self.monitor.after_update(update, metrics, update / self.config.updates)
        self.update = update
        evaluation = self._evaluate(update) if self._is_time_to_evaluate(update) else None
        best = evaluation is not None and evaluation > self.best_score
        if evaluation is not None:
            self.recorder.metrics(update, {"evaluation/score": evaluation})
        if best and evaluation is not None:
            self.best_score, self.best_update = evaluation, update
            self.recorder.event(Event("checkpoint", update, f"the best so far: {evaluation:.2f} points"))
        self._save(update)
        alarms = {anomaly.name for anomaly in anomalies}
        messages = [a.message for a in anomalies] + [event.message for event in diagnostics if event.kind in alarms]
        return UpdateReport(update, rollout, metrics, tuple(messages), evaluation, best)

    def _note_compile_failure(self, update: int) -> None:
        failure = self.agent.take_compile_failure()
        if failure is not None:
            message = f"torch.compile failed, and the network runs uncompiled from now on: {failure}"
            self.recorder.event(Event("compile", update, message, "warning"))

    def _note_cluster(self, update: int) -> None:
        """Nodes that came and went, with the logs of lost actors."""
        for note in () if self.cluster is None else self.cluster.members.take_notes():
            details = {"log": note.log} if note.log else {}
            self.recorder.event(Event("cluster", update, note.message, note.severity, data=details))

    def collect(self, update: int) -> Episodes:
        """One episode of every environment, played by copies of the policy."""
        draws = self.config.draw_ids(update)
        with self.timers("environment"):
            seeds = seeds_for(self.config.seed, update, len(draws))
            return self.fleet.play(self._policy(), draws, seeds=seeds).to(self.agent.device)  # not where it was played

    def _policy(self) -> bytes:
        return pack_policy(self.agent.network, self.agent.observation_normaliser)

    # -- judging and keeping ------------------------------------------------------------------------------------------

    def _is_time_to_evaluate(self, update: int) -> bool:
        every = self.config.evaluate_every
        return every > 0 and (update % every == 0 or update == self.config.updates)

    def _evaluate(self, update: int) -> float:
        """Mean score of the frozen policy on the held-out problems; the same ones every time."""
        draws = range(FIRST_EVALUATED, FIRST_EVALUATED + self.config.evaluation_episodes)
        with self.timers("evaluation"):
            episodes = self.fleet.play(self._policy(), draws, held_out=True)
            self.fleet.seconds()  # the phases of a rollout are logged without those of evaluations
            journal = Journal(self.recorder, update, EVALUATION, self.agent.policy_of)
            return fmean(journal.note(episodes).scores)

    def _save(self, update: int) -> None:
        if self.folder is None:
            return
        with self.timers("checkpoint"):
            self.recorder.flush()  # what a checkpoint stands for must be on the disk before it
            data: dict[str, Any] = {
                "update": update,
                "best_score": self.best_score,
                "best_update": self.best_update,
                "monitor": self.monitor.state(),
                "blueprints": blueprint_names(),  # what the numbers of the blueprint head stand for
            }
            self.folder.save(self.agent, data, self.config.keep)


def engine_of(config: TrainConfig, family: BoundedFamily, device: str) -> Engine:
    """What trains the networks of such a run."""
    first = config.draw_ids(1)[0]
    return choose_engine(
        config.engine, family, device, first=first, precision=config.precision, compiled=config.compiled
    )


def make_agent(config: TrainConfig, device: str = "cpu") -> PPOAgent:
    """A fresh agent for this configuration."""
    shape = growth_network_config(floor=config.floor)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        network = FactoredRecurrentActorCritic(shape)
    return PPOAgent(
        network,
        config.ppo,
        seed=config.seed,
        device=device,
        observation_normaliser=ObservationNormaliser(shape.overall_features, shape.slot_features, device=device),
    )
