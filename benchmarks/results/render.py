"""docs/results.md from the numbers in docs/results: tables, pictures, and which claims hold. Nothing is typed in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from esper.agent.shipped import DEFAULT_CONTROLLER
from results.claims import HARM_LIMIT, Claim, claims
from results.cost import cost_section
from results.figures import (
    Content,
    answers,
    best_rival,
    gains,
    harm,
    kind_difference,
    kind_mean,
    kinds,
    lines,
    mostly_kept,
    share_kept,
    shortfall,
    versus,
)
from results.kept import FOLDER, LEARNED, ROOT, SCHEDULE, TUNED, read
from results.pictures import draw_harm, draw_kinds, draw_scores
from results.wording import in_points, plain, share, share_with_interval, signed, table, with_interval

PARTS = ("mixed", "mixed_quick", "harm", "transfer", "cifar")
DOCS = ROOT / "docs"
SHIPPED = ROOT / "src" / "esper" / "agent" / "shipped"
PROVENANCE = SHIPPED / f"{DEFAULT_CONTROLLER}.json"
LOOKED_AT = ("deep series", "deep vectors", "very deep vectors")
"""Families of the transfer part that had a say, or a sibling of which had, in how the controller is trained now."""

MET = {
    "small": "the controller met series of two to four stages, vectors of three and four with data like these, and of "
    "two to eight with other data: those of five and six were added to `varied` after plays on other draws of *deep "
    "vectors*, those of seven and eight after plays on other draws of *very deep vectors*.",
    "small-conv": "the controller met two to four.",
}
"""How deep hosts were that a controller learnt from."""


def render(folder: Path, docs: Path = DOCS, provenance: Path = PROVENANCE) -> Path:
    """Write the page and its pictures from what is in the folder; parts that were not run are said to be missing."""
    parts, made = _checked(folder, provenance)
    (docs / "images").mkdir(parents=True, exist_ok=True)
    page = docs / "results.md"
    page.write_text(page_text(parts, made, docs), "utf-8")
    return page


def render_other(controller: str, folder: Path = FOLDER, docs: Path = DOCS, shipped: Path = SHIPPED) -> Path:
    """A shorter page, without pictures, about a controller that nobody gets unless it is named."""
    parts, made = _checked(folder / controller, shipped / f"{controller}.json")
    mixed, transfer, cifar = (parts[name] for name in ("mixed", "transfer", "cifar"))
    elsewhere = _missing("transfer") if transfer is None else transfer_section(transfer, mixed, _met(controller))
    sections = [
        [f"# Results of `{controller}`", "", f"It is {made['summary']}.", "", *commands(parts, controller)],
        ["## What it shows", "", *verdict(claims(parts))],
        ["## Transfer", "", *elsewhere],
        ["## CIFAR-10", "", *(_missing("cifar") if cifar is None else cifar_section(cifar))],
    ]
    page = docs / f"results_{controller}.md"
    page.write_text("\n\n".join("\n".join(section) for section in sections) + "\n", "utf-8")
    return page


def _checked(folder: Path, provenance: Path) -> tuple[dict[str, Content | None], dict[str, Any]]:
    """The parts in a folder, and what is stated about the controller; they must be about the same policy."""
    parts = {name: read(folder / f"{name}.json") for name in PARTS}
    made: dict[str, Any] = json.loads(provenance.read_text("utf-8")) if provenance.exists() else {}
    for place in made.get("asks") or ():  # a pair was made by what made its two policies
        of_one = json.loads((provenance.parent / f"{made['asks'][place]}.json").read_text("utf-8"))
        made["commands"] = [*made["commands"], f"# {made['asks'][place]}", *of_one["commands"]]
    for name, part in parts.items():
        if part is not None and (others := _policies(part) - {made.get("sha256")}):
            raise SystemExit(f"{name}.json is about another policy ({others.pop()[:12]}…) than ships: run it again")
    return parts, made


def _policies(part: Content) -> set[str]:
    """Sums of the learned controllers that a part is about."""
    made = [part, *part.get("families", {}).values()]
    made += [one for host in part.get("hosts", {}).values() for label, one in host["made"].items() if label == LEARNED]
    return {one["learned_sha256"] for one in made if "learned_sha256" in one}


def page_text(parts: Mapping[str, Content | None], made: dict[str, Any], docs: Path) -> str:
    mixed, harmless, transfer, cifar = (parts[name] for name in ("mixed", "harm", "transfer", "cifar"))
    met = _met(DEFAULT_CONTROLLER)
    elsewhere = _missing("transfer") if transfer is None else transfer_section(transfer, mixed, met)
    sections = [
        ["# Results: the learned controller against everything else", "", *commands(parts)],
        ["## What it must show", "", *verdict(claims(parts))],
        ["## Held-out problems", "", *(_missing("mixed") if mixed is None else main_section(mixed, docs))],
        ["## Harmlessness", "", *(_missing("harm") if harmless is None else harm_section(harmless, docs))],
        ["## Transfer", "", *elsewhere],
        ["## CIFAR-10", "", *(_missing("cifar") if cifar is None else cifar_section(cifar))],
        ["## What it costs", "", *cost_section(made, mixed, docs / "need_and_place.json")],
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _met(controller: str) -> str:
    if controller not in MET:
        raise SystemExit(
            f"render.py does not know how deep the hosts were that {controller} learnt from: say so in MET"
        )
    return MET[controller]


def _missing(part: str) -> list[str]:
    return [f"Not measured yet: `python benchmarks/results/run.py {part}`."]


# -- the top of the page -----------------------------------------------------------------------------------------------


def commands(parts: Mapping[str, Content | None], controller: str = DEFAULT_CONTROLLER) -> list[str]:
    """What was run, as anyone can run it."""
    where = "docs/results" if controller == DEFAULT_CONTROLLER else f"docs/results/{controller}"
    ran: list[str] = []
    for part in parts.values():
        if part is not None:
            made = [part, *part.get("families", {}).values()]
            made += [one for host in part.get("hosts", {}).values() for one in host["made"].values()]
            ran += [repeatable(one["command"], controller) for one in made if "command" in one]
    return [
        f"Written by `python benchmarks/results/run.py render` from the numbers in `{where}`; do not edit. "
        "They come from:",
        "",
        "```sh",
        *(dict.fromkeys(ran) or ["# nothing was run yet"]),
        "```",
        "",
        "DIR holds the binary files of CIFAR-10. Its baselines were played once, beside an earlier controller, on "
        "which they do not depend.",
        "",
        "Controllers are frozen, problems are held out, accuracy is that of test sets that nobody looked at before "
        "the end. Score = test accuracy − 5 points per extra host-size of parameters. In brackets: 95 % bootstrap "
        "intervals over problems; differences are paired, problem by problem ([how](compare.md)).",
    ]


def repeatable(command: str, controller: str = DEFAULT_CONTROLLER) -> str:
    """Without what only the machine had on which it ran: its folders, and what policies were called there."""
    command = re.sub(r" --out \S+", "", command)
    command = re.sub(r"--data-dir \S+", "--data-dir DIR", command)
    return re.sub(r"--controller \S+", f"--controller {controller}", command)


def verdict(found: list[Claim]) -> list[str]:
    words = {True: "**holds**", False: "**does not hold**", None: "open"}
    counts = [sum(claim.holds is value for claim in found) for value in (True, False, None)]
    return [
        f"{counts[0]} lines hold, {counts[1]} do not, {counts[2]} are open. A line about a difference holds if "
        "its whole 95 % interval lies on the right side of 0.",
        "",
        *table(["line", "", "measured"], ((claim.text, words[claim.holds], claim.evidence) for claim in found)),
    ]


# -- held-out problems -------------------------------------------------------------------------------------------------


def main_section(content: Content, docs: Path) -> list[str]:
    rows = lines(content)
    draw_scores(docs / "images" / "results_scores.png", rows, len(content["draws"]), content["rent_rate"])
    against = [rival for rival in ("none", SCHEDULE, "heuristic", TUNED) if rival in content["episodes"]]
    draw_kinds(docs / "images" / "results_kinds.png", content, against)
    head = ["", "test accuracy (%)", "score", "IQM", "size", "FLOPs", "training", "capacity regret", "its shortfall"]
    body = [
        [
            row.label,
            with_interval(row.accuracy),
            with_interval(row.score),
            plain(row.score_iqm.value),
            f"×{row.size:.2f}",
            "" if row.flops is None else f"×{row.flops:.2f}",
            f"×{row.training:.2f}",
            "" if row.regret is None else in_points(row.regret),
            "" if row.regret is None else plain(shortfall(content, row.label).value),
        ]
        for row in rows
    ]
    versus_head = ["learned against", "score", "test accuracy", "probability of improvement"]
    versus_body = [
        [row.label, in_points(v.score), in_points(v.accuracy), share_with_interval(v.better)]
        for row in rows
        if (v := row.behind) is not None and not row.label.startswith("static ×")
    ]
    minutes = content["wall_seconds"] / 60
    return [
        f"{len(content['draws'])} draws of `mixed`, {len(kinds(content))} kinds of problem{_shares(content)}. "
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
        *kind_table(content),
    ]


def _shares(content: Content) -> str:
    return " in equal shares" if len({len(numbers) for numbers in kinds(content).values()}) == 1 else ""


def kind_table(content: Content) -> list[str]:
    shown = [label for label in ("none", SCHEDULE, TUNED, LEARNED) if label in content["episodes"]]
    rival = TUNED if TUNED in shown else best_rival(content)
    meant = answers(content)
    body = [
        [
            kind,
            meant[kind],
            *(plain(kind_mean(content, label, numbers)) for label in shown),
            signed(kind_difference(content, rival, numbers)),
            mostly_kept(content, numbers),
        ]
        for kind, numbers in kinds(content).items()
    ]
    return table(["problem", "meant", *shown, f"learned − {rival}", "learned kept most often"], body)


# -- harmlessness, transfer, images ------------------------------------------------------------------------------------


def harm_section(content: Content, docs: Path) -> list[str]:
    found = harm(content, HARM_LIMIT)
    draw_harm(docs / "images" / "results_harm.png", found, content["seeds"])
    marks = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
    names = ["worst", "5 %", "25 %", "median", "75 %", "95 %", "best"]
    kind = {draw["draw"]: draw["kind"] for draw in content["draws"]}
    worst = [f"{kind[number]} {plain(found.differences[number])}" for number in found.below]
    return [
        f"Learned minus none, in test accuracy, on {len(found.differences)} held-out draws of `mixed` with "
        f"{content['seeds']} random seeds each (the same data and host, other first weights and minibatches), "
        "mean over the "
        f"seeds: {in_points(found.mean)} points. {len(found.below)} of {len(found.differences)} draws "
        f"({share(found.share)}) fall below {plain(found.limit)} points{': ' + ', '.join(worst) if worst else ''}.",
        "",
        *table(["quantile", *names], [["points", *(signed(q) for q in found.quantiles(*marks))]]),
        "",
        "![Learned minus none on every draw](images/results_harm.png)",
    ]


def transfer_section(content: Content, mixed: Content | None, met: str) -> list[str]:
    families: dict[str, Content] = content["families"]
    labels = list(dict.fromkeys(label for family in families.values() for label in family["episodes"]))
    head = ["family", "draws", *(f"{label}: score (accuracy)" for label in labels)]
    body = [
        [name, str(len(family["draws"])), *(_cell(family, label) for label in labels)]
        for name, family in families.items()
    ]
    others = [label for label in labels if label != LEARNED]
    rest = ["gain kept"] if mixed is not None else []
    home = None if mixed is None else gains(mixed, SCHEDULE)
    differences = []
    for name, family in families.items():
        row = [name]
        row += [in_points(versus(family, label).score) if label in family["episodes"] else "" for label in others]
        if home is not None:
            kept = share_kept([gains(family, SCHEDULE)], home)
            row.append("–" if kept is None else share_with_interval(kept))
        differences.append(row)
    return [
        "The same frozen controllers on families on whose problems none of them was trained, tuned or chosen. "
        "*deep series* and *deep vectors* have hosts of five stages and slots, *very deep vectors* of eight; "
        f"{met} "
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
        *table(head, body),
        "",
        "Learned minus the others, in points of score. *Gain kept*: learned minus schedule here, over the same "
        "on `mixed`.",
        "",
        *table(["family", *(f"− {label}" for label in others), *rest], differences),
        *_pooled(families, home),
        *_like_the_schedule(families),
    ]


def _cell(family: Content, label: str) -> str:
    if label not in family["episodes"]:
        return ""
    numbers = family["episodes"][label]["number"]
    return f"{plain(kind_mean(family, label, numbers))} ({plain(kind_mean(family, label, numbers, 'accuracy'))})"


def _pooled(families: dict[str, Content], home: Any) -> list[str]:
    if home is None:
        return []
    kept = share_kept([gains(family, SCHEDULE) for family in families.values()], home)
    if kept is None:
        return ["", "On `mixed` there is no gain over the fixed schedule to keep."]
    text = f"Of the gain over the fixed schedule, {share_with_interval(kept)} is kept, each family counting as much."
    looked_at = [name for name in families if name in LOOKED_AT]
    rest = [gains(family, SCHEDULE) for name, family in families.items() if name not in looked_at]
    unseen = share_kept(rest, home) if rest else None
    if unseen is not None and len(rest) < len(families):
        text += " On those that had no say in the controller's last changes, nor a sibling that had "
        text += f"(all but {', '.join(looked_at)}), it is "
        text += f"{share_with_interval(unseen)}."
    return ["", text]


def _like_the_schedule(families: dict[str, Content]) -> list[str]:
    """The controller learnt to begin as the schedule does: how often does it end so, too?"""
    both = [family["episodes"] for family in families.values() if SCHEDULE in family["episodes"]]
    pairs = [pair for one in both for pair in zip(one[LEARNED]["kept"], one[SCHEDULE]["kept"], strict=True)]
    same = sum(set(own.split("+")) == set(other.split("+")) for own, other in pairs)
    return ["", f"In {same} of {len(pairs)} draws it ends with the very seeds of the schedule."] if pairs else []


def cifar_section(content: Content) -> list[str]:
    setting = content["setting"]
    found = [
        f"The whole training set, 8-16-32 channels, {setting['horizon']} epochs of {setting['updates']} updates of 128 "
        f"images, {setting['seeds']} random seeds side by side on {setting['device']}; "
        f"{_limits(setting)}. *dw@\\** plants a depthwise seed in every slot from epoch 2 on. "
        "Intervals are over seeds: few, so wide.",
    ]
    for name, host in content["hosts"].items():
        rows = lines(host) if LEARNED in host["episodes"] else []
        body = [
            [
                row.label.replace("*", "\\*"),
                with_interval(row.accuracy),
                with_interval(row.score),
                f"×{row.size:.2f}",
                "" if row.behind is None else in_points(row.behind.score),
                _common(host["episodes"][row.label]["kept"]),
            ]
            for row in rows
        ]
        head = ["", "test accuracy (%)", "score", "size", "learned minus it: score", "kept most often"]
        found += ["", f"### {name}", "", *(table(head, body) if rows else ["Not finished yet."])]
    return found


def _limits(setting: Content) -> str:
    room = f"budget for {setting['room']:g} host-sizes of seeds" if setting["room"] else "no budget"
    return f"{room}, {setting['max_seeds'] or 'any number of'} seeds at a time"


def _common(kept: Iterable[str]) -> str:
    found = list(kept)
    return max(dict.fromkeys(found), key=found.count)
