"""8-bit floats with scales of blocks of 128 outputs and inputs: sums by block, and torch's product."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from runtime.devices.cuda import gemm as gemms
from runtime.devices.cuda import gemm_tiles
from runtime.devices.cuda.gemm import gemm, linear, quantize_activations, supports_torch_gemm, torch_gemm
from runtime.devices.cuda.kernels.launch import Gpu
from runtime.devices.cuda.moe import CudaExperts
from runtime.devices.cuda.weights import PackedWeight, pack
from runtime.models.config.quantization_schemes import Fp8
from tests.devices.cuda.test_gemm import HERE, quantised, randn, there
from tests.devices.cuda.torch_device import HAS_GPU, TORCH_DEVICE, near

HOPPER = Gpu(132, 233472, True, has_block_scales=True)


def blocked(outs: int, ins: int) -> PackedWeight:
    """A random weight whose blocks share scales."""
    weight = quantised(Fp8(128), outs, ins)
    scale = weight.scale[::128].repeat_interleave(128, 0)
    return pack(there(replace(weight, scale=scale)))


def test_blocks_are_found() -> None:
    packed = blocked(256, 384)
    assert packed.blocks is not None and packed.scales is not None and packed.blocks.shape == (1, 2, 4)
    assert torch.equal(packed.blocks[0, :, :3], packed.scales[0, :, ::128].T)
    assert not packed.blocks[..., 3].any()
    assert pack(there(quantised(Fp8(128), 256, 384))).blocks is None
    assert pack(there(quantised(Fp8(128), 40, 384))).blocks is None


@pytest.mark.parametrize("splits", [1, 2])
def test_sums_by_block(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, packed, bias = randn(19, 384).to(TORCH_DEVICE), blocked(256, 384), randn(256).to(TORCH_DEVICE)
    monkeypatch.setattr(gemm_tiles, "SUMS_BY_BLOCK", False)
    wanted = gemm(x, packed, HERE, bias)
    monkeypatch.setattr(gemm_tiles, "SUMS_BY_BLOCK", True)
    monkeypatch.setattr(gemms, "select_splits", lambda *_: splits)
    near(gemm(x, packed, HERE, bias), wanted, torch.float32, wanted.abs().amax().item())


def test_experts_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gated product, whose gates and what they gate have blocks of their own."""
    packed = blocked(256, 128 * 2), blocked(256, 128)
    ids, shares = torch.tensor([[0], [-1], [0]]), torch.rand(3, 1)
    inputs = [tensor.to(TORCH_DEVICE) for tensor in (randn(3, 256), ids, shares)]
    monkeypatch.setattr(gemm_tiles, "SUMS_BY_BLOCK", False)
    wanted = CudaExperts(HERE).apply(*inputs, packed)  # type: ignore[call-arg]
    monkeypatch.setattr(gemm_tiles, "SUMS_BY_BLOCK", True)
    found = CudaExperts(HERE).apply(*inputs, packed)  # type: ignore[call-arg]
    near(found, wanted, torch.float32, wanted.abs().amax().item())


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    recipe_a: ScalingType,
    scale_b: Tensor,
    recipe_b: ScalingType,
    output_dtype: torch.dtype,
) -> Tensor:
    """torch's product, with what it checks of scales on a Hopper GPU."""
    (rows, ins), outs, groups = a.shape, b.shape[1], b.shape[0] // 128
    assert (recipe_a, recipe_b) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    assert rows % 4 == 0 and ins % 16 == outs % 16 == 0 and b.stride(0) == 1
    assert scale_a.shape == (rows, groups) and scale_a.stride() == (1, rows)
    whole = -(-groups // 4) * 4
    assert scale_b.shape == (whole, -(-outs // 128)) and scale_b.stride() == (1, whole)
    left = a.float() * scale_a.repeat_interleave(128, 1)
    right = b.float() * scale_b[:groups].repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :outs]
    return (left @ right).to(output_dtype)


@pytest.mark.skipif(HAS_GPU, reason="the double is of torch's product on a GPU")
@pytest.mark.parametrize("rows", [33, 64])
def test_torchs_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemms, "scaled_mm", scaled_mm)
    x, packed = randn(rows, 384).bfloat16(), blocked(256, 384)
    assert supports_torch_gemm(packed, rows, torch.bfloat16, HOPPER)
    assert not supports_torch_gemm(packed, rows, torch.bfloat16, Gpu(128, 102400, True))
    inputs, bias = quantize_activations(x, packed), randn(256).bfloat16()
    found = torch_gemm(x, packed, bias, inputs)
    wanted = gemm(x, packed, HERE, bias, inputs)
    most = wanted.abs().amax()
    near(found / most, wanted / most, torch.bfloat16)


def test_the_table_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's product of blocks is taken where the table names it."""
    taken: list[str] = []
    monkeypatch.setattr(gemms, "torch_gemm", lambda *_: taken.append("torch"))
    monkeypatch.setattr(gemms, "gemm", lambda *_: taken.append("ours"))
    x, packed = torch.zeros(64, 384, dtype=torch.bfloat16, device=TORCH_DEVICE), blocked(256, 384)
    arguments: tuple[Any, ...] = (packed, None, HOPPER, "by_rows")
    linear(x, *arguments)
    linear(x[:63], *arguments)
    monkeypatch.delitem(gemm_tiles.TORCH_FROM, "fp8_block")
    linear(x, *arguments)
    assert taken == ["torch", "ours", "ours"]
