"""The page beside a command that trains or grows: a process of its own, so that viewers take no time from the work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from esper.cli.watch import ENDS_WITH_INPUT, server


def check_watchable(watch: bool) -> None:
    """Before anything is written: refuse to watch where the packages are missing."""
    if watch:
        server()


@contextmanager
def serving_page(watch: bool, folder: Path, console: Console, *, stay: bool = False) -> Iterator[None]:
    """Serve the page of a run while the body works, where that is asked for; says where it is.

    With `stay` a person at a terminal keeps it until Ctrl-C: a network may have grown before it was looked at.
    """
    if not watch:
        yield
        return
    polite = ["nice", "-n", "5"] if shutil.which("nice") else []
    words = [*polite, sys.executable, "-m", "esper", "watch", str(folder.absolute())]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, text=True, env={**os.environ, ENDS_WITH_INPUT: "1"}, **pipes) as page:  # type: ignore[call-overload]
        assert page.stdout is not None
        assert page.stderr is not None
        said = page.stdout.readline().strip() or f"note: there is no page: {page.stderr.readline().strip()}"
        console.print(said, soft_wrap=True, highlight=False)
        try:
            yield
            if stay and console.is_terminal and sys.stdin.isatty():
                console.print("The page stays until Ctrl-C.")
                with suppress(KeyboardInterrupt):
                    page.wait()
        finally:
            page.terminate()
            try:
                page.wait(5)
            except subprocess.TimeoutExpired:
                page.kill()
    console.print(f"The page has ended; to see it again: esper watch {folder}", soft_wrap=True, highlight=False)
