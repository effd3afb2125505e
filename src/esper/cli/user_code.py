"""Functions in a person's own file, named on the shell as FILE.py:FUNCTION; what goes wrong in it is one line.

The file runs with all rights of the person who named it, as `python FILE.py` would.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import esper
from esper.config import special_kind
from esper.errors import did_you_mean, first_line, refused

PACKAGE = Path(esper.__file__).parent
_LOADED: dict[Path, ModuleType] = {}
"""A file that is named twice is run once, so that its classes are the same."""
_FOLDERS: list[Path] = []
"""Of these files."""


def user_function(option: str, named: str) -> Callable[[], Any]:
    """The function that `option` names."""
    file, _, name = named.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{option} must be FILE.py:FUNCTION, such as my.py:make_{option.strip('-')}, not {named!r}")
    path = Path(file)
    if (kind := special_kind(path)) is not None or path.is_dir():
        raise ValueError(f"{option} cannot be read: {file} is {kind or 'a folder'}")
    if not path.exists():
        raise ValueError(f"{option} cannot be read: there is no file {file}")
    with user_errors(f"{option} {file}"):
        module = _loaded(path.resolve())
    found = getattr(module, name, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value)]
        what = f"{file} has no function {name!r}" if found is None else f"{name!r} of {file} is no function"
        raise ValueError(f"{option}: {what}: {did_you_mean(name, functions, 'define it, without arguments')}")
    with refused(ValueError, f"{option}: {name!r} of {file} must work without arguments", TypeError):
        inspect.signature(found).bind()

    def call() -> Any:
        with user_errors(f"{option} {named}"):
            return found()

    return call


def _loaded(path: Path) -> ModuleType:
    if path not in _LOADED:
        # Under its own name beside its neighbours, as an import would have it: processes that load data import it so.
        name = path.stem if path.stem not in sys.modules else f"esper_user_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        _FOLDERS.append(path.parent)
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        _LOADED[path] = module
    return _LOADED[path]


@contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Within, an error of the user's code becomes one line that names its place there; those of Esper pass."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if (where := _place(error)) is None:
            raise
        detail = first_line(error)
        kind = type(error).__name__
        raise ValueError(f"{what} failed at {where}: {kind if detail == kind else f'{kind}: {detail}'}") from error


def _place(error: BaseException) -> str | None:
    """FILE:LINE of the user's code that raised it; None where Esper itself did."""
    if isinstance(error, SyntaxError) and error.filename:
        return _shown(error.filename, error.lineno)
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    for file, line in reversed(frames):
        if file.is_relative_to(PACKAGE):
            return None
        if _is_of_user(file):
            return _shown(str(file), line)
    return None


def _is_of_user(file: Path) -> bool:
    """The named files and their neighbours; not the packages of an environment that lies beside them."""
    beside = any(file.is_relative_to(folder) for folder in _FOLDERS)
    return beside and not any(file.is_relative_to(place) for place in (sys.prefix, sys.base_prefix))


def _shown(file: str, line: int | None) -> str:
    here = Path.cwd()
    return f"{Path(file).relative_to(here) if Path(file).is_relative_to(here) else file}:{line}"
