"""LoRA adapters of many sequences in one step (Chen et al., Punica, 2023): rows are aligned by LoRA slot, as
MoE slots are by expert (moe_permute.py), and each tile of rows is multiplied with the two small matrices of
one slot. Rows without an adapter are in no tile.

The first product is narrow and long, so its inputs are split among several programs; the second adds their
partial sums as it reads them.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    inner: tl.tensor,
    x: tl.tensor,
    a: tl.tensor,
    slots: tl.tensor,
    expert_ids: tl.tensor,
    num_rows: tl.tensor,
    ins: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid (tiles, blocks of the width, splits): inner float32 [SPLITS, rows, width] of x [rows, ins] and a
    [LoRA slots, width, ins]."""
    tile, split = tl.program_id(0), tl.program_id(2)
    lora_slot = tl.load(expert_ids + tile).to(tl.int64)
    if lora_slot >= 0:
        row, place = (
            tl.load(slots + tile * M + tl.arange(0, M)).to(tl.int64),
            tl.program_id(1) * N + tl.arange(0, N),
        )
        is_row, is_there = row < num_rows, place < width
        lead, weight = x + row * stride, a + (lora_slot * width + place) * ins
        k_blocks = tl.cdiv(ins, K)
        each = tl.cdiv(k_blocks, SPLITS)
        acc = tl.zeros((M, N), tl.float32)
        for block in tl.range(split * each, tl.minimum((split + 1) * each, k_blocks)):
            at = block * K + tl.arange(0, K)
            left = tl.load(lead[:, None] + at[None, :], mask=is_row[:, None] & (at < ins)[None, :], other=0.0)
            right = tl.load(
                weight[:, None] + at[None, :], mask=is_there[:, None] & (at < ins)[None, :], other=0.0
            )
            acc = tl.dot(left.to(DOT), tl.trans(right.to(DOT)), acc, input_precision="tf32x3")
        target = (split.to(tl.int64) * num_rows + row) * width
        tl.store(inner + target[:, None] + place[None, :], acc, mask=is_row[:, None] & is_there[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    out: tl.tensor,
    inner: tl.tensor,
    b: tl.tensor,
    column_blocks: tl.tensor,
    slots: tl.tensor,
    expert_ids: tl.tensor,
    num_rows: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    """Grid (tiles, blocks of columns): adds `inner` times b [LoRA slots, columns, RANK] to out [rows, any].
    `column_blocks`, int32 [any, 4]: the part of a block, its first column in b and in out, and its number of
    columns."""
    tile, block = tl.program_id(0), column_blocks + tl.program_id(1) * 4
    lora_slot = tl.load(expert_ids + tile).to(tl.int64)
    if lora_slot >= 0:
        row = tl.load(slots + tile * M + tl.arange(0, M)).to(tl.int64)
        part, first, target, count = (
            tl.load(block),
            tl.load(block + 1),
            tl.load(block + 2),
            tl.load(block + 3),
        )
        at, column = tl.arange(0, K), tl.arange(0, N)
        is_row, is_inner, is_column = row < num_rows, at < RANK, column < count
        held = inner + (row * width + part * RANK)[:, None] + at[None, :]
        mask = is_row[:, None] & is_inner[None, :]
        left = tl.load(held, mask=mask, other=0.0)
        for split in tl.static_range(1, SPLITS):
            left += tl.load(held + split * num_rows * width, mask=mask, other=0.0)
        weight = b + (lora_slot * columns + first + column)[:, None] * RANK + at[None, :]
        right = tl.load(weight, mask=is_column[:, None] & is_inner[None, :], other=0.0)
        added = tl.dot(left.to(DOT), tl.trans(right.to(DOT)), input_precision="tf32x3")
        place = out + (row * stride + target)[:, None] + column[None, :]
        mask = is_row[:, None] & is_column[None, :]
        total = tl.load(place, mask=mask, other=0.0).to(tl.float32) + added
        tl.store(place, total.to(out.dtype.element_ty), mask=mask)
