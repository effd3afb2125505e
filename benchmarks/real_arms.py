"""The arms of `real_problems.py`: growth by `esper.grow`, networks that are trained as they are, and Optuna's search.

All of them use AdamW, the rate that is constant and falls to zero over the last 30 % of the updates, and minibatches
that are drawn with replacement. FLOPs are those of `torch.utils.flop_counter`: matrix products and convolutions.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import esper
from esper.actions import Action, Op
from esper.engine.prepare import decay_over
from esper.env.rent import RENT_RATE
from esper.env.situation import Situation
from esper.errors import GrowthWarning
from esper.growth.blueprints import fitting
from esper.growth.graft import graft
from esper.growth.plain import grafts_of
from esper.growth.seed import Seed
from esper.growth.tensors import count_parameters
from esper.lifecycle import IN_FORWARD
from esper.policy.controller import Controller
from esper.training.catalogue import as_controller
from real_data import PROBLEMS, Data, Pair, Problem, Sources

Network = list[list[str]]
"""Seeds of a network: [slot, blueprint, blend] each."""
Place = tuple[str, nn.Module, float, dict[str, Any]]
"""What `graft` takes."""
GROWERS = {"small": ("small", RENT_RATE), "small free": ("small", 0.0)} | {
    name: (name, RENT_RATE) for name in ("heuristic", "schedule")
}
"""Arms that grow: by which controller, and at which price of size. Rivals pay none, so `small` has an arm without."""
NOTHING = "nothing"
REPORT_FROM, REDUCTION = 4, 3
"""Of Hyperband: epochs before a trial may be pruned, and how many trials one that goes on stands for."""


@dataclass(frozen=True)
class Job:
    """One training or search. `arm` is what is done; the rest is what it needs."""

    problem: str
    arm: str
    seed: int
    rate: float
    sources: Sources
    network: Network = field(default_factory=list)
    """Seeds that are there from the start, or from the epochs that `births` says."""
    births: list[int] = field(default_factory=list)
    ratio: float = 1.0
    """Of the host's parameters."""
    flops: float | None = None
    """To spend; None is the problem's epochs."""
    counted: bool = True
    """Whether the FLOPs of a growth are wanted: counting them is a second growth, and slow."""


def run_job(job: Job) -> dict[str, Any]:
    """What came of it, as data of JSON."""
    torch.set_num_threads(1)
    problem = PROBLEMS[job.problem]
    data = problem.read(job.seed, job.sources)
    with sdpa_kernel(SDPBackend.MATH):  # the counter has no entry for fused attention
        if job.arm in GROWERS:
            return grown(problem, data, job)
        if job.arm.startswith("optuna"):
            return searched(problem, data, job)
        return late(problem, data, job) if job.births else static(problem, data, job)


def adamw(rate: float, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=rate)


