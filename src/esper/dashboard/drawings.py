"""Charts of the report as SVG: lines over updates, the life of seeds over epochs, scores with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from esper.dashboard.markup import Child, Html, joined, number, tag

WIDTH = 720
MARGIN = {"left": 46, "right": 120, "top": 10, "bottom": 22}

Numbers = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One series; `points` are marked."""

    name: str
    x: Sequence[float]
    y: Numbers
    colour: str
    dash: str | None = None
    points: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """From values to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float
    height: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1.0)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1.0)
        wide = self.width - MARGIN["left"] - MARGIN["right"]
        high = self.height - MARGIN["top"] - MARGIN["bottom"]
        return MARGIN["left"] + across * wide, self.height - MARGIN["bottom"] - up * high

    def path(self, x: Sequence[float], y: Numbers) -> str:
        """Broken where nothing was measured."""
        parts, pen = [], False
        for a, b in zip(x, y, strict=True):
            if known(b):
                px, py = self.at(a, float(b or 0.0))
                parts.append(f"{'L' if pen else 'M'}{px:.1f} {py:.1f}")
            pen = known(b)
        return "".join(parts)


def known(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers between the two."""
    raw = ((high - low) or 1.0) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(k * power for k in (1.0, 2.0, 2.5, 5.0, 10.0) if k * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [step * k for k in range(first, first + 2 * count + 2) if step * k <= high + step * 1e-6]


def lines(
    series: Sequence[Line],
    label: str,
    *,
    levels: Mapping[str, float] | None = None,
    band: Any = None,
    height: int = 260,
) -> Html:
    """Series over updates, with dashed levels that are named at their right end."""
    shown = [line for line in series if any(known(y) for y in line.y)]
    if not shown:
        return tag("p", {"class": "none"}, f"{label}: not measured")
    levels = {name: value for name, value in (levels or {}).items() if known(value)}
    ys = [float(y or 0.0) for line in shown for y in line.y if known(y)] + list(levels.values())
    ys += [*band["low"], *band["high"]] if band else []
    xs = [x for line in shown for x in line.x]
    room = 0.05 * ((max(ys) - min(ys)) or abs(max(ys)) or 1.0)
    frame = Frame((min(xs), max(max(xs), min(xs) + 1)), (min(ys) - room, max(ys) + room), WIDTH, height)
    parts = [_axes(frame)]
    if band and len(band["updates"]) > 1:
        down = frame.path(band["updates"][::-1], band["low"][::-1]).replace("M", "L")
        parts.append(tag("path", {"class": "band", "d": frame.path(band["updates"], band["high"]) + down + "Z"}))
    parts += _levels(frame, levels)
    for line in shown:
        drawn = {"d": frame.path(line.x, line.y), "fill": "none", "stroke-dasharray": line.dash, "class": line.colour}
        parts.append(tag("path", drawn))
        if line.points:
            parts += [_point(frame, x, y, line.colour) for x, y in zip(line.x, line.y, strict=True) if known(y)]
    key = [_key(line) for line in shown]
    return joined((tag("p", {"class": "keys"}, key), _svg(parts, height, label)))


def _svg(parts: Sequence[Html], height: float, label: str) -> Html:
    return tag("svg", {"viewBox": f"0 0 {WIDTH} {height}", "role": "img", "aria-label": label}, parts)


def _key(line: Line) -> Html:
    value = tag("b", None, _last(line))
    return tag("span", {"class": "key"}, tag("i", {"class": f"swatch {line.colour}"}), line.name, " ", value)


def _last(line: Line) -> Child:
    value = next((y for y in reversed(line.y) if known(y)), None)
    return "–" if value is None else number(value, ".4g")


def _point(frame: Frame, x: float, y: float | None, colour: str) -> Html:
    px, py = frame.at(x, float(y or 0.0))
    return tag("circle", {"cx": f"{px:.1f}", "cy": f"{py:.1f}", "r": 3, "class": f"dot {colour}"})


def _axes(frame: Frame) -> Html:
    parts = []
    right = frame.width - MARGIN["right"]
    for value in ticks(*frame.y):
        _, y = frame.at(frame.x[0], value)
        parts.append(_across("grid", MARGIN["left"], right, y))
        parts.append(_text(MARGIN["left"] - 6, y + 4, number(value, ".4g"), "end"))
    for value in ticks(*frame.x, 6):
        if value == int(value):
            x, _ = frame.at(value, frame.y[0])
            parts.append(_text(x, frame.height - 5, f"{value:.0f}", "middle"))
    return joined(parts)


def _across(kind: str, left: float, right: float, y: float) -> Html:
    return tag("line", {"class": kind, "x1": f"{left:.1f}", "x2": f"{right:.1f}", "y1": f"{y:.1f}", "y2": f"{y:.1f}"})


def _text(x: float, y: float, text: Child, anchor: str = "start", strong: bool = False) -> Html:
    kind = "strong" if strong else None
    return tag("text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, "class": kind}, text)


def _levels(frame: Frame, levels: Mapping[str, float]) -> list[Html]:
    parts, above = [], math.inf
    for name, value in sorted(levels.items(), key=lambda item: item[1]):
        _, y = frame.at(frame.x[0], value)
        right = frame.width - MARGIN["right"]
        parts.append(_across("level", MARGIN["left"], right, y))
        above = min(y + 4, above - 12)  # labels do not lie on each other
        parts.append(_text(right + 6, above, f"{name[:12]} {value:.1f}"))
    return parts


def slot_lanes(episode: Mapping[str, Any]) -> Html:
    """Accuracy by epoch above, a lane for each slot below."""
    length = max(1, episode["epochs"])
    top, each = 150, 22
    height = top + (each + 4) * len(episode["slots"]) + 26
    accuracy = [step["accuracy"] for step in episode["steps"]]
    control = episode["control"]
    there = [v for v in (*accuracy, *control) if known(v)]
    frame = Frame((0.0, length), (min([*there, 100.0]) - 5.0, 101.0), WIDTH, 140)
    middles = [i + 0.5 for i in range(length)]
    parts = [_axes(Frame((0.1, 0.4), frame.y, WIDTH, 140)) if there else Html("")]
    if control:
        drawn = {"class": "s6", "fill": "none", "stroke-dasharray": "5 3"}
        parts.append(tag("path", {**drawn, "d": frame.path(middles[: len(control)], control)}))
        _, y = frame.at(length, float(control[-1] or 0.0))
        parts.append(_text(WIDTH - MARGIN["right"] + 6, y + 4, "not grown"))
    parts.append(tag("path", {"class": "s1", "fill": "none", "d": frame.path(middles[: len(accuracy)], accuracy)}))
    for i, lane in enumerate(episode["lanes"]):
        y = top + i * (each + 4)
        parts.append(_text(WIDTH - MARGIN["right"] + 6, y + 15, lane["slot"][-18:]))
        parts += [_segment(frame, segment, y, each, episode["seeds"]) for segment in lane["segments"]]
    for epoch in range(0, length + 1, max(1, math.ceil(length / 12))):
        parts.append(_text(frame.at(epoch, 0.0)[0], height - 6, str(epoch), "middle"))
    return joined((_stage_keys(), _svg(parts, height, "Accuracy and the life of seeds by epoch")))


def _segment(frame: Frame, segment: Mapping[str, Any], y: float, each: int, seeds: Mapping[str, Any]) -> Html:
    left, _ = frame.at(segment["from"], 0.0)
    right, _ = frame.at(segment["to"], 0.0)
    name = seeds.get(str(segment["seed"])) or ""
    title = f"{segment['stage'].lower()}, epochs {segment['from'] + 1} to {segment['to']} {name}"
    place = {"x": f"{left:.1f}", "y": y, "width": f"{right - left:.1f}", "height": each}
    return tag("rect", {**place, "class": f"lane {segment['stage']}"}, tag("title", None, title))


def _stage_keys() -> Html:
    stages = ("TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED", "EMBARGOED")
    named = {"FOSSILIZED": "kept", "PRUNED": "removed", "EMBARGOED": "resting"}
    keys = [
        tag("span", {"class": "key"}, tag("i", {"class": f"stage {stage}"}), named.get(stage, stage.lower()))
        for stage in stages
    ]
    return tag("p", {"class": "keys"}, keys)


def intervals(rows: Sequence[Mapping[str, Any]], label: str) -> Html:
    """A dot for each score with its interval, the best first."""
    known_rows = [row for row in rows if known(row["score"])]
    if not known_rows:
        return tag("p", {"class": "none"}, f"{label}: not measured")
    ends = [value for row in known_rows for value in (row["score"], row["low"], row["high"]) if known(value)]
    height = 26 * len(known_rows) + 34
    low, high = float(min(ends)), float(max(ends))
    room = 0.04 * ((high - low) or 1.0)

    def across(value: float) -> float:
        return 190 + (value - low + room) / (high - low + 2 * room) * (WIDTH - 290)

    parts = []
    for value in ticks(low, high, 5):
        x = f"{across(value):.1f}"
        parts.append(tag("line", {"class": "grid", "x1": x, "x2": x, "y1": 6, "y2": height - 24}))
        parts.append(_text(across(value), height - 8, number(value, ".4g"), "middle"))
    for i, row in enumerate(sorted(known_rows, key=lambda row: -row["score"])):
        y = 22 + 26 * i
        parts.append(_text(180, y + 4, str(row["name"])[:26], "end", strong=True))
        if known(row["low"]) and known(row["high"]):
            parts.append(_across("span", across(row["low"]), across(row["high"]), y))
        parts.append(tag("circle", {"class": "dot s1", "cx": f"{across(row['score']):.1f}", "cy": y, "r": 5}))
        parts.append(_text(WIDTH - 90, y + 4, number(row["score"])))
    return _svg(parts, height, label)
