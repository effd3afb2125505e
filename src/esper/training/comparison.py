"""Controllers side by side on held-out draws, with static controls: the arbiter behind `esper compare`.

`compare` runs everything and `summarise` turns results into rows. All rows of controllers speak of the same draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from esper.config import AT_LEAST_0, EngineName, check_number
from esper.env.rent import RENT_RATE
from esper.plain_data import as_json
from esper.policy.controller import Controller, NoGrowth, RandomLegal, RuleController
from esper.rollout.play import never
from esper.tasks.family import Family
from esper.training.catalogue import as_controller
from esper.training.controls import (
    FROM_SCRATCH,
    STATIC,
    Plan,
    Static,
    capacity_regret,
    control_jobs,
    from_scratch,
    gather_controls,
    static_widths,
)
from esper.training.evaluation import Job, PackedController, batch_size, jobs_for, run_jobs
from esper.training.own.grow import pick_device
from esper.training.pools import Executor
from esper.training.results import PASSES_OF_AN_UPDATE, EpisodeResult, Results
from esper.training.statistics import (
    Estimate,
    Floats,
    bootstrap,
    interquartile_mean,
    mean,
    paired,
    pareto_front,
    share_above_zero,
)

FORMAT = 1
OnProgress = Callable[[int, int, str], None]
"""(episodes done, episodes in all as far as known, what was done last)"""
CONTROLS_EXPECTED = 5
"""Controls per draw that the estimate of the time assumes before it is known: two from scratch, three widths."""


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One controller, or one static control, in the table. Estimates are over draws, with 95 % intervals."""

    name: str
    is_control: bool
    episodes: int
    test_accuracy: Estimate
    parameters_ratio: float
    """Mean of parameters over the host's; so are the two below."""
    flops_ratio: float
    training_flops_ratio: float
    """Over those of the ungrown host for the same epochs."""
    score: Estimate
    score_iqm: Estimate
    vs_none: Estimate | None
    """Score minus that of the ungrown host, draw by draw. None for the ungrown host itself, or without it."""
    better_than_none: Estimate | None
    """Probability of improvement."""
    vs_best_rule: Estimate | None
    """The same against the rule-based controller with the best mean score."""
    better_than_best_rule: Estimate | None
    regret: Estimate | None
    """Capacity regret, where the draws' hosts have widths and controls were run."""
    seeds_kept: float
    governed: int
    """Episodes that the governor ended."""
    on_front: bool
    """No other row has both fewer parameters and a better accuracy."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `esper compare`."""

    family: str
    numbers: tuple[int, ...]
    controllers: Results
    controls: Results = field(default_factory=dict)
    scratch_of: str | None = None
    """The controller whose final architectures were trained from scratch."""
    rules: frozenset[str] = frozenset()
    """The rule-based ones among the controllers."""
    rent: float = RENT_RATE
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def common(self) -> list[int]:
        """The draws that every controller completed."""
        shared = set(self.numbers).intersection(*(results.keys() for results in self.controllers.values()))
        return sorted(shared)

    def best_rule(self) -> str | None:
        return _best(self.controllers, [name for name in self.controllers if name in self.rules], self.common)


def compare(
    family: Family | str,
    controllers: Mapping[str, Controller | str],
    numbers: Sequence[int],
    *,
    controls: bool = True,
    scratch_of: str | None = None,
    workers: int = 1,
    executor: Executor | None = None,
    device: torch.device | str = "cpu",
    engine: EngineName | None = None,
    rent: float = RENT_RATE,
    progress: OnProgress | None = None,
    stop: Callable[[], bool] = never,
) -> Comparison:
    """Run the controllers on held-out draws, then the controls that their results call for.

    `scratch_of`: whose networks are trained from scratch; the default is the best growing controller's. `engine` trains
    the networks that controllers grow; None is the per-network one of the device, as for controls. `executor` works in
    place of `workers` processes of this machine.
    """
    started = time.perf_counter()
    check_number("rent", rent, AT_LEAST_0)
    if engine is not None and engine not in get_args(EngineName):
        raise ValueError(f"engine must be one of {', '.join(get_args(EngineName))} or None, not {engine!r}")
    if scratch_of is not None and scratch_of not in controllers:
        raise ValueError(f"scratch_of is none of the controllers: {scratch_of!r}")
    if executor is None:
        device = pick_device(device)
    expected = len(numbers) * (len(controllers) + (CONTROLS_EXPECTED if controls else 0))
    meter = _Meter(progress or (lambda done, total, what: None), expected)
    made = {label: as_controller(who) for label, who in controllers.items()}
    for label, controller in made.items():
        check_label(label, controller)
    sent = {label: PackedController.of(made[label]) if _is_file(who) else who for label, who in controllers.items()}
    batch = batch_size(engine, len(numbers), device)
    jobs = jobs_for(family, sent, numbers, batch=batch, engine=engine, rent=rent)
    results = run_jobs(jobs, workers=workers, executor=executor, device=device, progress=meter.note, stop=stop)
    found = Comparison(
        family=family if isinstance(family, str) else family.name,
        numbers=tuple(numbers),
        controllers=results,
        rules=frozenset(label for label, controller in made.items() if isinstance(controller, RuleController)),
        rent=rent,
    )
    if controls and not stop():
        found = replace(found, scratch_of=scratch_of or best_growing(found))
        plans, known = _plan(found)
        jobs = control_jobs(family, plans, known)
        meter.total, meter.phase = meter.done + len(jobs), "static controls"
        ran = run_jobs(jobs, workers=workers, executor=executor, device=device, progress=meter.note, stop=stop)
        found = replace(found, controls=gather_controls(plans, ran, known, _reference(found), rent))
    return replace(found, interrupted=stop(), seconds=time.perf_counter() - started)


