"""The shell: `esper COMMAND [options]`, one module per command.

A command's module has a frozen dataclass (its options, with their documentation) whose `run` does the job and returns
the exit code: 0 done; 1 failed, also where an option's value cannot be used; 2 the words are no command (nothing was
tried: an unknown command or option, or a word where a number belongs); 130 interrupted by Ctrl-C, 143 by SIGTERM, 129
by SIGHUP. What failed is said in one line.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Protocol

from esper.training.interrupt import INTERRUPTED, ended_by_signals

COMMANDS = {
    "train": "train a controller with PPO; resume; ends with a comparison",
    "grow": "grow one model with a controller, and keep the plain model",
    "compare": "controllers and static controls side by side on held-out draws",
    "record": "episodes of controllers, with exploration noise on request, to learn from",
    "clone": "a policy that imitates the controllers of a recording",
    "offline": "a policy learned from a recording by its rewards (implicit Q-learning)",
    "tune-heuristic": "search good settings for the heuristic, under a budget of steps",
    "sweep": "many training runs, seeds × settings, and one table of them",
    "checkpoint": "inspect a checkpoint, or bring an old one up to date",
    "watch": "a page that shows runs and networks while they grow; needs esper[web]",
    "report": "one HTML file of a run, a grown network or a comparison, to be mailed",
    "query": "ask the store of a run with SQL; without SQL, list its tables and views",
    "bench": "measure the speed of this machine, eager and with CUDA graphs",
    "info": "list tasks, controllers, blueprints and devices",
    "doctor": "check the installation: versions, packages, devices, speed",
    "completion": "print a script that completes commands and options in bash or zsh",
}


class Command(Protocol):
    """What every command's options can do."""

    def run(self) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `esper` program."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and not _asks_for_help(words):
        return _answer(words)
    return unless_the_reader_leaves(lambda: _answer(words))


def _asks_for_help(words: Sequence[str]) -> bool:
    return "-h" in words or "--help" in words


def unless_the_reader_leaves(answer: Callable[[], int | None]) -> int:
    """For what is only printed: `| head` may have seen enough, and that is no failure."""
    if sys.stdout is None:  # closed, by `>&-`: what writes the help asks whether it is a terminal
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            return answer() or 0
    try:
        try:
            return answer() or 0
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _answer(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] == "--version":
        from esper import __version__

        print(f"esper {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        from esper.errors import did_you_mean

        hint = did_you_mean(name, COMMANDS, f"the commands are {', '.join(COMMANDS)}")
        _say(f"esper: unknown command {name!r}: {hint}")
        return 2
    with ended_by_signals() as ending:
        return ending.code(_run(name, rest))


class UsageError(Exception):
    """The words are no command."""


def _run(name: str, words: list[str]) -> int:
    from esper.cli.options import check_options, no_empty_folders

    try:
        command = _parse(name, words)
        check_options(name, command)
        with no_empty_folders(command):
            return command.run()
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, BrokenPipeError) and _asks_for_help(words):
            raise
        if _is_interrupt(error):
            _say("esper: interrupted")
            return INTERRUPTED
        if isinstance(error, UsageError):
            _say(f"esper {name}: {error}; `esper {name} --help` shows the options")
            return 2
        from esper.errors import RefusedError
        from esper.telemetry.sinks import PackageMissingError

        # Bad input ends with one line that says what, where and what to do. A person who hunts a bug wants more.
        expected = (ValueError, OSError, RuntimeError, MemoryError, PackageMissingError)
        if not isinstance(error, expected) or os.environ.get("ESPER_TRACEBACK"):
            raise
        what = str(error) or type(error).__name__
        _say(f"esper {name}: {'out of memory: ' * isinstance(error, MemoryError)}{what}")
        return 2 if isinstance(error, RefusedError) else 1


LONGEST_LINE = 2_000


