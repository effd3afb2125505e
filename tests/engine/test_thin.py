"""Convolutions over few channels: filled up with zeros in bfloat16, and nothing else changes.

Covers: R118
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from esper.engine.fingerprint import module_fingerprint
from esper.engine.half import HalfWeights
from esper.engine.thin import ThinConv2d, fill_up_channels
from esper.growth.attach import attach
from esper.growth.export import plain_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


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
        copies = HalfWeights(host)
        with copies.in_place(), torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
            output = host(x)
            output.float().square().mean().backward()
        copies.hand_over()
    return output.detach().float(), [p.grad.clone() for p in weights if p.grad is not None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("half", [False, True])
def test_a_filled_up_convolution_gives_the_same_output_and_gradients(device: str, half: bool) -> None:
    x = torch.randn(5, 3, 9, 9, generator=torch.Generator().manual_seed(1)).to(device)
    plain, filled = picture_host(device), picture_host(device)
    fill_up_channels(filled)
    (expected, gradients), (seen, found) = passed(plain, x, half=half), passed(filled, x, half=half)
    near = 0.02 if half else 0.0  # in half precision another kernel adds up in another order
    torch.testing.assert_close(seen, expected, rtol=near, atol=near * float(expected.abs().max()))
    for one, other in zip(found, gradients, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=near, atol=near * float(other.abs().max()))


def test_only_plain_convolutions_of_few_channels_are_changed() -> None:
    class Own(nn.Conv2d):
        pass

    host = nn.Sequential(nn.Conv2d(3, 8, 3), Own(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(4, 4, 3, groups=4))
    names = list(host.state_dict())
    fill_up_channels(host)
    assert [type(part) for part in host] == [ThinConv2d, Own, nn.Conv2d, nn.Conv2d]
    assert list(host.state_dict()) == names


def test_hosts_with_such_convolutions_still_share_captured_epochs() -> None:
    hosts = [picture_host(), picture_host()]
    before = module_fingerprint(hosts[0])
    for host in hosts:
        fill_up_channels(host)
    assert module_fingerprint(hosts[0]) == module_fingerprint(hosts[1]) != before


def test_an_exported_model_has_plain_convolutions_again() -> None:
    x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    host = picture_host()
    fill_up_channels(host)
    growing = attach(host, ["1"], x)
    plain = plain_model(growing)
    assert [type(part) for part in plain] == [nn.Conv2d, nn.ReLU, nn.Conv2d]  # type: ignore[arg-type, attr-defined]
    assert type(host[0]) is ThinConv2d
    assert torch.equal(plain(x), growing(x))
