"""Matrix products of activations with weights of any scheme, for one weight or for those of many experts, in
one kernel. What becomes of their sums is in epilogue.py.

A program has a tile of M rows and N outputs (with GATED, N gates and the N numbers that they gate) and walks
the inputs K at a time. Numbers of few bits are multiplied in the form that the tensor cores take: int8 with
int8; 8-bit floats as they are where the GPU multiplies them, else as float16, which holds each of them
exactly; 4-bit and 8-bit codes minus their zero point in the dtype of the activations, which holds these
exactly too. So a product is exact up to its sum, and scales are applied to sums: those of a group after the
group, the others at the end.

4-bit codes are packed for this (weights.py): a byte has the codes of two inputs that are K apart, so that
both halves of what a program reads are multiplied with contiguous activations. With few rows the inputs are
split among several programs, so that the whole GPU reads weights; their partial sums are added in a fixed
order, in a second launch or by the last program of a tile that is done. Other codes of 4 bits are in
fragments (fragments.py).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from runtime.devices.cuda.kernels.activation_quantization import quantize_part
from runtime.devices.cuda.kernels.epilogue import Epilogue, add_parts, store_outputs
from runtime.devices.cuda.kernels.fp8_bytes import from_fp8
from runtime.devices.cuda.kernels.fragments import BLOCK, WORDS, sum_fragments
from runtime.devices.cuda.kernels.last_program import is_last_program

# tiles of rows that run one after the other for the same outputs, so that they find weights in the L2 cache
GROUP_M: tl.constexpr = tl.constexpr(8)


class Format(NamedTuple):
    """Compile-time facts about weights and activations."""

    KIND: tl.constexpr  # of weights: plain, fp8, int8, codes4, codes8, fragments4, mxfp4
    INPUTS: tl.constexpr  # of quantized activations: fp8, int8, or "" for activations in full
    GROUP: tl.constexpr  # inputs that share a scale; 0: all
    GROUPED_INPUTS: tl.constexpr  # whether activations have a scale for each group
    HAS_ZEROS: tl.constexpr  # whether codes have zero points of their own
    EVEN: tl.constexpr  # whether K divides the number of inputs
    NATIVE: tl.constexpr  # whether the tensor cores multiply 8-bit floats
    M: tl.constexpr
    N: tl.constexpr
    K: tl.constexpr
    DOT: tl.constexpr  # dtype of products of floats


class Weights(NamedTuple):
    """Pointers to one matrix [rows, ins] for N of its rows: numbers, and scales and zero points by group."""

    at: tl.tensor  # [N]
    scales: tl.tensor  # [N]
    zeros: tl.tensor  # [N]


@triton.jit
def _to_operand(raw: tl.tensor, zeros: tl.tensor, is_out: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """Stored weights [N, K] as the matrix product takes them, without their scales."""
    if F.KIND == "plain":
        return raw.to(F.DOT)
    elif F.NATIVE:
        return raw.to(tl.float8e4nv, bitcast=True)
    elif F.KIND == "fp8":
        return from_fp8(raw, "e4m3").to(F.DOT)
    elif F.KIND == "int8":
        return raw
    else:
        if F.HAS_ZEROS:
            codes = raw.to(tl.int16) - tl.load(zeros, mask=is_out, other=0).to(tl.int16)[:, None]
        else:
            codes = raw.to(tl.int16) - (8 if F.KIND == "codes4" else 128)
        if F.INPUTS == "int8":
            return codes.to(tl.int8)
        else:
            return codes.to(tl.float32).to(F.DOT)


@triton.jit
def _dot(x: tl.tensor, w: tl.tensor, acc: tl.tensor, F: tl.constexpr) -> tl.tensor:
    """acc + x w^T; `acc` may be None."""
    if F.NATIVE:  # the tensor cores' own sums of 8-bit floats are short: none is longer than K
        return tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=F.K)
    elif F.INPUTS == "int8":
        return tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="tf32x3")


@triton.jit
def _load_inputs(
    x: tl.tensor, at: tl.tensor, ins: tl.tensor, is_row: tl.tensor, F: tl.constexpr
) -> tl.tensor:
    """Activations [M, K] from column `at` on, of rows that begin at `x` [M]."""
    columns = at + tl.arange(0, F.K)
    mask = is_row[:, None] if F.EVEN else is_row[:, None] & (columns < ins)[None, :]
    values = tl.load(x[:, None] + columns[None, :], mask=mask, other=0)
    if F.NATIVE:
        return values.to(tl.float8e4nv, bitcast=True)
    elif F.INPUTS == "fp8":
        return from_fp8(values, "e4m3").to(F.DOT)
    elif F.INPUTS == "int8":
        return values
    else:
        return values.to(F.DOT)


@triton.jit
def _add_scaled(
    acc: tl.tensor, part: tl.tensor, factor: tl.tensor, scales: tl.tensor, is_out: tl.tensor, F: tl.constexpr
) -> tl.tensor:
    """acc plus the scaled sums of one group."""
    part = part.to(tl.float32) * tl.load(scales, mask=is_out, other=0.0)[None, :]
    return acc + (part * factor[:, None] if F.GROUPED_INPUTS else part)


@triton.jit
def _load_weights(
    at: tl.tensor, block: tl.tensor, ins: tl.tensor, is_out: tl.tensor, F: tl.constexpr
) -> tl.tensor:
    """Stored weights [N, K] of one block of columns."""
    inside = tl.arange(0, F.K)
    mask = is_out[:, None] if F.EVEN else is_out[:, None] & (block * F.K + inside < ins)[None, :]
    return tl.load(at[:, None] + block * F.K + inside[None, :], mask=mask, other=0)


@triton.jit
def _accumulate(
    x: tl.tensor,
    weights: Weights,
    gated_weights: Weights,
    factors: tl.tensor,
    is_row: tl.tensor,
    is_out: tl.tensor,
    ins: tl.tensor,
    rows: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    GATED: tl.constexpr,
    F: tl.constexpr,
) -> tuple:
    """Sums [M, N] over blocks [begin, end) of the inputs: of the outputs, and of what they gate. Scales and
    zero points of a group are `rows` behind those of the group before it."""
    HALVES: tl.constexpr = 2 if F.KIND == "codes4" else 1
    GROUPED: tl.constexpr = F.GROUP > 0
    ALONE: tl.constexpr = F.GROUP % (2 * F.K) != 0  # whether the two halves of a byte are of two groups
    SUM: tl.constexpr = tl.int32 if F.INPUTS == "int8" and F.GROUP == 0 else tl.float32
    acc = tl.zeros((F.M, F.N), SUM)
    gated = tl.zeros((F.M, F.N), SUM) if GATED else acc
    factor = is_row.to(tl.float32)
    for block in tl.range(begin, end):
        raw = _load_weights(weights.at, block, ins, is_out, F)
        gated_raw = _load_weights(gated_weights.at, block, ins, is_out, F) if GATED else raw
        part, gated_part = acc, gated
        for half in tl.static_range(HALVES):
            at = (block * HALVES + half) * F.K
            group = (at // F.GROUP if GROUPED else 0) * rows
            a = _load_inputs(x, at, ins, is_row, F)
            stored = raw if HALVES == 1 else (raw & 15 if half == 0 else raw >> 4)
            w = _to_operand(stored, weights.zeros + group, is_out, F)
            part = _dot(a, w, None if GROUPED and (half == 0 or ALONE) else part, F)
            if GATED:
                stored = gated_raw if HALVES == 1 else (gated_raw & 15 if half == 0 else gated_raw >> 4)
                w = _to_operand(stored, gated_weights.zeros + group, is_out, F)
                gated_part = _dot(a, w, None if GROUPED and (half == 0 or ALONE) else gated_part, F)
            if GROUPED and (half == HALVES - 1 or ALONE):
                if F.GROUPED_INPUTS:
                    factor = tl.load(factors + at // F.GROUP, mask=is_row, other=0.0)
                acc = _add_scaled(acc, part, factor, weights.scales + group, is_out, F)
                if GATED:
                    gated = _add_scaled(gated, gated_part, factor, gated_weights.scales + group, is_out, F)
        if GROUPED == 0:
            acc, gated = part, gated_part
    return acc, gated


@triton.jit
def _block_factors(
    factors: tl.tensor, scales: tl.tensor, block: tl.tensor, end: tl.tensor, is_row: tl.tensor
) -> tl.tensor:
    """What the sums [M, N] of a block of inputs are multiplied by, [M]. 0 beyond the last."""
    is_there = block < end
    factor = tl.load(factors + block, mask=is_row & is_there, other=0.0)
    return factor * tl.load(scales + block, mask=is_there, other=0.0)


@triton.jit
def _accumulate_blocks(
    x: tl.tensor,
    weights: Weights,
    gated_weights: Weights,
    factors: tl.tensor,
    is_row: tl.tensor,
    is_out: tl.tensor,
    ins: tl.tensor,
    rows: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    GATED: tl.constexpr,
    F: tl.constexpr,
) -> tuple:
    """Sums as of `_accumulate`, where a block of K inputs and all outputs of the program have one scale:
    `scales` is a pointer to the first of them, and `rows` is not used. A block's sums are added by one
    multiplication, with factors that were read while the block before was multiplied."""
    acc = tl.zeros((F.M, F.N), tl.float32)
    gated = tl.zeros((F.M, F.N), tl.float32) if GATED else acc
    ahead = _block_factors(factors, weights.scales, begin, end, is_row)
    gated_ahead = _block_factors(factors, gated_weights.scales, begin, end, is_row) if GATED else ahead
    for block in tl.range(begin, end):
        factor, gated_factor = ahead, gated_ahead
        a = _load_inputs(x, block * F.K, ins, is_row, F)
        w = _to_operand(_load_weights(weights.at, block, ins, is_out, F), weights.zeros, is_out, F)
        ahead = _block_factors(factors, weights.scales, block + 1, end, is_row)
        acc += _dot(a, w, None, F) * factor[:, None]
        if GATED:
            gated_raw = _load_weights(gated_weights.at, block, ins, is_out, F)
            w = _to_operand(gated_raw, gated_weights.zeros, is_out, F)
            gated_ahead = _block_factors(factors, gated_weights.scales, block + 1, end, is_row)
            gated += _dot(a, w, None, F) * gated_factor[:, None]
    return acc, gated


@triton.jit
def _sums(
    x: tl.tensor,
    weights: Weights,
    gated_weights: Weights,
    factors: tl.tensor,
    is_row: tl.tensor,
    is_out: tl.tensor,
    ins: tl.tensor,
    rows: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    GATED: tl.constexpr,
    BLOCKED: tl.constexpr,
    F: tl.constexpr,
) -> tuple:
    """Sums [M, N] of the outputs and of what they gate, as the format of the weights wants them."""
    where = is_row, is_out, ins, rows, begin, end
    if F.KIND == "fragments4" or F.KIND == "mxfp4":
        return sum_fragments(x, weights, gated_weights, *where, GATED, F)
    elif BLOCKED:
        return _accumulate_blocks(x, weights, gated_weights, factors, *where, GATED, F)
    else:
        return _accumulate(x, weights, gated_weights, factors, *where, GATED, F)


@triton.jit
def _tile_of(num_tiles: tl.tensor, columns: tl.tensor) -> tuple:
    """Which tile of rows and which of outputs this program has."""
    index = tl.program_id(0)
    first = index // (GROUP_M * columns) * GROUP_M
    height = tl.minimum(num_tiles - first, GROUP_M)
    return first + index % (GROUP_M * columns) % height, index % (GROUP_M * columns) // height


@triton.jit
def _rows_of(
    tile: tl.tensor,
    slots: tl.tensor,
    expert_ids: tl.tensor,
    num_rows: tl.tensor,
    ROUTED: tl.constexpr,
    M: tl.constexpr,
) -> tuple:
    """The expert of a tile, its rows [M], and which of them are there."""
    index = tl.arange(0, M)
    if ROUTED == "":
        return (tile * 0).to(tl.int64), tile * M + index, tile * M + index < num_rows
    elif ROUTED == "tiles":
        row = tl.load(slots + tile * M + index)
        return tl.load(expert_ids + tile).to(tl.int64), row, row < num_rows
    else:
        return tl.load(expert_ids + tile).to(tl.int64), tile + index * 0, index == 0


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def gemm_kernel(
    out: tl.tensor,
    merged: tl.tensor,
    counters: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    factors: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    slots: tl.tensor,
    expert_ids: tl.tensor,
    full: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    x_stride: tl.tensor,
    full_stride: tl.tensor,
    num_experts: tl.tensor,
    num_groups: tl.tensor,
    scale_stride: tl.tensor,
    KIND: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED_INPUTS: tl.constexpr,
    QUANTIZES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    FACTORED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ROUTED: tl.constexpr,
    REPEAT: tl.constexpr,
    BLOCKED: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGES: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid (tiles of rows * tiles of outputs, splits). Rows are those of x, or MoE slots, of which REPEAT
    share a row of x. GATE: "" for none, silu or clamped. ROUTED: "" for one weight, "tiles" for slots int32
    [tiles * M] and expert_ids int32 [tiles], "single" for one slot and expert per tile. BLOCKED: scales are
    of blocks, float32 [E, outs / 128, scale_stride], and K is 128. out [num_rows, outs]; or, with splits,
    uncorrected sums [splits, num_rows, outs], which with MERGES become `merged` [num_rows, outs]; then
    `counters`, int32 [programs], are 0 before and after the launch. QUANTIZES: x and factors are made of
    `full` [num_rows, ins]."""
    F: tl.constexpr = Format(KIND, INPUTS, GROUP, GROUPED_INPUTS, HAS_ZEROS, EVEN, NATIVE, M, N, K, DOT)
    E: tl.constexpr = Epilogue(FACTORED, SCALED, HAS_SUMS, HAS_BIAS)
    GATED: tl.constexpr = GATE != ""
    FRAGMENTS: tl.constexpr = KIND == "fragments4" or KIND == "mxfp4"
    tile, column = _tile_of(num_tiles, tl.cdiv(outs, N))
    expert, row, is_row = _rows_of(tile, slots, expert_ids, num_rows, ROUTED, M)
    if (expert >= 0) & (expert < num_experts):
        n = column * N + tl.arange(0, N)
        is_out = n < outs
        rows = outs * 2 if GATED else outs
        source = (row // REPEAT).to(tl.int64)
        width = ins // 2 if KIND == "codes4" else tl.cdiv(ins, BLOCK) * WORDS if FRAGMENTS else ins
        at = weight + expert * rows * width + n.to(tl.int64) * width
        blocks = tl.cdiv(ins, BLOCK) if FRAGMENTS else tl.cdiv(width, K)
        each = tl.cdiv(blocks, tl.num_programs(1)) if SPLIT else blocks
        begin = tl.program_id(1) * each
        if QUANTIZES:
            quantize_part(full, full_stride, x, factors, num_rows, ins, begin, each, F)
        grouped = expert * num_groups * rows + n
        if BLOCKED:
            scales_at = scales + (expert * (rows // 128) + column * N // 128) * scale_stride
            gated_scales = scales_at + outs // 128 * scale_stride
        else:
            scales_at, gated_scales = scales + grouped, scales + grouped + outs
        acc, gated = _sums(
            x + source * x_stride,
            Weights(at, scales_at, zeros + grouped),
            Weights(at + (expert * 0 + outs) * width, gated_scales, zeros + grouped + outs),
            factors + source * num_groups,
            is_row,
            is_out,
            ins,
            rows,
            begin,
            tl.minimum(begin + each, blocks),
            GATED,
            BLOCKED,
            F,
        )
        target = row.to(tl.int64)[:, None] * outs + n[None, :]
        mask = is_row[:, None] & is_out[None, :]
        lead = expert * rows + n
        corrections = factors, scales + lead, sums + lead, bias + lead
        where = source, outs, is_row, is_out, mask
        if SPLIT:
            size = num_rows.to(tl.int64) * outs
            tl.store(out + tl.program_id(1) * size + target, acc, mask=mask)
            if MERGES:
                if is_last_program(counters + tl.program_id(0), tl.num_programs(1)):
                    acc = add_parts(out + target, size, mask)
                    store_outputs(merged + target, acc, acc, *corrections, *where, GATE, E)
        else:
            store_outputs(out + target, acc, gated, *corrections, *where, GATE, E)
