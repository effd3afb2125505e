"""A grown model with other people's tools: every row of the table in docs/plain_models.md, in its order."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from growing import grow
from test_seeds_alone import PLANTINGS, SLOTS, Net, X, host_of
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.growth.export import load, plain_model, save
from esper.growth.graft import SEEDS
from esper.growth.plain import grafted

DOCS = Path(__file__).parents[2] / "docs" / "plain_models.md"
Y = torch.arange(4)


@pytest.fixture
def grown() -> nn.Module:
    torch.manual_seed(0)
    return plain_model(grow(Net(), X, PLANTINGS, slots=SLOTS)).eval()


def same(outputs: Tensor, grown: nn.Module, gap: float = 1e-6) -> None:
    torch.testing.assert_close(outputs, grown(X), rtol=0, atol=gap)


def state_dicts(grown: nn.Module, path: Path) -> None:
    fresh = plain_model(grow(Net(), X, PLANTINGS, slots=SLOTS)).eval()
    fresh.load_state_dict(grown.state_dict())
    same(fresh(X), grown)


def torch_save(grown: nn.Module, path: Path) -> None:
    torch.save(grown, path / "model.pt")
    same(torch.load(path / "model.pt", weights_only=False)(X), grown)


IN_ANOTHER_PROCESS = """
import pickle, sys, torch
sys.path[:0] = sys.argv[2:]
from torch.utils.hooks import RemovableHandle
model, x, y = pickle.load(open(sys.argv[1], "rb"))
taken = [number for module in model.modules() for number in module._forward_hooks]
assert RemovableHandle.next_id > max(taken), "a hook that is registered now may take the place of a seed's"
assert torch.equal(model(x), y)
"""


def pickled(grown: nn.Module, path: Path) -> None:
    same(pickle.loads(pickle.dumps(grown))(X), grown)
    (path / "model.pkl").write_bytes(pickle.dumps((grown, X, grown(X).detach())))
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, str(path / "model.pkl"), *folders],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def deep_copy(grown: nn.Module, path: Path) -> None:
    twin = copy.deepcopy(grown)
    same(twin(X), grown)
    for parameter in twin.parameters():
        parameter.data.zero_()
    assert not torch.equal(twin(X), grown(X))


def attributes(grown: nn.Module, path: Path) -> None:
    for name, module in Net().named_modules():
        assert type(grown.get_submodule(name)) is type(module)
    assert (len(grown.body), len(grown.skip), grown.conv.kernel_size) == (3, 0, (3, 3))
    assert isinstance(grown.body[-1], nn.ReLU)


def part(grown: nn.Module, path: Path) -> None:
    inside = {id(p) for path, seed in grafted(grown) if path == "body" for p in seed.parameters()}
    assert inside <= {id(p) for p in grown.body.parameters()}
    expected = grown.body(X)
    assert torch.equal(copy.deepcopy(grown.body)(X), expected)
    assert not torch.equal(host_of(grown).body(X), expected)


def moved(grown: nn.Module, path: Path) -> None:
    same(copy.deepcopy(grown).double()(X.double()).float(), grown)
    same(copy.deepcopy(grown).bfloat16()(X.bfloat16()).float(), grown, 0.1)
    modes = {module.training for module in grown.train().modules()}
    assert modes == {True}
    assert {module.training for module in grown.eval().modules()} == {False}


def compiled(grown: nn.Module, path: Path) -> None:
    same(torch.compile(grown, backend="aot_eager", fullgraph=True)(X), grown)


def exported(grown: nn.Module, path: Path) -> None:
    for strict in (False, True):
        same(torch.export.export(grown, (X,), strict=strict).module()(X), grown)


def onnx(grown: nn.Module, path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    torch.onnx.export(grown, (X,), dynamo=True, verbose=False).save(str(path / "model.onnx"))
    session = runtime.InferenceSession(str(path / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    same(torch.from_numpy(found), grown, 1e-5)


def fx(grown: nn.Module, path: Path) -> None:
    traced = torch.fx.symbolic_trace(grown)
    same(traced(X), grown)
    assert any(SEEDS in str(node.target) for node in traced.graph.nodes)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    growing = grow(nn.Sequential(encoder), torch.randn(2, 5, 8), [(0, "attention", "linear", "HOLDING")], ["0"])
    with pytest.raises(RuntimeError, match=r"cannot trace a seed that reads masks: use torch\.export"):
        grafted(plain_model(growing))[0][1].traced(None, None)


def jit_trace(grown: nn.Module, path: Path) -> None:
    same(torch.jit.trace(grown, X)(X), grown)


def jit_script(grown: nn.Module, path: Path) -> None:
    with pytest.raises(RuntimeError):
        torch.jit.script(grown)


def functional(grown: nn.Module, path: Path) -> None:
    tensors = dict(grown.named_parameters()) | dict(grown.named_buffers())
    same(torch.func.functional_call(grown, tensors, (X,)), grown)
    zeros = {name: torch.zeros_like(p) for name, p in grown.named_parameters() if SEEDS in name}
    assert not torch.equal(torch.func.functional_call(grown, zeros, (X,)), grown(X))
    same(torch.func.vmap(lambda one: grown(one.unsqueeze(0)).squeeze(0))(X), grown)


def averaged(grown: nn.Module, path: Path) -> None:
    average = AveragedModel(grown, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.update_parameters(grown)
    first = {name: p.detach().clone() for name, p in grown.named_parameters()}
    for parameter in grown.parameters():
        parameter.data += 1.0
    average.update_parameters(grown)
    for name, parameter in average.module.named_parameters():  # half of what was, half of what is
        torch.testing.assert_close(parameter, first[name] + 0.5)
    again = plain_model(grow(Net(), X, PLANTINGS, slots=SLOTS)).eval()
    again.load_state_dict(average.module.state_dict())
    same(again(X), average.module)


def distributed(grown: nn.Module, path: Path) -> None:
    store = torch.distributed.FileStore(str(path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(grown)
        same(wrapped(X), grown)
        nn.functional.cross_entropy(wrapped.train()(X), Y).backward()
        assert all(p.grad is not None for p in grown.parameters())
    finally:
        torch.distributed.destroy_process_group()
        grown.eval()


def data_parallel(grown: nn.Module, path: Path) -> None:
    grown.conv._is_replica = True  # what torch writes on a copy for another GPU
    with pytest.raises(RuntimeError, match="DataParallel cannot copy a grown model: use DistributedDataParallel"):
        grown(X)


def quantised(grown: nn.Module, path: Path) -> None:
    """By name, what holds no seed; by class, a line where a layer with a seed would be replaced."""
    quantise = torch.ao.quantization.quantize_dynamic
    holders = {name.partition(f".{SEEDS}")[0] for name, _ in grown.named_modules() if SEEDS in name}
    names = [name for name, module in grown.named_modules() if type(module) is nn.Linear and name not in holders]
    config = dict.fromkeys(names, torch.ao.quantization.default_dynamic_qconfig)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: deprecated
        torch.testing.assert_close(quantise(grown, config)(X), grown(X), atol=0.1, rtol=0.1)
        rows = torch.randn(3, 8)
        growing = grow(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), rows, [(0, "mlp", "linear", "HOLDING")], ["0"])
        wrong = quantise(plain_model(growing).eval(), {nn.Linear})
    with pytest.raises(RuntimeError, match="leave layers with seeds out when you quantise"):
        wrong(rows)


def fused_with_its_norm(grown: nn.Module, path: Path) -> None:
    """The page warns of it: torch folds the norm into the layer, and the seed's output is not normalised any more."""
    torch.manual_seed(0)
    rows = torch.randn(32, 10)
    host = nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    host(rows)  # moves the statistics
    model = plain_model(grow(host.eval(), rows, [(0, "mlp", "linear", "HOLDING")], ["0"])).eval()
    fused = torch.ao.quantization.fuse_modules(copy.deepcopy(model), [["0", "1"]])
    assert not torch.allclose(fused(rows), model(rows), atol=1e-3)


