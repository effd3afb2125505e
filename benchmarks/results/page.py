"""docs/results.md, and a shorter page for every other controller that ships, from the numbers in docs/results.

Nothing is typed in: tables, pictures, and which claims hold follow from the stored parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from esper.agent.shipped import DEFAULT_CONTROLLER
from esper.agent.shipped import FOLDER as SHIPPED
from esper.training.statistics import Floats, bootstrap, interquartile_mean
from results.claims import claims_section
from results.cost import cost_section
from results.estimates import (
    HARM_LIMIT,
    Content,
    answers,
    best_rival,
    column,
    difference,
    difference_over,
    estimate,
    gains,
    harm,
    improvement,
    kinds,
    mean_over,
    most_common,
    rows_of,
    share_kept,
    shortfall,
)
from results.markdown import in_points, page_of, plain, share, share_with_interval, signed, table, with_interval
from results.measure import FOLDER, LEARNED, ROOT, SCHEDULE, read
from results.plots import draw_harm, draw_kinds, draw_scores

PARTS = ("mixed", "harm", "transfer", "cifar")
DOCS = ROOT / "docs"
SEEN_FAMILIES = ("deep series", "deep vectors", "very deep vectors")
"""Families of the transfer part that had a say, or a sibling of which had, in how the controller is trained now."""

TRAINING_DEPTHS = {
    "small": "the controller met series of two to four stages, vectors of three and four with data like these, and of "
    "two to eight with other data: those of five and six were added to `varied` after plays on other draws of *deep "
    "vectors*, those of seven and eight after plays on other draws of *very deep vectors*.",
    "small-conv": "the controller met two to four.",
}
"""How deep hosts were that a controller learnt from."""


def render(
    controller: str = DEFAULT_CONTROLLER, folder: Path = FOLDER, docs: Path = DOCS, shipped: Path = SHIPPED
) -> Path:
    """Write a controller's page, and the default one's pictures; parts that were not run are said to be missing.

    The first one, mixed, must be there: the others are judged beside it.
    """
    parts = {name: read(folder / f"{name}.json") for name in PARTS}
    made = _provenance(shipped, controller)
    for name, part in parts.items():
        if others := {run["learned_sha256"] for run in _runs(part) if "learned_sha256" in run} - {made.get("sha256")}:
            raise SystemExit(f"{name}.json is about another policy ({others.pop()[:12]}…) than ships: run it again")
    mixed, harmless, transfer, cifar = parts.values()
    if mixed is None:
        raise SystemExit(f"{folder / 'mixed.json'} is not there: run `python benchmarks/results/run.py mixed` first")
    top, required = commands(parts, controller), claims_section(parts)
    elsewhere = [
        ["## Transfer", "", *(_missing("transfer") if transfer is None else _transfer(transfer, mixed, controller))],
        ["## CIFAR-10", "", *(_missing("cifar") if cifar is None else _cifar(cifar))],
    ]
    if controller != DEFAULT_CONTROLLER:
        title = [f"# Results of `{controller}`", "", f"It is {made['summary']}.", "", *top]
        page, sections = docs / f"results_{controller}.md", [title, ["## What it shows", "", *required], *elsewhere]
    else:
        (docs / "images").mkdir(parents=True, exist_ok=True)
        page = docs / "results.md"
        sections = [
            ["# Results: the learned controller against everything else", "", *top],
            ["## What it must show", "", *required],
            ["## Held-out problems", "", *_mixed(mixed, docs)],
            ["## Harmlessness", "", *(_missing("harm") if harmless is None else _harm(harmless, docs))],
            *elsewhere,
            ["## What it costs", "", *cost_section(made, mixed, docs / "need_and_place.json")],
        ]
    page.write_text(page_of(sections), "utf-8")
    return page


def _provenance(shipped: Path, controller: str) -> dict[str, Any]:
    """What is stated about the controller; a pair was made by what made its two policies."""
    path = shipped / f"{controller}.json"
    made: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for one in (made.get("asks") or {}).values():
        made["commands"] += [f"# {one}", *json.loads((shipped / f"{one}.json").read_text("utf-8"))["commands"]]
    return made


def _runs(part: Content | None) -> list[Content]:
    """The provenance of every run that a part was made by."""
    if part is None:
        return []
    hosts = [run for host in part.get("hosts", {}).values() for run in host["made"].values()]
    return [part, *part.get("families", {}).values(), *hosts]


def _missing(part: str) -> list[str]:
    return [f"Not measured yet: `python benchmarks/results/run.py {part}`."]


def commands(parts: Mapping[str, Content | None], controller: str) -> list[str]:
    """What was run, as anyone can run it."""
    where = "docs/results" if controller == DEFAULT_CONTROLLER else f"docs/results/{controller}"
    runs = [run for part in parts.values() for run in _runs(part) if "command" in run]
    ran = dict.fromkeys(repeatable(run["command"], controller) for run in runs)
    return [
        f"Written by `python benchmarks/results/run.py render` from the numbers in `{where}`; do not edit. "
        "They come from:",
        "",
        "```sh",
        *ran,
        "```",
        "",
        "DIR holds the binary files of CIFAR-10. Its baselines were played once, beside an earlier controller, on "
        "which they do not depend.",
        "",
        "Controllers are frozen, problems are held out, accuracy is that of test sets that nobody looked at before "
        "the end. Score = test accuracy − 5 points per extra host-size of parameters. In brackets: 95 % bootstrap "
        "intervals over problems; differences are paired, problem by problem ([how](compare.md)).",
    ]


def repeatable(command: str, controller: str) -> str:
    """Without what only the machine had on which it ran: its folders, and what policies were called there."""
    command = re.sub(r" --out \S+", "", command)
    command = re.sub(r"--data-dir \S+", "--data-dir DIR", command)
    return re.sub(r"--controller \S+", f"--controller {controller}", command)


# -- held-out problems -------------------------------------------------------------------------------------------------


def _mixed(content: Content, docs: Path) -> list[str]:
    labels, of_kind = [*content["episodes"], *content["controls"]], kinds(content)
    draw_scores(docs / "images" / "results_scores.png", content, labels)
    draw_kinds(docs / "images" / "results_kinds.png", content, ["none", SCHEDULE, "heuristic"])
    head = ["", "test accuracy (%)", "score", "IQM", "size", "FLOPs", "training", "capacity regret", "its shortfall"]
    body = [
        [
            label,
            with_interval(estimate(content, label, "accuracy")),
            with_interval(estimate(content, label, "score")),
            plain(estimate(content, label, "score", interquartile_mean).value),
            *(f"×{np.mean(rows_of(content, label)[name]):.2f}" for name in ("size", "flops", "training")),
            in_points(estimate(content, label, "regret")),
            plain(shortfall(content, label).value),
        ]
        for label in labels
    ]
    versus_head = ["learned against", "score", "test accuracy", "probability of improvement"]
    versus_body = [
        [
            label,
            *(in_points(difference(content, label, name)) for name in ("score", "accuracy")),
            share_with_interval(improvement(content, label)),
        ]
        for label in labels
        if label != LEARNED and not label.startswith("static ×")
    ]
    shares = " in equal shares" if len({len(numbers) for numbers in of_kind.values()}) == 1 else ""
    minutes = content["wall_seconds"] / 60
    return [
        f"{len(content['draws'])} draws of `mixed`, {len(of_kind)} kinds of problem{shares}. "
        f"{minutes:.0f} minutes with {content['workers']} processes.",
        "",
        "![Scores with intervals](images/results_scores.png)",
        "",
        *table(head, body),
        "",
        "IQM: the mean of the middle half of the problems. Size, FLOPs and training: parameters, FLOPs of one example "
        "and training FLOPs over those of the ungrown host. Capacity regret: points of accuracy below the best static "
        "host of the same size; below 0, growing beat it. Its shortfall: the mean with 0 where growing beat it.",
        "",
        *table(versus_head, versus_body),
        "",
        "The schedule is the best fixed one (`docs/results/schedule.toml`: chosen on training draws). The heuristic "
        "has its default settings, which its tuning did not improve on (`docs/results/heuristic.toml`).",
        "",
        "### By kind of problem",
        "",
        "![Learned minus its rivals, by kind](images/results_kinds.png)",
        "",
        *_kind_table(content),
    ]


def _kind_table(content: Content) -> list[str]:
    shown, rival, meant = ["none", SCHEDULE, LEARNED], best_rival(content), answers(content)
    kept = dict(zip(content["episodes"][LEARNED]["number"], content["episodes"][LEARNED]["kept"], strict=True))
    body = []
    for kind, numbers in kinds(content).items():
        ended = [kept[number] for number in numbers]
        common = most_common(ended)
        means = [plain(mean_over(content, label, numbers)) for label in shown]
        lead = signed(difference_over(content, rival, numbers))
        body.append([kind, meant[kind], *means, lead, f"{common} ({ended.count(common)} of {len(ended)})"])
    return table(["problem", "meant", *shown, f"learned − {rival}", "learned kept most often"], body)


# -- harmlessness, transfer, images ------------------------------------------------------------------------------------


def _harm(content: Content, docs: Path) -> list[str]:
    found = harm(content)
    draw_harm(docs / "images" / "results_harm.png", list(found.values()), content["seeds"])
    marks = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
    names = ["worst", "5 %", "25 %", "median", "75 %", "95 %", "best"]
    quantiles = [signed(points) for points in np.quantile(list(found.values()), marks)]
    kind = {draw["draw"]: draw["kind"] for draw in content["draws"]}
    worst = [f"{kind[draw]} {plain(points)}" for draw, points in found.items() if points < HARM_LIMIT]
    overall = bootstrap([found[draw] for draw in sorted(found)])
    return [
        f"Learned minus none, in test accuracy, on {len(found)} held-out draws of `mixed` with "
        f"{content['seeds']} random seeds each (the same data and host, other first weights and minibatches), "
        "mean over the "
        f"seeds: {in_points(overall)} points. {len(worst)} of {len(found)} draws "
        f"({share(len(worst) / len(found))}) fall below {plain(HARM_LIMIT)} points"
        f"{': ' + ', '.join(worst) if worst else ''}.",
        "",
        *table(["quantile", *names], [["points", *quantiles]]),
        "",
        "![Learned minus none on every draw](images/results_harm.png)",
    ]


def _transfer(content: Content, mixed: Content, controller: str) -> list[str]:
    if controller not in TRAINING_DEPTHS:
        raise SystemExit(f"say in TRAINING_DEPTHS (page.py) how deep the hosts were that {controller} learnt from")
    families: dict[str, Content] = content["families"]
    labels = list(dict.fromkeys(label for family in families.values() for label in family["episodes"]))
    others = [label for label in labels if label != LEARNED]
    home = gains(mixed, SCHEDULE)
    body, differences = [], []
    for name, family in families.items():
        there = family["episodes"]
        body.append([name, str(len(family["draws"])), *(_means(family, one) if one in there else "" for one in labels)])
        kept = share_kept([gains(family, SCHEDULE)], home)
        versus = (in_points(difference(family, label)) if label in there else "" for label in others)
        differences.append([name, *versus, "–" if kept is None else share_with_interval(kept)])
    return [
        "The same frozen controllers on families on whose problems none of them was trained, tuned or chosen. "
        "*deep series* and *deep vectors* have hosts of five stages and slots, *very deep vectors* of eight; "
        f"{TRAINING_DEPTHS[controller]} "
        "*natural/digits* (hosts with a fault) and *digits* are real data, *stories* is the next character of "
        "generated text. How strange they are differs: the families `disguised` and `varied`, on which the "
        "controller was trained, were made after an earlier controller had failed on *deep series* and *stories*, and "
        "have relatives of both and of *deep vectors* (other draws of `mnist1d`, another language, the same boards). "
        "`varied` was widened, with points of up to 64 dimensions that are easy or hard to tell apart, after the next "
        "controller had grown on the digits, where growing does not pay; they are points of 64 dimensions. It was "
        "widened once more, with points that a linear host cannot tell apart, when fixed plans on other draws of *deep "
        "series* and *deep vectors* had shown what could be gained there; then hosts of `disguised` got different "
        "learning rates, and vectors more plans, when plays on other draws of *deep vectors* had shown what works "
        "there; and that the controller removes nothing was first thought of when an earlier one had given up what "
        "helped, on the very draws of *deep series* below ([experiments](experiments.md)). Nothing like CIFAR-10 was "
        "among them. The draws of a family differ by random seeds, few hosts and fewer data sets: intervals speak of "
        "these, and another problem of the kind may differ by more.",
        "",
        *table(["family", "draws", *(f"{label}: score (accuracy)" for label in labels)], body),
        "",
        "Learned minus the others, in points of score. *Gain kept*: learned minus schedule here, over the same "
        "on `mixed`.",
        "",
        *table(["family", *(f"− {label}" for label in others), "gain kept"], differences),
        *_pooled(families, home),
        *_same_as_schedule(families),
    ]


def _means(family: Content, label: str) -> str:
    return " ".join(
        write(float(np.mean(list(column(family, label, name).values()))))
        for name, write in (("score", plain), ("accuracy", lambda value: f"({plain(value)})"))
    )


def _pooled(families: dict[str, Content], home: Floats) -> list[str]:
    kept = share_kept([gains(family, SCHEDULE) for family in families.values()], home)
    if kept is None:
        return ["", "On `mixed` there is no gain over the fixed schedule to keep."]
    text = f"Of the gain over the fixed schedule, {share_with_interval(kept)} is kept, each family counting as much."
    seen = [name for name in families if name in SEEN_FAMILIES]
    rest = [gains(family, SCHEDULE) for name, family in families.items() if name not in seen]
    unseen = share_kept(rest, home) if rest else None
    if unseen is not None and len(rest) < len(families):
        text += " On those that had no say in the controller's last changes, nor a sibling that had "
        text += f"(all but {', '.join(seen)}), it is "
        text += f"{share_with_interval(unseen)}."
    return ["", text]


def _same_as_schedule(families: dict[str, Content]) -> list[str]:
    """The controller learnt to begin as the schedule does: how often it ends so, too."""
    both = [family["episodes"] for family in families.values() if SCHEDULE in family["episodes"]]
    pairs = [pair for one in both for pair in zip(one[LEARNED]["kept"], one[SCHEDULE]["kept"], strict=True)]
    same = sum(set(own.split("+")) == set(other.split("+")) for own, other in pairs)
    return ["", f"In {same} of {len(pairs)} draws it ends with the very seeds of the schedule."] if pairs else []


def _cifar(content: Content) -> list[str]:
    setting = content["setting"]
    room = f"budget for {setting['room']:g} host-sizes of seeds" if setting["room"] else "no budget"
    found = [
        f"The whole training set, 8-16-32 channels, {setting['horizon']} epochs of {setting['updates']} updates of 128 "
        f"images, {setting['seeds']} random seeds side by side on {setting['device']}; "
        f"{room}, {setting['max_seeds'] or 'any number of'} seeds at a time. "
        "*dw@\\** plants a depthwise seed in every slot from epoch 2 on. "
        "Intervals are over seeds: few, so wide.",
    ]
    head = ["", "test accuracy (%)", "score", "size", "learned minus it: score", "kept most often"]
    for name, host in content["hosts"].items():
        found += ["", f"### {name}", ""]
        body = [
            [
                label.replace("*", "\\*"),
                *(with_interval(estimate(host, label, column)) for column in ("accuracy", "score")),
                f"×{np.mean(rows['size']):.2f}",
                "" if label == LEARNED else in_points(difference(host, label)),
                most_common(rows["kept"]),
            ]
            for label, rows in host["episodes"].items()
        ]
        found += table(head, body)
    return found
