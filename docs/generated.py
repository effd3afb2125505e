"""Parts of the reference that are made from the code: commands, names, settings, metrics, alarms, observation.

`python docs/generated.py` writes them into the pages, between two comments; a test checks that they are current.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from enum import Enum
from pathlib import Path
from typing import Any

import esper
from esper.actions import HEAD_NAMES, Action, Op
from esper.agent.config import FIRST_RATIO_TOLERANCE, PPOConfig
from esper.agent.metrics import METRICS
from esper.cli import COMMANDS, main
from esper.env.observation import OVERALL_FIELDS, SCHEMA_VERSION, SLOT_FIELDS
from esper.env.reward.config import RewardConfig
from esper.env.situation import Situation, SlotView
from esper.growth.blueprints.registry import BUILT_IN
from esper.lifecycle import Rules, Stage
from esper.policy.heuristic import HeuristicSettings
from esper.policy.network import NetworkConfig
from esper.telemetry.alarms import ALARM_RULES, RATIO_HIGH, RATIO_LOW, AlarmRule
from esper.training.train_config import TrainConfig

PAGES = Path(__file__).parent / "reference"
PART = re.compile(r"(<!-- generated: (\w+) ?(\w*) -->\n).*?(<!-- end of generated -->)", re.S)
"""A part of a page: the function of this module that makes it, and its argument."""
SETTINGS = {
    "train": TrainConfig,
    "ppo": PPOConfig,
    "reward": RewardConfig,
    "network": NetworkConfig,
    "lifecycle": Rules,
    "heuristic": HeuristicSettings,
}
"""Table of a page → the dataclass whose fields it lists."""
PHASES = ("warm-up", "early", "late")
OTHER_RANGES = {
    "ratio_max": f"≤ {RATIO_HIGH:g} (`ratio_explosion`)",
    "ratio_min": f"≥ {RATIO_LOW:g} (`ratio_explosion`)",
    "first_ratio_gap": f"< {FIRST_RATIO_TOLERANCE:g}, or the update is refused",
}
"""Ranges that are not a limit of a rule."""
FOR_CONTROLLERS = (Op, Action, Situation, SlotView, Stage)
INTERNAL = {"tensors", "source"}
"""Fields of a `Situation` that only learned policies read."""


def current(page: str) -> str:
    """The text of a page with its generated parts made anew."""
    return PART.sub(lambda m: f"{m[1]}\n{globals()[m[2]](*filter(None, [m[3]])).strip()}\n\n{m[4]}", page)


def commands() -> str:
    """A section for every command: what it does, and its help."""
    parts = []
    for name, what in COMMANDS.items():
        parts += [f"## esper {name}", "", f"{what[0].upper()}{what[1:]}.", "", "```text", help_of(name), "```", ""]
    return "\n".join(parts)


def help_of(name: str) -> str:
    """What `esper NAME --help` prints on a terminal of 84 columns, without colours."""
    kept = {key: os.environ.get(key) for key in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS="84", NO_COLOR="1")
    try:
        with redirect_stdout(io.StringIO()) as said, suppress(SystemExit):
            main([name, "--help"])
    finally:
        for key, value in kept.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})
    return re.sub(r"\x1b\[[0-9;]*m| +$", "", said.getvalue(), flags=re.M).strip()


def api() -> str:
    """Every name of `esper.__all__`, from its signature and docstring."""
    names = sorted(esper.__all__, key=lambda name: (isinstance(getattr(esper, name), type), name.lower()))
    return "\n".join(_described(f"esper.{name}", getattr(esper, name)) for name in names)


def controllers() -> str:
    """What a controller of one's own reads and gives back."""
    return "\n".join(_described(f"{kind.__module__}.{kind.__name__}", kind, "###") for kind in FOR_CONTROLLERS)


def _described(name: str, value: Any, level: str = "##") -> str:
    made = vars(value).get("__init__") if isinstance(value, type) and not dataclasses.is_dataclass(value) else value
    parts = [f"{level} {name}"]
    if inspect.isfunction(made):
        parts.append(f"```text\n{_signature(name, made)}\n```")
    parts += [inspect.cleandoc(one.__doc__) for one in dict.fromkeys((value, made)) if getattr(one, "__doc__", None)]
    if isinstance(value, type) and (members := list(_members(value))):
        parts.append("\n".join(members))
    return "\n\n".join(parts) + "\n"


def _signature(name: str, value: Any, width: int = 84) -> str:
    """As it would be written: one argument a line where a line has no room for all."""
    signature, words = inspect.signature(value), []
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "" if one.default is one.empty else f" = {one.default!r}"
        words.append(f"{stars}{one.name}: {_type(one.annotation)}{default}")
    gives = signature.return_annotation
    end = "" if gives in (signature.empty, "None") else f" -> {_type(gives)}"
    line = f"{name}({', '.join(words)}){end}"
    return line if len(line) <= width else "\n    ".join([f"{name}(", *(f"{word}," for word in words)]) + f"\n){end}"


