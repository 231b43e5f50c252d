"""Launches of products: activations rounded as a scheme wants them, then multiplied, for one weight or for
the experts of many slots."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton import knobs

from runtime.devices.cuda.gemm_tiles import TORCH_FROM, Numbers, choose_splits, choose_tile
from runtime.devices.cuda.kernels.activation_quantization import by_group, by_row
from runtime.devices.cuda.kernels.gemm import add_parts, multiply
from runtime.devices.cuda.kernels.launch import Card, dot_type, power
from runtime.devices.cuda.kernels.moe_permute import Tiles
from runtime.devices.cuda.weights import Packed

ROW_BLOCK = 4096  # numbers of a row that a program rounds at once


@dataclass(frozen=True, slots=True)
class Inputs:
    """Activations as a product takes them."""

    values: Tensor  # [rows, padded]; 8-bit floats as bytes
    factors: Tensor | None  # float32 [rows, groups or 1]
    repeat: int  # slots that share a row


def prepare(x: Tensor, packed: Packed, ids: Tensor | None = None, repeat: int = 1) -> Inputs:
    """x [rows, ins]; of slots with experts `ids` it has a row for each `repeat` of them."""
    if not packed.inputs and packed.columns is None:
        return Inputs(x if x.stride(-1) == 1 else x.contiguous(), None, repeat)
    x = x if x.stride(-1) == 1 else x.contiguous()
    kept = x.dtype if not packed.inputs else torch.int8 if packed.inputs == "int8" else torch.uint8
    if packed.groups_inputs:
        assert packed.scales is not None
        groups = packed.scales.shape[1]
        values, factors = (
            x.new_empty(len(x), packed.padded, dtype=kept),
            x.new_empty(len(x), groups, dtype=torch.float32),
        )
        block = power(packed.group, 16)
        together = max(1, min(power(groups), 2048 // block))
        by_group[(len(x), triton.cdiv(groups, together))](
            x,
            values,
            factors,
            x if ids is None else ids,
            packed.ins,
            x.stride(0),
            groups,
            len(packed.weight),
            ROUTED=ids is not None and repeat == 1,
            GROUP=packed.source_group,
            WIDTH=packed.group,
            GROUPS=together,
            BLOCK=block,
            num_warps=4,
        )
        return Inputs(values, factors, repeat)
    # rows become, or are, slots; others' are not looked at
    spread = ids is not None and (repeat == 1 or packed.depends_on_expert)
    rows, turns = (len(x) * repeat, repeat) if spread else (len(x), 1)
    values, factors = x.new_empty(rows, packed.padded, dtype=kept), x.new_empty(rows, 1, dtype=torch.float32)
    block = min(power(packed.padded, 16), ROW_BLOCK)
    raw = values.view(torch.uint8) if packed.inputs else values
    by_row[(rows,)](
        x,
        raw,
        factors,
        x if ids is None else ids,
        x if packed.columns is None else packed.columns,
        factors if packed.given is None else packed.given,
        factors if packed.offsets is None else packed.offsets,
        packed.ins,
        packed.padded,
        x.stride(0),
        len(packed.weight),
        KIND=packed.inputs,
        REPEAT=turns,
        ROUTED=spread,
        ORDERED=packed.columns is not None,
        GIVEN=packed.given is not None,
        SHIFTED=packed.offsets is not None,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )
    return Inputs(
        values, None if not packed.inputs or packed.sums is not None else factors, 1 if spread else repeat
    )


def product(x: Tensor, packed: Packed, card: Card, bias: Tensor | None = None) -> Tensor:
    """One weight: x [N, ins] -> [N, outs] in the dtype of x."""
    if len(x) == 0:
        return x.new_empty(0, packed.outs)
    inputs = prepare(x, packed)
    return _multiply(inputs, packed, None, len(x), len(x), x.dtype, card, bias=bias)


def products(
    x: Tensor, packed: Packed, tiles: Tiles, ids: Tensor, repeat: int, card: Card, *, is_gated: bool
) -> Tensor:
    """Slots: x [T * k / repeat, ins] -> [T * k, outs], rows of other ranks' experts undefined; gated: [T * k,
    outs / 2]."""
    inputs = prepare(x, packed, ids, repeat)
    return _multiply(inputs, packed, tiles, ids.numel(), tiles.size or 1, x.dtype, card, is_gated=is_gated)


def _multiply(
    inputs: Inputs,
    packed: Packed,
    tiles: Tiles | None,
    num_rows: int,
    tile_rows: int,
    dtype: torch.dtype,
    card: Card,
    bias: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    outs = packed.outs // 2 if is_gated else packed.outs
    values, is_native = inputs.values, packed.inputs == "fp8" and card.has_fp8 and not knobs.runtime.interpret
    numbers = Numbers(
        values.itemsize,
        0.5 if packed.kind == "codes4" else packed.weight.itemsize,
        packed.piece,
        packed.kind == "codes4",
        is_gated,
        not packed.inputs and values.dtype == torch.float32,
        packed.group > 0,
    )
    tile = choose_tile(tile_rows, outs, numbers, card)
    size = tile.m if tiles is None else tiles.size or 16
    num_tiles = triton.cdiv(num_rows, size) if tiles is None else len(tiles.owners.view(-1))
    programs = num_tiles * triton.cdiv(outs, tile.n)
    splits = 1 if tiles is not None else choose_splits(programs, num_rows, packed.padded // tile.k, card)
    is_scaled, is_grouped = packed.scales is not None and packed.group == 0, packed.group > 0
    has_factors = inputs.factors is not None and not packed.groups_inputs
    is_exact = packed.inputs == "int8" and not is_grouped
    out = values.new_empty(num_rows, outs, dtype=dtype)
    target = (
        out
        if splits == 1
        else values.new_empty(splits, num_rows, outs, dtype=torch.int32 if is_exact else torch.float32)
    )
    weight = packed.weight
    given = (inputs.factors, packed.scales, packed.zeros, packed.sums, bias)
    factors, scales, zeros, sums, added = (weight if tensor is None else tensor for tensor in given)
    slots, owners = (weight, weight) if tiles is None else (tiles.slots, tiles.owners)
    multiply[(programs, splits)](
        target,
        values,
        weight,
        factors,
        scales,
        zeros,
        sums,
        added,
        slots,
        owners,
        num_rows,
        num_tiles,
        outs,
        packed.padded,
        values.stride(0),
        len(weight),
        1 if packed.scales is None else packed.scales.shape[1],
        KIND=packed.kind,
        INPUTS=packed.inputs,
        GROUP=packed.group,
        GROUPED_INPUTS=packed.groups_inputs,
        HAS_ZEROS=packed.zeros is not None,
        FACTORED=has_factors,
        SCALED=is_scaled,
        HAS_SUMS=packed.sums is not None,
        HAS_BIAS=bias is not None,
        GATED=is_gated,
        ROUTED="" if tiles is None else "tiles" if tiles.size else "single",
        REPEAT=inputs.repeat,
        SPLITS=splits,
        EVEN=packed.padded % tile.k == 0,
        NATIVE=is_native,
        M=size,
        N=tile.n,
        K=tile.k,
        DOT=dot_type(torch.float16 if packed.inputs == "fp8" else dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        finish(out, target, inputs.factors if has_factors else None, packed, bias)
    return out


def finish(out: Tensor, parts: Tensor, factors: Tensor | None, packed: Packed, bias: Tensor | None) -> None:
    """Parts [splits, rows, outs] of sums, added and scaled."""
    block = min(1024, power(packed.outs, 16))
    given = [parts if t is None else t for t in (factors, packed.scales, packed.sums, bias)]
    add_parts[(len(out), triton.cdiv(packed.outs, block))](
        out,
        parts,
        *given,
        len(out),
        packed.outs,
        FACTORED=factors is not None,
        SCALED=packed.scales is not None and packed.group == 0,
        HAS_SUMS=packed.sums is not None,
        HAS_BIAS=bias is not None,
        SPLITS=len(parts),
        BLOCK=block,
        num_warps=4,
    )


def takes_torch(packed: Packed, rows: int, dtype: torch.dtype, card: Card) -> bool:
    """Whether torch has a product for this weight and so many rows, whatever is faster: what its kernels ask
    for in shapes and types."""
    if len(packed.weight) != 1 or packed.outs % 16 or packed.ins % 16:
        return False
    if packed.kind == "int8":
        return rows > 16
    return (
        packed.kind == "fp8"
        and packed.inputs == "fp8"
        and packed.group == 0
        and card.has_fp8
        and dtype == torch.bfloat16
    )


def linear(x: Tensor, packed: Packed, bias: Tensor | None, card: Card, backend: str) -> Tensor:
    """See Ops.linear. `backend`: of choices.NAMES, for 8-bit floats."""
    least = TORCH_FROM.get(packed.scheme)
    if packed.kind == "fp8" and backend != "by_rows":
        least = 1 if backend == "cutlass" else None
    if least is None or len(x) < least or not takes_torch(packed, len(x), x.dtype, card):
        return product(x, packed, card, bias)
    return torch_product(x, packed, bias)


def torch_product(x: Tensor, packed: Packed, bias: Tensor | None) -> Tensor:
    """The same by torch's kernels."""
    assert packed.scales is not None
    inputs = prepare(x, packed)
    if packed.kind == "int8":
        parts = torch._int_mm(inputs.values, packed.weight[0].T)
        out = x.new_empty(len(x), packed.outs)
        finish(out, parts.unsqueeze(0), inputs.factors, packed, bias)
        return out
    assert inputs.factors is not None
    found = torch._scaled_mm(
        inputs.values.view(torch.float8_e4m3fn),
        packed.weight[0].view(torch.float8_e4m3fn).T,
        scale_a=inputs.factors,
        scale_b=packed.scales[0],
        out_dtype=torch.bfloat16,
    )
    return found if bias is None else found + bias