def _say(message: str) -> None:
    """One line on the error stream. Names and files may hold anything, also what would command the terminal."""
    line = " ".join(message.split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    with suppress(OSError):  # the reader is gone
        print(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} …", file=sys.stderr)


def _is_interrupt(error: BaseException) -> bool:
    """Ctrl-C while modules are imported may arrive as the cause of another error: Python 3.11 wraps it so where a class
    is being made. The context of an error is not looked at: what fails after a Ctrl-C is news of its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__
    return cause is not None


def _parse(name: str, words: list[str]) -> Command:
    import tyro

    from esper.cli.options import optional_values
    from esper.config import read_table, required, settings_from

    kind: Any = importlib.import_module(f"esper.cli.{name.replace('-', '_')}").COMMAND
    file, words = _take(words, "--config")
    data, words = _in_full({} if file is None else read_table(Path(file)), words, getattr(kind, "SHORT", {}))
    for option in getattr(kind, "SHELL_ONLY", ()):
        if isinstance(data, dict) and option in data:
            raise ValueError(
                f"{file}: {option} names code that is run: give it as --{option}, not in a file of settings"
            )
    given = {option: _take(words, f"--{option}")[0] or _text(data, option) for option in ("preset", "resume")}
    default = kind.base(**given) if getattr(kind, "base", None) else kind(**dict.fromkeys(required(kind), tyro.MISSING))
    default = settings_from(data, kind, str(file), default=default)
    with redirect_stderr(io.StringIO()) as said:
        try:
            values = (tyro.conf.EnumChoicesFromValues,)
            with optional_values():
                command: Command = tyro.cli(kind, prog=f"esper {name}", args=words, default=default, config=values)
            return command
        except SystemExit as stopped:
            if not stopped.code:  # --help
                raise
    raise UsageError(_unboxed(said.getvalue()))


def _take(words: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of an option that decides the defaults of the others, and the other words."""
    for i, word in enumerate(words):
        if word == option and i + 1 < len(words):
            return words[i + 1], words[:i] + words[i + 2 :]
        if word.startswith(f"{option}="):
            return word.partition("=")[2], words[:i] + words[i + 1 :]
    return None, words


def _text(data: object, name: str) -> str | None:
    value = data.get(name) if isinstance(data, dict) else None
    return value if isinstance(value, str) else None


def _in_full(data: Any, words: list[str], short: Mapping[str, str]) -> tuple[Any, list[str]]:
    """Data and words with the full names of settings that have short ones, such as --reward for --reward.mode."""
    options = {f"--{name.replace('_', '-')}": f"--{full.replace('_', '-')}" for name, full in short.items()}
    split = [word.partition("=") for word in words]
    words = [options.get(word.replace("_", "-"), word) + sign + value for word, sign, value in split]
    for name, full in short.items() if isinstance(data, dict) else ():
        table, _, inner = full.partition(".")
        found = next((key for key in data if key.replace("-", "_") == name), None)
        if found is not None and not isinstance(data[found], dict):
            value = data.pop(found)
            data[table] = {**data[table], inner: value} if isinstance(data.get(table), dict) else {inner: value}
    return data, words


def _unboxed(box: str) -> str:
    """What tyro said in a box (drawn, or in plain characters): what is below its title, up to the first rule; and the
    first option that it proposes."""
    parts = [""]
    for line in (line.strip("│| ") for line in box.strip().splitlines()[1:]):
        is_rule = line and not line.strip("─-╰╯")
        parts += [""] if is_rule else []
        parts[-1] += "" if is_rule else f" {line}"
    first = next((part for part in parts if part.strip()), "the words are no command")
    meant = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", " ".join(parts))
    hint = f"; did you mean {meant[1]}?" if meant else ""
    said = " ".join(first.partition("Got errors:")[0].split())
    said = re.sub(r"^Missing from [^:]*:", "missing:", said).replace(". (required)", ";")
    return said.rstrip(".;")[:300] + hint


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: esper COMMAND [options]",
            "",
            "Neural networks that grow while they train.",
            "",
            *lines,
            "",
            "esper COMMAND --help shows a command's options; --config FILE (TOML or JSON) sets their defaults.",
            "Exit codes: 0 done, 1 failed, 2 not a command, 130 interrupted (143 by SIGTERM, 129 by SIGHUP).",
            "esper --version shows the version.",
        ]
    )
