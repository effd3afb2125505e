"""Write a grown model as one Python file that needs torch and safetensors, and not Esper.

The file is made of the sources of the classes that the model uses, and of what these name: base classes, helper classes
and functions, plain constants, imports from torch and from the standard library. Whatever else a source needs cannot
travel; then there is no file, and `NotPortableError` says which name it was.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import symtable
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import nn

from esper.growth.blueprints import ChannelsLast, Gated
from esper.growth.graft import Grafted, fill, graft

# Names that the file has anyway, and what they are there.
_IN_TEMPLATE = {
    "torch": torch,
    "nn": nn,
    "Any": Any,
    "Path": Path,
    "load_file": load_file,
    "build": object(),  # equal to no other value
    "load": object(),
}

_HOSTS: dict[str, type[nn.Module]] = {}
_Host = TypeVar("_Host", bound=type[nn.Module])


class NotPortableError(ValueError):
    """A source that needs more than torch, with the reason."""


def portable_host(host: _Host) -> _Host:
    """Let models with this host be saved with their source and rebuilt from plain data; usable as a decorator.

    Instances must keep their constructor's keyword arguments, plain JSON data, in `config`.
    """
    if _HOSTS.setdefault(host.__name__, host) is not host:
        raise ValueError(f"a host called {host.__name__} is registered already, in {_HOSTS[host.__name__].__module__}")
    return host


def find_host(name: str) -> type[nn.Module] | None:
    return _HOSTS.get(name)


@dataclass(frozen=True, slots=True)
class Graft:
    """One seed of a saved model: what rebuilds it, as plain data."""

    path: str
    """The module of the host at whose output it grew."""
    blueprint: str
    layout: str
    class_name: str
    arguments: dict[str, Any]
    blend: str
    alpha: float
    stage: str
    """Of its life, when the model was exported."""
    parameters: int
    visibility: str = "both"
    channels_last: bool = False


def model_source(host: nn.Module, grafts: Sequence[tuple[Graft, nn.Module]], tied: dict[str, str]) -> str:
    """The text of `model.py`: `build()`, `load()`, and all that they need."""
    collected = _Sources()
    for module in (host, *(module for _, seed in grafts for module in _nested(seed))):
        collected.add(type(module))
    for part in (Grafted, graft, fill):
        collected.add(part)
    lines = [
        f"        ({_literal(g.path, 'a path')}, {_constructor(g, seed)}, {_literal(g.alpha, 'an alpha')}, {{}}),"
        for g, seed in grafts
    ]
    places = "\n".join(["[", *lines, "    ]"]) if lines else "[]"
    source = _TEMPLATE.format(
        host=type(host).__name__,
        grown=f" with {len(grafts)} grown part{'s' * (len(grafts) != 1)}" if grafts else "",
        imports="\n".join(sorted(collected.imports, key=lambda line: (line.startswith("from"), line))),
        constants="".join(f"\n{constant}" for constant in collected.constants),
        classes="\n\n\n".join(collected.texts),
        config=_literal(getattr(host, "config", None), "the host's config"),
        places=places,
        tied=_literal(tied, "the names of tied weights"),
    )
    compile(source, "model.py", "exec")
    return source


def _nested(seed: nn.Module) -> list[nn.Module]:
    """A seed's module, and those inside of what `enclosed` put around it."""
    found = [seed]
    while isinstance(found[-1], Gated | ChannelsLast):
        found.append(found[-1].body)
    return found


def _constructor(record: Graft, seed: nn.Module) -> str:
    """How the source builds a seed, in names of its class: a record may come from a file of unknown origin."""
    kind = type(_nested(seed)[-1])
    if unknown := [key for key in record.arguments if key not in inspect.signature(kind).parameters]:
        raise NotPortableError(f"{kind.__name__} has no argument {unknown[0]!r:.60}")
    arguments = ", ".join(f"{key}={_literal(value, record.blueprint)}" for key, value in record.arguments.items())
    text = f"{kind.__name__}({arguments})"
    layout = _literal(record.layout, "a layout")
    if record.blend == "gated":
        channels, causal = _literal(record.arguments["channels"], record.blueprint), record.visibility != "both"
        text = f"{Gated.__name__}({text}, {channels}, {layout}, {causal})"
    return f"{ChannelsLast.__name__}({text})" if record.channels_last else text


