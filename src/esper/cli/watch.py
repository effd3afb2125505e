"""`esper watch`: a page that shows runs and networks while they grow, and afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from tyro.conf import Positional, arg

from esper.cli.terminal import wide_console

if TYPE_CHECKING:
    from esper.dashboard.guard import Policy

PORT = 8470
"""The first that is tried."""
PORTS = 50
ENDS_WITH_INPUT = "ESPER_WATCH_ENDS_WITH_INPUT"
"""Variable of the environment by which `esper train --watch` and `esper grow --watch` start their page."""


@dataclass(frozen=True)
class WatchCommand:
    """Show runs, or networks that grow, on a page in the browser, live. Nothing can be changed there."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [OTHER …]")]
    """Folders of runs, or of grown networks; the first one is shown, the others can be compared with it."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other than this machine's own loopback demands a token, which is printed once."""
    port: int | None = None
    """Port to listen on; the first free one from 8470 on if none is named."""
    allow_host: tuple[str, ...] = ()
    """More names by which people reach this machine, such as that of a proxy."""
    open: bool = False
    """Also open the page in a browser."""

    def run(self) -> int:
        from esper.dashboard.guard import Policy
        from esper.dashboard.source import Source

        serve = server()
        sources = [Source.of(path) for path in self.runs]
        listening = listen(self.host, self.port)
        policy = Policy.of(self.host, self.allow_host)
        console = wide_console()
        address = address_of(listening, self.host, policy)
        console.print(f"Watch it on {address}", soft_wrap=True, highlight=False)
        if policy.token is not None:
            console.print("The token in this address is needed once, and is not printed again.", highlight=False)
        console.print("Ctrl-C ends this page; a run that is being trained goes on.", style="dim", highlight=False)
        if self.open:
            import webbrowser

            webbrowser.open(address)
        if os.environ.get(ENDS_WITH_INPUT):
            threading.Thread(target=_end_with_input, daemon=True).start()
        serve(sources, policy, listening)
        return 0


def _end_with_input() -> None:
    """A command that shows its own page holds the other end of the pipe: killed or not, the page ends with it."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def server() -> Any:
    """What serves; refused in words where the packages are missing."""
    from esper.telemetry.sinks import PackageMissingError

    try:
        from esper.dashboard.server import serve
    except ImportError as error:
        raise PackageMissingError(
            f"the page needs packages that are not installed ({error.name}): pip install 'esper[web]'; "
            "`esper report` needs none"
        ) from error
    return serve


def listen(host: str, port: int | None) -> socket.socket:
    """A socket on the port that was asked for, or on the first free one."""
    if not host.strip():  # which the system takes for every address of the machine
        raise ValueError("--host names no address: leave it out for this machine alone, or give 0.0.0.0 for all")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem: OSError | None = None
    for number in range(PORT, PORT + PORTS) if port is None else [port]:
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(128)
        except (OSError, OverflowError) as error:
            found.close()
            problem = OSError(str(error))
            continue
        return found
    what = f"port {port}" if port is not None else f"any port from {PORT} to {PORT + PORTS - 1}"
    raise ValueError(f"cannot listen on {host}, {what} ({problem}): choose another with --host or --port")


def address_of(listening: socket.socket, host: str, policy: Policy) -> str:
    port = listening.getsockname()[1]
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    name = f"[{shown}]" if ":" in shown else shown
    return f"http://{name}:{port}/" + ("" if policy.token is None else f"?token={policy.token}")


# -- beside a command that trains or grows: a process of its own, so that viewers take no time from the work -----------


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


COMMAND = WatchCommand
