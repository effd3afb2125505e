"""Task families: a new problem for every episode, the same one for the same number, and others for evaluation.

`get_family("mixed")` generates problems ("mixed/vector" only those of vectors), "disguised" hides what gives them away,
"varied" builds hosts at random, "grammar" composes hosts and data at random ("grammar-unseen": of kinds that "grammar"
never has), "natural" has some hosts of built-in tasks ("natural/mnist1d" only of that one), and the name of any task is
a family in which only the seeds vary. "mixed+varied" takes turns, a round of each; "6*grammar+mixed" takes six rounds
of the first for each of the second.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from esper.errors import did_you_mean
from esper.tasks.registry import Task, check_task_options, load_task, task_names, task_options

Fact = str | int | float


@dataclass(frozen=True, slots=True, eq=False)  # eq: a task does not compare to a bool
class Draw:
    """One episode's problem."""

    task: Task
    """Data, host and training settings."""
    seed: int
    """Decides the host's start, its minibatches and its seeds. Even in training draws, odd in held-out ones."""
    horizon: int
    """Epochs."""
    budget: int | None
    """Most parameters in all; None is no limit."""
    max_seeds: int | None
    """Most seeds at a time; None is no limit."""
    facts: dict[str, Fact]
    """What is known about the problem: for analysis only, never shown to a controller."""


class Family(Protocol):
    """Numbered problems, made on demand."""

    name: str

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        """The problem of this number, always the same. Held-out draws never coincide with training draws."""


class BoundedFamily(Family, Protocol):
    """A family whose largest problem is known: what the records of its episodes must have room for."""

    @property
    def slots(self) -> int:
        """Most slots that a host has."""

    @property
    def horizon(self) -> int:
        """Most epochs that an episode lasts."""


class NamedFamily(BoundedFamily, Protocol):
    """One that comes by name, and can take turns with others."""

    @property
    def round(self) -> int:
        """Draws in which every kind of problem occurs once."""


def draw_rng(name: str, number: int, held_out: bool, use: int = 0) -> np.random.Generator:
    """The random numbers of one draw: of no other draw, no other family, and no other use."""
    if number < 0:
        raise ValueError(f"draws are numbered from 0, not {number}")
    return np.random.default_rng([int.from_bytes(name.encode(), "little") % 2**32, int(held_out), number, use])


def draw_seed(rng: np.random.Generator, held_out: bool) -> int:
    """A seed whose last bit says whether the draw is held out, so that the two kinds can never share one."""
    return 2 * int(rng.integers(2**30)) + int(held_out)


def dashed(numbers: Iterable[float]) -> str:
    """Widths, kernels and the like, as facts about a draw spell them."""
    return "-".join(str(int(number)) for number in numbers)


DATA_SEEDS = 4
"""Data sets among which a family of one task varies. Few, so that they stay in memory."""

_cached_task = lru_cache(maxsize=16)(load_task)


class TaskFamily:
    """One task; the seeds vary, and so do the data where they are generated or can be split anew."""

    def __init__(
        self,
        name: str,
        *,
        horizon: int = 25,
        budget: int | None = None,
        max_seeds: int | None = None,
        data_seeds: int | None = None,
        **options: Any,
    ) -> None:
        check_task_options(name, options)
        self.name = name
        self.horizon, self.budget, self.max_seeds = horizon, budget, max_seeds
        # Data from files are read once: another split of them is no other problem, and they may be large.
        from_files = {"data_dir", "text_file"} & set(task_options(name))
        self.round = 1
        self.data_seeds = data_seeds or (1 if from_files else DATA_SEEDS)
        self.options = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}  # hashable

    @property
    def slots(self) -> int:
        return len(_cached_task(self.name, seed=0, **self.options).slots)

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        rng = draw_rng(self.name, number, held_out)
        data_seed = number % self.data_seeds + (self.data_seeds if held_out else 0)
        return Draw(
            task=_cached_task(self.name, seed=data_seed, **self.options),
            seed=draw_seed(rng, held_out),
            horizon=self.horizon,
            budget=self.budget,
            max_seeds=self.max_seeds,
            facts={"kind": self.name, "data_seed": data_seed},
        )


# Hosts with different weaknesses (DESIGN 5.1): narrow throughout, a narrow first, middle or last stage, large.
NATURAL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mnist1d", {"widths": (8, 8, 8), "kernels": (5, 3, 3)}),
    ("digits", {"widths": (6, 6)}),
    ("mnist1d", {"widths": (2, 12, 12), "kernels": (1, 3, 3)}),
    ("mnist1d", {"widths": (8, 3, 12), "kernels": (5, 1, 3)}),
    ("digits", {"widths": (4, 12)}),
    ("mnist1d", {"widths": (8, 12, 3), "kernels": (5, 3, 1)}),
    ("mnist1d", {"widths": (16, 16, 16), "kernels": (5, 3, 3)}),
    ("digits", {"widths": (16, 4)}),
)


class Natural:
    """Hosts of several shapes on `mnist1d` and `digits`, in turn: the reality check beside the generated problems."""

    name = "natural"

    def __init__(self, *, task: str | None = None, horizon: int = 20, max_seeds: int | None = 2) -> None:
        """`task` leaves only the hosts of that task."""
        self._hosts = [(name, options) for name, options in NATURAL if task in (None, name)]
        self.members = [
            TaskFamily(name, horizon=horizon, max_seeds=max_seeds, data_seeds=1, **options)
            for name, options in self._hosts
        ]
        self.horizon = horizon
        self.round = len(self.members)

    @property
    def slots(self) -> int:
        return max(member.slots for member in self.members)

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        turn, member = divmod(number, len(self.members))
        drawn = self.members[member].draw(turn, held_out=held_out)
        name, options = self._hosts[member]
        rng = draw_rng(self.name, number, held_out)
        facts: dict[str, Fact] = {**drawn.facts, "kind": f"{name} {dashed(options['widths'])}"}
        return Draw(drawn.task, draw_seed(rng, held_out), drawn.horizon, drawn.budget, drawn.max_seeds, facts)


