"""One HTML file of a run, a grown network or a comparison: a page for whoever decides, tables for whoever checks.

No scripts and nothing from elsewhere: the file can be mailed, printed and kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.dashboard.curves import curves
from esper.dashboard.drawings import Line, known, lines, slot_lanes
from esper.dashboard.episode_answers import episode, rollout
from esper.dashboard.findings import findings, leaderboard
from esper.dashboard.markup import Html, joined, number, table, tag
from esper.dashboard.overview import overview
from esper.dashboard.report_comparison import of_comparison
from esper.dashboard.report_growth import of_growth
from esper.dashboard.report_parts import fact_boxes, folded, interval, page, section
from esper.dashboard.source import Source

COMPARISON = "comparison.json"
MARKS = {"good": "✓", "neutral": "–", "warning": "!", "bad": "×", "unknown": "?"}


def report(path: Path) -> Html:
    """Of the folder of a run or of a grown network, or of a comparison (its folder or its file)."""
    file = path / COMPARISON if path.is_dir() else path
    if file.is_file() and file.suffix == ".json" and file.name != "history.json":
        return of_comparison(file)
    source = Source.of(path)
    view = overview(source)
    return of_growth(source, view) if view["kind"] == "growth" else of_run(source, view)


def of_run(source: Source, view: Mapping[str, Any]) -> Html:
    found, latest = curves(source), view["latest"]
    score = found["series"].get("episode/score", [])
    first = next((v for v in score if known(v)), None)
    held = latest.get("evaluation/score")
    levels = {level["name"]: level["score"] for level in found["levels"]}
    return page(
        str(view["name"]),
        f"Training of a controller on {view['task'] or 'an unknown task'}: update {view['update']} of "
        f"{view['updates'] or '?'}, {view['state']['name']}",
        tag("p", {"class": "lead"}, _story(view, first, levels)),
        fact_boxes(
            {
                "score, last update": (number(latest["episode/score"]), joined((number(first), " in the first"))),
                "held-out score": (number(held), "frozen policy" if known(held) else "evaluations were off"),
                "accuracy": (number(latest["episode/accuracy"]), "percent, final networks"),
                "size": (number(latest["episode/growth"], ".2f"), "times the host's parameters"),
                "speed": (number(view["steps_per_second"], ",.0f"), f"steps/s; {view['steps']:,} steps in all"),
            }
        ),
        section("Is it healthy?", _lights(view["lights"])),
        section("Did it learn?", _learning(found, levels), _baselines(found["levels"])),
        section("What does it grow?", _example(source), _best(source)),
        section("Alarms and events", _events(source)),
        section("The policy in numbers", _policy(found)),
        folded("Every metric", _numbers(found)),
        folded("Settings and commands", _settings(view["settings"]), _sessions(view["sessions"])),
    )


def _story(view: Mapping[str, Any], first: float | None, levels: Mapping[str, float]) -> str:
    """In words, for a person who reads nothing else."""
    latest = view["latest"]
    now, held = latest["episode/score"], latest.get("evaluation/score")
    if now is None or first is None:
        return "No update has been recorded yet."
    said = [f"The mean score of the networks that it grows went from {first:.1f} to {now:.1f} points."]
    if known(held):
        said.append(f"On problems that it never trained on, the frozen policy scores {held:.1f}.")
    others = {name: value for name, value in levels.items() if name != "learned" and known(value)}
    if known(levels.get("learned")) and others:
        best = max(others, key=lambda name: others[name])
        gap = levels["learned"] - others[best]
        word = "ahead of" if gap > 0 else "behind" if gap < 0 else "level with"
        said.append(f"In the comparison it is {abs(gap):.1f} points {word} the best of the others, {best}.")
    elif not levels:
        said.append("It has not been compared with the baselines.")
    bad = [light["name"] for light in view["lights"] if light["state"] in ("warning", "bad")]
    said.append(f"To look at: {', '.join(bad)}." if bad else "No alarm is on.")
    return " ".join(said)


def _lights(lights: Sequence[Mapping[str, str]]) -> Html:
    rows = (
        tag(
            "li",
            {"data-state": one["state"]},
            tag("span", {"class": "mark", "title": one["state"]}, MARKS[one["state"]]),
            tag("b", None, one["name"]),
            tag("span", None, one["said"], f": {one['remedy']}" if one["remedy"] else ""),
        )
        for one in lights
    )
    return tag("ul", {"class": "lights"}, rows)


def _learning(found: Mapping[str, Any], levels: Mapping[str, float]) -> Html:
    series = [
        Line("training mean", found["updates"], found["series"].get("episode/score", []), "s1"),
        Line("held-out", found["evaluation"]["updates"], found["evaluation"]["scores"], "s3", points=True),
    ]
    drawn = lines([s for s in series if s.y], "Score by update", levels=levels, band=found["band"])
    note = "Band: the middle 80 % of the episodes of an update. Dashed: controllers on held-out problems."
    return joined((drawn, tag("p", {"class": "sub"}, note)))


def _baselines(levels: Sequence[Mapping[str, Any]]) -> Html:
    if not levels:
        return tag("p", {"class": "none"}, "Levels of the baselines: not measured (esper compare measures them).")
    rows = [(one["name"], number(one["score"]), interval(one["low"], one["high"])) for one in levels]
    return table(["controller, held-out problems", "score", "95 % interval"], rows, (1, 2))


def _example(source: Source) -> Html:
    """The episode of the last update that kept the most, drawn."""
    last = rollout(source, None, "train")

    def kept(tile: Mapping[str, Any]) -> tuple[int, float]:
        return sum(stage == "FOSSILIZED" for _, stage in tile["stages"]), tile["score"] or 0.0

    tiles = sorted(last["tiles"], key=kept, reverse=True)
    if not tiles:
        return tag("p", {"class": "none"}, "No episode is recorded step by step.")
    chosen = episode(source, (last["update"], "train", tiles[0]["env"]))
    if chosen is None:
        return Html("")
    summary = (
        f"Environment {chosen['env']} of update {last['update']}, problem {tiles[0]['draw']}: accuracy by epoch above, "
        "the life of each slot's seeds below. It ended with an accuracy (%) of "
    )
    size = f" and ×{tiles[0]['size']:.2f}."
    return joined((tag("p", None, summary, number(tiles[0]["accuracy"]), size), slot_lanes(chosen)))


def _best(source: Source) -> Html:
    rows = [
        (
            number(one["score"]),
            number(one["accuracy"]),
            f"×{one['size']:.2f}",
            str(one["draw"]),
            f"{one['arm']}, update {one['update']}",
            number(None) if one["kept"] is None else ", ".join(one["kept"]) or "unfinished seeds only",
        )
        for one in leaderboard(source)["best"][:8]
    ]
    headings = ["score", "accuracy", "size", "problem", "episode", "kept"]
    return joined((tag("h3", None, "Best grown networks, one per problem"), table(headings, rows, (0, 1, 2, 3))))


def _policy(found: Mapping[str, Any]) -> Html:
    colours = {"op": "s1", "slot": "s2", "blueprint": "s3", "blend": "s4"}
    dashes = {"op": None, "slot": "6 3", "blueprint": "2 2", "blend": "7 2 2 2"}

    def heads(what: str, label: str) -> Html:
        own = [
            Line(head, found["updates"], found["series"].get(f"{head}/{what}", []), colours[head], dashes[head])
            for head in colours
        ]
        return tag("div", None, tag("h3", None, label), lines([one for one in own if one.y], label, height=300))

    variance = found["series"].get("explained_variance", [])
    critics = [Line("explained variance", found["updates"], variance, "s1")] if variance else []
    critic = tag("div", None, tag("h3", None, "Critic"), lines(critics, "Explained variance", height=300))
    terms = tag("div", None, tag("h3", None, "Reward by term, mean of episodes, last update"), _terms(found))
    return tag("div", {"class": "two"}, heads("entropy", "Entropy by head"), heads("kl", "KL by head"), critic, terms)


def _terms(found: Mapping[str, Any]) -> Html:
    named = {name[7:]: values for name, values in found["series"].items() if name.startswith("reward/")}
    rows = [
        (name.replace("_", " "), number(values[0], "+.2f"), number(values[-1], "+.2f"))
        for name, values in named.items()
    ]
    return table(["term", "first", "last"], rows, (1, 2))


def _numbers(found: Mapping[str, Any]) -> Html:
    """First, last and extremes of every series: the table that an engineer trusts."""
    rows = []
    for name, values in sorted(found["series"].items()):
        there = [v for v in values if known(v)]
        if there:
            rows.append((name, *(number(v, ".4g") for v in (there[0], there[-1], min(there), max(there)))))
    each = f"each point is the mean of {found['every']} updates" if found["every"] > 1 else "by update"
    return joined(
        (
            tag("h3", None, f"Every metric, {each}"),
            table(["metric", "first", "last", "least", "most"], rows, range(1, 5)),
        )
    )


def _events(source: Source) -> Html:
    found = findings(source)
    serious = [one for one in found["events"] if one["severity"] != "info"][:10]
    counts = ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in found["counts"].items()) or "nothing"
    rows = [
        (one["update"], str(one["name"] or one["kind"]).replace("_", " "), one["message"], one["remedy"])
        for one in serious
    ]
    summary = tag("p", None, f"Recorded: {counts}.")
    return joined((summary, table(["update", "what", "said", "what to do"], rows, (0,)))) if rows else summary


def _settings(settings: Mapping[str, Any]) -> Html:
    rows = (tag("div", None, tag("dt", None, name), tag("dd", None, str(value))) for name, value in settings.items())
    return tag("dl", {"class": "settings"}, rows)


def _sessions(sessions: Sequence[Mapping[str, Any]]) -> Html:
    rows = [(one["from_update"], one["version"], one["command"]) for one in sessions]
    return joined(
        (tag("h3", None, "Commands that wrote this run"), table(["from update", "Esper", "command"], rows, (0,)))
    )
