"""RMS norms (Zhang and Sennrich, 2019), alone and fused with the addition to the residual, and with the
quantization of their result."""

import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.activation_quantization import RowCodes, quantize_held
from runtime.devices.cuda.kernels.launch import await_inputs, launch_options, next_power_of_2


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    stride: tl.tensor,
    inner_stride: tl.tensor,
    eps: tl.tensor,
    WEIGHTS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Norms rows of x [outer, inner, SIZE], ROWS in each program. `weight` has WEIGHTS rows: one for each of
    `inner`, or one for all."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    is_there = (rows < num_rows)[:, None] & (at < SIZE)[None, :]
    offsets = (rows // inner).to(tl.int64) * stride + (rows % inner) * inner_stride
    values = tl.load(x + offsets[:, None] + at[None, :], mask=is_there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / SIZE + eps)
    factors = tl.load(weight + (rows % WEIGHTS)[:, None] * SIZE + at[None, :], mask=is_there, other=0.0).to(
        tl.float32
    )
    normed = (values * scale[:, None] * factors).to(out.dtype.element_ty)
    tl.store(out + rows.to(tl.int64)[:, None] * SIZE + at[None, :], normed, mask=is_there)


@triton.jit
def add_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    codes: tl.tensor,
    code_scales: tl.tensor,
    stride: tl.tensor,
    residual_stride: tl.tensor,
    num_scales: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid (rows,): residual += x in the dtype of the residual, and the norm of that sum. With KIND also its
    bytes `codes` [rows, SIZE] and `code_scales` [rows, num_scales], see quantize_held."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    await_inputs(EARLY)
    residual_at = residual + row * residual_stride + at
    total = tl.load(residual_at, mask=at < SIZE, other=0.0).to(tl.float32)
    total += tl.load(x + row * stride + at, mask=at < SIZE, other=0.0).to(tl.float32)
    kept = total.to(residual.dtype.element_ty)
    tl.store(residual_at, kept, mask=at < SIZE)
    total = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / SIZE + eps)
    factors = tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
    normed = (total * scale * factors).to(out.dtype.element_ty)
    tl.store(out + row * SIZE + at, normed, mask=at < SIZE)
    if KIND != "":
        scales_at = code_scales + row * num_scales
        quantize_held(normed.to(tl.float32), codes + row * SIZE, scales_at, row * 0, SIZE, KIND, GROUP, BLOCK)


def num_warps_for(block: int) -> int:
    """The number of warps for a program of `block` numbers: sixteen numbers a thread, at most sixteen
    warps."""
    return min(16, max(1, block // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See Ops.rms_norm. x [..., D] or [..., heads, D] with any strides before the last dimension that views
    allow."""
    size = x.shape[-1]
    out = x.new_empty(x.shape)
    if x.numel() == 0:
        return out
    rows = x if x.dim() == 3 else x.reshape(-1, 1, size)
    block = next_power_of_2(size, 16)
    per_program = max(1, min(16, 2048 // block))
    num_rows = rows.shape[0] * rows.shape[1]
    rms_norm_kernel[(triton.cdiv(num_rows, per_program),)](
        rows,
        out,
        weight,
        num_rows,
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        eps,
        WEIGHTS=weight.numel() // size,
        SIZE=size,
        ROWS=per_program,
        BLOCK=block,
        num_warps=num_warps_for(per_program * block),
    )
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    quantized: RowCodes | None = None,
    early: bool = False,
) -> tuple[Tensor, Tensor]:
    """See Ops.add_rms_norm; overwrites `residual`. Both [T, D]. `quantized`: where the norm is also written
    in 8 bits; None: nowhere. `early`: see launch.starts_early."""
    out = x.new_empty(x.shape)
    if len(x):
        block = next_power_of_2(x.shape[1], 16)
        add_rms_norm_kernel[(len(x),)](
            x,
            residual,
            out,
            weight,
            out if quantized is None else quantized.codes,
            out if quantized is None else quantized.scales,
            x.stride(0),
            residual.stride(0),
            0 if quantized is None else quantized.scales.shape[1],
            eps,
            SIZE=x.shape[1],
            BLOCK=block,
            KIND="" if quantized is None else quantized.kind,
            GROUP=0 if quantized is None else quantized.group,
            EARLY=early,
            num_warps=num_warps_for(block),
            **launch_options(early=early),
        )
    return out, residual
