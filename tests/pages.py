"""The pages of this repository as tests read them: README.md and docs, and the fenced blocks in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:\*Not run by the tests: (?P<why>[^\n]+)\.\*\n+)?```(?P<kind>\w+)\n(?P<code>.*?)^```", re.M | re.S
)
NEEDS_A_RUN = {ROOT / "docs" / "read_run.md", ROOT / "docs" / "telemetry.md"}
"""Their Python and SQL read a run, which the commands of the page make or presuppose: run by test_shell_blocks.py."""

FENCED = re.compile(r"^```.*?^```", re.M | re.S)
INLINE = re.compile(r"`(esper \w[^`|]* --[^`|]*)`")
BEFORE_A_COMMAND = re.compile(r"\w+\$|\w+=.*")
"""The prompt of a machine, or a variable of the environment."""


class Block(NamedTuple):
    kind: str
    code: str
    why: str | None
    """It is not run."""


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    return [Block(m["kind"], m["code"], m["why"]) for m in BLOCK.finditer(page.read_text("utf-8"))]


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command in the `sh` blocks, without comments and without a prompt or variables before it."""
    for block in blocks(page):
        if block.kind == "sh":
            for line in block.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and BEFORE_A_COMMAND.fullmatch(words[0]):
                    words.pop(0)
                if words:
                    yield words


def inline_commands(page: Path) -> Iterator[list[str]]:
    """Commands of Esper with options that stand in a sentence."""
    for line in INLINE.findall(FENCED.sub("", page.read_text("utf-8"))):
        yield shlex.split(line)