def right(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of each example's positions that are right."""
    return (outputs.argmax(-1) == targets).float().mean(-1)


def accuracy(model: nn.Module, pair: Pair) -> float:
    """Per cent right; of real targets, per cent of their variance that is explained (R²)."""
    x, y = pair
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in x.split(256)])
    if y.is_floating_point():
        return 100.0 * (1.0 - float(((outputs - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()))
    return 100.0 * float((outputs.argmax(-1) == y).float().mean())


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@contextmanager
def counted() -> Iterator[FlopCounterMode]:
    with FlopCounterMode(display=False) as counter:
        yield counter


# -- growth ------------------------------------------------------------------------------------------------------------


def grown(problem: Problem, data: Data, job: Job) -> dict[str, Any]:
    """`esper.grow` with the defaults of its controller."""
    began = time.perf_counter()
    found = grow(problem, data, job)
    seconds = time.perf_counter() - began
    flops = {"flops": 0}
    if job.counted:  # the same once more, but for the last bit of a number: this one is kept
        found, flops = counted_growth(problem, data, job)
    seeds = [[s.slot, s.blueprint, s.fate.name, s.born, s.ended] for s in found.history.seeds()]
    network = [[one.path, one.blueprint, one.blend] for one, _ in grafts_of(found.model)]
    return outcome(found.model, data, flops["flops"], seconds) | flops | {"seeds": seeds, "network": network}


def grow(problem: Problem, data: Data, job: Job, decider: Controller | None = None) -> esper.Grown:
    """`decider` is the arm's controller, where that is made already."""
    controller, rent = GROWERS[job.arm]
    metric: dict[str, Any] = {"metric": right, "metric_scale": "fraction"} if problem.symbols else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GrowthWarning)
        return esper.grow(
            problem.host(job.seed),
            data.train,
            data.val,
            controller=decider or controller,
            rent=rent,
            epochs=problem.epochs,
            optimizer=partial(adamw, job.rate),
            batch_size=problem.batch_size,
            updates_per_epoch=problem.updates(data),
            seed=job.seed,
            device="cpu",
            **metric,
        )


def counted_growth(problem: Problem, data: Data, job: Job) -> tuple[esper.Grown, dict[str, int]]:
    """A growth, and the FLOPs of all that it computes but for its controller.

    Parts of these, of the network as it was in each epoch: its updates, and one pass over the validation examples.
    """

    @cache
    def cost(seeds: frozenset[tuple[str, str, str]]) -> tuple[int, int]:
        training = Training(problem, data, built(problem, data, [list(seed) for seed in sorted(seeds)], job.seed), job)
        return training.update_flops, training.validation_flops

    decider, decisions = as_controller(GROWERS[job.arm][0]), 0
    decide = decider.decide

    def deciding(situations: Sequence[Situation]) -> list[Action]:
        nonlocal decisions
        with counted() as counter:
            actions = decide(situations)
        decisions += counter.get_total_flops()
        return actions

    vars(decider)["decide"] = deciding
    with counted() as counter:
        found = grow(problem, data, job, decider)
    planted: dict[int, tuple[str, str, str]] = {}
    updates, validation = 0, 0
    for record in found.history.records:
        action = record.effect.action
        if action.op is Op.GERMINATE and record.effect.changed and action.slot is not None:
            planted[action.slot] = (found.history.slots[action.slot], str(action.blueprint), str(action.blend))
        acting = frozenset(planted[i] for i, stage in enumerate(record.stages) if stage in IN_FORWARD)
        updates += problem.updates(data) * cost(acting)[0]
        validation += cost(acting)[1]
    flops = {"flops": counter.get_total_flops() - decisions, "update_flops": updates, "validation_flops": validation}
    return found, flops


def outcome(model: nn.Module, data: Data, flops: float, seconds: float) -> dict[str, Any]:
    return {
        "test": round(accuracy(model, data.test), 4),
        "val": round(accuracy(model, data.val), 4),
        "parameters": count_parameters(model),
        "flops": int(flops),
        "seconds": round(seconds, 2),
    }


# -- networks that are trained as they are -----------------------------------------------------------------------------


def built(problem: Problem, data: Data, network: Network, seed: int, ratio: float = 1.0) -> nn.Module:
    """The host with these seeds in it, new as the host is. The host's first weights are those of every other arm."""
    host = problem.host(seed, ratio)
    graft(host, new_seeds(problem, data, network, ratio))
    return host


def new_seeds(problem: Problem, data: Data, network: Network, ratio: float = 1.0) -> list[Place]:
    """With first weights by torch's random numbers as they are."""
    if not network:
        return []
    with torch.random.fork_rng(devices=[]):
        found = esper.slots(problem.host(0, ratio), data.train[0][:2])
    shapes = {slot.path: slot.shape for slot in found}
    return [(path, Seed(name, shapes[path], blend).body, 1.0, {}) for path, name, blend in network]


def static(problem: Problem, data: Data, job: Job) -> dict[str, Any]:
    model = built(problem, data, job.network, job.seed, job.ratio)
    training = Training(problem, data, model, job)
    if job.flops is not None:
        training.updates = max(1, round(job.flops / training.epoch_flops * training.per_epoch))
    began = time.perf_counter()
    training.advance(training.updates)
    seconds = time.perf_counter() - began
    found = outcome(model, data, training.updates / training.per_epoch * training.epoch_flops, seconds)
    return found | {"updates": training.updates, "network": job.network}


def late(problem: Problem, data: Data, job: Job) -> dict[str, Any]:
    """Seeds that act from the epoch in which growth planted them: no incubation, no blending, no warm-up."""
    model, seeds = problem.host(job.seed), new_seeds(problem, data, job.network)
    training = Training(problem, data, model, job)
    flops, began = 0, time.perf_counter()
    for epoch in range(problem.epochs):
        for place, born in zip(seeds, job.births, strict=True):
            if born == epoch:
                graft(model, [place])
                training.optimizer.add_param_group({"params": list(place[1].parameters())})
                training.measure_flops()
        flops += training.epoch_flops
        training.advance(training.per_epoch)
    return outcome(model, data, flops, time.perf_counter() - began)


class Training:
    """A plain loop."""

    def __init__(self, problem: Problem, data: Data, model: nn.Module, job: Job) -> None:
        self.model, self.data, self.batch_size = model, data, problem.batch_size
        self.rate, self.made = job.rate, 0
        self.per_epoch = problem.updates(data)
        self.updates = problem.epochs * self.per_epoch
        self.rng = torch.Generator().manual_seed(job.seed)
        self.optimizer = adamw(job.rate, model.parameters())
        self.measure_flops()

    def measure_flops(self) -> None:
        """Of the network as it is: an update, a pass over the validation examples, and an epoch with one such pass."""
        self.update_flops, self.validation_flops = self.flops_of(train=True), self.flops_of(train=False)
        self.epoch_flops = self.per_epoch * self.update_flops + self.validation_flops

    def flops_of(self, *, train: bool) -> int:
        """FLOPs of an update, or of a pass over the validation examples."""
        rng_state = torch.get_rng_state()
        trial = copy.deepcopy(self.model)
        with counted() as counter:
            if train:
                x, y = (part[: self.batch_size] for part in self.data.train)
                reached = len(x) / self.batch_size
                loss_of(trial.train()(x), y).backward()
            else:
                accuracy(trial, self.data.val)
                reached = 1.0
        torch.set_rng_state(rng_state)
        return int(counter.get_total_flops() / reached)

    def advance(self, updates: int) -> None:
        x, y = self.data.train
        share = decay_over(self.updates)
        self.model.train()
        for _ in range(updates):
            rows = torch.randint(len(x), (self.batch_size,), generator=self.rng)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * share(self.made)
            self.optimizer.zero_grad()
            loss_of(self.model(x[rows]), y[rows]).backward()
            self.optimizer.step()
            self.made += 1


# -- Optuna ------------------------------------------------------------------------------------------------------------


def searched(problem: Problem, data: Data, job: Job) -> dict[str, Any]:
    """TPE with Hyperband's pruning over what stands at each slot, until the FLOPs are spent.

    The answer is the network with the best validation accuracy of those that the trials ended with.
    """
    import optuna  # noqa: PLC0415 - an extra

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    assert job.flops is not None
    sampler = optuna.samplers.TPESampler(seed=job.seed)
    pruner = optuna.pruners.HyperbandPruner(
        min_resource=REPORT_FROM, max_resource=problem.epochs, reduction_factor=REDUCTION
    )
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    choices = {
        slot.path: (NOTHING, *(kind.name for kind in fitting(slot.shape)))
        for slot in esper.slots(problem.host(job.seed), data.train[0][:2]).auto
    }
    spent, best, trials, began = 0.0, (-math.inf, nn.Module(), Network()), 0, time.perf_counter()
    while spent < job.flops:
        trial = study.ask()
        picked = {path: trial.suggest_categorical(path, names) for path, names in choices.items()}
        network = [[path, name, "linear"] for path, name in picked.items() if name != NOTHING]
        model = built(problem, data, network, 10_000 * job.seed + trial.number)
        cost, reached, pruned = trial_of(problem, data, model, job, trial, job.flops - spent)
        study.tell(trial, None if pruned else reached, optuna.trial.TrialState.PRUNED if pruned else None)
        spent, trials = spent + cost, trials + 1
        if reached > best[0]:
            best = (reached, model, network)
    found = outcome(best[1], data, spent, time.perf_counter() - began)
    return found | {"network": best[2], "trials": trials}


def trial_of(
    problem: Problem, data: Data, model: nn.Module, job: Job, trial: Any, left: float
) -> tuple[float, float, bool]:
    """FLOPs, the last validation accuracy, and whether the pruner ended it."""
    training = Training(problem, data, model, job)
    for epoch in range(1, problem.epochs + 1):
        training.advance(training.per_epoch)
        found = accuracy(model, data.val)
        reached = found if math.isfinite(found) else -1e6
        trial.report(reached, epoch)
        if epoch * training.epoch_flops >= left or epoch == problem.epochs:
            return epoch * training.epoch_flops, reached, False
        if trial.should_prune():
            return epoch * training.epoch_flops, reached, True
    raise AssertionError("a trial has at least one epoch")
