"""Writes docs/requirements.md: which tests and which decisions answer each row of the requirements.

    python docs/traceability.py [REQUIREMENTS.md]      # without a path: ../shared/REQUIREMENTS.md, if it is there

Tests name the rows that they cover in the docstring of their module (`Covers: R005, R031`). Rows that are answered in
another way than asked are in the table of decisions in docs/design.md.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "requirements.md"
PLACES = [parent / "shared" / "REQUIREMENTS.md" for parent in ROOT.parents]
ROW = re.compile(r"^- (R\d{3}) (.*?)(?: \[([^\]]*)\])?$", re.MULTILINE)


@dataclass(frozen=True)
class Requirement:
    """One row."""

    number: str
    words: str
    section: str


def requirements_file() -> Path | None:
    """Where the requirements are on this machine; the repository does not hold them."""
    return next((path for path in PLACES if path.is_file()), None)


def read_requirements(text: str) -> list[Requirement]:
    found, section = [], ""
    for line in text.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ").strip()
        elif match := ROW.match(line):
            found.append(Requirement(match[1], match[2], section))
    return found


def covering(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Row → the test modules that name it."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for part in re.findall(r'Covers:(.*?)(?:\n\s*\n|""")', path.read_text("utf-8"), re.DOTALL):
            for number in re.findall(r"R\d{3}", part):
                found.setdefault(number, []).append(str(path.relative_to(folder)))
    return found


def decided(design: str) -> set[str]:
    """Rows in the table of decisions: its lines begin with `| R…`."""
    lines = [line for line in design.splitlines() if line.startswith("| R")]
    return {number for line in lines for number in re.findall(r"R\d{3}", line.split("|")[1])}


def page(rows: list[Requirement], tests: dict[str, list[str]], decisions: set[str]) -> str:
    lines = [
        "# Requirements and their tests",
        "",
        "For reviewers: which test modules answer each requirement. Written by `python docs/traceability.py`; do not "
        "edit.",
        "",
        "The requirements are those of five review documents, numbered R001 to "
        f"{rows[-1].number}. A *decision* is a row that is met in another way than asked, or on purpose not at all: "
        "[the table of decisions](design.md#rows-that-are-met-otherwise) has the reason.",
        "",
        *_summary(rows, tests, decisions),
    ]
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "", "| row | requirement | tests |", "|---|---|---|"]
        answers = [f"`{name}`" for name in dict.fromkeys(tests.get(row.number, []))]
        answers += ["[decision](design.md#rows-that-are-met-otherwise)"] if row.number in decisions else []
        words = row.words.replace("|", "∣").replace("<", "&lt;")
        lines.append(f"| {row.number} | {words} | {', '.join(answers) or '**none**'} |")
    return "\n".join(lines) + "\n"


def _summary(rows: list[Requirement], tests: dict[str, list[str]], decisions: set[str]) -> list[str]:
    numbers = [row.number for row in rows]
    without = [number for number in numbers if number not in tests and number not in decisions]
    tested = sum(number in tests for number in numbers)
    open_rows = f"Without either: {', '.join(without)}." if without else "No row is without either."
    return [f"{tested} of {len(rows)} rows have a test module; {len(decisions)} have a decision. {open_rows}"]


def current(requirements: Path) -> str:
    """The page as it should be."""
    design = (ROOT / "docs" / "design.md").read_text("utf-8")
    return page(read_requirements(requirements.read_text("utf-8")), covering(), decided(design))


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else requirements_file()
    if source is None:
        sys.exit("No REQUIREMENTS.md was found beside this repository: give its path")
    PAGE.write_text(current(source), "utf-8")
    print(f"Written: {PAGE}")