def converted_by_fx(grown: nn.Module, path: Path) -> None:
    """The page warns of it."""
    from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    torch.manual_seed(0)
    rows = torch.randn(32, 10)
    host = nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 3))
    model = plain_model(grow(host, rows, [(0, "mlp", "linear", "HOLDING")], ["0"])).eval()
    everything = QConfigMapping().set_global(default_dynamic_qconfig)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: deprecated
        converted = convert_fx(prepare_fx(copy.deepcopy(model), everything, (rows,)))
    assert not any(SEEDS in name for name, _ in converted.named_modules())


def lightning(grown: nn.Module, path: Path) -> None:
    library = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Lit(library.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Lit()
    module.net = grown
    trainer = library.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=4))
    trainer.save_checkpoint(path / "grown.ckpt")
    grown.eval()
    again = Lit.load_from_checkpoint(path / "grown.ckpt", strict=False, map_location="cpu")
    esper.load_seeds(again, path / "grown.ckpt")
    same(again.net.eval()(X), grown)
    again.load_state_dict(module.state_dict())  # strictly


def hugging_face(grown: nn.Module, path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(0, 30, (4, 12))
    growing = grow(
        transformers.GPT2LMHeadModel(config), ids, [(0, "mlp", "gated", "HOLDING"), (1, "lora", "linear", "HOLDING")],
        slots=["transformer.h.*"],
    )  # fmt: skip
    model = plain_model(growing).eval()
    model.save_pretrained(path)
    again = transformers.GPT2LMHeadModel.from_pretrained(path).eval()
    assert not torch.allclose(again(ids).logits, model(ids).logits, atol=1e-4)
    esper.load_seeds(again, path)
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-6)
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(again.generate(ids, **settings), model.generate(ids, **settings))


