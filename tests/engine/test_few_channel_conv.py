"""Convolutions of few channels: quick in bfloat16, by kernels of their own or filled up with zeros, and the same else.

Covers: R118
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.engine import few_channel_conv
from esper.engine.bf16_weights import Bf16Weights
from esper.engine.few_channel_conv import PaddedConv2d, SmallConv2d, use_few_channel_convs
from esper.engine.fingerprint import module_fingerprint
from esper.growth.attach import attach
from esper.growth.export import plain_model
from small_worlds import EAGER, advance

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.fixture(autouse=True)
def nothing_decided_before() -> Iterator[None]:
    few_channel_conv.kernels_work.cache_clear()
    yield
    few_channel_conv.kernels_work.cache_clear()


@pytest.fixture
def working_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Triton is, and a GPU."""
    monkeypatch.setattr(few_channel_conv, "MOST_CHANNELS", 32)
    monkeypatch.setattr(few_channel_conv, "_try_kernels", lambda device: None)


def picture_host(device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    host = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3))
    return host.to(device, memory_format=torch.channels_last)


def passed(host: nn.Sequential, x: Tensor, *, half: bool) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the weights in single precision."""
    weights = list(host.parameters())
    host.zero_grad()
    if not half:
        output = host(x)
        output.square().mean().backward()
    else:
        copies = Bf16Weights(host)
        with copies.in_place(), torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            output = host(x)
            output.float().square().mean().backward()
        copies.hand_over()
    return output.detach().float(), [p.grad.clone() for p in weights if p.grad is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", [False, True])
def test_a_convolution_of_few_channels_gives_the_same_output_and_gradients(device: str, half: bool) -> None:
    x = torch.randn(5, 3, 9, 9, generator=torch.Generator().manual_seed(1)).to(device)
    plain, filled = picture_host(device), picture_host(device)
    use_few_channel_convs(filled)
    (expected, gradients), (seen, found) = passed(plain, x, half=half), passed(filled, x, half=half)
    near = 0.02 if half else 0.0  # in half precision another kernel adds up in another order
    torch.testing.assert_close(seen, expected, rtol=near, atol=near * float(expected.abs().max()))
    for one, other in zip(found, gradients, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=near, atol=near * float(other.abs().max()))


@pytest.mark.usefixtures("working_kernels")
def test_only_plain_convolutions_of_few_channels_are_changed() -> None:
    class Own(nn.Conv2d):
        pass

    small = [nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)]
    other = [nn.Conv2d(8, 8, 3), nn.Conv2d(64, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, stride=2)]
    host = nn.Sequential(nn.Conv2d(3, 8, 3), Own(3, 8, 3), nn.Conv2d(4, 4, 3, groups=4), *small, *other)
    names = list(host.state_dict())
    use_few_channel_convs(host)
    assert [type(part) for part in host] == [PaddedConv2d, Own, nn.Conv2d, *[SmallConv2d] * 2, *[nn.Conv2d] * 3]
    assert list(host.state_dict()) == names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("inputs", "outputs", "batch", "height", "width"),
    [
        (3, 8, 7, 9, 9),
        (8, 8, 7, 12, 20),
        (1, 5, 7, 6, 9),
        (5, 12, 7, 7, 7),
        (16, 32, 7, 8, 8),
        (32, 32, 7, 16, 16),
        (8, 8, 128, 32, 32),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_the_kernels_for_few_channels_are_as_near_to_the_truth_as_bfloat16_is(
    inputs: int, outputs: int, batch: int, height: int, width: int, bias: bool
) -> None:
    """Output and all gradients against double precision; a third of a percent is half a unit in the last place."""
    from esper.engine.small_conv import small_conv2d

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        made = torch.randn(*shape, device="cuda").to(dtype)
        return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made

    # A picture comes in single precision, and is cast as it is read.
    x = random(batch, inputs, height, width, dtype=torch.float32 if inputs == 3 else torch.bfloat16)
    given = [x, random(outputs, inputs, 3, 3), *([random(outputs)] if bias else [])]
    gradient = random(batch, outputs, height, width)
    found, exact = [], []
    for results, tensors in ((found, given), (exact, [x.bfloat16().double(), *(t.double() for t in given[1:])])):
        leaves = [t.detach().requires_grad_() for t in tensors]
        known = (*leaves, None)[:3]
        output = small_conv2d(*known) if results is found else F.conv2d(*known, padding=1)
        results += [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]
    for one, other in zip(found, exact, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 4e-3
        assert one.dim() != 4 or one.is_contiguous(memory_format=torch.channels_last)


def test_where_the_kernels_are_missing_or_cannot_be_built_the_log_says_so_once_and_cudnn_does_the_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tried when a network is prepared, so that neither a pass nor a capture can fail on it."""
    tried = []

    def broken(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("Failed to find C compiler.\nand a long trace")

    monkeypatch.setattr(few_channel_conv, "_try_kernels", broken)
    for channels, reason in (
        (0, "Triton is not installed"),
        (32, "Triton's kernels do not work on cpu (RuntimeError: Failed to find C compiler.)"),
    ):
        monkeypatch.setattr(few_channel_conv, "MOST_CHANNELS", channels)
        few_channel_conv.kernels_work.cache_clear()
        caplog.clear()
        for _ in range(2):
            host = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
            use_few_channel_convs(host)
            assert [type(part) for part in host] == [PaddedConv2d, nn.Conv2d]
        assert caplog.messages == [f"{reason}: cuDNN makes small convolutions, at a half to a quarter of the speed"]
    assert tried == [torch.device("cpu")]


@pytest.mark.usefixtures("working_kernels")
def test_kernels_that_work_are_used_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    host = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    use_few_channel_convs(host)
    assert [type(part) for part in host] == [SmallConv2d, SmallConv2d]
    assert not caplog.messages


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_with_triton_has_working_kernels() -> None:
    pytest.importorskip("triton")
    assert few_channel_conv.kernels_work(torch.device("cuda", 0))


def test_hosts_with_such_convolutions_still_share_captured_epochs() -> None:
    hosts = [picture_host(), picture_host()]
    before = module_fingerprint(hosts[0])
    for host in hosts:
        use_few_channel_convs(host)
    assert module_fingerprint(hosts[0]) == module_fingerprint(hosts[1]) != before


def test_an_exported_model_has_plain_convolutions_again() -> None:
    x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    host = picture_host()
    use_few_channel_convs(host)
    growing = attach(host, ["1"], x)
    plain = plain_model(growing)
    assert [type(part) for part in plain] == [nn.Conv2d, nn.ReLU, nn.Conv2d]  # type: ignore[arg-type, attr-defined]
    assert type(host[0]) is PaddedConv2d
    assert torch.equal(plain(x), growing(x))


@pytest.mark.usefixtures("working_kernels")
def test_so_has_a_seed_that_grew() -> None:
    x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    growing = attach(picture_host(), ["1"], x, rules=EAGER)
    growing.on_planting = use_few_channel_convs
    growing.germinate(growing.slots[0], "conv", "linear", epoch=0)
    for _ in range(4):
        advance(growing.slots[0])
    growing._follow(growing.slots[0])
    assert growing.joined
    seed = growing.slots[0].seed
    assert seed is not None
    assert any(type(module) is SmallConv2d for module in seed.modules())
    assert not any(isinstance(module, PaddedConv2d) for module in plain_model(growing).modules())
