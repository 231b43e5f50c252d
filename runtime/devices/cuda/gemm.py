"""Launches of matrix products: activations quantized as a scheme wants them, then multiplied, for one weight
or for the experts of many slots."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm
from triton import knobs

from runtime.devices.cuda import gemm_tiles
from runtime.devices.cuda.fragments import FRAGMENTS
from runtime.devices.cuda.gemm_tiles import TORCH_FROM, Tile, TileBytes, select_splits, select_tile
from runtime.devices.cuda.kernels.activation_quantization import (
    PART_ROWS,
    quantize_groups_kernel,
    quantize_rows_kernel,
)
from runtime.devices.cuda.kernels.epilogue import add_splits_kernel
from runtime.devices.cuda.kernels.gemm import gemm_kernel
from runtime.devices.cuda.kernels.launch import Gpu, dot_type, next_power_of_2
from runtime.devices.cuda.kernels.moe_permute import ExpertTiles
from runtime.devices.cuda.weights import SCALE_BLOCK, PackedWeight, pack_dense

ROW_BLOCK = 4096  # numbers of a row that a program quantizes at once
GROUP_BLOCK = 2048  # the same of groups


@dataclass(frozen=True, slots=True)
class GemmInputs:
    """Activations as a product takes them."""

    values: Tensor  # [rows, padded]; 8-bit floats as bytes
    factors: Tensor | None  # float32 [rows, groups or 1]: a product's sums are multiplied by them
    repeat: int  # slots that share a row
    full: Tensor | None = None  # what the product makes `values` and `factors` of; None: they are known


def quantize_activations(
    x: Tensor, packed: PackedWeight, ids: Tensor | None = None, repeat: int = 1
) -> GemmInputs:
    """x [rows, ins] in the form that products with `packed` take.

    `ids`: the expert of each slot, where `packed` are the weights of experts; `repeat` slots share a row of
    x.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    if not packed.inputs and packed.columns is None:
        return GemmInputs(x, None, repeat)
    dtype = x.dtype if not packed.inputs else torch.int8 if packed.inputs == "int8" else torch.uint8
    if packed.has_group_input_scales:
        return _quantize_groups(x, packed, ids, repeat, dtype)
    return _quantize_rows(x, packed, ids, repeat, dtype)


