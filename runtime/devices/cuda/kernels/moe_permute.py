"""MoE permutation: slots aligned by expert, and the weighted sum of a token's slots. A *slot* is one expert
of one token: slot `token * k + i` is the token's i-th expert.

Slots are listed by expert, each expert's list padded to whole tiles, so that a tile of a product reads one
weight. Nothing is sorted and there are no atomics: a program for each expert and part of the slots reads all
of that part and counts, and in a second launch writes behind what the earlier counts take. Few slots are one
launch, in which each program counts for all experts, or the end of the launch that routes (`align_few`). So
slots keep their order. The host does not know the counts: grids are as large as the worst case needs, and
unused tiles have no expert. Ids of other ranks' experts match no program.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.launch import next_power_of_2

PART = 4096  # slots that a program reads
CHUNK = 1024  # slots that it reads at a time
LEAST_PART = 128  # smaller parts would be further variants of the kernels, and leave threads idle
MAX_TILE = 128  # the most slots of a tile
ALONE = 1024  # the most slots that each program counts for all experts
COUNTED = 8192  # comparisons that it makes at a time
NO_EXPERT = -1  # the expert id of an unused tile


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["ids"])
def count_experts_kernel(
    ids: tl.tensor, counts: tl.tensor, num_slots: tl.tensor, PART: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """Grid (experts, parts): the number of slots of each, int32 counts [experts, parts]."""
    expert, part = tl.program_id(0), tl.program_id(1)
    total = tl.zeros((CHUNK,), tl.int32)
    for at in range(0, PART, CHUNK):
        slot = part * PART + at + tl.arange(0, CHUNK)
        total += (tl.load(ids + slot, mask=slot < num_slots, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert * tl.num_programs(1) + part, tl.sum(total, 0))


@triton.jit(do_not_specialize=["num_slots", "num_tiles", "size"], do_not_specialize_on_alignment=["ids"])
def align_kernel(
    ids: tl.tensor,
    counts: tl.tensor,
    slots: tl.tensor,
    expert_ids: tl.tensor,
    num_slots: tl.tensor,
    num_tiles: tl.tensor,
    size: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MOST: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Grid (experts, parts): slots int32 [tiles * size], padded with `num_slots`, and expert_ids int32
    [tiles]; `size` is at most MOST. LANES 0: `counts` are known; else there is one part, and a program counts
    LANES slots at a time."""
    expert, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    experts, parts = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_P)
    is_there = (experts < EXPERTS)[:, None] & (parts < num_parts)[None, :]
    if LANES > 0:
        known = tl.zeros((BLOCK_E, BLOCK_P), tl.int32)
        for step in range(0, PART, LANES):
            slot = step + tl.arange(0, LANES)
            own = tl.load(ids + slot, mask=slot < num_slots, other=-1)
            known += tl.sum((own[None, :] == experts[:, None]).to(tl.int32), 1)[:, None]
    else:
        known = tl.load(counts + experts[:, None] * num_parts + parts[None, :], mask=is_there, other=0)
    tiles = (tl.sum(known, 1) + size - 1) // size
    first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
    mine = tl.sum(tl.where((experts == expert)[:, None], known, 0), 0)
    total, before = tl.sum(mine, 0), tl.sum(tl.where(parts < part, mine, 0), 0)
    end = first + (total + size - 1) // size
    if part == 0:
        for at in range(first, end, BLOCK_E):
            tl.store(expert_ids + at + experts, expert + experts * 0, mask=at + experts < end)
        padding = first * size + total + tl.arange(0, MOST)
        tl.store(slots + padding, num_slots + tl.arange(0, MOST) * 0, mask=padding < end * size)
        if expert == EXPERTS - 1:
            for at in range(end, num_tiles, BLOCK_E):
                tl.store(expert_ids + at + experts, experts * 0 - 1, mask=at + experts < num_tiles)
    at = first * size + before
    for step in range(0, PART, CHUNK):
        slot = part * PART + step + tl.arange(0, CHUNK)
        is_mine = tl.load(ids + slot, mask=slot < num_slots, other=-1) == expert
        order = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(slots + at + order - 1, slot, mask=is_mine)
        at += tl.max(order, 0)