def _literal(value: Any, owner: str) -> str:
    text = repr(value)
    try:
        same = ast.literal_eval(text) == value
    except (ValueError, SyntaxError):
        same = False
    if not same:
        raise NotPortableError(f"{owner} is not plain data: {textwrap.shorten(text, 60)}")
    return text


@dataclass(slots=True)
class _Sources:
    """Definitions in an order in which Python can run them, each after what it uses."""

    texts: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    _taken: dict[str, Any] = field(default_factory=lambda: dict(_IN_TEMPLATE))

    def add(self, part: type | Callable[..., Any]) -> None:
        if not self._is_new(part.__name__, part, f"{part.__module__}.{part.__qualname__}"):
            return
        text, bare = _definition(part)
        scope = vars(sys.modules[part.__module__])
        for name in sorted(_free_names(bare)):
            if name == part.__name__:
                continue
            if name in scope:
                self._need(name, scope[name], part)
            elif name not in vars(builtins):
                raise NotPortableError(f"{part.__qualname__} uses {name!r}, which is no name of its file")
        self.texts.append(text)

    def _need(self, name: str, value: Any, user: Any) -> None:
        """Bring along what the source of `user` calls `name`."""
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
        if module.partition(".")[0] in {"torch", *sys.stdlib_module_names}:
            if self._is_new(name, value, name):
                self.imports.add(_import(name, value, module))
        elif isinstance(value, type | FunctionType) and value.__name__ == name:
            self.add(value)
        elif value is None or isinstance(value, int | float | str | tuple | list | dict | set):
            if self._is_new(name, value, name):
                self.constants.append(f"{name} = {_literal(value, f'{name!r}, which {user.__qualname__} uses,')}")
        else:
            raise NotPortableError(f"{user.__qualname__} uses {name!r}, which is neither torch's nor a plain class")

    def _is_new(self, name: str, value: Any, shown: str) -> bool:
        if name not in self._taken:
            self._taken[name] = value
            return True
        if self._taken[name] is not value:
            raise NotPortableError(f"two different things that the model uses are called {name!r} ({shown} is one)")
        return False


def _definition(part: type | Callable[..., Any]) -> tuple[str, ast.stmt]:
    """The source without what registers it, and its syntax tree without annotations, which are not evaluated there."""
    try:
        text = textwrap.dedent(inspect.getsource(part))
        node = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise NotPortableError(f"the source of {part.__qualname__} cannot be read: {error}") from error
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    for decorator in node.decorator_list:
        called = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if called.rpartition(".")[2] not in ("blueprint", portable_host.__name__):
            raise NotPortableError(f"{part.__qualname__} is decorated with {called}, which would have to travel, too")
    node.decorator_list = []
    return "\n".join(text.rstrip().split("\n")[node.lineno - 1 :]), _WithoutAnnotations().visit(node)


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Pass() if node.value is None else ast.Assign([node.target], node.value, lineno=node.lineno)


def _free_names(definition: ast.stmt) -> set[str]:
    """The names that a definition takes from its file or from Python."""
    tables = [symtable.symtable(ast.unparse(definition), "source", "exec")]
    names: set[str] = set()
    for table in tables:  # grows while it is walked
        tables.extend(table.get_children())
        at_top = table.get_type() == "module"
        names.update(s.get_name() for s in table.get_symbols() if s.is_referenced() and (at_top or s.is_global()))
    return names


def _import(name: str, value: Any, module: str) -> str:
    if isinstance(value, ModuleType):
        return f"import {module}" if module == name else f"import {module} as {name}"
    own = getattr(value, "__name__", name)
    for origin in ("torch", module):  # torch's own name where there is one: its inner modules move
        if getattr(sys.modules.get(origin), own, None) is value:
            return f"from {origin} import {own}" + (f" as {name}" if own != name else "")
    raise NotPortableError(f"{name!r} is no public name of {module}")


_TEMPLATE = '''"""A {host}{grown}, written by Esper. Needs torch and safetensors, not Esper.

    from model import load
    model = load()  # ready to evaluate; model.train() to train on
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
{imports}
{constants}

{classes}


def build() -> nn.Module:
    """The network with fresh weights."""
    model = {host}(**{config})
    graft(model, {places})
    return model.eval()


def load(directory: str | Path = Path(__file__).parent) -> nn.Module:
    """The network with the weights of `model.safetensors`, in evaluation mode."""
    model = build()
    fill(model, load_file(Path(directory) / "model.safetensors"), {tied})
    return model


if __name__ == "__main__":
    print(f"{{sum(p.numel() for p in load().parameters()):,}} parameters")
'''
