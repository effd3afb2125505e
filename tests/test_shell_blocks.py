"""Every command of README and docs is run, in a smaller form where it would take long, or has a reason why not.

The commands of a page run in their order in one folder, which holds what the page presupposes (`PREPARED`). `SMALLER`
and `MORE` are all that is changed in them. The pages run in a slow test; an ordinary one checks that the tables below
are complete and that nothing in them is left over.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pages import FENCED, NEEDS_A_RUN, PAGES, blocks, commands, named

NOT_RUN = {
    "make": "installs packages; `make test` is this suite, and CI makes the rest",
    "source": "acts on the shell of a person",
    "export": "the same",
    "pip install": "installs packages",
    "ray start": "needs a cluster; tests/training/test_cluster.py starts one",
    "srun": "needs Slurm",
    "sleep": "a part of the script for Slurm",
    "show hostnames": "the same",
    "esper train --task mixed --envs 96 --cluster": "needs a cluster",
    "esper train --task mixed --run runs/first --cluster": "needs a cluster",
    "nvidia-cuda-mps-control": "needs a GPU",
    "esper bench --device cuda": "needs a GPU",
    "esper compare --task cifar10": "needs the files of CIFAR-10",
    "python benchmarks/results.py": "hours; it writes docs/results.md; tests/benchmarks/test_results.py runs its parts",
    "python benchmarks/real_problems.py": "an hour; tests/benchmarks/test_real_problems.py runs it on a tiny problem",
    "python benchmarks/ship.py": "writes into the package; tests/agent/test_shipped.py runs it elsewhere",
}
"""How a command begins → why it is not run."""

SMALLER = {
    "--preset small": "--preset demo",
    "--task mixed ": "--task mixed/vector ",
    "--episodes 400": "--episodes 8",
    "--episodes 100": "--episodes 8",
    "--episodes 32": "--episodes 1",
    "--budget-steps 20000 --out heuristic.toml": "--budget-steps 600 --out tuned.toml",
    "--draws 8 --envs 8 --updates 4": "--draws 2 --envs 2 --updates 2",
    "--epochs 40": "--epochs 8",
    "--stop-after 535": "--stop-after 20",
    "--stop-after 125": "--stop-after 20",
    "--cluster auto": "--workers 1",
}
"""Words of a command → words that are run in their place."""

BRIEF_RUN = "--envs 2 --updates 1 --evaluate-every 0 --compare-episodes 0"
MORE = {
    "esper train --preset": BRIEF_RUN,
    "esper train --task": BRIEF_RUN,
    "esper train --resume": "--updates 2",
    "esper grow --task mnist1d": "--epochs 8",
    "esper compare": "--episodes 1 --no-controls",
    "esper tune-heuristic": "--episodes 1",
    "esper clone": "--epochs 2 --compare-episodes 0",
    "esper offline": "--epochs 2 --compare-episodes 0",
    "esper bench": "--epochs 6 --episodes 1",
    "esper sweep": "--episodes 1",
    "python -m esper.training --preset": "--set envs=2 updates=1 evaluate_every=0",
}
"""How a command begins → words that are added to it; an option that is given twice has its last value."""

SMALLER_FILES = {"seeds = [0, 1, 2]": "seeds = [0]", "updates = 15": "updates = 1\nenvs = 2\nevaluate_every = 0"}
"""The same for files that a page shows: those that begin with a comment of their name."""

PREPARED = {
    "docs/compare.md": ("runs/mine", "runs/a", "runs/b", "heuristic.toml"),
    "docs/scaling.md": ("runs/first",),
    "docs/telemetry.md": ("runs/mine",),
    "docs/watch.md": ("runs/first", "runs/second", "grown/mnist1d-small-0"),
}
"""Page → what its reader has already."""

LONGEST = 600.0
"""Seconds for one command."""

SERVES = "Ctrl-C ends"
"""In the last line of a command that shows a page: it is interrupted then."""


def why_not(words: list[str]) -> str | None:
    line = shlex.join(words)
    return next((why for start, why in NOT_RUN.items() if line.startswith(start)), None)


def smaller(words: list[str]) -> list[str]:
    line = shlex.join(words)
    for whole, part in SMALLER.items():
        line = line.replace(whole, part)
    more = max((start for start in MORE if line.startswith(start)), key=len, default=None)
    return shlex.split(line if more is None else f"{line} {MORE[more]}")


def pages() -> list[Path]:
    return [page for page in PAGES if any(why_not(words) is None for words in commands(page))]


def files_shown(page: Path) -> dict[str, str]:
    """Name → text of the blocks that begin with a comment of a file's name."""
    shown = {}
    for block in blocks(page):
        first = block.code.split("\n", 1)[0]
        if first.startswith("# ") and first.endswith((".py", ".toml")) and " " not in first[2:]:
            shown[first[2:]] = block.code
    return shown


