"""The evidence for the learned controller: held-out problems, played once, kept in one JSON, written as one page.

    python benchmarks/results.py measure mixed unseen              # parts, all arms; two cores take minutes a part
    python benchmarks/results.py measure mixed --arms small        # one arm anew; the others stay
    python benchmarks/results.py measure mixed --arms before --before OLD.safetensors    # an earlier policy, beside it
    python benchmarks/results.py render                            # docs/results.md and its picture

Controllers are frozen, draws are held out, test sets are looked at once, at the end. The controller was trained, and
its settings were chosen, on training draws; so were the schedule and the heuristic.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import tyro

from esper.agent.shipped import DEFAULT_CONTROLLER, provenance, shipped_names
from esper.env.rent import RENT_RATE
from esper.files import write_whole
from esper.tasks.counted_init import DrawNumbers
from esper.tasks.draws import comparison_draws
from esper.tasks.family import Draw, Family, get_family
from esper.training.catalogue import make_controller
from esper.training.engines import choose_engine
from esper.training.evaluation import batch_size, jobs_for, run_jobs
from esper.training.plots import drawing, error_bar, hide_spines
from esper.training.results import EpisodeResult
from esper.training.statistics import Estimate, Floats, bootstrap
from judged_families import transfer_families
from page_text import in_points, page_of, plain, share, table, with_interval

ROOT = Path(__file__).resolve().parents[1]
STORE, PAGE = ROOT / "docs/results.json", ROOT / "docs/results.md"
SCHEDULE = ROOT / "docs/results/schedule.toml"
TRAINING = ROOT / "docs/results/training.json"
"""Metrics of the run that made `small`, update by update, from its store."""
LEARNED, BEFORE, AGAIN = "small", "before", "again"
HARM = 0.5
"""Points of accuracy below no growth that count as harm."""


@dataclass(frozen=True, slots=True)
class Part:
    """Draws that all arms play."""

    family: str
    draws: int
    title: str
    rent: float = RENT_RATE
    arms: tuple[str, ...] = ("none", AGAIN, "schedule", "heuristic", LEARNED)


PARTS: dict[str, Part] = {
    "mixed": Part("mixed", 96, "`mixed`: a family it was trained on"),
    "grammar": Part("grammar", 96, "`grammar`: a family it was trained on"),
    "unseen": Part("grammar-unseen", 96, "`grammar-unseen`: kinds of problem that no training draw has"),
    "disguised": Part("disguised", 48, "`disguised`: problems of `mixed` without what gives them away"),
    **{name: Part(name, 24, f"`{name}`") for name in ("deep series", "deep vectors", "very deep vectors")},
    **{name: Part(name, 24, f"`{name}`: natural data") for name in ("natural/digits", "digits")},
    **{
        f"rent {rent:g}": Part("mixed+6*grammar", 48, f"rent {rent:g}", rent, (LEARNED,))
        for rent in (0.0, 1.0, 5.0, 20.0)
    },
}
MAIN = ("mixed", "grammar", "unseen", "disguised", "deep series", "deep vectors", "very deep vectors")
NATURAL = ("natural/digits", "digits")


@dataclass(frozen=True, slots=True)
class OtherNumbers:
    """The same problems with other minibatches; where hosts are drawn by a seed, with other first weights as well."""

    family: Family
    name = AGAIN

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        drawn = self.family.draw(number, held_out=held_out)
        counted = drawn.task.numbers and DrawNumbers(drawn.task.numbers.key ^ 1)
        return replace(drawn, seed=drawn.seed + 2, task=replace(drawn.task, numbers=counted))


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(name: str, arms: Sequence[str], controllers: Mapping[str, str], workers: int) -> dict[str, Any]:
    """Play some arms of a part: its facts, with the columns of these arms."""
    part = PARTS[name]
    family, draws = family_of(part.family), comparison_draws(part.draws)
    engine = choose_engine("auto", family, "cpu", first=draws[0]).name
    found: dict[str, Any] = {"family": part.family, "rent": part.rent, "draws": list(draws), "arms": {}}
    for arm in arms:
        began, who = time.perf_counter(), controllers[arm]
        problems, by = (OtherNumbers(family), "eager") if arm == AGAIN else (family, engine)
        jobs = jobs_for(problems, {arm: who}, draws, batch=batch_size(by, len(draws), "cpu"), engine=by, rent=part.rent)
        played = run_jobs(jobs, workers=workers)[arm]
        rows = [played[number] for number in draws]
        found["kinds"] = [str(row.facts.get("kind", part.family)) for row in rows]
        found["arms"][arm] = {"made": _made(who, workers, began), **columns(rows)}
        score = np.mean(found["arms"][arm]["score"])
        print(f"{name}, {arm}: {score:.2f} in {time.perf_counter() - began:.0f} s", flush=True)
    return found


def family_of(name: str) -> Family:
    judged = transfer_families()
    return judged[name] if name in judged else get_family(name)


def columns(rows: Sequence[EpisodeResult]) -> dict[str, Any]:
    """In the order of the draws."""
    return {
        "score": [round(row.score, 3) for row in rows],
        "accuracy": [round(row.test_accuracy, 3) for row in rows],
        "size": [round(row.parameters / row.host_parameters, 4) for row in rows],
        "kept": ["+".join(f"{s.blueprint}@{s.path.rpartition('.')[2]}" for s in row.kept) for row in rows],
        "planted": [row.planted for row in rows],
    }


def _made(who: str, workers: int, began: float) -> dict[str, Any]:
    """How the numbers came about."""
    return {
        "controller": Path(who).name,
        "sha256": sum_of(who),
        "command": shlex.join(["python", "benchmarks/results.py", *sys.argv[1:]]),
        "workers": workers,
        "seconds": round(time.perf_counter() - began, 1),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def sum_of(who: str) -> str:
    """Of the file that a learned controller, or a schedule, is; empty for a rule."""
    if who in shipped_names():
        return provenance(who).sha256
    return hashlib.sha256(Path(who).read_bytes()).hexdigest() if Path(who).is_file() else ""


def write(store: Mapping[str, Any], path: Path = STORE) -> None:
    """Each column on one line: small files, readable differences."""
    text = json.dumps(store, ensure_ascii=False, indent=1)
    innermost = re.compile(r"[\[{]\n[^\[\]{}]*[\]}]")
    write_whole(path, innermost.sub(lambda found: json.dumps(json.loads(found[0]), ensure_ascii=False), text) + "\n")


def read(path: Path = STORE) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


# -- estimates ---------------------------------------------------------------------------------------------------------


def column(part: Mapping[str, Any], arm: str, name: str = "score") -> Floats:
    return np.array(part["arms"][arm][name], dtype=np.float64)


def lead(part: Mapping[str, Any], over: str, name: str = "score") -> Estimate:
    """The learned controller minus another arm, paired by draw."""
    return bootstrap(column(part, LEARNED, name) - column(part, over, name))


def over_parts(parts: Sequence[Mapping[str, Any]], over: str) -> Estimate:
    """The mean over families of the mean lead; families count alike, draws are resampled within each."""
    gaps = [column(part, LEARNED) - column(part, over) for part in parts]
    rng, value = np.random.default_rng(0), float(np.mean([gap.mean() for gap in gaps]))
    again = np.mean([rng.choice(gap, (10_000, len(gap))).mean(1) for gap in gaps], axis=0)
    low, high = np.quantile(again, [0.025, 0.975])
    return Estimate(value, float(low), float(high), sum(map(len, gaps)))


def by_kind(part: Mapping[str, Any]) -> dict[str, list[int]]:
    """Places of the draws of each kind."""
    found: dict[str, list[int]] = {}
    for place, kind in enumerate(part["kinds"]):
        found.setdefault(kind, []).append(place)
    return dict(sorted(found.items()))


def harmed(part: Mapping[str, Any], arm: str = LEARNED) -> list[float]:
    """Points of accuracy of the draws that ended below no growth by more than `HARM`, the worst first."""
    gaps = column(part, arm, "accuracy") - column(part, "none", "accuracy")
    return sorted(float(gap) for gap in gaps if gap < -HARM)


INTRODUCTION = f"""Frozen controllers, held-out draws, test sets that were looked at once. Score = test accuracy − rent
× extra host-sizes of parameters, rent {RENT_RATE:g} unless stated. In brackets: 95 % bootstrap intervals over draws;
differences are paired by draw ([how](compare.md)). *schedule* is the best fixed schedule
([schedule.toml](results/schedule.toml), chosen on training draws of `mixed`), *heuristic* the built-in rule, *before*
the imitation that shipped as `small` in version 0.1, played at commit 57c0526, the last that has it."""
RIVALS = ("none", "schedule", "heuristic", BEFORE)


# -- the page ----------------------------------------------------------------------------------------------------------


def render(store: Mapping[str, Any], images: Path) -> str:
    main = {name: store[name] for name in (*MAIN, *NATURAL) if name in store}
    draw_leads(images / "results_leads.png", main)
    draw_training(images / "results_training.png", json.loads(TRAINING.read_text("utf-8")))
    arms = [(label, arm) for part in store.values() for label, arm in part["arms"].items()]
    commands = sorted({arm["made"]["command"] for label, arm in arms if label != BEFORE})
    return page_of(
        [
            ["# Results: the learned controller compared with others"],
            [
                "For everyone who asks how good `small` is. Written by `python benchmarks/results.py render` from "
                "docs/results.json; do not edit."
            ],
            [INTRODUCTION],
            ["![Lead of the learned controller, by family](images/results_leads.png)"],
            ["## Scores", "", *score_table(main)],
            ["## Leads", "", "Points of score that `small` is ahead by.", "", *lead_table(main)],
            ["## Kinds of problem that no training draw has", "", *kinds_table(main.get("unseen"))],
            ["## Harm", "", *harm_table(main)],
            ["## The price of size", "", *rent_table(store)],
            ["## How it was made", "", *origin()],
            ["## Commands", "", "```sh", *commands, "python benchmarks/results.py render", "```"],
        ]
    )


def score_table(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    arms, rows = (*RIVALS, LEARNED), []
    for name, part in parts.items():
        there = [plain(float(column(part, arm).mean())) if arm in part["arms"] else "–" for arm in arms]
        size = f"×{np.mean(part['arms'][LEARNED]['size']):.2f}"
        rows.append([PARTS[name].title, str(len(part["draws"])), *there, size])
    return table(["family", "draws", *arms, "size with `small`"], rows)


def lead_table(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for name, part in parts.items():
        ahead = [in_points(lead(part, arm)) if arm in part["arms"] else "–" for arm in RIVALS]
        rows.append([PARTS[name].title.partition(":")[0], *ahead])
    lines = table(["`small` against", *RIVALS], rows)
    for arm in RIVALS[1:]:
        some = [part for part in parts.values() if arm in part["arms"]]
        if len(some) > 1:
            lines += ["", f"Mean over {len(some)} families, `small` − {arm}: {in_points(over_parts(some, arm))}."]
    return lines


def kinds_table(part: Mapping[str, Any] | None) -> list[str]:
    if part is None:
        return ["Not measured."]
    rows = []
    for kind, places in by_kind(part).items():
        means = [plain(float(column(part, arm)[places].mean())) for arm in ("none", "schedule", LEARNED)]
        gaps = [
            in_points(bootstrap(column(part, LEARNED)[places] - column(part, arm)[places]))
            for arm in ("none", "schedule")
        ]
        rows.append([kind, str(len(places)), *means, *gaps])
    return table(["kind", "draws", "none", "schedule", "`small`", "`small` − none", "`small` − schedule"], rows)


def harm_table(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for name, part in parts.items():
        found, draws = harmed(part), len(part["draws"])
        worst = ", ".join(plain(gap) for gap in found[:5]) or "–"
        rows.append([PARTS[name].title, f"{len(found)} of {draws}", share(len(found) / draws), worst])
        rows[-1] += [share(len(harmed(part, AGAIN)) / draws) if AGAIN in part["arms"] else "–"]
    said = f"""Draws that end more than {HARM:g} points of test accuracy below the same host without growth. Some of
