"""Products of a few rows against the definition in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.cuda.fused import CudaFusedOps
from runtime.devices.cuda.kernels.gemv import gemv
from runtime.devices.cuda.ops import CudaOps
from tests.devices.cuda.test_gemm import HERE
from tests.devices.cuda.torch_device import DTYPES, TORCH_DEVICE, near


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(TORCH_DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 24, 512), (3, 21, 1100), (8, 8, 96)])
def test_products(rows: int, outs: int, ins: int, dtype: torch.dtype) -> None:
    """Also of numbers of outputs and inputs that no tile divides, and of rows with a stride."""
    x, weight = randn(rows, 2 * ins, dtype=dtype)[:, :ins], randn(outs, ins, dtype=dtype) / 16
    bias = randn(outs, dtype=dtype)
    wanted = x.double() @ weight.double().T
    near(gemv(x, weight, None, HERE), wanted, dtype, 4)
    near(gemv(x, weight, bias, HERE), wanted + bias.double(), dtype, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates(dtype: torch.dtype) -> None:
    x, weight = randn(2, 640, dtype=dtype), randn(2 * 30, 640, dtype=dtype) / 16
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    near(gemv(x, weight, None, HERE, is_gated=True), torch.nn.functional.silu(gate) * up, dtype, 4)


def test_whose_product_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS has all of them, unless more rows are asked for."""
    taken: list[Any] = []
    monkeypatch.setattr("runtime.devices.cuda.ops.gemv", lambda x, *_: taken.append(len(x)))
    monkeypatch.setattr("runtime.devices.cuda.fused.gemv", lambda x, *_, **__: taken.append(len(x)) or x)
    weight = randn(16, 32, dtype=torch.float32)
    for most in (0, 2):
        ops = CudaOps(torch.float32, HERE, gemv_rows=most)
        for rows in (1, 2, 3):
            ops.linear(randn(rows, 32, dtype=torch.float32), weight, None)
    assert taken == [1, 2]
    fused, x = CudaFusedOps(ops), randn(2, 32, dtype=torch.float32)
    assert fused.gated_product(x, weight, "silu") is x and taken == [1, 2, 2]
    assert fused.gated_product(x, weight, "gelu") is None
    assert fused.gated_product(x, weight.T.contiguous().T, "silu") is None
