"""README and docs: links resolve, Python runs, commands exist, generated parts are complete.

The Python blocks of a page are one program, in their order, run in an empty folder. A block that cannot be run has a
line above it that readers see, too: `*Not run by the tests: REASON.*` Commands of `sh` blocks are parsed by the program
itself; test_shell_blocks.py runs them.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper
from esper.agent.metrics import METRICS
from esper.cli import COMMANDS, UsageError, _parse
from esper.env.observation import OVERALL_FIELDS, SLOT_FIELDS
from esper.telemetry.alarms import ALARM_RULES
from pages import FENCED, NEEDS_A_RUN, PAGES, ROOT, blocks, commands, inline_commands, named

LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")

# -- links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#{1,6} (.+)$", FENCED.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_relative_links_resolve(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{named(page)}: {link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{named(page)}: {link} names no heading of {named(target)}"


def test_every_page_is_in_the_contents_and_says_for_whom_it_is() -> None:
    contents = (ROOT / "docs" / "index.md").read_text("utf-8")
    for page in PAGES[1:]:
        name = str(page.relative_to(ROOT / "docs").with_suffix(""))
        assert name == "index" or re.search(rf"^{re.escape(name)}$", contents, re.M), f"{name} is not in docs/index.md"
        lines = [line for line in page.read_text("utf-8").splitlines()[1:] if line.strip()]
        if page.name.startswith("results"):
            continue  # written by benchmarks/results, from what was measured
        assert lines[0].startswith("For "), f"{named(page)} does not begin with the readers that it is for"


# -- Python -----------------------------------------------------------------------------------------------------------


def run_elsewhere(page: Path) -> bool:
    """Whether another test module runs the Python of this page."""
    texts = (path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__))
    name = rf"\b{re.escape(page.name)}\b|[\"']{re.escape(page.stem)}[\"']"
    return any("```python" in text and re.search(name, text) for text in texts)


def programs() -> Iterator[Path]:
    for page in PAGES:
        if any(block.kind == "python" and block.why is None for block in blocks(page)) and not run_elsewhere(page):
            yield page


@pytest.mark.parametrize("page", [page for page in programs() if page not in NEEDS_A_RUN], ids=named)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run_python(page, tmp_path)


def run_python(page: Path, folder: Path) -> None:
    program = "\n".join(block.code for block in blocks(page) if block.kind == "python" and block.why is None)
    for package in set(re.findall(r"^(?:import|from) (\w+)", program, re.M)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed, and the page uses it")
    (folder / "page.py").write_text(program, "utf-8")
    command = [sys.executable, "-W", "ignore", "page.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


# -- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if [*commands(page), *inline_commands(page)]], ids=named)
def test_the_commands_of_a_page_exist(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Esper; programs of others are not checked."""
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    monkeypatch.chdir(tmp_path)
    for words in (*commands(page), *inline_commands(page)):
        program, rest = words[0], words[1:]
        if program == "make":
            assert set(rest) <= targets, shlex.join(words)
        elif program == "python" and rest[0].endswith(".py"):
            assert (ROOT / rest[0]).exists(), shlex.join(words)
        elif program == "esper":
            check_command(rest)


def check_command(words: list[str]) -> None:
    words = [word for word in words if word != "--help"]
    if not words:
        return
    words = words[: words.index(">")] if ">" in words else words
    assert words[0] in COMMANDS, words
    try:
        _parse(words[0], words[1:])
    except UsageError as error:
        raise AssertionError(f"esper {shlex.join(words)}: {error}") from error
    except (ValueError, OSError):
        pass  # the words are right; the files that they name are not here


def test_the_commands_of_the_first_page_work(tmp_path: Path) -> None:
    for words in commands(ROOT / "docs" / "start.md"):
        if words[:2] == ["esper", "grow"]:
            run_command(words, tmp_path)
    rows = re.findall(r"^\| `(\S+\.\w+)`", (ROOT / "docs" / "start.md").read_text("utf-8"), re.M)
    assert {row.strip("`,") for row in rows} <= {path.name for path in (tmp_path / "first").iterdir()}