that is chance: the last column is the share for that host without growth, trained once more with other minibatches (in
families other than `grammar`, with other first weights as well)."""
    return [said, "", *table(["family", "draws", "share", "the worst (points)", "by chance alone"], rows)]


def rent_table(store: Mapping[str, Any]) -> list[str]:
    rows = []
    for part in sorted(
        (part for name, part in store.items() if name.startswith("rent ")), key=lambda part: part["rent"]
    ):
        accuracy, size = bootstrap(column(part, LEARNED, "accuracy")), bootstrap(column(part, LEARNED, "size"))
        planted = np.mean(part["arms"][LEARNED]["planted"])
        rows.append(
            [
                f"{part['rent']:g}",
                with_interval(accuracy),
                f"×{size.value:.2f} ({size.low:.2f} to {size.high:.2f})",
                plain(planted),
            ]
        )
    if not rows:
        return ["Not measured."]
    said = "The rent is an input of the policy. 24 draws of `mixed` and 24 of `grammar`, the same at every rent."
    return [said, "", *table(["rent", "test accuracy", "size", "seeds planted"], rows)]


def origin() -> list[str]:
    known = provenance(DEFAULT_CONTROLLER)
    return [
        f"{known.summary}. {known.env_steps:,} env-steps (one epoch of one network each), "
        f"{known.wall_seconds / 60:.0f} minutes on {known.machine}. Commands:",
        "",
        "```sh",
        *known.commands,
        "```",
        "",
        "![Score and entropy of the training run by env-steps](images/results_training.png)",
        "",
        "Of rollouts, so with decisions that are drawn from the policy, on new training draws of `grammar` and `mixed` "
        "at every rent: not comparable with the tables above. One seed.",
    ]


def draw_training(path: Path, run: Mapping[str, Any]) -> None:
    """The score of rollouts by env-steps, and the policy's entropy."""
    with drawing(path, 1, 2, figsize=(8.6, 2.8)) as (_, axes):
        thousands = [steps / 1000 for steps in run["env_steps"]]
        for one, (name, label) in zip(
            axes, (("score", "mean score of a rollout"), ("entropy", "entropy")), strict=True
        ):
            one.plot(thousands, run[name], color="#0072b2", marker="o", markersize=3)
            one.set(xlabel="env-steps (thousands)", ylabel=label)
            hide_spines(one)
            one.grid(alpha=0.25)


