"""The shell: `esper COMMAND [options]`, one module per command.

A command's module has a frozen dataclass (its options, with their documentation) whose `run` does the job and returns
the exit code: 0 done; 1 failed, also where an option's value cannot be used; 2 the words are no command (nothing was
tried: an unknown command or option, or a word where a number belongs); 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

COMMANDS = {
    "train": "train a controller with PPO; resume; ends with a comparison",
    "grow": "grow one model with a controller, and keep the plain model",
    "compare": "controllers and static controls side by side on held-out draws",
    "record": "episodes of controllers, with exploration noise on request, to learn from",
    "clone": "a policy that imitates the controllers of a recording",
    "offline": "a policy from a recording by what paid (implicit Q-learning)",
    "tune-heuristic": "search good settings for the heuristic, under a budget of steps",
    "checkpoint": "inspect a checkpoint, or bring an old one up to date",
    "query": "ask the store of a run with SQL; without SQL, list its tables and views",
    "bench": "how fast growing is on this machine, eager and with CUDA graphs",
    "info": "what there is: tasks, controllers, blueprints, devices",
}


class Command(Protocol):
    """What every command's options can do."""

    def run(self) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `esper` program."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        from esper import __version__

        print(f"esper {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        print(f"esper: unknown command {name!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return _parse(name, rest).run()
    except (KeyboardInterrupt, Exception) as error:
        if _is_interrupt(error):
            print("esper: interrupted", file=sys.stderr)
            return 130
        from esper.telemetry.optional import PackageMissingError

        # Bad input ends with one line that says what, where and what to do. A person who hunts a bug wants more.
        expected = (ValueError, OSError, RuntimeError, PackageMissingError)
        if not isinstance(error, expected) or os.environ.get("ESPER_TRACEBACK"):
            raise
        print(f"esper {name}: {error}", file=sys.stderr)
        return 1


def _is_interrupt(error: BaseException) -> bool:
    """Ctrl-C while modules are imported may arrive as the cause of another error: Python 3.11 wraps it so where a class
    is being made. The context of an error is not looked at: what fails after a Ctrl-C is news of its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__
    return cause is not None


def _parse(name: str, words: list[str]) -> Command:
    import tyro

    from esper.config import read_config

    kind: type[Command] = importlib.import_module(f"esper.cli.{name.replace('-', '_')}").COMMAND
    defaults, words = _take_config(words)
    if defaults is None:
        return tyro.cli(kind, prog=f"esper {name}", args=words)
    return tyro.cli(kind, prog=f"esper {name}", args=words, default=read_config(defaults, kind))


def _take_config(words: list[str]) -> tuple[Path | None, list[str]]:
    """`--config FILE` gives defaults for the other options, so it must be read before them."""
    for i, word in enumerate(words):
        if word == "--config" and i + 1 < len(words):
            return Path(words[i + 1]), words[:i] + words[i + 2 :]
        if word.startswith("--config="):
            return Path(word.partition("=")[2]), words[:i] + words[i + 1 :]
    return None, words


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: esper COMMAND [options]",
            "",
            "Neural networks that grow themselves while they train.",
            "",
            *lines,
            "",
            "esper COMMAND --help shows a command's options; --config FILE (TOML or JSON) sets their defaults.",
            "Exit codes: 0 done, 1 failed, 2 not a command, 130 interrupted. esper --version shows the version.",
        ]
    )