def run_command(words: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", *words]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, f"{shlex.join(words)}: {result.stderr[-2000:]}"


def test_the_readme_says_how_to_get_the_program_before_it_is_used() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    used = [match.start() for match in re.finditer(r"^esper ", page, re.M)]
    assert page.index("source .venv/bin/activate") < min(used)
    assert page.index('".[gym]"') < page.index("gymnasium.make")


# -- what is generated -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_documentation_builds_without_warnings(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason=f"{package} is not installed: it comes with the extra docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(ROOT / "docs"), str(tmp_path / "pages")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    shown = (tmp_path / "pages" / "reference" / "metrics.html").read_text("utf-8")
    assert "explained_variance" in shown


@pytest.fixture
def docs_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))


@pytest.mark.usefixtures("docs_folder")
def test_the_reference_has_every_command_metric_alarm_and_setting() -> None:
    """Covers: R071 (the sizes of the observation are on a page)."""
    import generated

    shown = generated.commands()
    assert all(f"## esper {name}\n" in shown for name in COMMANDS)
    assert "--param-budget INT" in shown
    assert "\x1b" not in shown
    assert all(f"## esper.{name}\n" in generated.api() for name in esper.__all__)
    table = generated.metrics()
    assert all(f"`{name.replace('head/', 'HEAD/', 1)}`" in table for name in METRICS)
    assert "| `kl_max` | the same, highest minibatch | " in table
    assert "warm-up ≤ 0.2, early ≤ 0.1, late ≤ 0.1 (`kl_spike`)" in table
    assert all(f"`{name}`" in generated.alarms() for name in ALARM_RULES)
    sizes = generated.observation()
    assert f"| the run | {len(OVERALL_FIELDS)} |" in sizes
    assert f"| each slot | {len(SLOT_FIELDS)} |" in sizes
    for name in generated.SETTINGS:
        lines = generated.settings(name).splitlines()[2:]
        undocumented = [line for line in lines if line.endswith("|  |")]
        assert len(undocumented) <= 2, undocumented


@pytest.mark.usefixtures("docs_folder")
def test_the_generated_parts_of_the_reference_are_current() -> None:
    import generated

    used: set[tuple[str, str]] = set()
    for page in generated.PAGES.glob("*.md"):
        text = page.read_text("utf-8")
        used |= {(part[2], part[3]) for part in generated.PART.finditer(text)}
        assert generated.current(text) == text, f"{named(page)}: run python docs/generated.py"
    parts = {(name, "") for name in ("api", "controllers", "commands", "metrics", "alarms", "observation")}
    assert used == parts | {("settings", name) for name in generated.SETTINGS}


@pytest.mark.usefixtures("docs_folder")
def test_drawings_are_those_of_the_script() -> None:
    import drawings

    for name, draw in drawings.DRAWINGS.items():
        assert (drawings.IMAGES / name).read_text("utf-8") == str(draw()), f"{name}: run python docs/drawings.py"


@pytest.mark.usefixtures("docs_folder")
def test_every_requirement_has_a_test_or_a_decision() -> None:
    import traceability

    source = traceability.requirements_file()
    if source is None:
        pytest.skip("the requirements are not beside this repository")
    rows = traceability.read_requirements(source.read_text("utf-8"))
    tests, design = traceability.covering(), (ROOT / "docs" / "design.md").read_text("utf-8")
    assert len(rows) > 150
    assert [
        row.number for row in rows if row.number not in tests and row.number not in traceability.decided(design)
    ] == []
    assert set(tests) <= {row.number for row in rows}, "tests name rows that do not exist"
    assert traceability.PAGE.read_text("utf-8") == traceability.current(source), "run python docs/traceability.py"
