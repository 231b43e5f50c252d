"""MoE routing: scores, expert groups, top-k experts and their weights in one launch, a program for each
token.

The largest scores are found one after the other, so that of equal scores the lowest expert or group comes
first. Softmax and sigmoid are float32, as in layers/moe/routing.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.last_program import is_last_program
from runtime.devices.cuda.kernels.launch import next_power_of_2
from runtime.devices.cuda.kernels.moe_permute import ExpertTiles, align_few, most_tiles
from runtime.models.config.moe_config import Routing

EXCLUDED: tl.constexpr = tl.constexpr(float("-inf"))
FILLED: tl.constexpr = tl.constexpr(512)  # slots that are filled with padding at a time
# what the program that aligns holds: comparisons of slots with experts, and slots
HELD, MOST_SLOTS = 8192, 64


@triton.jit
def _select_groups(
    choice: tl.tensor,
    is_there: tl.tensor,
    group: tl.tensor,
    member: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMMED: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
) -> tl.tensor:
    """The groups that a token's experts are chosen from, bool [GROUPS]."""
    best = tl.max(choice, 1)
    if SUMMED == 2:
        first = tl.min(tl.where(choice == best[:, None], member[None, :], MEMBERS), 1)
        best += tl.max(tl.where(member[None, :] == first[:, None], EXCLUDED, choice), 1)
    best = tl.where(group < NUM_GROUPS, best, EXCLUDED)
    is_open = group < 0
    for _ in range(TOP_GROUPS):
        top = tl.max(tl.where(is_open, EXCLUDED, best), 0)
        chosen = tl.min(tl.where((best == top) & (is_open == 0), group, GROUPS), 0)
        is_open = is_open | (group == chosen)
    return is_open


@triton.jit(do_not_specialize=["num_tiles", "size"])
def topk_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    slots: tl.tensor,
    tile_experts: tl.tensor,
    counter: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    num_tiles: tl.tensor,
    size: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMMED: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZES: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """Grid (tokens,): ids and weights of the TOP_K experts of a token. Its experts are a tile [GROUPS,
    MEMBERS], padded from NUM_GROUPS and SIZE. With SLOTS, the most there are, the last program aligns all
    slots in tiles of `size`, as align_kernel does; then `counter` is 0 before and after the launch."""
    row = tl.program_id(0).to(tl.int64)
    group, member, place = tl.arange(0, GROUPS), tl.arange(0, MEMBERS), tl.arange(0, CHOSEN)
    is_there = (group < NUM_GROUPS)[:, None] & (member < SIZE)[None, :]
    expert = group[:, None] * SIZE + member[None, :]
    values = tl.load(logits + row * stride + expert, mask=is_there, other=EXCLUDED)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        exps = tl.exp(values - tl.max(tl.max(values, 1), 0))
        scores = exps / tl.sum(tl.sum(exps, 1), 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=is_there, other=0.0)
    choice = tl.where(is_there, choice, EXCLUDED)
    if TOP_GROUPS < NUM_GROUPS:
        is_open = _select_groups(
            choice, is_there, group, member, NUM_GROUPS, TOP_GROUPS, SUMMED, GROUPS, MEMBERS
        )
        choice = tl.where(is_open[:, None], choice, EXCLUDED)
    chosen_ids, chosen_weights = place * 0, place * 0.0
    for nth in range(TOP_K):
        top = tl.max(tl.max(choice, 1), 0)
        best = tl.min(tl.min(tl.where((choice == top) & is_there, expert, NUM_GROUPS * SIZE), 1), 0)
        best = tl.minimum(best, NUM_GROUPS * SIZE - 1)  # of NaN nothing is the largest
        share = tl.sum(tl.sum(tl.where((expert == best) & is_there, scores, 0.0), 1), 0)
        chosen_ids, chosen_weights = (
            tl.where(place == nth, best, chosen_ids),
            tl.where(place == nth, share, chosen_weights),
        )
        choice = tl.where(expert == best, EXCLUDED, choice)
    if NORMALIZES:
        chosen_weights = chosen_weights / (tl.sum(chosen_weights, 0) + 1e-20)
    tl.store(ids + row * TOP_K + place, chosen_ids.to(tl.int64), mask=place < TOP_K)
    tl.store(weights + row * TOP_K + place, chosen_weights * scale, mask=place < TOP_K)
    if SLOTS > 0:
        if is_last_program(counter, tl.num_programs(0)):
            count = tl.num_programs(0) * TOP_K
            num_experts: tl.constexpr = NUM_GROUPS * SIZE
            align_few(
                ids, slots, tile_experts, count, num_tiles, size, num_experts, GROUPS * MEMBERS, SLOTS, FILLED
            )


def route(logits: Tensor, bias: Tensor | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Expert ids int64 [T, k] and weights float32 [T, k] from float32 logits [T, E]; see Experts.route."""
    return _routed(logits, bias, routing, None, None)


def slots_aligned(num_experts: int) -> int:
    """How many slots the program which routes the last token aligns, a power of two; 0: none."""
    return min(MOST_SLOTS, HELD // next_power_of_2(num_experts))


def route_aligned(
    logits: Tensor, bias: Tensor | None, routing: Routing, size: int, counter: Tensor
) -> tuple[Tensor, Tensor, ExpertTiles]:
    """`route`, and slots in tiles of `size`, as moe_align_block_size makes them. `counter`: int32 [1], 0
    between launches of one stream."""
    num_slots, num_experts = len(logits) * routing.top_k, logits.shape[1]
    num_tiles = most_tiles(num_slots, num_experts, size)
    slots, expert_ids = (
        torch.empty(number, dtype=torch.int32, device=logits.device)
        for number in (num_tiles * size, num_tiles)
    )
    tiles = ExpertTiles(slots, expert_ids, size)
    return (*_routed(logits, bias, routing, tiles, counter), tiles)


def _routed(
    logits: Tensor, bias: Tensor | None, routing: Routing, tiles: ExpertTiles | None, counter: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Routes, and fills `tiles` in."""
    num, num_experts = logits.shape
    ids = torch.empty(num, routing.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num, routing.top_k, dtype=torch.float32, device=logits.device)
    has_groups = routing.top_groups < routing.num_groups
    groups = routing.num_groups if has_groups else 1
    size = num_experts // groups
    if num:
        topk_kernel[(num,)](
            logits,
            logits if bias is None else bias,
            ids,
            weights,
            ids if tiles is None else tiles.slots,
            ids if tiles is None else tiles.expert_ids,
            ids if counter is None else counter,
            logits.stride(0),
            routing.scale,
            0 if tiles is None else len(tiles.expert_ids),
            0 if tiles is None else tiles.size,
            NUM_GROUPS=groups,
            SIZE=size,
            TOP_GROUPS=routing.top_groups if has_groups else 1,
            SUMMED=1 if routing.group_score == "largest" else 2,
            TOP_K=routing.top_k,
            SIGMOID=routing.score == "sigmoid",
            HAS_BIAS=bias is not None,
            NORMALIZES=routing.normalizes,
            GROUPS=next_power_of_2(groups),
            MEMBERS=next_power_of_2(size),
            CHOSEN=next_power_of_2(routing.top_k),
            SLOTS=0 if tiles is None else slots_aligned(num_experts),
            num_warps=1 if num_experts <= 512 and tiles is None else 4,
        )
    return ids, weights