def grow_again(grown: nn.Module, path: Path) -> None:
    later = grow(grown, X, [(0, "conv", "gated", "HOLDING")], slots=["body"])
    again = plain_model(later).eval()
    assert torch.equal(again(X), later(X))
    assert set(grown.state_dict()) < set(again.state_dict())
    assert [path for path, _ in grafted(again)] == ["body", "body", "conv", "skip"]
    assert later.detach() is grown
    assert len(grafted(grown)) == 3  # what grew earlier stays
    torch.testing.assert_close(esper.load_seeds(host_of(again), again.state_dict())(X), again(X), rtol=0, atol=1e-6)


def saved(grown: nn.Module, path: Path) -> None:
    save(grown, path, X)
    same(load(path, host=Net())(X), grown)
    save(load(path, host=Net()), path / "again", X)
    same(load(path / "again", host=Net())(X), grown)


CHECKS: dict[str, Callable[[nn.Module, Path], None]] = {
    "`state_dict` / `load_state_dict`": state_dicts,
    "`torch.save(model)` / `torch.load`": torch_save,
    "`pickle`": pickled,
    "`copy.deepcopy`": deep_copy,
    "`isinstance`, attributes, `len`, indices": attributes,
    "a part of the model, such as `model.body`": part,
    "`.to`, `.double`, `.half`, `.train`, `.eval`": moved,
    "`torch.compile`": compiled,
    "`torch.export`": exported,
    "ONNX (`torch.onnx.export`)": onnx,
    "`torch.fx.symbolic_trace`": fx,
    "`torch.jit.trace`": jit_trace,
    "`torch.jit.script`": jit_script,
    "`torch.func.functional_call`, `vmap`": functional,
    "`AveragedModel` (EMA, SWA)": averaged,
    "`DistributedDataParallel`": distributed,
    "`nn.DataParallel`": data_parallel,
    "`quantize_dynamic`": quantised,
    "`fuse_modules` of a linear layer and its BatchNorm": fused_with_its_norm,
    "quantisation by FX (`convert_fx`)": converted_by_fx,
    "Lightning `load_from_checkpoint`": lightning,
    "Hugging Face `save_pretrained` / `from_pretrained`": hugging_face,
    "`esper.grow` again": grow_again,
    "`grown.save` / `esper.load`": saved,
}


def test_the_page_has_these_rows() -> None:
    rows = re.findall(r"^\| (.+?) \| (?:yes|no|in part) \|", DOCS.read_text(), re.MULTILINE)
    assert rows == list(CHECKS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", CHECKS)
def test_row(row: str, grown: nn.Module, tmp_path: Path) -> None:
    CHECKS[row](grown, tmp_path)


def test_the_snippet_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    exec(snippet, names := {})  # type: ignore[var-annotated]
    assert len(grafted(names["model"])) > 0, "nothing grew: the page would show nothing"
