"""What a command reads and writes, checked before it begins; a command that is refused leaves nothing behind.

Here: numbers in range, text that is text, inputs that are files or folders, outputs that can be written and hold no
earlier results. What only a command can find out, it finds out itself.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from itertools import count
from operator import or_
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from esper.config import (
    ABOVE_0,
    COUNTS,
    SHARE,
    WITHIN_0_AND_1,
    Count,
    EngineName,
    EngineOption,
    Range,
    check_number,
    special_kind,
)

if TYPE_CHECKING:
    import torch

    from esper.tasks.family import Family

_Config = TypeVar("_Config")

MOST_WEIGHT = 1e6
"""Of a term in a loss: far above any use, and its products are finite."""
WEIGHT = Range(f"a number from 0 to {MOST_WEIGHT:,.0f}", lambda x: 0 <= x <= MOST_WEIGHT)
POSITIVE = Range(f"{ABOVE_0.words} and at most {MOST_WEIGHT:,.0f}", lambda x: 0 < x <= MOST_WEIGHT)

RANGES: dict[str, Count | Range] = {
    **COUNTS,
    "batch_episodes": Count(1, 1_000_000),
    "batch_size": Count(1, 1_000_000_000),
    "budget_steps": Count(1, 100_000_000),
    "draw": Count(0, 10**15),
    "epochs": Count(1, 1_000_000),
    "episodes": Count(1, 1_000_000),
    "max_seeds": Count(0, 1_000_000),
    "param_budget": Count(1, 10**15),
    "patience": Count(1, 1_000_000),
    "port": Count(1, 65_535),
    "workers": Count(1, 1_024),
    "balance": SHARE,
    "conservative": WEIGHT,
    "discount": SHARE,
    "expectile": WITHIN_0_AND_1,
    "exploding_gradient": POSITIVE,
    "floor": SHARE,
    "learning_rate": POSITIVE,
    "noise": SHARE,
    "rent": WEIGHT,
    "temperature": POSITIVE,
    "vanishing_gradient": WEIGHT,
}
"""By option, whatever the command. A test fails for a number that has no range."""

FILES = ("text_file", "path")
OUTPUTS = ("out", "run_dir", "profile", "json", "checkpoint")
"""Where results go."""
FOLDERS = ("data_dir", "resume", "recording", "checkpoint")
EITHER = ("folder", "controller", "init")
READ_IN_FOLDERS = ("config.json", "run.sqlite", "checkpoints/*.safetensors", "episodes-*.safetensors")
"""Of a run or a recording."""


class ConfigOptions:
    """Options of a command that are the fields of a configuration, which its class inherits.

    The configuration's own checks wait until it is made: before, options are checked under their own names, and a
    --config file and the words may only together be right.
    """

    def __post_init__(self) -> None:
        """Not the configuration's."""

    def config_as(self, kind: type[_Config]) -> _Config:
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(cast(Any, kind))})