def check_label(label: str, controller: Controller) -> None:
    """Names that mean something in a table: `none` is what all are compared with, and controls have names of their own.
    Another controller of such a name would stand in their place."""
    for name, kind in (("none", NoGrowth), ("random", RandomLegal)):
        if label == name and not isinstance(controller, kind):
            raise ValueError(f"{label!r} is the name of a rule: call {controller.name} something else")
    if label.startswith(STATIC) or FROM_SCRATCH in label:
        raise ValueError(f"{label!r} is the name of a static control: call {controller.name} something else")


def _is_file(controller: Controller | str) -> bool:
    return isinstance(controller, str) and Path(controller).exists()


class _Meter:
    """Counts episodes for whoever watches."""

    def __init__(self, progress: OnProgress, total: int) -> None:
        self.progress, self.total, self.done, self.phase = progress, total, 0, ""

    def note(self, job: Job, results: list[EpisodeResult]) -> None:
        self.done += len(results)
        self.progress(self.done, max(self.total, self.done), self.phase or job.label)


def best_growing(found: Comparison) -> str | None:
    """Whose networks are worth training from scratch: those of the growing controller with the best mean score."""
    grew = [name for name, results in found.controllers.items() if any(r.kept for r in results.values())]
    return _best(found.controllers, [name for name in grew if name != "random"] or grew, found.common)


def _best(results: Results, names: Sequence[str], numbers: Sequence[int]) -> str | None:
    if not names or not numbers:
        return None
    return max(names, key=lambda name: float(np.mean([results[name][number].score for number in numbers])))


def _reference(found: Comparison) -> dict[int, EpisodeResult]:
    """Any controller's results: the host of a draw is the same for all."""
    return {number: result for results in found.controllers.values() for number, result in results.items()}


def _plan(found: Comparison) -> tuple[dict[str, Plan], dict[tuple[int, Static], EpisodeResult]]:
    """The controls by name, and the networks among them that the controller `none` has trained already."""
    reference = _reference(found)
    plans: dict[str, Plan] = {}
    if "none" not in found.controllers:
        plans[f"{STATIC}1"] = dict.fromkeys(reference, Static())
    if found.scratch_of is not None:
        grown = found.controllers[found.scratch_of]
        plans[f"{found.scratch_of}{FROM_SCRATCH}, equal epochs"] = from_scratch(grown, "epochs")
        plans[f"{found.scratch_of}{FROM_SCRATCH}, equal FLOPs"] = from_scratch(grown, "flops")
    # Widths up to the size of what was grown on purpose. Chance grows much larger ones, at a price that few would pay.
    every = [result for name, results in found.controllers.items() if name != "random" for result in results.values()]
    plans |= static_widths(reference, max((r.parameters / r.host_parameters for r in every), default=1.0))
    known = {(number, Static()): result for number, result in found.controllers.get("none", {}).items()}
    return plans, known


# -- from results to rows -------------------------------------------------------------------------------------------


