"""Products of activations with weights of any scheme, for one weight or for those of many experts: one
kernel, and one that joins parts.

A program has a tile of M rows and N outputs, or of N gates and the N numbers that they gate, and walks the
inputs K at a time. Numbers of few bits meet as the tensor cores like them: int8 with int8; 8-bit floats as
they are where the card multiplies them, else as float16, which holds each of them exactly; codes less their
zero point as the type of the activations, which holds these exactly too. So a product is exact up to its sum,
and scales come behind it: those of groups after each group, the others at the end.

Codes of four bits are packed for this (weights.py): a byte has the codes of two inputs that are K apart, so
that both halves of what a program reads meet activations that lie side by side. With few rows the inputs are
split among several programs, so that all of the card reads weights; their parts are added in order.
"""

import triton
import triton.language as tl

from runtime.devices.cuda.kernels.fp8_bytes import widen

# tiles of rows that are neighbours in time, so that they find weights in the cache
BAND: tl.constexpr = tl.constexpr(8)


@triton.jit
def _known(
    raw: tl.tensor,
    zeros: tl.tensor,
    is_out: tl.tensor,
    KIND: tl.constexpr,
    INPUTS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
    NATIVE: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """[N, K] of weights as they lie -> as they are multiplied, but for their scales."""
    if KIND == "plain":
        return raw.to(DOT)
    elif NATIVE:
        return raw.to(tl.float8e4nv, bitcast=True)
    elif KIND == "fp8":
        return widen(raw, "e4m3").to(DOT)
    elif KIND == "int8":
        return raw
    else:
        if HAS_ZEROS:
            known = raw.to(tl.int16) - tl.load(zeros, mask=is_out, other=0).to(tl.int16)[:, None]
        else:
            known = raw.to(tl.int16) - MIDDLE
        if INPUTS == "int8":
            return known.to(tl.int8)
        else:
            return known.to(tl.float32).to(DOT)


@triton.jit
def _dot(
    x: tl.tensor, w: tl.tensor, acc: tl.tensor, INPUTS: tl.constexpr, NATIVE: tl.constexpr, K: tl.constexpr
) -> tl.tensor:
    if NATIVE:  # the tensor cores' own sums of 8-bit floats are short: none is longer than K
        return tl.dot(x, tl.trans(w), acc, max_num_imprecise_acc=K)
    elif INPUTS == "int8":
        return tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
    else:
        return tl.dot(x, tl.trans(w), acc, input_precision="tf32x3")


@triton.jit
def _inputs(
    x: tl.tensor,
    at: tl.tensor,
    ins: tl.tensor,
    is_row: tl.tensor,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    """[M, K] of rows that begin at `x` [M]."""
    columns = at + tl.arange(0, K)
    mask = is_row[:, None] if EVEN else is_row[:, None] & (columns < ins)[None, :]
    found = tl.load(x[:, None] + columns[None, :], mask=mask, other=0)
    if NATIVE:
        return found.to(tl.float8e4nv, bitcast=True)
    elif INPUTS == "fp8":
        return widen(found, "e4m3").to(DOT)
    elif INPUTS == "int8":
        return found
    else:
        return found.to(DOT)


@triton.jit
def _scaled(
    acc: tl.tensor,
    part: tl.tensor,
    factor: tl.tensor,
    scales: tl.tensor,
    is_out: tl.tensor,
    GROUPED_INPUTS: tl.constexpr,
) -> tl.tensor:
    """acc and what a group adds."""
    part = part.to(tl.float32) * tl.load(scales, mask=is_out, other=0.0)[None, :]
    return acc + (part * factor[:, None] if GROUPED_INPUTS else part)


@triton.jit
def _walk(
    x: tl.tensor,
    weight: tl.tensor,
    up: tl.tensor,
    factors: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    is_row: tl.tensor,
    is_out: tl.tensor,
    ins: tl.tensor,
    rows: tl.tensor,
    above: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    KIND: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED_INPUTS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
) -> tuple:
    """Sums over pieces [begin, end) of the inputs: of the outputs, and of those that lie `above` rows further
    on where they are gated."""
    HALVES: tl.constexpr = 2 if KIND == "codes4" else 1
    MIDDLE: tl.constexpr = 8 if KIND == "codes4" else 128
    GROUPED: tl.constexpr = GROUP > 0
    ALONE: tl.constexpr = GROUP % (2 * K) != 0  # whether two halves of a byte are of two groups
    KEPT: tl.constexpr = tl.int32 if INPUTS == "int8" and GROUP == 0 else tl.float32
    acc = tl.zeros((M, N), KEPT)
    gated = tl.zeros((M, N), KEPT) if GATED else acc
    inside = tl.arange(0, K)
    factor = is_row.to(tl.float32)
    for piece in tl.range(begin, end):
        mask = is_out[:, None] if EVEN else is_out[:, None] & (piece * K + inside < ins)[None, :]
        raw = tl.load(weight[:, None] + piece * K + inside[None, :], mask=mask, other=0)
        other = tl.load(up[:, None] + piece * K + inside[None, :], mask=mask, other=0) if GATED else raw
        part, other_part = acc, gated
        for half in tl.static_range(HALVES):
            at = (piece * HALVES + half) * K
            group = at // GROUP if GROUPED else 0
            a = _inputs(x, at, ins, is_row, INPUTS, EVEN, NATIVE, K, DOT)
            w = _known(
                raw if HALVES == 1 else (raw & 15 if half == 0 else raw >> 4),
                zeros + group * rows,
                is_out,
                KIND,
                INPUTS,
                HAS_ZEROS,
                MIDDLE,
                NATIVE,
                DOT,
            )
            part = _dot(a, w, None if GROUPED and (half == 0 or ALONE) else part, INPUTS, NATIVE, K)
            if GATED:
                w = _known(
                    other if HALVES == 1 else (other & 15 if half == 0 else other >> 4),
                    zeros + group * rows + above,
                    is_out,
                    KIND,
                    INPUTS,
                    HAS_ZEROS,
                    MIDDLE,
                    NATIVE,
                    DOT,
                )
                other_part = _dot(
                    a, w, None if GROUPED and (half == 0 or ALONE) else other_part, INPUTS, NATIVE, K
                )
            if GROUPED and (half == HALVES - 1 or ALONE):
                if GROUPED_INPUTS:
                    factor = tl.load(factors + group, mask=is_row, other=0.0)
                acc = _scaled(acc, part, factor, scales + group * rows, is_out, GROUPED_INPUTS)
                if GATED:
                    gated = _scaled(
                        gated, other_part, factor, scales + group * rows + above, is_out, GROUPED_INPUTS
                    )
        if GROUPED == 0:
            acc, gated = part, other_part
    return acc, gated


@triton.jit
def _finish(
    acc: tl.tensor,
    factor: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    is_out: tl.tensor,
    FACTORED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """float32 [M, N] of what the loop leaves."""
    if HAS_SUMS:
        acc += tl.load(sums, mask=is_out, other=0)[None, :]
    found = acc.to(tl.float32)
    if FACTORED:
        found *= factor[:, None]
    if SCALED:
        found *= tl.load(scales, mask=is_out, other=0.0)[None, :]
    if HAS_BIAS:
        found += tl.load(bias, mask=is_out, other=0.0).to(tl.float32)[None, :]
    return found


@triton.jit
def multiply(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    factors: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    slots: tl.tensor,
    owners: tl.tensor,
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    outs: tl.tensor,
    ins: tl.tensor,
    x_stride: tl.tensor,
    num_experts: tl.tensor,
    num_groups: tl.tensor,
    KIND: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED_INPUTS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    FACTORED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ROUTED: tl.constexpr,
    REPEAT: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid (tiles of rows * tiles of outputs, splits). Rows are those of x, or slots, of which REPEAT share a
    row of x; ROUTED: "" for one weight, "tiles" for slots int32 [tiles * M] and owners int32 [tiles],
    "single" for a slot and owner each tile. out [num_rows, outs]; or, with splits, [SPLITS, num_rows, outs]
    of sums as they are."""
    columns, index, lines = tl.cdiv(outs, N), tl.program_id(0), tl.arange(0, M)
    first = index // (BAND * columns) * BAND
    height = tl.minimum(num_tiles - first, BAND)
    tile, column = first + index % (BAND * columns) % height, index % (BAND * columns) // height
    if ROUTED == "":
        expert, row = (tile * 0).to(tl.int64), tile * M + lines
        is_row = row < num_rows
    elif ROUTED == "tiles":
        expert, row = tl.load(owners + tile).to(tl.int64), tl.load(slots + tile * M + lines)
        is_row = row < num_rows
    else:
        expert, row = tl.load(owners + tile).to(tl.int64), tile + lines * 0
        is_row = lines == 0
    if (expert >= 0) & (expert < num_experts):
        place = column * N + tl.arange(0, N)
        is_out = place < outs
        rows = outs * 2 if GATED else outs
        source = (row // REPEAT).to(tl.int64)
        width = ins // 2 if KIND == "codes4" else ins
        lead = weight + expert * rows * width + place.to(tl.int64) * width
        grouped = expert * num_groups * rows + place
        pieces = tl.cdiv(width, K)
        each = tl.cdiv(pieces, SPLITS)
        begin = tl.program_id(1) * each
        acc, gated = _walk(
            x + source * x_stride,
            lead,
            lead + (expert * 0 + outs) * width,
            factors + source * num_groups,
            scales + grouped,
            zeros + grouped,
            is_row,
            is_out,
            ins,
            rows,
            outs,
            begin,
            tl.minimum(begin + each, pieces),
            KIND,
            INPUTS,
            GROUP,
            GROUPED_INPUTS,
            HAS_ZEROS,
            GATED,
            EVEN,
            NATIVE,
            M,
            N,
            K,
            DOT,
        )
        target = row.to(tl.int64)[:, None] * outs + place[None, :]
        mask = is_row[:, None] & is_out[None, :]
        if SPLITS > 1:
            tl.store(out + tl.program_id(1).to(tl.int64) * num_rows * outs + target, acc, mask=mask)
        else:
            factor = tl.load(factors + source, mask=is_row, other=0.0) if FACTORED else is_row.to(tl.float32)
            lead = expert * rows + place
            found = _finish(
                acc,
                factor,
                scales + lead,
                sums + lead,
                bias + place,
                is_out,
                FACTORED,
                SCALED,
                HAS_SUMS,
                HAS_BIAS,
            )
            if GATED:
                passed = _finish(
                    gated,
                    factor,
                    scales + lead + outs,
                    sums + lead + outs,
                    bias,
                    is_out,
                    FACTORED,
                    SCALED,
                    HAS_SUMS,
                    False,
                )
                found = found / (1.0 + tl.exp(-found)) * passed
            tl.store(out + target, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_parts(
    out: tl.tensor,
    parts: tl.tensor,
    factors: tl.tensor,
    scales: tl.tensor,
    sums: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    outs: tl.tensor,
    FACTORED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (rows, pieces of a row): out [rows, outs] of parts [SPLITS, rows, outs]."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_out = place < outs
    total = tl.load(parts + row * outs + place, mask=is_out, other=0)
    for split in range(1, SPLITS):
        total += tl.load(parts + (split * num_rows + row) * outs + place, mask=is_out, other=0)
    factor = tl.load(factors + row + tl.arange(0, 1)) if FACTORED else tl.full((1,), 1.0, tl.float32)
    found = _finish(
        total[None, :],
        factor,
        scales + place,
        sums + place,
        bias + place,
        is_out,
        FACTORED,
        SCALED,
        HAS_SUMS,
        HAS_BIAS,
    )
    tl.store(out + row * outs + place[None, :], found.to(out.dtype.element_ty), mask=is_out[None, :])
