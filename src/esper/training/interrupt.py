"""Ctrl-C that loses nothing: after the first one the job stops at the end of its current step, the second stops it.

In a command, SIGTERM and SIGHUP do the same. In a user's program that calls `esper.grow` they are not handled: they are
meant for the program, not for one call in it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C stopped; of one that another signal stopped it is 128 and the signal's number."""


class Interrupt:
    """Whether a stop was requested."""

    requested = False


class Ending:
    """Of a command: the signal that stopped it, and where its output goes."""

    def __init__(self) -> None:
        self.number = int(signal.SIGINT)
        self.terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def note(self, number: int, frame: FrameType | None = None) -> None:
        self.number = number
        for stream in self.terminals:
            try:
                os.get_terminal_size(stream)
            except OSError:  # the terminal is closed: to write there would be an error before anything is saved
                with suppress(OSError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler where no work is being done that could be kept."""
        self.note(number)
        raise KeyboardInterrupt

    def code(self, code: int) -> int:
        """The exit code of the command, if its own is `code`."""
        return 128 + self.number if code == INTERRUPTED else code


@contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """SIGTERM and SIGHUP interrupt the command inside, as Ctrl-C does. What is ignored (`nohup`) stays ignored."""
    ending = Ending()
    with handled(ending, (number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN)):
        yield ending


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    commands = {number: handler for number in ENDING if isinstance(handler := signal.getsignal(number), Ending)}

    def note(number: int, frame: FrameType | None) -> None:
        if number in commands:
            commands[signal.Signals(number)].note(number)
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True
        if number == signal.SIGINT:
            _announce()

    with handled(note, (signal.SIGINT, *commands)):
        yield interrupt


def _announce() -> None:
    """A step may take long, and a person at a terminal would think that nothing happened."""
    if os.isatty(2):
        with suppress(OSError):  # not print: a signal may come while something else is being written
            os.write(2, b"\nstopping at the end of this step; Ctrl-C once more stops at once\n")


@contextmanager
def handled(handler: Any, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Within, these signals have this handler, as `signal.signal` takes it; only the main thread may handle any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
