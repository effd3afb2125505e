"""Learned controllers that come with Esper, by name: `NAME.json` (its provenance) and `NAME.safetensors` (a policy).

`benchmarks/ship.py` makes them. A policy's network is kept in float16 and loaded into float32; apart from that, it is
an ordinary checkpoint. Nothing here needs torch, so that the options' help is quick.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from esper.config import ConfigError, read_table, settings_from

DEFAULT_CONTROLLER = "small"
"""The controller of `esper grow` and `esper.grow` where none is named. The only place that says so; docs/results.md has
the reasons."""

SHIPPED_FOLDER = Path(__file__).parent


class ShippedError(ValueError):
    """A controller that this installation does not have whole. The message says what to do."""


@dataclass(frozen=True, slots=True)
class ShippedScore:
    """What `esper compare` gave the shipped file, in its score, with 95 % intervals."""

    on: str
    """The problems, for example: held-out draws 0 to 63 of mixed."""
    value: float
    low: float
    high: float
    rule: str | None
    """The best rule-based controller on these draws, and the paired difference to it."""
    vs_rule: float | None
    vs_rule_low: float | None
    vs_rule_high: float | None

    def __str__(self) -> str:
        said = f"score {self.value:.1f} ({self.low:.1f} to {self.high:.1f}) on {self.on}"
        if self.rule is None or self.vs_rule is None:
            return said
        return f"{said}; {self.vs_rule:+.1f} ({self.vs_rule_low:+.1f} to {self.vs_rule_high:+.1f}) against {self.rule}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a shipped controller comes from, and which file is meant."""

    summary: str
    """What it is, in half a line."""
    commands: list[str]
    """What made it, in order."""
    seeds: list[int]
    env_steps: int
    """Epochs of single networks that it learnt from."""
    wall_seconds: float
    machine: str
    git_commit: str
    torch: str
    score: ShippedScore | None
    """None: not judged yet."""
    sha256: str
    """Of the safetensors file."""
    blueprints: list[str]
    """The kinds of seed that it can plant, in the order of their numbers."""
    layout: str
    """Of the observations that it reads."""

    def __str__(self) -> str:
        return f"{self.summary}; {self.score or 'not judged yet'}"


STATED = ("summary", "commands", "seeds", "env_steps", "wall_seconds", "machine", "git_commit", "torch")
"""What a person states about a controller; the rest is read from files."""


def shipped_names() -> tuple[str, ...]:
    files = [path for suffix in ("json", "safetensors") for path in SHIPPED_FOLDER.glob(f"*.{suffix}")]
    # What lacks one of its two files is listed, too.
    return tuple(sorted({path.stem for path in files}))


def shipped_path(name: str) -> Path:
    """The policy's file, after making sure that it is the one that was shipped."""
    known = provenance(name)
    path = SHIPPED_FOLDER / f"{name}.safetensors"
    if not path.exists():
        raise ShippedError(f"{path} is missing: install Esper again")
    if hashlib.sha256(path.read_bytes()).hexdigest() != known.sha256:
        raise ShippedError(
            f"{path} is not the file that was shipped as {name!r} (its sha256 differs from {name}.json): install Esper "
            "again"
        )
    return path


def provenance(name: str) -> Provenance:
    """What is known about a shipped controller. The policy's file is not looked at."""
    if name not in shipped_names():
        raise ShippedError(f"no controller {name!r} comes with Esper; there are: {', '.join(shipped_names())}")
    path = SHIPPED_FOLDER / f"{name}.json"
    try:
        return settings_from(read_table(path), Provenance, path.name, complete=True)
    except ConfigError as error:
        raise ShippedError(f"{path} cannot be read ({error}): install Esper again") from error
