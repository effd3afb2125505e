"""`esper report`: one HTML file of a run, a grown network or a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from esper.cli.options import by_default
from esper.cli.terminal import wide_console

NAME = "report.html"


@dataclass(frozen=True)
class ReportCommand:
    """Write one HTML file that can be mailed: no scripts, nothing from elsewhere. Needs no other package."""

    folder: Annotated[Positional[Path], arg(metavar="RUN|GROWN|COMPARISON")]
    """Folder of a run, of a grown network or of a comparison, or a comparison.json."""
    out: Annotated[Path | None, by_default("report.html in the folder")] = None
    """The file; one that is there is replaced."""

    def run(self) -> int:
        from esper.dashboard.report import report
        from esper.files import write_whole

        where = self.folder if self.folder.is_dir() else self.folder.parent
        out = self.out or where / NAME
        if out.is_dir():
            raise ValueError(f"{out} is a folder: name a file with --out")
        write_whole(out, report(self.folder))
        wide_console().print(f"Written: {out}", soft_wrap=True, highlight=False)
        return 0


COMMAND = ReportCommand
