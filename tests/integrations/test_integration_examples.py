"""The examples and the pages of the integrations run as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from esper.growth.plain import grafted

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "library", "least"),
    [("lightning_callback", "lightning", 90.0), ("huggingface_trainer", "transformers", 55.0)],
)
def test_an_example_grows_and_reloads(
    name: str, library: str, least: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 80
    grown = runpy.run_path(str(path))["main"](str(tmp_path / "run"))
    assert len(grafted(grown.model)) > 0
    assert grown.validation.accuracy > least
    shown = capsys.readouterr().out
    if name == "lightning_callback":
        assert float(re.findall(r"reloaded: ([\d.]+)%", shown)[0]) == pytest.approx(grown.validation.accuracy, abs=0.06)
    else:
        assert float(re.findall(r"outputs differ by (\S+)", shown)[0]) < 1e-6


@pytest.mark.parametrize("page", ["lightning", "huggingface"])
def test_the_snippet_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip({"huggingface": "transformers"}.get(page, page), reason="the library is not installed")
    monkeypatch.chdir(tmp_path)
    snippet, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(snippet, names)
    model, again = names["module" if page == "lightning" else "model"], names["again"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(again, torch.nn.Module)
    assert len(grafted(again)) == len(grafted(model)) > 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize(
    ("module", "library", "match"),
    [
        ("lightning", "lightning.pytorch", r"Lightning is not installed: pip install \"esper\[lightning\]\""),
        ("huggingface", "transformers", r"transformers is not installed: pip install \"esper\[huggingface\]\""),
        ("accelerate", "accelerate", r"Accelerate is not installed: pip install \"esper\[huggingface\]\""),
    ],
)
def test_a_library_that_is_not_there_is_named(
    module: str, library: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=match):
        runpy.run_path(str(ROOT / "src" / "esper" / "integrations" / f"{module}.py"))