def _quantize_groups(
    x: Tensor, packed: PackedWeight, ids: Tensor | None, repeat: int, dtype: torch.dtype
) -> GemmInputs:
    """With a scale for each row and group of inputs."""
    assert packed.scales is not None
    groups = packed.scales.shape[1]
    values = x.new_empty(len(x), packed.padded, dtype=dtype)
    factors = x.new_empty(len(x), groups, dtype=torch.float32)
    block = next_power_of_2(packed.group, 16)
    together = max(1, min(next_power_of_2(groups), GROUP_BLOCK // block))
    quantize_groups_kernel[(len(x), triton.cdiv(groups, together))](
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
    return GemmInputs(values, factors, repeat)


def _quantize_rows(
    x: Tensor, packed: PackedWeight, ids: Tensor | None, repeat: int, dtype: torch.dtype
) -> GemmInputs:
    """With a scale for each row, or with none and reordered columns. Where experts want a token's activations
    differently, each slot gets a row; slots of other ranks' experts are left undefined."""
    is_per_slot = ids is not None and (repeat == 1 or packed.has_expert_inputs)
    rows, source_repeat = (len(x) * repeat, repeat) if is_per_slot else (len(x), 1)
    values = x.new_empty(rows, packed.padded, dtype=dtype)
    factors = x.new_empty(rows, 1, dtype=torch.float32)
    block = min(next_power_of_2(packed.padded, 16), ROW_BLOCK)
    quantize_rows_kernel[(rows,)](
        x,
        values.view(torch.uint8) if packed.inputs else values,
        factors,
        x if ids is None else ids,
        x if packed.columns is None else packed.columns,
        factors if packed.input_scale is None else packed.input_scale,
        factors if packed.input_offset is None else packed.input_offset,
        packed.ins,
        packed.padded,
        x.stride(0),
        len(packed.weight),
        KIND=packed.inputs,
        REPEAT=source_repeat,
        ROUTED=is_per_slot,
        ORDERED=packed.columns is not None,
        STATIC=packed.input_scale is not None,
        SHIFTED=packed.input_offset is not None,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )
    has_factors = packed.inputs and packed.sums is None
    return GemmInputs(values, factors if has_factors else None, 1 if is_per_slot else repeat)


def gemm(
    x: Tensor,
    packed: PackedWeight,
    gpu: Gpu,
    bias: Tensor | None = None,
    inputs: GemmInputs | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """The product with one weight: x [N, ins] -> [N, outs] in the dtype of x. `inputs`: x as `packed` takes
    it, where that is known already. `counters`: of `split_counters`; None: partial sums are added in a launch
    of their own, and inputs are quantized in one."""
    if len(x) == 0:
        return x.new_empty(0, packed.outs)
    if inputs is None and counters is not None and quantizes_inside(x, packed):
        values = x.new_empty(x.shape, dtype=torch.int8 if packed.inputs == "int8" else torch.uint8)
        inputs = GemmInputs(values, x.new_empty(len(x), 1, dtype=torch.float32), 1, x)
    inputs = quantize_activations(x, packed) if inputs is None else inputs
    return _multiply(inputs, packed, None, len(x), len(x), x.dtype, gpu, bias=bias, counters=counters)


def quantizes_inside(x: Tensor, packed: PackedWeight) -> bool:
    """Whether the programs of a product quantize x [N, ins] themselves: few rows, with a scale for each that
    is found in it."""
    is_found = packed.input_scale is None and packed.input_offset is None and packed.columns is None
    is_whole = packed.padded == packed.ins and not packed.has_group_input_scales and x.stride(-1) == 1
    return packed.inputs != "" and is_found and is_whole and len(x) <= PART_ROWS.value


def split_counters(gpu: Gpu, torch_device: torch.device) -> Tensor:
    """What programs of one product count themselves by, where the last one adds partial sums: as many numbers
    as there are programs where inputs are split. They are 0 between launches, and of one stream: on the side
    stream products are split only while the main stream computes experts, whose products are not."""
    return torch.zeros(gpu.num_cores, dtype=torch.int32, device=torch_device)


def gated_product(x: Tensor, weight: Tensor, gpu: Gpu) -> Tensor:
    """silu(gate(x)) * up(x) of x [N, ins] and a weight in full [2 * D, ins], gate above up -> [N, D]."""
    inputs, packed = GemmInputs(x if x.stride(-1) == 1 else x.contiguous(), None, 1), pack_dense(weight[None])
    return _multiply(inputs, packed, None, len(x), len(x), x.dtype, gpu, gate="silu")


def grouped_gemm(
    x: Tensor, packed: PackedWeight, tiles: ExpertTiles, ids: Tensor, repeat: int, gpu: Gpu, *, gate: str
) -> Tensor:
    """Products of slots with their experts' weights: x [T * k / repeat, ins] -> [T * k, outs], or [T * k,
    outs / 2] with a `gate`, silu or clamped. Rows of other ranks' experts are undefined."""
    inputs = quantize_activations(x, packed, ids, repeat)
    rows, bias = ids.numel(), packed.biases
    return _multiply(inputs, packed, tiles, rows, tiles.size or 1, x.dtype, gpu, bias=bias, gate=gate)


def _multiply(
    inputs: GemmInputs,
    packed: PackedWeight,
    tiles: ExpertTiles | None,
    num_rows: int,
    tile_rows: int,
    dtype: torch.dtype,
    gpu: Gpu,
    bias: Tensor | None = None,
    gate: str = "",
    counters: Tensor | None = None,
) -> Tensor:
    """Sizes the launch, and adds the parts where the inputs are split."""
    outs = packed.outs // 2 if gate else packed.outs
    values = inputs.values
    is_packed = packed.kind in ("codes4", *FRAGMENTS)
    tile_bytes = TileBytes(
        values.itemsize,
        0.5 if is_packed else packed.weight.itemsize,
        packed.k_block,
        is_packed,
        gate != "",
        not packed.inputs and values.dtype == torch.float32,
        packed.group > 0,
        packed.kind in FRAGMENTS,
    )
    tile = select_tile(tile_rows, outs, tile_bytes, gpu)
    size = tile.m if tiles is None else tiles.size or 16
    num_tiles = triton.cdiv(num_rows, size) if tiles is None else len(tiles.expert_ids.view(-1))
    programs = num_tiles * triton.cdiv(outs, tile.n)
    is_whole = tiles is not None or gate != ""
    splits = 1 if is_whole else select_splits(programs, num_rows, packed.padded // tile.k, gpu)
    out = values.new_empty(num_rows, outs, dtype=dtype)
    grid = _Grid(num_tiles, programs, splits, size, tile, packed.inputs == "fp8" and gpu.has_fp8)
    if splits == 1:
        _launch_kernel(out, None, None, inputs, packed, tiles, grid, dtype, bias, gate)
        return out
    is_exact = packed.inputs == "int8" and packed.group == 0
    parts = values.new_empty(splits, num_rows, outs, dtype=torch.int32 if is_exact else torch.float32)
    merged = None if counters is None else out
    _launch_kernel(parts, merged, counters, inputs, packed, tiles, grid, dtype, bias, gate)
    if merged is not None:
        return out
    add_splits(out, parts, None if packed.has_group_input_scales else inputs.factors, packed, bias)
    return out


@dataclass(frozen=True, slots=True)
class _Grid:
    """How a product is cut into programs."""

    num_tiles: int  # of rows
    programs: int  # tiles of rows times tiles of outputs
    splits: int  # of the inputs
    rows: int  # of a tile
    tile: Tile
    has_fp8: bool  # both operands are 8-bit floats, and the tensor cores multiply them


def _launch_kernel(
    out: Tensor,
    merged: Tensor | None,
    counters: Tensor | None,
    inputs: GemmInputs,
    packed: PackedWeight,
    tiles: ExpertTiles | None,
    grid: _Grid,
    dtype: torch.dtype,
    bias: Tensor | None,
    gate: str,
) -> None:
    """out [rows, outs], or partial sums [splits, rows, outs], which may become `merged` [rows, outs]."""
    values, weight, tile = inputs.values, packed.weight, grid.tile
    blocks = packed.blocks if _takes_blocks(packed, tile, gate) else None
    scales = packed.scales if blocks is None else blocks
    optional = (inputs.factors, scales, packed.zeros, packed.sums, bias)
    pointers = (weight if tensor is None else tensor for tensor in optional)
    width = values.shape[1] if packed.kind in FRAGMENTS else packed.padded
    slots, expert_ids = (weight, weight) if tiles is None else (tiles.slots, tiles.expert_ids)
    gemm_kernel[(grid.programs, grid.splits)](
        out,
        out if merged is None else merged,
        out if counters is None else counters,
        values,
        weight,
        *pointers,
        slots,
        expert_ids,
        values if inputs.full is None else inputs.full,
        out.shape[-2],
        grid.num_tiles,
        out.shape[-1],
        width,
        values.stride(0),
        values.stride(0) if inputs.full is None else inputs.full.stride(0),
        len(weight),
        1 if packed.scales is None else packed.scales.shape[1],
        1 if blocks is None else blocks.shape[2],
        KIND=packed.kind,
        INPUTS=packed.inputs,
        GROUP=packed.group,
        GROUPED_INPUTS=packed.has_group_input_scales,
        QUANTIZES=inputs.full is not None,
        HAS_ZEROS=packed.zeros is not None,
        FACTORED=inputs.factors is not None and not packed.has_group_input_scales,
        SCALED=packed.has_output_scales,
        HAS_SUMS=packed.sums is not None,
        HAS_BIAS=bias is not None,
        GATE=gate,
        ROUTED="" if tiles is None else "tiles" if tiles.size else "single",
        REPEAT=inputs.repeat,
        BLOCKED=blocks is not None,
        SPLIT=grid.splits > 1,
        MERGES=merged is not None,
        EVEN=width % tile.k == 0,
        NATIVE=grid.has_fp8 and not knobs.runtime.interpret,
        M=grid.rows,
        N=tile.n,
        K=tile.k,
        DOT=dot_type(torch.float16 if packed.inputs == "fp8" else dtype),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _takes_blocks(packed: PackedWeight, tile: Tile, gate: str) -> bool:
    """Whether a program's outputs have one scale for each block of inputs that it takes."""
    is_whole = not gate or packed.outs // 2 % SCALE_BLOCK == 0
    return gemm_tiles.SUMS_BY_BLOCK and packed.blocks is not None and tile.k == SCALE_BLOCK and is_whole


def add_splits(
    out: Tensor, parts: Tensor, factors: Tensor | None, packed: PackedWeight, bias: Tensor | None
) -> None:
    """Adds partial sums [splits, rows, outs] to out [rows, outs], and applies factors, scales and bias."""
    block = min(1024, next_power_of_2(packed.outs, 16))
    pointers = [parts if t is None else t for t in (factors, packed.scales, packed.sums, bias)]
    add_splits_kernel[(len(out), triton.cdiv(packed.outs, block))](
        out,
        parts,
        *pointers,
        len(out),
        packed.outs,
        FACTORED=factors is not None,
        SCALED=packed.has_output_scales,
        HAS_SUMS=packed.sums is not None,
        HAS_BIAS=bias is not None,
        SPLITS=len(parts),
        BLOCK=block,
        num_warps=4,
    )


def supports_torch_gemm(packed: PackedWeight, rows: int, dtype: torch.dtype, gpu: Gpu) -> bool:
    """Whether torch has a product for this weight and so many rows, by what its kernels ask for in shapes and
    dtypes; not whether it is faster."""
    if len(packed.weight) != 1 or packed.outs % 16 or packed.ins % 16:
        return False
    if packed.kind == "int8":
        return rows > 16
    has_scales = packed.group == 0 or (packed.blocks is not None and gpu.has_block_scales)
    is_fp8 = packed.kind == "fp8" and packed.inputs == "fp8" and has_scales
    return is_fp8 and gpu.has_fp8 and dtype == torch.bfloat16


def linear(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None,
    gpu: Gpu,
    backend: str,
    inputs: GemmInputs | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """See Ops.linear. `backend`: one of gemm_tiles.NAMES, for 8-bit floats. `inputs` and `counters`: as of
    `gemm`."""
    least = TORCH_FROM.get(packed.scheme)
    if packed.kind == "fp8" and backend != "by_rows":
        least = 1 if backend == "cutlass" else None
    if least is None or len(x) < least or not supports_torch_gemm(packed, len(x), x.dtype, gpu):
        return gemm(x, packed, gpu, bias, inputs, counters)
    return torch_gemm(x, packed, bias, inputs)


def torch_gemm(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, inputs: GemmInputs | None = None
) -> Tensor:
    """The product with one weight by torch's kernels; see supports_torch_gemm. `inputs`: as of `gemm`."""
    assert packed.scales is not None
    inputs = quantize_activations(x, packed) if inputs is None else inputs
    if packed.kind == "int8":
        parts = torch._int_mm(inputs.values, packed.weight[0].T)
        out = x.new_empty(len(x), packed.outs)
        add_splits(out, parts.unsqueeze(0), inputs.factors, packed, bias)
        return out
    assert inputs.factors is not None
    if packed.group:
        out = _torch_block_gemm(inputs.values, inputs.factors, packed)
        return out if bias is None else out + bias
    out = torch._scaled_mm(
        inputs.values.view(torch.float8_e4m3fn),
        packed.weight[0].view(torch.float8_e4m3fn).T,
        scale_a=inputs.factors,
        scale_b=packed.scales[0],
        out_dtype=torch.bfloat16,
    )
    return out if bias is None else out + bias


def _torch_block_gemm(values: Tensor, factors: Tensor, packed: PackedWeight) -> Tensor:
    """Bytes [rows, ins] with scales [rows, groups] times a weight with scales of blocks -> bfloat16 [rows,
    outs]. torch takes the scales of a group side by side (the layouts of cuBLAS: "Scaling Factors Layouts"),
    and its scales of rows begin at multiples of 16 bytes."""
    assert packed.blocks is not None
    rows, whole = len(values), -(-len(values) // 4) * 4
    by_group = factors.new_empty(factors.shape[1], whole)
    by_group[:, :rows].copy_(factors.T)
    if rows != whole:
        values = torch.nn.functional.pad(values, (0, 0, 0, whole - rows))
    out: Tensor = scaled_mm(
        values.view(torch.float8_e4m3fn),
        packed.weight[0].view(torch.float8_e4m3fn).T,
        by_group.T,
        ScalingType.BlockWise1x128,
        packed.blocks[0].T,
        ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return out[:rows]