def summarise(found: Comparison) -> list[ComparisonRow]:
    """One row per controller on the draws that all of them completed, then one per control."""
    numbers = found.common
    if not numbers:
        return []
    named = [(name, {n: results[n] for n in numbers}, False) for name, results in found.controllers.items()]
    for name, results in found.controls.items():
        if shared := {n: results[n] for n in numbers if n in results}:
            named.append((name, shared, True))
    points = [(_ratio(results, "parameters"), _mean(results, "test_accuracy")) for _, results, _ in named]
    complete = [i for i, (_, results, _) in enumerate(named) if len(results) == len(numbers)]
    front = {complete[i] for i in pareto_front([points[i][0] for i in complete], [points[i][1] for i in complete])}
    none = found.controllers.get("none") or found.controls.get(f"{STATIC}1") or {}
    rule = found.best_rule()
    rivals = (none, found.controllers[rule] if rule is not None else {})
    return [
        _row(name, results, is_control, found, rivals, i in front)
        for i, (name, results, is_control) in enumerate(named)
    ]


def _row(
    name: str,
    results: dict[int, EpisodeResult],
    is_control: bool,
    found: Comparison,
    rivals: tuple[Mapping[int, EpisodeResult], Mapping[int, EpisodeResult]],
    on_front: bool,
) -> ComparisonRow:
    scores = [result.score for result in results.values()]
    to_none, to_rule = (_differences(results, rival) for rival in rivals)
    regrets = [capacity_regret(result, static_hosts(found, number)) for number, result in results.items()]
    known_regrets = [regret for regret in regrets if regret is not None]
    return ComparisonRow(
        name=name,
        is_control=is_control,
        episodes=len(results),
        test_accuracy=bootstrap([result.test_accuracy for result in results.values()]),
        parameters_ratio=_ratio(results, "parameters"),
        flops_ratio=_ratio(results, "flops"),
        training_flops_ratio=float(np.mean([r.training_flops / host_training_flops(r) for r in results.values()])),
        score=bootstrap(scores),
        score_iqm=bootstrap(scores, interquartile_mean),
        vs_none=None if to_none is None else bootstrap(to_none, mean),
        better_than_none=None if to_none is None else bootstrap(to_none, share_above_zero),
        vs_best_rule=None if to_rule is None else bootstrap(to_rule, mean),
        better_than_best_rule=None if to_rule is None else bootstrap(to_rule, share_above_zero),
        regret=bootstrap(known_regrets) if known_regrets else None,
        seeds_kept=float(np.mean([len(result.kept) for result in results.values()])),
        governed=sum(result.governor is not None for result in results.values()),
        on_front=on_front,
    )


def _differences(results: Mapping[int, EpisodeResult], rival: Mapping[int, EpisodeResult]) -> Floats | None:
    """Paired differences of the score; None where the rival is the same set of results, or shares no draw."""
    if all(rival.get(number) is result for number, result in results.items()):
        return None
    scores = [{number: result.score for number, result in side.items()} for side in (results, rival)]
    found = paired(scores[0], scores[1])
    return found if len(found) else None


def static_hosts(found: Comparison, number: int) -> list[EpisodeResult]:
    """The draw's own host and the wider ones, not grown."""
    static = [results for name, results in found.controls.items() if name.startswith(STATIC)]
    return [results[number] for results in (found.controllers.get("none", {}), *static) if number in results]


def _mean(results: Mapping[int, EpisodeResult], name: str) -> float:
    return float(np.mean([getattr(result, name) for result in results.values()]))


def _ratio(results: Mapping[int, EpisodeResult], name: str) -> float:
    return float(np.mean([getattr(r, name) / getattr(r, f"host_{name}") for r in results.values()]))


def host_training_flops(result: EpisodeResult) -> float:
    """FLOPs of training the host alone to the draw's horizon."""
    return PASSES_OF_AN_UPDATE * result.host_flops * result.examples / result.epochs * result.horizon


# -- as JSON ----------------------------------------------------------------------------------------------------------


def comparison_json(found: Comparison, rows: Sequence[ComparisonRow]) -> dict[str, Any]:
    """Everything: the table, and every episode behind it."""
    return {
        "format": FORMAT,
        "task": found.family,
        "draws": list(found.numbers),
        "common_draws": found.common,
        "rent_rate": found.rent,
        "best_rule": found.best_rule(),
        "scratch_of": found.scratch_of,
        "pareto_front": [row.name for row in sorted(rows, key=lambda row: row.parameters_ratio) if row.on_front],
        "rows": [asdict(row) for row in rows],
        "episodes": {name: _episodes(results) for name, results in found.controllers.items()},
        "control_episodes": {name: _episodes(results) for name, results in found.controls.items()},
        "interrupted": found.interrupted,
        "seconds": found.seconds,
        "torch": str(torch.__version__),
    }


def _episodes(results: Mapping[int, EpisodeResult]) -> list[dict[str, Any]]:
    return [as_json(results[number]) for number in sorted(results)]
