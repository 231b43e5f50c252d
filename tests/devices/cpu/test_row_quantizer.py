"""Rows that the kernels quantize while weights are loaded have the bits of what torch makes of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.devices.cpu.kernels import library
from runtime.devices.cpu.kernels.levels import Level
from runtime.devices.cpu.matrices import Threads
from runtime.devices.cpu.row_quantizer import CpuRowQuantizer
from runtime.layers.quantization.layouts import load_online
from runtime.models.config.quantization_schemes import Int8, PackedInt
from tests.devices.cpu.test_kernels import BUILT

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=BUILT, ids=lambda level: level.name)
def quantizer(request: pytest.FixtureRequest) -> CpuRowQuantizer:
    level: Level = request.param
    return CpuRowQuantizer(Threads(library.Library(level), 2))


def rows(dtype: torch.dtype, inputs: int) -> Tensor:
    """Random rows, and some that are special: zeros, ties, halves, and numbers that overflow or vanish."""
    values = torch.randn(40, inputs, generator=torch.Generator().manual_seed(inputs))
    values[0] = 0
    values[1, ::2], values[1, 1::2] = 1, -1
    values[2, ::2], values[2, 1::2] = -1, 1
    values[3] = torch.arange(inputs) % 17 - 8.0
    values[4], values[5] = values[4] * 1e-9, values[5] * (6e4 if dtype == torch.float16 else 1e9)
    values[6, 5:] = 0
    return values.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else values.to(dtype)


def load(
    values: Tensor, scheme: Int8 | PackedInt, quantizer: CpuRowQuantizer | None
) -> tuple[Tensor, Tensor]:
    """Codes and scales as a module without other ranks has them."""
    count, inputs = values.shape
    is_int8 = isinstance(scheme, Int8)
    groups = 1 if isinstance(scheme, Int8) else -(-inputs // scheme.group_size)
    codes = torch.zeros(
        count, inputs if is_int8 else inputs // 2, dtype=torch.int8 if is_int8 else torch.uint8
    )
    scale = torch.zeros(count, groups)
    module: Any = SimpleNamespace(
        format=SimpleNamespace(scheme=scheme),
        tensors={"weight": codes, "scale": scale},
        rows=slice(0, count),
        columns=slice(0, inputs),
        inputs=SimpleNamespace(size=inputs, full=inputs),
        group_ids=torch.arange(groups),
        quantizer=quantizer,
    )
    load_online(module, values)  # a tensor is read as a reader is
    return codes, scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("scheme", "inputs"),
    [(Int8("token"), 300), (Int8("token"), 64), (PackedInt(4, 32), 96), (PackedInt(4, 128), 200)],
    ids=str,
)
def test_codes_and_scales_are_those_of_torch(
    quantizer: CpuRowQuantizer, scheme: Int8 | PackedInt, inputs: int, dtype: torch.dtype
) -> None:
    values = rows(dtype, inputs)
    found = load(values, scheme, quantizer)
    for ours, reference in zip(found, load(values, scheme, None), strict=True):
        assert torch.equal(ours, reference)


def test_what_the_kernels_do_not_do_is_left_to_torch(quantizer: CpuRowQuantizer) -> None:
    codes, scales = torch.zeros(4, 256, dtype=torch.uint8), torch.zeros(4, 1)
    assert not quantizer.quantize(torch.ones(4, 512), 512, codes, scales)
    assert not quantizer.quantize(torch.ones(4, 512).double(), 32, codes, scales)
    assert not codes.any() and not scales.any()
