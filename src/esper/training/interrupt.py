"""Ctrl-C that loses nothing: the first one asks the job to stop after the step it is in, the second one stops it.

SIGTERM and SIGHUP do the same, unless somebody handles or ignores them (`nohup` does).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether the person has asked to stop."""

    requested = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield interrupt
        return

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    others = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, *others)}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
