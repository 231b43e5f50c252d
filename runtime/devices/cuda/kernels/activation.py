"""Gated activations of feed-forwards: act(first half) * second half."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def act_and_mul_kernel(
    x: tl.tensor, out: tl.tensor, size: tl.tensor, stride: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Grid (rows, blocks of a row)."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(x + row * stride + at, mask=at < size, other=0.0).to(tl.float32)
    second = tl.load(x + row * stride + size + at, mask=at < size, other=0.0).to(tl.float32)
    if KIND == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-first))
    elif KIND == "gelu":
        sigmoid = 0.5 * (1.0 + tl.math.erf(first * 0.7071067811865476))
    else:  # gelu_tanh: 0.5 * (1 + tanh(y)) is the sigmoid of 2 y
        sigmoid = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (first + 0.044715 * first * first * first)))
    tl.store(out + row * size + at, (first * sigmoid * second).to(out.dtype.element_ty), mask=at < size)


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