def test_every_command_is_run_or_has_a_reason() -> None:
    """What is in no `sh` block is not run: so no command may stand elsewhere, and no table may name what is nowhere."""
    all_words = [words for page in PAGES for words in commands(page)]
    lines = [shlex.join(words) for words in all_words]
    for start in (*NOT_RUN, *MORE):
        written = [shlex.join(smaller(words)) for words in all_words] if start in MORE else lines
        assert any(line.startswith(start) for line in written), f"no page has a command that begins with {start!r}"
    for whole in SMALLER:
        assert any(whole in line for line in lines), f"no page has {whole!r}"
    for words in all_words:
        assert why_not(words) or words[0] in ("esper", "python"), f"{shlex.join(words)}: neither run nor in NOT_RUN"
    assert set(PREPARED) <= {named(page) for page in pages()}
    for page in PAGES:
        text = page.read_text("utf-8")
        elsewhere = [code for kind, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if kind != "sh"]
        elsewhere += re.findall(r"^    .*", FENCED.sub("", text), re.M)
        for code in elsewhere:
            found = re.search(r"^ *(?:\$ )?(?:esper|make|pip|python) (?!=).*", code, re.M)
            assert found is None, f"{named(page)}: {found[0]!r} is in no block of sh"


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(f"esper train --task mixed/vector --draws 2 {BRIEF_RUN} --run run".split(), folder)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=named)
def test_the_commands_of_a_page_work(page: Path, finished_run: Path, tmp_path: Path) -> None:
    for path in PREPARED.get(named(page), ()):
        prepare(tmp_path / path, finished_run)
    for name, text in files_shown(page).items():
        for whole, part in SMALLER_FILES.items():
            text = text.replace(whole, part)
        (tmp_path / name).write_text(text, "utf-8")
    for words in commands(page):
        if why_not(words) is None:
            run(smaller(words), tmp_path)
    if page in NEEDS_A_RUN:
        program = "\n".join(block.code for block in blocks(page) if block.kind == "python" and block.why is None)
        run(["python", "-c", program], tmp_path)
        for store in tmp_path.glob("runs/*/run.sqlite"):
            for block in blocks(page):
                if block.kind == "sql" and "ATTACH" not in block.code:  # that one is for duckdb
                    sqlite3.connect(store).executescript(block.code)


def prepare(path: Path, finished_run: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".toml":
        path.write_text('name = "heuristic"\n\n[heuristic]\npatience = 3\n', "utf-8")
    elif path.parent.name == "grown":
        run(["esper", "grow", "--task", "mixed/vector", "--out", str(path)], path.parents[1])
    else:
        shutil.copytree(finished_run, path)


def run(words: list[str], folder: Path) -> None:
    words, into = (words[:-2], folder / words[-1]) if ">" in words else (words, None)
    program = [sys.executable, "-m", "esper"] if words[0] == "esper" else [sys.executable]
    shows_a_page, interrupted = words[:2] == ["esper", "watch"] or "--watch" in words, False
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as errors:
        process = subprocess.Popen([*program, *words[1:]], cwd=folder, stdout=out, stderr=errors)
        deadline = time.monotonic() + LONGEST
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            if shows_a_page and SERVES in (folder / "stdout").read_text() + (folder / "stderr").read_text():
                process.send_signal(signal.SIGINT)
                shows_a_page, interrupted = False, True
        process.kill()
    if into is not None:
        shutil.copy(folder / "stdout", into)
    said = (folder / "stderr").read_text()[-2000:]
    assert process.wait() in ((0, 130) if interrupted else (0,)), f"{shlex.join(words)}: {said}"