@triton.jit
def align_few(
    ids: tl.tensor,
    slots: tl.tensor,
    expert_ids: tl.tensor,
    num_slots: tl.tensor,
    num_tiles: tl.tensor,
    size: tl.tensor,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """What all programs of align_kernel write, by one that holds all slots, at most SLOTS. It reads ids past
    its multiprocessor's cache, as others have stored them. Slots of unused tiles are `num_slots`."""
    experts, slot, chunk = tl.arange(0, BLOCK_E), tl.arange(0, SLOTS), tl.arange(0, CHUNK)
    for begin in range(0, num_tiles * size, CHUNK):
        at = begin + chunk
        tl.store(slots + at, num_slots + chunk * 0, mask=at < num_tiles * size)
    tl.debug_barrier()  # a slot is stored at its place behind the padding that was there
    own = tl.load(ids + slot, mask=slot < num_slots, other=-1, cache_modifier=".cg").to(tl.int32)
    is_of = own[:, None] == experts[None, :]
    tiles = (tl.sum(is_of.to(tl.int32), 0) + size - 1) // size
    ends = tl.cumsum(tiles, 0)
    first = tl.sum(tl.where(is_of, (ends - tiles)[None, :], 0), 1)
    is_earlier = (own[:, None] == own[None, :]) & (slot[None, :] < slot[:, None])
    place = first * size + tl.sum(is_earlier.to(tl.int32), 1)
    tl.store(slots + place, slot, mask=(own >= 0) & (own < EXPERTS) & (slot < num_slots))
    used = tl.sum(tiles, 0)
    for begin in range(0, num_tiles, SLOTS):
        tile = begin + slot
        expert = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        tl.store(expert_ids + tile, tl.where(tile < used, expert, -1), mask=tile < num_tiles)


@triton.jit
def sum_experts_kernel(
    x: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    added: tl.tensor,
    size: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (tokens, blocks of a row): float32 sums in the order of a token's expert ids; with ADDS, plus rows
    of `added` once they are rounded."""
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOP_K):
        slot = token * TOP_K + i
        expert = tl.load(ids + slot)
        is_here = (expert >= 0) & (expert < EXPERTS)
        row = tl.load(x + slot * size + at, mask=is_here & (at < size), other=0.0).to(tl.float32)
        total += row * tl.where(is_here, tl.load(weights + slot), 0.0)
    if ADDS:
        total = total.to(out.dtype.element_ty).to(tl.float32)
        total += tl.load(added + token * size + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + token * size + at, total.to(out.dtype.element_ty), mask=at < size)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Slots by expert, a tile at a time."""

    # int32 [tiles * size], padded with the number of slots; not read with size 0, where tile i is slot i
    slots: Tensor
    expert_ids: Tensor  # [tiles]: expert of each tile; tiles of other ranks' experts are skipped
    size: int  # slots of a tile, 0: one


def most_tiles(num_slots: int, num_experts: int, size: int) -> int:
    """The number of tiles of `size` slots in the worst case."""
    return (num_slots + min(num_experts, num_slots) * (size - 1)) // size


def moe_align_block_size(ids: Tensor, num_experts: int, size: int, *, fuses: bool = False) -> ExpertTiles:
    """Tiles of `size` slots, at most MAX_TILE, of ids int64 [T, k]. With `size` 0 each slot is a tile, for
    steps so small that slots rarely share an expert. `fuses`: few slots are one launch."""
    assert size <= MAX_TILE
    if not size:
        return ExpertTiles(ids, ids, 0)
    num_slots = ids.numel()
    num_tiles = most_tiles(num_slots, num_experts, size)
    parts = triton.cdiv(num_slots, PART)
    counts, slots, expert_ids = (
        torch.empty(number, dtype=torch.int32, device=ids.device)
        for number in (num_experts * parts, num_tiles * size, num_tiles)
    )
    part = min(PART, next_power_of_2(num_slots, LEAST_PART))
    chunk = min(CHUNK, part)
    grid, block = (num_experts, parts), next_power_of_2(num_experts)
    is_alone = fuses and part <= ALONE
    if not is_alone:
        count_experts_kernel[grid](ids, counts, num_slots, PART=part, CHUNK=chunk, num_warps=4)
    align_kernel[grid](
        ids,
        counts,
        slots,
        expert_ids,
        num_slots,
        num_tiles,
        size,
        EXPERTS=num_experts,
        BLOCK_E=block,
        BLOCK_P=1 if parts == 1 else next_power_of_2(parts, 16),
        MOST=MAX_TILE,
        PART=part,
        CHUNK=chunk,
        LANES=min(part, max(16, COUNTED // block)) if is_alone else 0,
        num_warps=4,
    )
    return ExpertTiles(slots, expert_ids, size)


def moe_sum_reduce(
    x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, added: Tensor | None = None
) -> Tensor:
    """Rows of slots x [T * k, N] -> weighted sums of tokens [T, N], plus `added` [T, N]."""
    (num, top_k), size = ids.shape, x.shape[1]
    out = x.new_empty(num, size)
    if num:
        block = min(1024, next_power_of_2(size, 16))
        sum_experts_kernel[(num, triton.cdiv(size, block))](
            x,
            ids,
            weights,
            out,
            out if added is None else added.contiguous(),
            size,
            EXPERTS=num_experts,
            TOP_K=top_k,
            ADDS=added is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out
