"""The notebook of the examples runs in a kernel: a bar that moves, tables and a picture, and nothing that warns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "own_model.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_short_and_has_no_outputs_of_ours() -> None:
    assert sum(len(cell.splitlines()) for cell in code_cells()) < 80
    assert not any(cell.get("outputs") for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"])


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install nbclient ipykernel")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'esper[plot]'")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # of a plot that was drawn before; a kernel brings its own
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(output.get("name") == "stderr" for cell in outputs for output in cell)
    slots, growing, grown, picture, number = outputs[1:]
    assert "What a seed adds" in slots[0].data["text/html"]
    assert [output.output_type for output in growing] == ["display_data"]
    assert "<progress value='30' max='30'>" in growing[0].data["text/html"]
    assert "same host, not grown" in grown[0].data["text/html"]
    assert "image/png" in picture[0].data
    assert len(picture) == 1  # the value of the cell, not once more by pyplot
    assert "% of the test data" in number[0].text