MOST_ROUNDS = 1000


class Together:
    """Several families in turn: some rounds of the first, some of the next, and so on from the beginning."""

    def __init__(self, members: Sequence[NamedFamily], rounds: Sequence[int] | None = None) -> None:
        """`rounds` of each member before it is the next one's turn; one by default."""
        self.members = tuple(members)
        times = rounds or [1] * len(members)
        names = zip(times, members, strict=True)
        self.name = "+".join(member.name if count == 1 else f"{count}*{member.name}" for count, member in names)
        self.slots = max(member.slots for member in members)
        self.horizon = max(member.horizon for member in members)
        self._shares = [count * member.round for count, member in zip(times, members, strict=True)]
        """Draws of each member in a round of all."""
        self.round = sum(self._shares)

    def member_of(self, number: int) -> tuple[NamedFamily, int]:
        """Whose draw it is, and the draw's number there."""
        if number < 0:
            raise ValueError(f"draws are numbered from 0, not {number}")
        turn, place = divmod(number, self.round)
        for member, share in zip(self.members, self._shares, strict=True):
            if place < share:
                return member, turn * share + place
            place -= share
        raise AssertionError("a round is the sum of its members' shares")

    def draw(self, number: int, *, held_out: bool = False) -> Draw:
        member, own = self.member_of(number)
        return member.draw(own, held_out=held_out)


def family_names() -> tuple[str, ...]:
    return ("mixed", "disguised", "varied", "grammar", "grammar-unseen", "natural", *task_names())


def family_of(name: str, *, data_dir: str | Path | None = None, text_file: str | Path | None = None) -> BoundedFamily:
    """The family of this name, with the files that a person named for it, if any."""
    named = {"data_dir": data_dir, "text_file": text_file}
    files = {option: str(path) for option, path in named.items() if path is not None}
    if files and "+" in name:
        raise ValueError(
            f"families in turn cannot read files: train on one of {name!r}, or leave out {_spelled(files)}"
        )
    if files and name not in task_names():
        get_family(name)  # an unknown name is refused before anything else
        raise ValueError(f"the problems of {name!r} are generated and read no files: leave out {_spelled(files)}")
    return get_family(name, **files)


def _spelled(options: Iterable[str]) -> str:
    return " and ".join(f"--{option.replace('_', '-')}" for option in options)


def get_family(name: str, **options: Any) -> NamedFamily:
    """The family of this name; the options are its constructor's (for the name of a task, the task's own as well).

    Names that are joined by "+" are families in turn, "3*" before one of them gives it three rounds.
    """
    if "+" in name:
        parts = [part.rpartition("*") for part in name.split("+")]
        for count, star, _ in parts:
            if star and not (count.isdecimal() and 0 < int(count) <= MOST_ROUNDS):
                raise ValueError(f"{name!r}: before a * stands how many rounds, from 1 to {MOST_ROUNDS}, not {count!r}")
        members = [get_family(part, **options) for _, _, part in parts]
        return Together(members, [int(count or 1) for count, _, _ in parts])
    base, _, part = name.partition("/")
    if base in ("mixed", "disguised"):
        # Late, because they need `Draw` from here.
        from esper.tasks.disguised import Disguised  # noqa: PLC0415
        from esper.tasks.mixed import KINDS, Mixed  # noqa: PLC0415

        kinds = [kind for kind in KINDS if kind.startswith(part)]
        if not kinds:
            firsts = dict.fromkeys(kind.split()[0] for kind in KINDS)
            raise ValueError(f"no kind of {base} problem starts so: {name!r}; try {base}/{f', {base}/'.join(firsts)}")
        return {"mixed": Mixed, "disguised": Disguised}[base](**({"kinds": kinds} if part else {}), **options)
    if base == "varied":
        from esper.tasks.varied import SORTS, Varied  # noqa: PLC0415

        if part and part not in SORTS:
            raise ValueError(f"no sort of varied problem is called so: {name!r}; try varied/{', varied/'.join(SORTS)}")
        return Varied(**({"sorts": [part]} if part else {}), **options)
    if base in ("grammar", "grammar-unseen"):
        from esper.tasks.grammar import Grammar  # noqa: PLC0415
        from esper.tasks.grammar_forms import DATA_NAMES  # noqa: PLC0415

        if part and part not in DATA_NAMES:
            raise ValueError(f"no part of {base} is called so: {name!r}; try {base}/{f', {base}/'.join(DATA_NAMES)}")
        return Grammar(part=part or None, unseen=base == "grammar-unseen", **options)
    if name == "natural":
        return Natural(**options)
    if name.startswith("natural/"):
        task = name.removeprefix("natural/")
        if task not in dict(NATURAL):
            raise ValueError(
                f"no natural problem is of the task {task!r}; try natural/{', natural/'.join(dict(NATURAL))}"
            )
        return Natural(task=task, **options)
    if name not in task_names():
        hint = did_you_mean(name, family_names(), "`esper info` lists them, too")
        raise ValueError(f"unknown task family {name!r}; there are {', '.join(family_names())}; {hint}")
    return TaskFamily(name, **options)
