"""Quantisation, and matrix products of quantised weights.

Limits: the wheel's docstrings of each operator; of products in FRACTAL_NZ see formats.py. `float32` outputs,
which CANN does not have, are possible where limits are not strict, so that a quantised model in fp32 can be
compared with the CPU's.
"""

from typing import Any

import torch
from torch import Tensor

from tests.ascend.emulate.memory import NZ, format_of
from tests.ascend.emulate.norms import quantised_rows
from tests.ascend.emulate.table import Limits, need, need_dtype, need_half, need_shape, need_values, operator

HALVES = (torch.float16, torch.bfloat16)
SCALAR_TYPES = {
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    12: torch.int8,
    13: torch.uint8,
    14: torch.int32,
    15: torch.bfloat16,
}  # c10::ScalarType; the quantised ones as what they are stored in
INNER_LIMIT = 65535


def dtype_of(number: Any, default: torch.dtype) -> torch.dtype:
    """A dtype argument: torch.dtype arrives as its number in c10::ScalarType."""
    if number is None:
        return default
    found = number if isinstance(number, torch.dtype) else SCALAR_TYPES.get(int(number))
    need(found is not None, f"dtype {number} is not emulated")
    assert found is not None
    return found


def rounded(values: Tensor) -> Tensor:
    """Values as int8, saturated."""
    return values.round().clamp(-128, 127).to(torch.int8)


