"""Damage files of any kind, and see that a reader refuses them in one line or reads what was there before.

A kind of file is one entry of a table: how to make a valid one, how to read it, how to tell that what was read is what
was made, and how an attacker damages it on purpose. `test_fuzz_models.py` is the first user of it; to add a kind, write
another `Kind` and call `attack` for each of its `cases`.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_SECONDS = 5.0
MOST_BYTES = 10**9

HOSTILE = (
    "__import__('os').system('touch exploded')",
    "x=(__import__('pathlib').Path('exploded').touch())",
    "'); import os; os.mkdir('exploded') #",
    "../../../../etc/passwd",
    "/dev/zero",
    "line\nbreak",
    "\x00",
    "\ud800",
    "{0.__class__}",
    "%s%n",
    "a" * 100_000,
    "",
    "class",
)
WRONG: tuple[Any, ...] = (None, True, -1, 0, 2**31, 2**63, 10**40, 1e308, -0.5, [], {}, [[]], [None], {"": {}}, "text")
HUGE = (2**14, 2**20, 2**31 - 1, 2**40, 10**12)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file, or of folder with files, that Esper reads."""

    name: str
    make: Callable[[Path], None]
    """Write a valid one at this path."""
    read: Callable[[Path], Any]
    """As a user reads it."""
    same: Callable[[Any, Any], bool]
    """What was read, and what was read from the undamaged files."""
    refusals: tuple[type[Exception], ...]
    """How it may be refused; the message has one line."""
    forged: Sequence[Callable[[Path, random.Random], str]] = field(default=())
    """Damage on purpose, by someone who makes digests fit; says what was done."""


@dataclass(frozen=True, slots=True)
class Case:
    kind: Kind
    number: int

    def __str__(self) -> str:
        return f"{self.kind.name}-{self.number}"


def cases(kind: Kind, count: int, start: int = 0) -> list[Case]:
    return [Case(kind, number) for number in range(start, start + count)]


def attack(case: Case, valid: Path, original: Any, place: Path) -> None:
    """Damage a copy of the valid files, read it, and check what comes of it."""
    kind, rng = case.kind, random.Random(case.number)
    if valid.is_dir():
        shutil.copytree(valid, place)
    else:
        shutil.copy(valid, place)
    ways = [lambda path, r=rng, d=damage: d(_any_file(path, r), r) for damage in (flip, truncate, overwrite, insert)]
    chosen = rng.choice([*ways, *(lambda path, f=forge: f(path, rng) for forge in kind.forged for _ in range(2))])
    what = chosen(place)
    before = _peak()
    refusal = None
    try:
        with _in_time(what):
            found = kind.read(place)
    except kind.refusals as error:
        refusal = str(error)
    if refusal is None:
        assert kind.same(found, original), f"{what}: accepted, and read as something else"
    else:
        assert refusal.isprintable(), f"{what}: not refused in one line of plain text: {refusal!r:.300}"
        assert 0 < len(refusal) < 1000, f"{what}: refused with {len(refusal)} characters"
    grown = _peak() - before
    assert grown < MOST_BYTES, f"{what}: took {grown / 1e9:.1f} GB"
    shutil.rmtree(place) if place.is_dir() else place.unlink()  # ten thousand of them would fill a disk


@contextmanager
def _in_time(what: str) -> Iterator[None]:
    """A reader that would never end is stopped."""

    def stop(*_: object) -> None:
        raise AssertionError(f"{what}: took more than {MOST_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _peak() -> int:
    """Bytes: the most memory that this process ever had. It never falls, so what one case takes is what it adds."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _any_file(path: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(path.iterdir())) if path.is_dir() else path


# -- damage by accident -----------------------------------------------------------------------------------------------


def flip(file: Path, rng: random.Random) -> str:
    content = bytearray(file.read_bytes())
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {at} of {file.name} flipped"


def truncate(file: Path, rng: random.Random) -> str:
    content = file.read_bytes()
    length = rng.choice([0, 1, rng.randrange(len(content)), len(content) - 1])
    file.write_bytes(content[:length])
    return f"{file.name} cut to {length} bytes"


def overwrite(file: Path, rng: random.Random) -> str:
    content = bytearray(file.read_bytes())
    at, length = rng.randrange(len(content)), rng.choice([1, 8, 512])
    content[at : at + length] = rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length)])
    file.write_bytes(content)
    return f"{length} bytes at {at} of {file.name} overwritten"


def insert(file: Path, rng: random.Random) -> str:
    content = file.read_bytes()
    at, more = rng.randrange(len(content) + 1), rng.randbytes(rng.choice([1, 100]))
    file.write_bytes(content[:at] + more + content[at:])
    return f"{len(more)} bytes inserted at {at} of {file.name}"


# -- damage on purpose ------------------------------------------------------------------------------------------------


def damage_json(data: Any, rng: random.Random) -> str:
    """One value somewhere in the data becomes another, or goes, or gets another name. Changes `data` itself."""
    holder, key = rng.choice(list(_places(data)))
    old = holder[key]
    way = rng.choice(["wrong type", "hostile text", "huge", "gone", "renamed"])
    if way == "huge":
        number = rng.choice(HUGE)
        holder[key] = [number] * rng.choice([1, 3, 50_000]) if isinstance(old, list) else number
    elif way == "gone":
        del holder[key]
    elif way == "renamed" and isinstance(holder, dict):
        holder[rng.choice(HOSTILE)] = holder.pop(key)
    else:
        holder[key] = rng.choice(HOSTILE if way == "hostile text" else WRONG)
    return f"{way}: {key!r} was {json.dumps(old)[:60]}"


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) at every depth."""
    pending = [data]
    while pending:
        part = pending.pop()
        keys = list(part) if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
        for key in keys:
            yield part, key
            pending.append(part[key])
