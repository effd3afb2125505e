"""`model.pt2`: a model as a program of torch's operators, which runs without the classes it was written in.

torch.export's own loader unpickles whatever an archive contains, evaluates symbolic sizes and guards as Python, looks
up operators by any dotted name, and writes names into Python that it runs: a .pt2 of unknown origin is as dangerous as
a pickle. What is written here needs none of that, so `read_program` refuses an archive that does. It is a second line
of defence, written for one version of torch. The first is that a program is loaded only if its origin is trusted.
"""

from __future__ import annotations

import io
import json
import keyword
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from esper.errors import first_line, refused
from esper.growth.folder import LoadError
from esper.growth.probe import arguments, input_tensors, with_batch


@dataclass(frozen=True, slots=True)
class Program:
    """What torch.export made of a model, or why it could not."""

    exported: ExportedProgram | None
    batch: str
    """Which batch sizes it takes: "any", "only 64", or "none" without a program."""
    problem: str = ""
    """Why it is not "any"; empty when it is."""
    cache: bool = True
    """False: it was traced with use_cache=False, because torch.export cannot return a key-value cache."""

    def content(self) -> bytes:
        """The file; empty without a program."""
        if self.exported is None:
            return b""
        self.exported.example_inputs = None  # they would be the only pickle in the file
        _drop_sources(self.exported.graph_module)
        buffer = io.BytesIO()
        torch.export.save(self.exported, buffer)
        return buffer.getvalue()


def packed(program: Program) -> tuple[Program, bytes]:
    """The file; and the program, or why there is none: torch can make some that it cannot write (sparse constants)."""
    try:
        return program, program.content()
    except Exception as error:  # torch.export fails in many ways of its own
        return Program(None, "none", f"torch.export said: {first_line(error)}"), b""


def _drop_sources(graph: nn.Module) -> None:
    """Nodes hold files, lines and classes of the machine that they were made on: a saved program leaves them out."""
    for part in graph.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                for key in _SOURCES:
                    node.meta.pop(key, None)


_SOURCES = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node", "custom")


def trace(model: nn.Module, example: Any) -> Program:
    """The model's program for every batch size where that can be, else for the example's, else none.

    Symbols (integer inputs) are text or the like: their length stays free, too, where the model lets it.
    """
    if cached := [config for config in _configs(model) if getattr(config, "use_cache", None) is True]:
        for config in cached:
            config.use_cache = False
        try:
            return replace(trace(model, example), cache=False)
        finally:
            for config in cached:
                config.use_cache = True
    inputs = input_tensors(example)
    batch = inputs[0].shape[0]
    symbols = any(not value.is_floating_point() and value.dim() > 1 for value in inputs)
    problem = ""
    for free_length in (True, False) if symbols else (False,):
        try:
            return Program(_export(model, with_batch(example, 2), _free_axes(example, batch, free_length)), "any")
        except Exception as error:  # torch.export fails in many ways of its own
            problem = f"takes batches of {batch} only, because torch.export said: {first_line(error)}"
    try:
        return Program(_export(model, example, None), f"only {batch}", problem)
    except Exception as error:
        return Program(None, "none", f"torch.export said: {first_line(error)}")


def _configs(model: nn.Module) -> list[Any]:
    """The settings that Hugging Face's models and their parts share, each object once."""
    found = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    return list({id(config): config for config in found}.values())