@operator("npu::npu_dynamic_quant")
def dynamic_quant(
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: Any = None,
    quant_mode: str | None = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """npu_dynamic_quant."""
    need_half(input=x)
    need(x.dim() > 1, "input has at least two dimensions")
    need(
        dtype_of(dst_type, torch.int8) == torch.int8 and quant_mode == "pertoken",
        "only int8 for each token is emulated",
    )
    if smooth_scales is None:
        return quantised_rows(x.float())
    need(smooth_scales.dtype == x.dtype, f"smooth_scales are {smooth_scales.dtype}, input {x.dtype}")
    if group_index is None:
        need_shape("smooth_scales", smooth_scales, x.shape[-1])
        return quantised_rows(x.float() * smooth_scales.float())
    need_dtype("group_index", group_index, torch.int32)
    need_shape("smooth_scales", smooth_scales, group_index.numel(), x.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    need_values(
        lambda: (group_index.diff() >= 0).all() and int(group_index[-1]) == rows.shape[0],
        "group_index rises to all rows",
    )
    of_row = torch.bucketize(torch.arange(rows.shape[0]), group_index.long(), right=True).clamp_max(
        group_index.numel() - 1
    )
    y, scale = quantised_rows(rows.float() * smooth_scales.float()[of_row])
    return y.view(x.shape), scale.view(x.shape[:-1])


@operator("npu::npu_quantize")
def quantize(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, dtype: Any, axis: int = 1, div_mode: bool = True
) -> Tensor:
    """npu_quantize."""
    need_dtype("input", x, torch.float32, *HALVES)
    target = dtype_of(dtype, torch.int8)
    need(target == torch.int8, f"dtype {target} is not emulated")
    need(axis < x.dim(), f"axis {axis} of {x.dim()} dimensions")
    # multiplying: -2, else the last one whatever is given
    at = axis % x.dim() if div_mode or axis == -2 else x.dim() - 1
    if div_mode:
        need_dtype("scales", scales, torch.float32, torch.bfloat16)
        need(
            zero_points is None
            or zero_points.dtype in (torch.int8, torch.uint8, torch.int32, torch.bfloat16),
            "zero_points: dtype",
        )
    else:
        need_dtype("scales", scales, torch.float32, *HALVES)
        need(
            zero_points is None or zero_points.dtype == scales.dtype and zero_points.shape == scales.shape,
            "zero_points have the dtype and shape of scales",
        )
    need(
        scales.dim() == 1 and scales.numel() in (1, x.shape[at]),
        f"scales {tuple(scales.shape)} for {tuple(x.shape)} along {at}",
    )
    shape = [1] * x.dim()
    shape[at] = -1
    scale, zero = scales.float().view(shape), 0.0 if zero_points is None else zero_points.float().view(shape)
    return rounded((x.float() / scale if div_mode else x.float() * scale) + zero)


@operator("npu::npu_trans_quant_param")
def trans_quant_param(scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
    """float32 in the low half of an int64."""
    need_dtype("scale", scale, torch.float32)
    need(offset is None, "offset is not emulated")
    return scale.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def scale_values(scale: Tensor) -> Tensor:
    """Scales as float32, also from 64-bit words."""
    if scale.dtype == torch.int64:
        return (scale & 0xFFFFFFFF).to(torch.int32).view(torch.float32).double()
    return scale.double()


# output -> dtypes of scale, bias, with and without pertoken_scale: the table of npu_quant_matmul
PRODUCTS = {
    (torch.float16, False): ((torch.int64, torch.float32), (torch.int32,)),
    (torch.int8, False): ((torch.int64, torch.float32), (torch.int32,)),
    (torch.bfloat16, False): ((torch.float32, torch.bfloat16), (torch.int32, torch.bfloat16, torch.float32)),
    (torch.bfloat16, True): ((torch.float32, torch.bfloat16), (torch.int32, torch.bfloat16, torch.float32)),
    (torch.float16, True): ((torch.float32,), (torch.int32, torch.float16, torch.float32)),
    (torch.int32, False): ((torch.float32, torch.bfloat16), (torch.int32,)),
}


@operator("npu::npu_quant_matmul")
def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: Any = None,
    **rest: Any,
) -> Tensor:
    """npu_quant_matmul."""
    need(
        all(given is None for given in rest.values()) and offset is None,
        f"not emulated: offset or {list(rest)}",
    )
    need(x1.dtype == x2.dtype == torch.int8, f"x1 and x2 are int8, not {x1.dtype} and {x2.dtype}")
    need(2 <= x1.dim() <= 6 and 2 <= x2.dim() <= 6, "x1 and x2 have 2 to 6 dimensions")
    need(x1.shape[-1] == x2.shape[-2], f"inner dimensions {tuple(x1.shape)} x {tuple(x2.shape)}")
    need(max(x1.shape[-1], x2.shape[-1]) <= INNER_LIMIT, f"last dimensions are at most {INNER_LIMIT}")
    need(format_of(x2) != NZ or min(x2.shape[-2:]) > 1, f"x2 {tuple(x2.shape)} in NZ: neither k nor n is 1")
    out = dtype_of(output_dtype, torch.int8)
    row = PRODUCTS.get(
        (torch.bfloat16 if out == torch.float32 and not Limits.strict else out, pertoken_scale is not None)
    )
    need(
        row is not None, f"output {out} {'with' if pertoken_scale is not None else 'without'} pertoken_scale"
    )
    assert row is not None
    need(scale.dtype in row[0], f"scale is {scale.dtype} for output {out}: {row[0]}")
    need(
        scale.dim() == 1 and scale.numel() in (1, x2.shape[-1]),
        f"scale {tuple(scale.shape)}: 1 or n = {x2.shape[-1]}",
    )
    if bias is not None:
        need(bias.dtype in row[1], f"bias is {bias.dtype} for output {out}: {row[1]}")
        need(bias.shape[-1] == x2.shape[-1], f"bias {tuple(bias.shape)}: n = {x2.shape[-1]}")
    if pertoken_scale is not None:
        need_dtype("pertoken_scale", pertoken_scale, torch.float32)
        need_shape("pertoken_scale", pertoken_scale, x1.shape[-2])
    total = x1.double() @ x2.double()
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias.double()
    y = total * scale_values(scale)
    if pertoken_scale is not None:
        y = y * pertoken_scale.double()[:, None]
    if bias is not None and bias.dtype != torch.int32:
        y = y + bias.double()
    return rounded(y) if out == torch.int8 else y.round().to(out) if out == torch.int32 else y.to(out)


def nibbles(packed: Tensor) -> Tensor:
    """int32 holding eight int4, the lowest bits first, as numbers."""
    parts = (packed[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
    return torch.where(parts > 7, parts - 16, parts).flatten(-2)


@operator("npu::npu_convert_weight_to_int4pack")
def convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """npu_convert_weight_to_int4pack."""
    need_dtype("weight", weight, torch.int32)
    need(
        weight.dim() == 2 and weight.shape[-1] % 8 == 0,
        f"weight {tuple(weight.shape)}: 2-D, the last dimension a multiple of 8",
    )
    need_values(lambda: ((weight >= -8) & (weight <= 7)).all(), "a weight lies outside -8 .. 7")
    parts = (weight.long() & 15).unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    total = parts.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


@operator("npu::npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: Any = None,
) -> Tensor:
    """npu_weight_quant_batchmatmul."""
    need(
        quant_scale is None and quant_offset is None and weight_dtype is None,
        "quantised output is not emulated",
    )
    need_half(x=x)
    need(x.dim() == weight.dim() == 2, "x and weight are 2-D")
    need_dtype("weight", weight, torch.int8, torch.int32)
    numbers = (nibbles(weight) if weight.dtype == torch.int32 else weight).float()
    k, n = numbers.shape
    need(x.shape[1] == k, f"inner dimensions {tuple(x.shape)} x {(k, n)}")
    need(max(k, n) <= INNER_LIMIT, f"k and n are at most {INNER_LIMIT}")
    size = antiquant_group_size
    need(
        size == 0 or (size % 32 == 0 and 32 <= size <= k - 1),
        f"antiquant_group_size {size}: 0, or a multiple of 32 below k = {k}",
    )
    need(antiquant_scale.dtype == x.dtype, f"antiquant_scale is {antiquant_scale.dtype}, x {x.dtype}")
    need(
        antiquant_offset is None
        or antiquant_offset.dtype == x.dtype
        and antiquant_offset.shape == antiquant_scale.shape,
        "antiquant_offset has the dtype and shape of antiquant_scale",
    )
    if size:
        need_shape("antiquant_scale", antiquant_scale, -(-k // size), n)
    else:
        need(
            antiquant_scale.numel() in (1, n), f"antiquant_scale {tuple(antiquant_scale.shape)}: 1 or n = {n}"
        )

    def spread(values: Tensor) -> Tensor:
        return values.float().repeat_interleave(size, 0)[:k] if size else values.float().view(1, -1)

    whole = (numbers if antiquant_offset is None else numbers + spread(antiquant_offset)) * spread(
        antiquant_scale
    )
    y = x.float() @ whole
    return (y if bias is None else y + bias.float()).to(x.dtype)


@operator("npu::npu_transpose_batchmatmul")
def transpose_batchmatmul(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: list[int] | None = None,
    perm_x2: list[int] | None = None,
    perm_y: list[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:
    """npu_transpose_batchmatmul."""
    need(
        bias is None and scale is None and batch_split_factor in (None, 1),
        "bias, scale and a split are not emulated",
    )
    first, second, last = list(perm_x1 or (0, 1, 2)), list(perm_x2 or (0, 1, 2)), list(perm_y or (1, 0, 2))
    need(
        first in ([0, 1, 2], [1, 0, 2]) and second == [0, 1, 2] and last == [1, 0, 2],
        f"perms {first}, {second}, {last}",
    )
    need(x.dim() == weight.dim() == 3 and x.dtype == weight.dtype, "input and weight are 3-D, of one dtype")
    need_dtype("input", x, torch.float32, *HALVES)
    left = x.permute(first)
    need(
        left.shape[0] == weight.shape[0] and left.shape[2] == weight.shape[1],
        f"{tuple(left.shape)} x {tuple(weight.shape)}",
    )
    batch, k, n = weight.shape
    need(k % 16 == 0 and n % 16 == 0, f"k {k} and n {n} are multiples of 16")
    need(
        (k * batch if first == [1, 0, 2] else k) < 65536,
        "k (times batch, where input is transposed) is below 65536",
    )
    return (left.float() @ weight.float()).permute(last).contiguous().to(x.dtype)


@operator("npu::npu_prefetch")
def prefetch(weight: Tensor, dependency: Tensor | None, max_size: int, offset: int = 0) -> None:
    """npu_prefetch, which computes nothing. Limits: op-plugin's document (517f2e7)."""
    need(weight.numel() > 0, "input is empty")
    need(max_size > 0, f"max_size {max_size} is above 0")
    need(0 <= offset < weight.nbytes, f"offset {offset}, within {weight.nbytes} bytes")
