"""Matrix products of rows grouped by expert, and what is fused with them. Limits: the wheel's docstrings, and
grouped_matmul_tiling.cpp in CANN's public ops-transformer repository (c29bc10)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.ascend.emulate.experts import garbage
from tests.ascend.emulate.linears import HALVES, dtype_of, nibbles, rounded, scale_values
from tests.ascend.emulate.memory import NZ, format_of
from tests.ascend.emulate.norms import FLOATS, quantised_rows
from tests.ascend.emulate.table import Limits, need, need_dtype, need_shape, need_values, operator

LIMIT = 65536  # of last dimensions, exclusive


def group_ends(group_list: Tensor, kind: int, rows: int) -> list[int]:
    """Where each group ends. CANN says that the last end is the number of rows; engines with experts
    elsewhere send fewer, and the rows after it stay unwritten."""
    need_dtype("group_list", group_list, torch.int64)
    need(
        group_list.dim() == 1 and group_list.numel() <= 1024,
        f"group_list {tuple(group_list.shape)}: 1-D, at most 1024 groups",
    )
    need(kind in (0, 1), f"group_list_type {kind}")
    need(kind == 0 or group_list.numel() > 1, "group_list_type 1 with one group")
    ends = group_list.cumsum(0) if kind == 1 else group_list
    need_values(
        lambda: (group_list >= 0).all() and (ends.diff() >= 0).all() and int(ends[-1]) <= rows,
        f"group_list {group_list.tolist()} (type {kind}) for {rows} rows",
    )
    return ends.tolist()


def weights_of(weight: list[Tensor], groups: int) -> list[Tensor]:
    """A matrix for each group."""
    if len(weight) == 1 and weight[0].dim() == 3:
        need(weight[0].shape[0] == groups, f"{weight[0].shape[0]} weights for {groups} groups")
        return list(weight[0].unbind(0))
    need(
        len(weight) == groups <= 128 and all(w.dim() == 2 for w in weight),
        f"{len(weight)} weights for {groups} groups: 2-D, at most 128",
    )
    need(len({w.shape[1] for w in weight}) == 1, "weights differ in n")
    return weight


def of_group(values: list[Tensor] | None, index: int) -> Tensor | None:
    """Of [one tensor with a row for each group] or [a tensor for each group]."""
    if not values:
        return None
    return (
        values[0][index]
        if len(values) == 1 and values[0].dim() > 1
        else values[index if len(values) > 1 else 0]
    )


def check_dtypes(x: Tensor, weight: Tensor, given: dict[str, Any], out: torch.dtype) -> None:
    """The table of npu_grouped_matmul for a group_list tensor."""
    scale, tokens = given["scale"], given["per_token_scale"]
    if x.dtype == torch.int8 and weight.dtype == torch.int32:
        check_narrow(x, weight, given, out)
        return
    if x.dtype == torch.int8:
        need(weight.dtype == torch.int8, f"x is int8, weight {weight.dtype}")
        if not scale:
            need(out == torch.int32 and not tokens, "int8 without scale gives int32")
            return
        need(
            out in (torch.int8, *HALVES) or (out == torch.float32 and not Limits.strict),
            f"int8 with scale gives no {out}",
        )
        wanted = {
            torch.int8: (torch.int64,),
            torch.float16: (torch.float32,),
            torch.bfloat16: (torch.bfloat16, torch.float32),
        }
        need(
            scale[0].dtype in wanted.get(out, (torch.float32, torch.bfloat16)),
            f"scale is {scale[0].dtype} for {out}",
        )
        need(
            not tokens or tokens[0].dtype == torch.float32 and out != torch.int8,
            "per_token_scale is float32, for floats",
        )
        return
    need_dtype("x", x, *FLOATS)
    need(not scale and not tokens, "scales are for int8")
    if given["antiquant_scale"]:
        undo, shift = given["antiquant_scale"][0], (given["antiquant_offset"] or [None])[0]
        need(
            weight.dtype in (torch.int8, torch.int32) and undo.dtype == x.dtype,
            "antiquant: int8 or int4 weight, antiquant_scale like x",
        )
        need(
            shift is not None and shift.dtype == undo.dtype and shift.shape == undo.shape,
            "antiquant_offset is like antiquant_scale",
        )
        need(weight.dtype == torch.int32 or undo.dim() == 2, "antiquant: scales by group are for int4")
        need(
            undo.dim() == 2 or undo.dim() == 3 and weight.shape[0] % undo.shape[1] == 0,
            f"{undo.shape[1]} groups of {weight.shape[0]}",
        )
        return
    need(weight.dtype == x.dtype and out == x.dtype, f"x is {x.dtype}, weight {weight.dtype}, output {out}")
    if given["bias"]:
        bias, shape = given["bias"][0], (given["groups"], weight.shape[-1])
        need_dtype("bias", bias, torch.float32 if x.dtype == torch.bfloat16 else x.dtype)
        need(bias.shape == shape, f"bias {tuple(bias.shape)}: {shape}, a row for each group")


def check_narrow(x: Tensor, weight: Tensor, given: dict[str, Any], out: torch.dtype) -> None:
    """int8 times int4 with a scale for each output: op-plugin's documents of
    npu_grouped_matmul_swiglu_quant_v2, and its tests of this operator; scales by group are not emulated."""
    scale, bias, tokens = given["scale"], given["bias"], given["per_token_scale"]
    groups, outs = given["groups"], 8 * weight.shape[-1]
    need(scale and bias and tokens, "int8 by int4 needs scale, bias and per_token_scale")
    need(
        scale[0].dtype == torch.int64 and scale[0].shape == (groups, 1, outs),
        "scale is int64 (E, 1, N), of words of float32",
    )
    need_values(lambda: (scale[0] >> 32 == 0).all(), "the upper half of a scale is 0")
    need(
        bias[0].dtype == torch.float32 and bias[0].shape == (groups, outs),
        "bias is float32 (E, N): 8 times the sums of weights",
    )
    need(tokens[0].dtype == torch.float32, "per_token_scale is float32")
    need(given["kind"] == 1, "int8 by int4 counts rows: group_list_type 1")
    need(out in HALVES or (out == torch.float32 and not Limits.strict), f"int8 by int4 gives no {out}")
    need(
        x.shape[1] <= 18432 and x.shape[1] % 64 == 0 or not Limits.strict and x.shape[1] <= 18432,
        f"int8 by int4: k {x.shape[1]} is a multiple of 64 up to 18432",
    )


def check_tiles(weight: Tensor) -> None:
    """The inner axis of a weight in NZ: a multiple of 32 bytes."""
    if format_of(weight) == NZ:
        lanes = 32 // weight.element_size()
        need(
            weight.shape[-1] % lanes == 0,
            f"the inner axis of a weight in NZ, {weight.shape[-1]}, is no multiple of {lanes}",
        )


OPTIONAL = ("bias", "scale", "offset", "antiquant_scale", "antiquant_offset", "per_token_scale")


@operator("npu::npu_grouped_matmul")
def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: Any = None,
    tuning_config: Any = None,
    **rest: Any,
) -> list[Tensor]:
    """One x, grouped along its rows, and one result; the forms with several are not emulated."""
    given = {name: rest.pop(name, None) for name in OPTIONAL}
    need(
        all(value is None for value in rest.values()) and given["offset"] is None,
        f"not emulated: {list(rest)}",
    )
    need(
        len(x) == 1 and group_type == 0 and split_item in (2, 3),
        "emulated: one x, group_type 0 and split_item 2 or 3",
    )
    need(group_list is not None, "group_type 0 needs group_list")
    need(act_type in (None, 0), "an activation is not emulated")
    rows = x[0]
    need(rows.dim() == 2 and rows.is_contiguous(), "x is 2-D and not transposed")
    assert group_list is not None
    ends = group_ends(group_list, group_list_type or 0, rows.shape[0])
    matrices = weights_of(weight, len(ends))
    out = dtype_of(output_dtype, rows.dtype)
    check_dtypes(rows, matrices[0], given | {"groups": len(ends), "kind": group_list_type}, out)
    need(
        matrices[0].shape[0] == rows.shape[1], f"k is {rows.shape[1]} in x, {matrices[0].shape[0]} in weight"
    )
    need(rows.shape[1] < LIMIT and matrices[0].shape[1] < LIMIT, f"k and n are below {LIMIT}")
    check_tiles(weight[0])
    if given["per_token_scale"]:
        need_shape("per_token_scale", given["per_token_scale"][0], rows.shape[0])
    # of int4, in words of eight
    width = matrices[0].shape[1] * (8 if matrices[0].dtype == torch.int32 else 1)
    y = garbage(rows.shape[0], width, dtype=out)
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            y[start:end] = product(rows[start:end], matrices[index], index, given, slice(start, end), out)
    if rows.dtype == torch.int8 and matrices[0].dtype == torch.int32:
        rows.fill_(113)  # op-plugin's tests say that it is overwritten
    return [y]


def product(x: Tensor, w: Tensor, index: int, given: dict[str, Any], rows: slice, out: torch.dtype) -> Tensor:
    """The product of one group, with its scales and biases."""
    bias, scale = of_group(given["bias"], index), of_group(given["scale"], index)
    if x.dtype != torch.int8:
        whole, undo = (
            (nibbles(w) if w.dtype == torch.int32 else w).float(),
            of_group(given["antiquant_scale"], index),
        )
        if undo is not None:
            shift = of_group(given["antiquant_offset"], index)
            assert shift is not None
            size = whole.shape[0] // undo.shape[0] if undo.dim() == 2 else 0
            undo, shift = (
                each.float().repeat_interleave(size, 0) if size else each.float() for each in (undo, shift)
            )
            whole = (whole + shift) * undo
        y = x.float() @ whole
        return (y if bias is None else y + bias.float()).to(out)
    if w.dtype == torch.int32:
        assert bias is not None and scale is not None
        high, low = (
            part.double() @ nibbles(w).double() * scale_values(scale) for part in (x >> 4, (x & 15) - 8)
        )
        return ((16 * high + low + bias.double()) * given["per_token_scale"][0][rows].double()[:, None]).to(
            out
        )
    total = x.double() @ w.double()
    total = total if bias is None else total + bias.double()
    if scale is None:
        return total.to(torch.int32)
    total = total * scale_values(scale)
    if given["per_token_scale"]:
        total = total * given["per_token_scale"][0][rows].double()[:, None]
    return rounded(total) if out == torch.int8 else total.to(out)


@operator("npu::npu_grouped_matmul_swiglu_quant")
def grouped_matmul_swiglu_quant(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor,
    *,
    bias: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """group_list rises to the number of valid rows."""
    need(bias is None and offset is None, "bias and offset are not supported")
    need(x.dtype == weight.dtype == torch.int8, "x and weight are int8")
    need(x.dim() == 2 and weight.dim() == 3, "x is 2-D; weight 3-D here, as npu_format_cast made it")
    need(
        format_of(weight) == NZ, "weight is taken for FRACTAL_NZ whatever it is: cast it with npu_format_cast"
    )
    need_dtype("weight_scale", weight_scale, *FLOATS)
    need_dtype("x_scale", x_scale, torch.float32)
    need_shape("weight_scale", weight_scale, weight.shape[0], weight.shape[2])
    need_shape("x_scale", x_scale, x.shape[0])
    need(x.shape[1] == weight.shape[1], f"k is {x.shape[1]} in x, {weight.shape[1]} in weight")
    need(group_list.numel() == weight.shape[0], f"{group_list.numel()} groups for {weight.shape[0]} weights")
    ends = group_ends(group_list, 0, x.shape[0])
    y = garbage(x.shape[0], weight.shape[2] // 2, dtype=torch.int8)
    scales = garbage(x.shape[0], dtype=torch.float32)
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        total = (
            (x[start:end].double() @ weight[index].double())
            * weight_scale[index].double()
            * x_scale[start:end].double()[:, None]
        )
        gate, up = total.float().chunk(2, -1)
        y[start:end], scales[start:end] = quantised_rows(F.silu(gate) * up)
    return y, scales, torch.empty(0)


@operator("npu::npu_grouped_matmul_swiglu_quant_v2")
def grouped_matmul_swiglu_quant_v2(
    x: Tensor,
    weight: list[Tensor],
    weight_scale: list[Tensor],
    x_scale: Tensor,
    group_list: Tensor,
    *,
    dequant_mode: int | None = 0,
    dequant_dtype: int | None = 6,
    quant_mode: int | None = 0,
    quant_dtype: int | None = 1,
    group_list_type: int | None = 0,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    """int8 weights of one tensor. op-plugin's documents (7.3.0) and aclnnGroupedMatmulSwigluQuantWeightNzV2:
    A2 and A3."""
    need(all(value is None for value in rest.values()), f"not emulated: {list(rest)}")
    need(len(weight) == len(weight_scale) == 1, "emulated: one tensor of all weights")
    need(dequant_mode == quant_mode == 0, "int8 weights: dequant_mode and quant_mode are 0")
    need((dequant_dtype, quant_dtype) == (6, 1), "emulated: dtypes keep their defaults")
    need_dtype("weight_scale", weight_scale[0], torch.float32)
    need(x.shape[1] < LIMIT and weight[0].shape[2] <= 10240, "k is below 65536, n at most 10240")
    ends = group_ends(group_list, group_list_type or 0, x.shape[0])
    y, scales, _ = grouped_matmul_swiglu_quant(
        x, weight[0], torch.tensor(ends, dtype=torch.int64), weight_scale[0], x_scale
    )
    return y, scales


@operator("npu::npu_dequant_swiglu_quant")
def dequant_swiglu_quant(
    x: Tensor,
    *,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    dst_type: Any = None,
    round_mode: Any = None,
    activate_dim: Any = None,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """npu_dequant_swiglu_quant."""
    need(x.dim() == 2 and x.shape[1] % 2 == 0, f"x {tuple(x.shape)}: 2-D, the last dimension even")
    need_dtype("x", x, torch.int32, *HALVES, *(() if Limits.strict else (torch.float32,)))
    need(
        quant_mode == 1 and quant_offset is None and swiglu_mode == 0,
        "emulated: quant_mode 1 without offset, swiglu_mode 0",
    )
    need(dst_type in (None, 1) and activate_dim in (None, -1, 1), "emulated: int8, along the last dimension")
    need(bias is None, "bias is not emulated")
    half = x.shape[1] // 2
    ends = [x.shape[0]]
    if group_index is not None:
        need_dtype("group_index", group_index, torch.int64)
        need(
            half <= 10496 and half % 64 == 0 or not Limits.strict,
            f"with group_index: H {half} is a multiple of 64, at most 10496",
        )
        ends = group_index.cumsum(0).tolist()
        need_values(
            lambda: (group_index >= 0).all() and ends[-1] <= x.shape[0],
            f"group_index ends at {ends[-1]} of {x.shape[0]}",
        )
    need(
        (weight_scale is not None) == (x.dtype == torch.int32),
        "weight_scale is for int32, and int32 needs it",
    )
    if x.dtype == torch.int32:
        assert weight_scale is not None
        need_dtype("weight_scale", weight_scale, torch.float32)
        need_shape("weight_scale", weight_scale, len(ends), 2 * half)
        need(activation_scale is not None, "int32 needs activation_scale")
    need(quant_scale is None or quant_scale.shape == (len(ends), half), "quant_scale is (groups, H)")
    y, scales = garbage(x.shape[0], half, dtype=torch.int8), garbage(x.shape[0], dtype=torch.float32)
    for index, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        values = x[start:end].float()
        if weight_scale is not None and activation_scale is not None:
            values = values * weight_scale[index] * activation_scale.view(-1)[start:end, None]
        first, second = values.chunk(2, -1)
        turned = F.silu(first) * second if activate_left else F.silu(second) * first
        y[start:end], scales[start:end] = quantised_rows(
            turned if quant_scale is None else turned * quant_scale[index].float()
        )
    return y, scales
