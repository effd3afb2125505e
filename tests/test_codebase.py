"""Habits of the whole code base that reviews asked for, checked on its syntax trees.

Covers: R017, R053, R064, R070, R082, R093, R094, R102
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper

ROOT = Path(esper.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
OUTSIDE_CLI = [path for path in MODULES if path.parent.name != "cli"]


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            yield node


def is_triton_program(function: ast.FunctionDef) -> bool:
    """Its arguments are pointers and numbers of a GPU, for which Python has no types."""
    return any(ast.unparse(one).startswith("triton.jit") for one in function.decorator_list)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_annotated_and_modules_say_what_they_are_for(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    if tree.body:
        assert ast.get_docstring(tree), "the first lines of a module say what it is for"
    for function in functions(path):
        if is_triton_program(function):
            continue
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for argument in arguments:
            assert argument.annotation is not None or argument.arg in ("self", "cls"), (
                f"{function.name}: {argument.arg}"
            )


@pytest.mark.parametrize("path", OUTSIDE_CLI, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_inside_functions_are_rare_and_explained(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    for function in functions(path):
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "noqa: PLC0415" in lines[node.lineno - 1], f"{function.name}, line {node.lineno}"


def test_nothing_is_asked_whether_it_has_an_attribute() -> None:
    """`hasattr` hides a missing contract; where a user's object is met, `getattr` says what is assumed."""
    calls = [
        (path.name, node.lineno)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
    ]
    assert calls == []


def test_no_file_is_too_long_to_read() -> None:
    too_long = {path.name: count for path in MODULES if (count := len(path.read_text("utf-8").splitlines())) > 420}
    assert too_long == {}


def test_a_shell_completes_the_public_names_alone() -> None:
    assert set(dir(esper)) == {*esper.__all__, "__version__"}