def check_options(name: str, command: object) -> None:
    """Refuse, in one line, what the command `name` could not work with."""
    fields = dataclasses.fields(cast(Any, command))
    given = {field.name: value for field in fields if (value := getattr(command, field.name)) is not None}
    for option, value in given.items():
        if isinstance(value, str | Path):
            _check_text(option_name(option), str(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            check_number(option_name(option), value, RANGES[option])
    for option, path in _inputs(name, given):
        check_input(option, path)
    for option in OUTPUTS:
        if isinstance(value := given.get(option), str | Path):
            _check_output(option, Path(value))


def option_name(field: str) -> str:
    """A field as the help shows it: an option by its name, or a word that has its place."""
    shown_as = {"run_dir": "--run", "path": "PATH", "recording": "PATH", "folder": "RUN", "sql": "SQL"}
    return shown_as.get(field, f"--{field.replace('_', '-')}")


def by_default(words: str) -> object:
    """Of an option whose default is found out later: what the help says about it."""
    return tyro.conf.arg(help_behavior_hint=f"(default: {words})")


def optional_values() -> ConstructorRegistry:
    """How tyro shows and reads options of type `X | None`: as X, with "none" where nothing is set.

    The word None is taken, too: some settings have a value by default, and None turns them off.
    """
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if NoneType not in get_args(info.type):
            return None
        kind = reduce(or_, (part for part in get_args(info.type) if part is not NoneType))
        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
        if not isinstance(spec, PrimitiveConstructorSpec):  # a table of settings
            return None
        return dataclasses.replace(
            spec,
            instance_from_str=lambda words: None if words == ["None"] else spec.instance_from_str(words),
            is_instance=lambda value: value is None or spec.is_instance(value),
            str_from_instance=lambda value: ["none"] if value is None else spec.str_from_instance(value),
            choices=None,
        )

    return registry


def _check_text(option: str, text: str) -> None:
    if "\0" in text:
        raise ValueError(f"{option} has a NUL character, which no name has")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{option} is not UTF-8 text: {text!a}") from error


def pick_workers(wanted: int | None, device: str) -> int:
    return wanted or ((os.cpu_count() or 1) if device == "cpu" else 1)


def pick_engine(
    wanted: EngineOption,
    family: Family,
    device: torch.device,
    draws: Sequence[int],
    workers: int | None,
    *,
    here: bool,
) -> tuple[EngineName, list[str]]:
    """What trains the networks of these draws, and lines that say so. What cannot be had is refused. Where they are not
    trained `here`, nothing is said about memory."""
    from esper.training.engines import check_memory, choose_engine
    from esper.training.evaluation import batch_size

    engine = choose_engine(wanted, family, device, first=draws[0])
    if engine.name != "stacked" or not here:
        return engine.name, [str(engine)]
    batch = batch_size(engine.name, len(draws), device)
    together = min(batch, len(draws)) * (pick_workers(workers, "cpu") if device.type == "cpu" else 1)
    return engine.name, [str(engine), check_memory(family, together, device, first=draws[0])]


# -- inputs -----------------------------------------------------------------------------------------------------------


def _inputs(name: str, given: dict[str, object]) -> Iterator[tuple[str, Path]]:
    """Option → path that the command reads, if it is there."""
    for option in (*FILES, *FOLDERS, *EITHER):
        if option in given:
            yield option, Path(str(given[option]))
    for word in str(given.get("controllers", "")).split(","):
        yield "controllers", Path(word.strip())
        yield "controllers", Path(word.partition("=")[2].strip() or "none")
    if name == "record" and "out" in given:  # a recording that is there is read before it is added to
        yield "out", Path(str(given["out"]))


def check_input(option: str, path: Path) -> None:
    kind = special_kind(path)
    if kind is not None:
        raise ValueError(f"{option_name(option)} cannot be read: {path} is {kind}")
    if option in FILES and path.is_dir():
        raise ValueError(f"{option_name(option)} must be a file, and {path} is a directory")
    if option in FOLDERS and path.is_file():
        raise ValueError(f"{option_name(option)} must be a folder, and {path} is not a directory")
    if option not in ("data_dir", *FILES) and path.is_dir():
        for file in (found for pattern in READ_IN_FOLDERS for found in path.glob(pattern)):
            if (kind := special_kind(file)) is not None:
                raise ValueError(f"{option_name(option)} cannot be read: {file} is {kind}")


# -- outputs ----------------------------------------------------------------------------------------------------------


def _check_output(option: str, path: Path) -> None:
    """Only JSON is written into what is there already: a pipe, or the terminal."""
    kind = special_kind(path)
    if kind is None or (option == "json" and kind == "a device"):
        return
    if option != "json":
        raise ValueError(f"{option_name(option)} cannot be written: {path} is {kind}")
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # without O_NONBLOCK it would wait for a reader
    except OSError as error:
        raise ValueError(f"{option_name(option)} cannot be written: {path} is {kind} that nobody reads") from error


def file_name(task: str) -> str:
    """Of what is kept about a task: `mixed/vector` is one name, not a folder in a folder."""
    return task.replace("/", "-")


@contextmanager
def results_folder(chosen: Path | None, usual: Path) -> Iterator[Path]:
    """The folder that was chosen, or a new one like the usual, which goes again if there is nothing to keep."""
    if chosen is not None:
        claim(chosen)
        yield chosen
        return
    out = new_folder(usual.parent, usual.name)
    try:
        yield out
    finally:
        with suppress(OSError):  # only an empty folder can be removed
            out.rmdir()


def refuse_if_it_holds(folder: Path | None, files: Sequence[str], what: str) -> None:
    """What was written there before would be lost."""
    if folder is not None and any((folder / name).exists() for name in files):
        raise ValueError(f"{folder} holds {what} already: choose another folder with --out")


def new_folder(parent: Path, name: str) -> Path:
    """The first of NAME, NAME-2, … that does not exist, made at once: another command may be looking for one, too."""
    with _writing(f"to {parent}", "folder with --out"):
        parent.mkdir(parents=True, exist_ok=True)
        for i in count(1):
            out = parent / (f"{name}-{i}" if i > 1 else name)
            with suppress(FileExistsError):
                out.mkdir()
                break
    return out


def claim(out: Path) -> None:
    """Find out whether results can be kept in this folder."""
    with _writing(f"to {out}", "folder with --out"):
        out.mkdir(parents=True, exist_ok=True)
        _try_folder(out)


def claim_file(path: Path, option: str, *, new: bool = False) -> None:
    """Find out whether the file can be written; where it must be `new`, nothing may be there."""
    if new and (path.is_file() or path.is_symlink()):
        raise ValueError(f"{path} exists already: choose another file with {option}")
    with _writing(str(path), f"file with {option}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if not path.exists():
            _try_folder(path.parent)
        elif not os.access(path, os.W_OK):  # not opened: a pipe would wait for its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _writing(where: str, other: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"cannot write {where} ({error.strerror}): choose another {other}") from error


def _try_folder(folder: Path) -> None:
    """By a file without a name, where the system has such, else with one that nothing had: no link can be laid."""
    tempfile.TemporaryFile(dir=folder).close()


# -- after a refusal ---------------------------------------------------------------------------------------------------

USUAL_FOLDERS = (Path("grown"), Path("compared"), Path("runs"))
"""Where results go if no option says."""
RUN_FILES = ("config.json", "run.sqlite", "run.sqlite-wal", "run.sqlite-shm", "checkpoints/start.safetensors", ".lock")
"""What a run's folder has before its first update."""


@contextmanager
def no_empty_folders(command: object) -> Iterator[None]:
    """If the command fails, the folders that it made and that hold nothing are removed."""
    named = [getattr(command, name, None) for name in OUTPUTS]
    paths = [Path(value) for value in named if isinstance(value, str | Path)]
    with no_empty_folder(*paths, *(path.with_suffix("") for path in paths if path.name), *USUAL_FOLDERS):
        yield


@contextmanager
def no_empty_folder(*paths: Path) -> Iterator[None]:
    """The same for these folders, and those that they are in."""
    missing = [folder for path in paths for folder in (path, *path.parents) if not os.path.exists(folder)]
    try:
        yield
    except BaseException:
        for folder in sorted(missing, key=lambda folder: -len(folder.parts)):
            with suppress(OSError, ValueError):  # it is no folder, or not empty, or was not made
                folder.rmdir()
        raise


def discard_run(folder: Path, *, had_tensorboard: bool) -> None:
    """What a new run wrote before its first step."""
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)
    if not had_tensorboard:
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
