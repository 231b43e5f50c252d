"""Gated activations of feed-forwards: act(first half) * second half, alone and with their quantization."""

import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.activation_quantization import RowCodes, quantize_held
from runtime.devices.cuda.kernels.launch import next_power_of_2
from runtime.devices.cuda.kernels.norm import num_warps_for

BLOCK = 1024


@triton.jit
def act_and_mul_kernel(
    x: tl.tensor, out: tl.tensor, size: tl.tensor, stride: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Grid (rows, blocks of a row)."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gated = _gated(x + row * stride + at, size, at < size, KIND)
    tl.store(out + row * size + at, gated.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def act_and_quantize_kernel(
    x: tl.tensor,
    out: tl.tensor,
    codes: tl.tensor,
    code_scales: tl.tensor,
    size: tl.tensor,
    stride: tl.tensor,
    num_scales: tl.tensor,
    ACTIVATION: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows, blocks of a row; one block where a row has one scale): as act_and_mul_kernel, and its
    result in 8 bits, see quantize_held."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    gated = _gated(x + row * stride + at, size, at < size, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + row * size + at, gated, mask=at < size)
    scales_at = code_scales + row * num_scales
    quantize_held(gated.to(tl.float32), codes + row * size, scales_at, first, size, KIND, GROUP, BLOCK)


@triton.jit
def _gated(at: tl.tensor, size: tl.tensor, mask: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """act(x at `at`) * (x `size` behind it), float32."""
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + size, mask=mask, other=0.0).to(tl.float32)
    if KIND == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-first))
    elif KIND == "gelu":
        sigmoid = 0.5 * (1.0 + tl.math.erf(first * 0.7071067811865476))
    else:  # gelu_tanh: 0.5 * (1 + tanh(y)) is the sigmoid of 2 y
        sigmoid = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (first + 0.044715 * first * first * first)))
    return first * sigmoid * second


def act_and_quantize(x: Tensor, kind: str, quantized: RowCodes) -> Tensor:
    """As `act_and_mul` of x [T, 2 * D], whose result is also written in 8 bits."""
    size = x.shape[1] // 2
    out = x.new_empty(len(x), size)
    if len(x):
        block = BLOCK if quantized.group else next_power_of_2(size, 16)
        act_and_quantize_kernel[(len(x), triton.cdiv(size, block))](
            x,
            out,
            quantized.codes,
            quantized.scales,
            size,
            x.stride(0),
            quantized.scales.shape[1],
            ACTIVATION=kind,
            KIND=quantized.kind,
            GROUP=quantized.group,
            BLOCK=block,
            num_warps=max(4, num_warps_for(block)),
        )
    return out


def act_and_mul(x: Tensor, kind: str) -> Tensor:
    """x [..., 2 * D] -> [..., D]; `kind`: silu, gelu, or gelu_tanh."""
    size = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], size)
    rows = x.reshape(-1, 2 * size)
    if rows.numel():
        act_and_mul_kernel[(len(rows), triton.cdiv(size, BLOCK))](
            rows, out, size, rows.stride(0), KIND=kind, BLOCK=BLOCK, num_warps=4
        )
    return out