def _members(kind: type[Any]) -> Iterator[str]:
    """Values of an enumeration, or fields; then what has a docstring of its own."""
    words = dict(_documented(kind))
    if issubclass(kind, Enum):
        yield from (f"- `{one.name}`{f': {words[one.name]}' if one.name in words else ''}" for one in kind)
        return
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    for field in fields:
        if not field.name.startswith("_") and field.name not in INTERNAL:
            yield f"- `{field.name}: {_type(field.type)}`{f': {words[field.name]}' if field.name in words else ''}"
    for name, value in vars(kind).items():
        if name.startswith("_") or not (text := _folded(getattr(value, "__doc__", None))):
            continue
        if isinstance(value, property):
            yield f"- `{name}`: {text}"
        elif inspect.isfunction(value):
            yield f"- `{_signature(name, value, width=sys.maxsize)}`: {text}"


def settings(table: str) -> str:
    """The fields of a dataclass: name, type, default, and the sentence that stands below it in the source."""
    kind = SETTINGS[table]
    words = dict(_documented(kind))
    rows = []
    for field in dataclasses.fields(kind):
        kind_of_field = _type(field.type).replace("|", "or")
        rows.append((f"`{field.name}`", f"`{kind_of_field}`", _default(field), words.get(field.name, "")))
    return _table(("setting", "type", "default", "meaning"), rows)


def _documented(kind: type[Any]) -> Iterator[tuple[str, str]]:
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    for one, following in zip(body.body, body.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign | ast.Assign) and isinstance(following, ast.Expr):
            name = one.target if isinstance(one, ast.AnnAssign) else one.targets[0]
            yield ast.unparse(name), _folded(ast.literal_eval(following.value))


def _folded(text: str | None) -> str:
    return " ".join((text or "").split())


def _type(kind: object) -> str:
    return str(getattr(kind, "__name__", kind))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "table" if field.default_factory is not dataclasses.MISSING else "required"
    return f"`{getattr(field.default, 'value', field.default)!r}`"


def metrics() -> str:
    """Every metric of an update with its meaning and its healthy range, which is what no alarm reports."""
    rows = [(f"`{_logged(name)}`", metric.meaning, healthy(name) or "–") for name, metric in METRICS.items()]
    return _table(("metric", "meaning", "healthy"), rows)


def healthy(name: str) -> str:
    """From the limits of the rules that read this metric."""
    found = [OTHER_RANGES[name]] if name in OTHER_RANGES else []
    for rule_name, rule in ALARM_RULES.items():
        if rule.read is None and _logged(name) in rule.metrics:
            found.append(f"{_limits(rule)} (`{rule_name}`)")
    return "; ".join(found)


def _logged(name: str) -> str:
    return name.replace("head/", "HEAD/", 1)


def _limits(rule: AlarmRule) -> str:
    sign, limits = ("≥", rule.below) if rule.above is None else ("≤", rule.above)
    unit = " × clip norm" if rule.in_clip_norms else ""
    if not isinstance(limits, tuple):
        return f"{sign} {limits:g}{unit}"
    if len(set(limits)) == 1:
        return f"{sign} {limits[0]:g}{unit}"
    by_phase = zip(PHASES, limits, strict=True)
    return ", ".join(f"{phase} {sign} {limit:g}{unit}" for phase, limit in by_phase if limit is not None)


def alarms() -> str:
    """Every alarm: how long it must last, how serious it is, what it means, what to try."""
    rows = []
    for name, rule in ALARM_RULES.items():
        watched = ", ".join(f"`{metric}`" for metric in rule.metrics) or "see the meaning"
        meaning = f"{rule.meaning[0].upper()}{rule.meaning[1:]}"
        rows.append((f"`{name}`", watched, str(rule.updates), rule.severity, meaning, rule.remedy))
    return _table(("alarm", "reads", "updates", "severity", "meaning", "remedy"), rows)


def observation() -> str:
    """The sizes of what a learned policy reads, with every field."""
    count = len(BUILT_IN)
    sizes = [
        ("the run", f"{len(OVERALL_FIELDS)}", ", ".join(f"`{name}`" for name in OVERALL_FIELDS)),
        ("each slot", f"{len(SLOT_FIELDS)}", ", ".join(f"`{name}`" for name in SLOT_FIELDS)),
        ("each slot, its blueprint", "1", "number of the blueprint that grows there, 0 for none"),
        ("each slot, each blueprint", f"{count}", f"what a seed of this kind would cost there; {count} are built in"),
    ]
    slots = len(SLOT_FIELDS) + 1 + count
    total = f"With S slots that is {len(OVERALL_FIELDS)} + S · {slots} numbers; observation schema {SCHEMA_VERSION}."
    heads = f"The action has {len(HEAD_NAMES)} heads: {', '.join(HEAD_NAMES)}."
    return f"{_table(('of', 'numbers', 'fields'), sizes)}\n\n{total} {heads}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(current(path.read_text("utf-8")), "utf-8")
