"""The built-in hosts: shapes, slots called once, rebuilt from their config, no dependence but torch."""

import ast
import inspect
import json
from collections import Counter

import pytest
import torch
from torch import nn

from esper.tasks import hosts
from esper.tasks.hosts import Conv1dHost, Conv2dHost, GPTHost, MLPHost
from small_worlds import stages_of

CASES = {
    "mlp": (lambda: MLPHost(in_features=12, widths=[7, 5], classes=3), torch.randn(4, 12), (4, 3)),
    "conv1d": (lambda: Conv1dHost(2, [4, 6, 5], [5, 1, 3], 3), torch.randn(4, 2, 20), (4, 3)),
    "conv1d average, no norm, no activation": (
        lambda: Conv1dHost(2, [4, 6], [5, 3], 3, pools=[4, 2], pooling="average", norm=False, activation=False),
        torch.randn(4, 2, 20),
        (4, 3),
    ),
    "conv2d": (lambda: Conv2dHost(3, [4, 8], [3, 3], 10), torch.randn(4, 3, 8, 8), (4, 10)),
    "gpt": (
        lambda: GPTHost(vocabulary=11, context=9, width=8, heads=2, layers=2),
        torch.randint(11, (4, 9)),
        (4, 9, 11),
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@cases
def test_forward_has_the_right_shape_and_every_parameter_gets_a_gradient(case):
    build, x, shape = case
    host = build()
    outputs = host(x)
    assert outputs.shape == shape
    outputs.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in host.parameters())


@cases
def test_stages_are_modules_called_once_with_a_batch_first_tensor(case):
    build, x, _ = case
    host = build()
    calls = Counter()
    for path in stages_of(host):
        host.get_submodule(path).register_forward_hook(lambda m, a, out, path=path: calls.update({(path, len(out))}))
    host(x)
    assert calls == Counter({(path, len(x)): 1 for path in stages_of(host)})
    assert len(stages_of(host)) == len(host.config.get("widths", range(host.config.get("layers", 0))))


@cases
def test_config_is_json_and_rebuilds_the_same_architecture(case):
    build, x, _ = case
    host = build().eval()
    twin = type(host)(**json.loads(json.dumps(host.config))).eval()
    assert twin.config == host.config
    assert str(twin) == str(host)
    twin.load_state_dict(host.state_dict())
    assert torch.equal(twin(x), host(x))


@cases
def test_a_host_is_decided_by_the_torch_random_state(case):
    build, x, _ = case
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        outputs.append(build().eval()(x))
    assert torch.equal(*outputs)


def test_parameter_counts_worked_by_hand():
    def count(host: nn.Module) -> int:
        return sum(p.numel() for p in host.parameters())

    # 1·8·5 + 16 (norm), 8·8·3 + 16, 8·8·3 + 16, head 8·10 + 10
    assert count(Conv1dHost(1, [8, 8, 8], [5, 3, 3], 10)) == 56 + 208 + 208 + 90
    # 3·8·9 + 16, 8·16·9 + 32, 16·32·9 + 64, head 32·10 + 10: the published 6,418
    assert count(Conv2dHost(3, [8, 16, 32], [3, 3, 3], 10)) == 6_418
    assert count(MLPHost(64, [8, 8], 10)) == 64 * 8 + 8 + 8 * 8 + 8 + 90
    # embedding counted once, positions, per block 4·w² + 8·w² + biases 9·w + norms 4·w, final norm 2·w
    assert count(GPTHost(11, 9, 8, 2, 2)) == 11 * 8 + 9 * 8 + 2 * (12 * 64 + 13 * 8) + 16


def test_conv_slots_lie_before_the_pooling():
    host = Conv1dHost(1, [2, 2, 2], [3, 3, 3], 4)
    lengths = []
    for stage in host.stages:
        stage.register_forward_hook(lambda m, a, out: lengths.append(out.shape[2]))
    host(torch.randn(1, 1, 40))
    assert lengths == [40, 20, 10]


def test_gpt_is_causal_and_takes_shorter_inputs():
    host = GPTHost(11, 9, 8, 2, 2).eval()
    x = torch.randint(11, (2, 9))
    changed = x.clone()
    changed[:, 6] = (x[:, 6] + 1) % 11
    before, after = host(x), host(changed)
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-6)
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-6)
    assert torch.allclose(host(x[:, :4]), before[:, :4], atol=1e-6)


def test_gpt_dropout_only_acts_in_training():
    host = GPTHost(11, 9, 8, 2, 2, dropout=0.5)
    x = torch.randint(11, (2, 9))
    assert not torch.equal(host(x), host(x))
    host.eval()
    assert torch.equal(host(x), host(x))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MLPHost(4, [], 2), "at least one width"),
        (lambda: Conv1dHost(1, [4, 4], [3], 2), "one kernel and one pool per width"),
        (lambda: Conv1dHost(1, [4], [4], 2), "odd kernels"),
        (lambda: Conv2dHost(1, [4], [3], 2, pooling="sum"), "'max' or 'average'; got 'sum'"),
        (lambda: GPTHost(5, 5, 10, 3, 1), "multiple of its heads"),
    ],
)
def test_impossible_sizes_are_refused_with_the_reason(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_the_source_of_the_hosts_imports_torch_alone():
    tree = ast.parse(inspect.getsource(hosts))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    assert modules == {"torch", "__future__"}
    # Nothing at module level but imports and classes: a class copied out with its bases misses no helper.
    kinds = {type(node) for node in tree.body[1:]}
    assert kinds == {ast.Import, ast.ImportFrom, ast.ClassDef}
