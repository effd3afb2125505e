"""What messages are made of: the first line of another error, a value, the nearest known name.

Files and other people's code put anything into them, so each is one printable line of bounded length.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


def first_line(error: BaseException) -> str:
    """What an error says, or its type where it says nothing."""
    line = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    return line if line.isprintable() else ascii(line)


@contextmanager
def refused(kind: type[Exception], what: str, *errors: type[Exception]) -> Iterator[None]:
    """Within, errors of these types become one of `kind`, which says `what` and the cause. Those of `kind` pass."""
    try:
        yield
    except kind:
        raise
    except errors as error:
        raise kind(f"{what}: {first_line(error)}") from error


def shown(value: object) -> str:
    """A value in a message."""
    if isinstance(value, int) and abs(value) >= 10**40:  # Python refuses to write very long ones at all
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """A question with the known name that is most like `name`; `otherwise` if none is."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else otherwise


class RefusedError(ValueError):
    """What was asked for cannot be done here, whatever the data are: a command that is refused ends with 2."""


class GrowthWarning(UserWarning):
    """A run that cannot do what its user expects, by what is known before it starts."""