def draw_leads(path: Path, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """`small` minus its rivals by family, with intervals."""
    rivals = {"schedule": ("#0072b2", "o"), "heuristic": ("#d55e00", "s"), BEFORE: ("#8a8a8a", "^")}
    with drawing(path, figsize=(8.6, 1.4 + 0.55 * len(parts))) as (_, axes):
        for row, part in enumerate(parts.values()):
            for i, (arm, (colour, marker)) in enumerate(rivals.items()):
                if arm in part["arms"]:
                    gap = lead(part, arm)
                    axes.errorbar(
                        gap.value,
                        row + 0.22 * (i - 1),
                        xerr=error_bar(gap),
                        fmt=marker,
                        color=colour,
                        capsize=3,
                        markersize=6,
                    )
        for arm, (colour, marker) in rivals.items():
            axes.plot([], [], marker, color=colour, label=f"against {arm}")
        axes.axvline(0.0, color="#444444", linewidth=0.8)
        axes.set_yticks(range(len(parts)), [f"{name} ({len(part['draws'])})" for name, part in parts.items()])
        axes.set(
            xlabel="points of score that the learned controller is ahead by (95 % intervals)",
            ylim=(len(parts) - 0.5, -0.5),
        )
        axes.legend(frameon=False, fontsize=9, loc="lower right")
        hide_spines(axes)
        axes.grid(axis="x", alpha=0.25)


def main(
    what: tyro.conf.Positional[Literal["measure", "render"]],
    parts: tyro.conf.Positional[tuple[str, ...]] = (),
    arms: tuple[str, ...] = (),
    learned: str = DEFAULT_CONTROLLER,
    before: str = "",
    workers: int = os.cpu_count() or 1,
) -> int:
    """Measure parts, or write the page.

    Args:
        parts: By name; without any, all.
        arms: Only these; others that were measured stay.
        learned: The learned controller: a name, a checkpoint, a run.
        before: The policy of the arm `before`.
    """
    store = read()
    if what == "render":
        write_whole(PAGE, render(store, ROOT / "docs/images"))
        print(f"Written: {PAGE}")
        return 0
    controllers = {
        "none": "none",
        AGAIN: "none",
        "schedule": str(SCHEDULE),
        "heuristic": "heuristic",
        LEARNED: learned,
        BEFORE: before,
    }
    if unknown := [name for name in parts if name not in PARTS]:
        raise SystemExit(f"results: no part is called {unknown[0]!r}; there are {', '.join(PARTS)}")
    for name in parts or PARTS:
        wanted = arms or PARTS[name].arms
        for arm in wanted:
            make_controller(controllers[arm])  # a wrong path is reported now, not after an hour
        found = measure(name, wanted, controllers, workers)
        kept = store.get(name, {}).get("arms", {}) if store.get(name, {}).get("draws") == found["draws"] else {}
        store = read() | {name: found | {"arms": kept | found["arms"]}}
        write(store)
    return 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main, description=__doc__))
