"""One environment's precision is nobody else's: torch's switches are global, so they are put back.

There is no gradient scaler to share: bfloat16 has the range of single precision.

Covers: R118
"""

from __future__ import annotations

import pytest
import torch

from esper.engine.precision import Precision, arithmetic


def switches() -> tuple[bool, bool, bool]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark


@pytest.mark.parametrize(("precision", "rounds"), [(Precision.FP32, False), (Precision.TF32, True)])
def test_a_precision_holds_inside_and_leaves_no_trace_even_after_a_failure(precision: Precision, rounds: bool) -> None:
    before = switches()
    with arithmetic(precision, torch.device("cuda")):
        assert switches() == (rounds, rounds, True)
    assert switches() == before
    with pytest.raises(RuntimeError, match="broken"), arithmetic(precision, torch.device("cuda")):
        raise RuntimeError("broken")
    assert switches() == before


def test_precisions_nest_without_mixing() -> None:
    with arithmetic(Precision.TF32, torch.device("cuda")):
        with arithmetic(Precision.FP32, torch.device("cuda")):
            assert switches()[:2] == (False, False)
        assert switches()[:2] == (True, True)


def test_a_cpu_calculates_as_it_always_does() -> None:
    before = switches()
    with arithmetic(Precision.BF16, torch.device("cpu")):
        assert switches() == before
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
