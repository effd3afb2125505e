"""`esper completion`: a script that lets a shell complete commands and options."""

from __future__ import annotations

import importlib
import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro


@dataclass(frozen=True)
class Completion:
    """Print a completion script of all commands and options; source it from the start-up file of the shell."""

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """The shell that will read the script."""

    def run(self) -> int:
        print(script(self.shell))
        return 0


def script(shell: str) -> str:
    """The commands as subcommands of one program, which is the form that tyro writes completions for."""
    from esper.cli import COMMANDS
    from esper.cli.options import optional_values

    kinds: dict[str, Any] = {
        name: importlib.import_module(f"esper.cli.{name.replace('-', '_')}").COMMAND for name in COMMANDS
    }
    words = ["--tyro-print-completion", shell]
    values = (tyro.conf.EnumChoicesFromValues,)
    with redirect_stdout(io.StringIO()) as said, optional_values():
        try:
            tyro.extras.subcommand_cli_from_dict(kinds, prog="esper", args=words, config=values)
        except SystemExit as stopped:
            if stopped.code:
                raise RuntimeError(f"no completion script could be made for {shell}") from stopped
    return said.getvalue().rstrip()


COMMAND = Completion