def _export(model: nn.Module, example: Any, free_axes: Any) -> ExportedProgram:
    args, kwargs = arguments(example)
    with warnings.catch_warnings(), _without_logging(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")  # what goes wrong is an exception, and said in a line of its own
        return torch.export.export(model, args, kwargs, dynamic_shapes=free_axes)


@contextmanager
def _without_logging() -> Iterator[None]:
    """torch.export logs and prints whole graphs when a way of tracing fails, and the next one is tried."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _free_axes(example: Any, batch: int, free_length: bool) -> Any:
    def axes(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != batch:
            return None
        length = {1: Dim.AUTO} if free_length and not value.is_floating_point() and value.dim() > 1 else {}
        return {0: Dim.DYNAMIC, **length}

    args, kwargs = arguments(example)
    return {name: axes(value) for name, value in kwargs.items()} or tuple(axes(value) for value in args)


# -- reading ----------------------------------------------------------------------------------------------------

_RECORDS = re.compile(
    r"archive_format|archive_version|byteorder|\.format_version|\.storage_alignment|\.data/(version|serialization_id)"
    r"|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/weights/(weight_\d+|model_weights_config\.json)|data/constants/(tensor_\d+|model_constants_config\.json)"
)
_OPERATORS = re.compile(
    r"torch\.ops\.aten\.(?!from_file)\w+\.\w+"
    r"|torch\.ops\.higher_order\.wrap_with_(set_grad_enabled|autocast)"
    r"|torch\.sym_\w+|math\.\w+"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)"
)
_SIZES = re.compile(
    r"(?:[\s\d.+\-*/%(),<>=&|~]|'[a-z]+\d+'|\b[a-z]\d+\b"
    r"|\b(?:Symbol|Integer|Float|Rational|Add|Mul|Pow|Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not|Max|Min|Mod|PythonMod|FloorDiv"
    r"|CleanDiv|CeilDiv|CeilToInt|FloorToInt|TruncToInt|RoundToInt|ToFloat|IntTrueDiv|FloatTrueDiv|FloatPow"
    r"|PowByNatural|Where|ModularIndexing|Identity|positive|nonnegative|integer|real|evaluate|True|False)\b)*"
)


def read_program(path: Path) -> nn.Module:
    """The program in `path`, in evaluation mode for good. Refuses what is more than arithmetic on tensors."""
    # Imported here: it takes 1.6 s, and only this function needs it.
    from torch.export.pt2_archive._package import load_pt2  # noqa: PLC0415

    content = path.read_bytes()  # read once: what is checked is what is loaded
    _check(content, path)
    with refused(LoadError, f"{path} cannot be loaded by torch {torch.__version__}", Exception):
        # Not torch.export.load, which falls back to an older format, all pickle, when this one fails.
        return load_pt2(io.BytesIO(content)).exported_programs["model"].module()


_GUARDS = re.compile(
    r"(?:[\s\d.+\-*/%(),<>=!]|\bL(?:\['\w+'\]|\[\d+\])+\.size\(\)\[\d+\]|\b(?:and|or|not|max|min|Max|Min|Mod|Eq|Ne|True|False)\b)*"
)
_NAMES = frozenset(("name", "as_name", "forward_arg_names"))
_TABLES = frozenset(("tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values", "custom_obj_values"))
"""Their keys are names, too."""
_UNUSED = frozenset(_SOURCES)
"""What older files of Esper's say about their origin: kept as text, and never run."""
_TEXTS = {
    "target": _OPERATORS,
    "as_operator": _OPERATORS,
    "expr_str": _SIZES,
    "guards_code": _GUARDS,
    "in_spec": re.compile(r"[\w\s.,:\[\]{}\"\\-]*"),  # JSON about how inputs are nested, by names of types
    "out_spec": re.compile(r"[\w\s.,:\[\]{}\"\\-]*"),
    "as_string": re.compile(r"[\w\s.,:>\-]*"),  # a rounding mode, an equation of einsum
    "as_strings": re.compile(r"[\w\s.,:>\-]*"),
    "torch_version": re.compile(r"[\w.+]*"),
}
_PATH = re.compile(r"[\w.\-: /]*")
"""All others: the path of a parameter, of a module, of a type. Without quotes and brackets it is no code."""


def _check(content: bytes, path: Path) -> None:
    with refused(
        LoadError, f"{path} is not a .pt2 archive, or it is damaged", RuntimeError, ValueError, RecursionError
    ):
        archive = torch._C.PyTorchFileReader(io.BytesIO(content))  # the reader that the loader uses
        names = archive.get_all_records()
        sizes = {name: archive.get_record_size(name) for name in names}
        if (total := sum(sizes.values())) > len(content):  # torch packs without compression
            raise LoadError(f"{path} unpacks to {total:,} bytes, more than the file itself: it was not loaded")
        documents = [json.loads(archive.get_record(name)) for name in names if name.endswith(".json")]
    if strange := [name for name in names if not _RECORDS.fullmatch(name)]:
        raise LoadError(f"{path} holds {strange[0]!r:.60}, which no program of a grown model needs: it was not loaded")
    if sizes.get("data/sample_inputs/model.pt"):
        raise LoadError(f"{path} holds pickled example inputs: it was not written by Esper, and was not loaded")
    for key, value in (pair for document in documents for pair in _pairs(document)):
        if not _is_harmless(key, value):
            raise LoadError(
                f"{path} asks for {key[:60]!r} = {str(value)[:60]!r}, which is more than arithmetic: it was not loaded"
            )


def _is_harmless(key: str, value: Any) -> bool:
    """`key` is where the value stands, or for a key of a table which table it is."""
    if key == "use_pickle":
        return value is False
    if not isinstance(value, str):
        return key not in ("expr_str", "guards_code")  # torch would take them for text all the same
    if "__enum__" in value or ("\\u" in value and key not in _UNUSED):  # imports any module by name
        return False
    if key in _NAMES or key in _TABLES:
        return not value or (value.isidentifier() and not keyword.iskeyword(value))
    return key in _UNUSED or _TEXTS.get(key, _PATH).fullmatch(value) is not None


def _pairs(document: Any) -> Iterator[tuple[str, Any]]:
    """Every value at every depth, with the key that it stands under; and every key, with the key of its table."""
    pending: list[tuple[str, Any]] = [("", document)]
    while pending:
        key, part = pending.pop()
        if isinstance(part, dict):
            yield from ((key if key in _TABLES else "", name) for name in part)
            pending.extend((name, value) for name, value in part.items())
        elif isinstance(part, list):
            pending.extend((key, value) for value in part)
        else:
            yield key, part
