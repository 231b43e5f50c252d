"""Mixtures of experts on one device: choosing, sorting by expert, and putting back. Limits: the wheel's
docstrings, and op-plugin's newer documents (517f2e7) for drop_pad_mode of npu_moe_finalize_routing and the
formula of npu_moe_gating_top_k."""

import math

import torch
from torch import Tensor

from tests.ascend.emulate.norms import FLOATS, quantised_rows
from tests.ascend.emulate.table import need, need_dtype, need_shape, need_values, operator


def garbage(*shape: int, dtype: torch.dtype) -> Tensor:
    """What an operator leaves unwritten: NaN, or a number that shows."""
    return torch.full(shape, math.nan if dtype.is_floating_point else 113, dtype=dtype)


def largest(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest, of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@operator("npu::npu_moe_gating_top_k")
def gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """npu_moe_gating_top_k."""
    need(x.dim() == 2, f"x is {x.dim()}-D, not 2-D")
    need_dtype("x", x, *FLOATS)
    need(input_ids is None and tid2eid is None, "choosing by a hash is not emulated")
    tokens, experts = x.shape
    need(experts <= 2048, f"{experts} experts: at most 2048")
    need(group_count > 0 and experts % group_count == 0, f"{experts} experts in {group_count} groups")
    need(experts // group_count > 2, f"{experts} experts in {group_count} groups: more than 2 in each")
    need(
        -(-(experts // group_count) // 32) * 32 * group_count <= 2048,
        "groups rounded up to 32 experts: at most 2048 in all",
    )
    need(1 <= k_group <= group_count, f"k_group {k_group} of {group_count}")
    need(1 <= k <= experts // group_count * k_group, f"k {k} of {k_group} groups of {experts // group_count}")
    need(
        renorm == 0 and norm_type in (0, 1) and group_select_mode in (0, 1),
        "renorm 0, norm_type 0 or 1, group_select_mode 0 or 1",
    )
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    choice = scores
    if bias is not None:
        need(bias.dtype == x.dtype, f"bias is {bias.dtype}, x {x.dtype}")
        need_shape("bias", bias, experts)
        choice = scores + bias.float()
    if group_count > 1:
        grouped = choice.unflatten(-1, (group_count, -1))
        of_group = grouped.amax(-1) if group_select_mode == 0 else grouped.topk(2, -1).values.sum(-1)
        kept = torch.zeros(tokens, group_count, dtype=torch.bool).scatter_(
            -1, largest(of_group, k_group), True
        )
        choice = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
    ids = largest(choice, k)
    weights = scores.gather(-1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    shown = scores if out_flag else garbage(*scores.shape, dtype=torch.float32)
    return (weights * routed_scaling_factor).to(x.dtype), ids.to(torch.int32), shown


@operator("npu::npu_moe_gating_top_k_softmax")
def gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """npu_moe_gating_top_k_softmax."""
    need(x.dim() in (2, 3), f"x is {x.dim()}-D")
    need_dtype("x", x, *FLOATS)
    need(0 < k <= min(1024, x.shape[-1]), f"k {k}: 1 .. {min(1024, x.shape[-1])}")
    need(
        finished is None or finished.dtype == torch.bool and finished.shape == x.shape[:-1],
        "finished is bool, a value for each row",
    )
    scores = x.float().softmax(-1)
    ids = largest(scores, k)
    if finished is not None:
        ids = ids.masked_fill(finished[..., None], x.shape[-1])
    rows = torch.arange(scores[..., 0].numel(), dtype=torch.int32).view(scores.shape[:-1])
    places = rows[..., None] + torch.arange(k, dtype=torch.int32) * scores[..., 0].numel()
    return scores.gather(-1, ids.clamp_max(x.shape[-1] - 1)).to(x.dtype), ids.to(torch.int32), places


@operator("npu::npu_moe_gating_top_k_softmax_v2")
def gating_top_k_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest, and their softmax: over all with renorm 0, over themselves with renorm 1. Limits:
    aclnnMoeGatingTopKSoftmaxV2."""
    need(x.dim() in (2, 3), f"x is {x.dim()}-D")
    need_dtype("x", x, *FLOATS)
    need(0 < k <= min(1024, x.shape[-1]), f"k {k}: 1 .. {min(1024, x.shape[-1])}")
    need(renorm in (0, 1), f"renorm {renorm}: 0 or 1")
    need(finished is None and not output_softmax, "emulated: neither finished nor output_softmax")
    ids = largest(x.float(), k)
    scores = x.float() if renorm else x.float().softmax(-1)
    chosen = scores.gather(-1, ids)
    return (
        (chosen.softmax(-1) if renorm else chosen).to(x.dtype),
        ids.to(torch.int32),
        garbage(*x.shape, dtype=torch.float32),
    )


@operator("npu::npu_moe_init_routing_v2")
def init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int] | tuple[int, ...] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of x, once for each chosen expert, in the order of experts."""
    need(
        x.dim() == expert_idx.dim() == 2 and x.shape[0] == expert_idx.shape[0],
        "x and expert_idx are 2-D, with as many rows",
    )
    need_dtype("x", x, *FLOATS, torch.int8)
    need_dtype("expert_idx", expert_idx, torch.int32)
    need(
        expert_num > 0 and expert_num <= (5120 if expert_tokens_num_type == 2 else 10240),
        f"expert_num {expert_num}",
    )
    need(drop_pad_mode == 0 and offset is None, "drop_pad_mode is 0 and offset None")
    need(
        expert_tokens_num_type in (1, 2) and expert_tokens_num_flag,
        "expert_tokens_num_type is 1 or 2, expert_tokens_num_flag True",
    )
    need(quant_mode == -1 or quant_mode == 1 and x.dtype != torch.int8, "quant_mode is -1, or 1 for floats")
    need(row_idx_type in (0, 1) and active_num >= -1, "row_idx_type is 0 or 1, active_num at least -1")
    first, last = active_expert_range or (0, expert_num)
    need(0 <= first < last <= expert_num, f"active_expert_range {first} .. {last} of {expert_num}")
    need_values(
        lambda: ((expert_idx >= 0) & (expert_idx < expert_num)).all(),
        f"an expert outside 0 .. {expert_num - 1}",
    )
    flat = expert_idx.flatten().long()
    total = flat.numel()
    kept = (flat >= first) & (flat < last)
    order = flat.masked_fill(~kept, expert_num).sort(stable=True).indices[: int(kept.sum())]
    if 0 < active_num < total:
        order = order[:active_num]
    found = order.numel()
    sources, experts = order // expert_idx.shape[1], flat[order] - first
    scales = garbage(total, dtype=torch.float32)
    rows = garbage(total, x.shape[1], dtype=torch.int8 if quant_mode == 1 else x.dtype)
    if quant_mode == 1:
        values = x.float()[sources]
        if scale is not None:
            need_shape("scale", scale, last - first, x.shape[1])
            values = values * scale.float()[experts]
        rows[:found], scales[:found] = quantised_rows(values)
    else:
        rows[:found] = x[sources]
        if scale is not None:
            need_dtype("scale", scale, torch.float32)
            need_shape("scale", scale, x.shape[0])
            scales[:found] = scale[sources]
    return (
        rows,
        row_places(order, total, row_idx_type),
        counts_of(experts, first, last, expert_num, expert_tokens_num_type),
        scales,
    )


def row_places(order: Tensor, total: int, kind: int) -> Tensor:
    """0: where each (token, choice) went, -1 for those of other ranks; 1: from which (token, choice) each row
    came."""
    if kind == 1:
        places = garbage(total, dtype=torch.int32)
        places[: order.numel()] = order.to(torch.int32)
        return places
    places = torch.full((total,), -1, dtype=torch.int32)
    places[order] = torch.arange(order.numel(), dtype=torch.int32)
    return places


def counts_of(experts: Tensor, first: int, last: int, expert_num: int, kind: int) -> Tensor:
    """Rows of each expert, as counts or as running sums."""
    counts = torch.bincount(experts, minlength=last - first)[: last - first]
    if kind == 1:
        return counts
    pairs = garbage(expert_num, 2, dtype=torch.int64)
    busy = counts.nonzero().flatten()
    pairs[: busy.numel()] = torch.stack((busy + first, counts[busy]), -1)
    pairs[busy.numel() : busy.numel() + 1] = 0
    return pairs


@operator("npu::npu_moe_finalize_routing")
def finalize_routing(
    rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    row_idx: Tensor,
    expert_idx: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """Each token's sum over its experts. row_idx holds all tokens' first choices, then all second ones
    (drop_pad_mode 0), or token by token (2 and 3). With 3 rows are (experts, capacity, H), and -1 is no row
    (aclnnMoeFinalizeRoutingV2)."""
    need_dtype("expanded_permuted_rows", rows, *FLOATS)
    need_dtype("expanded_src_to_dst_row", row_idx, torch.int32)
    need(drop_pad_mode in (0, 2, 3), f"drop_pad_mode {drop_pad_mode}: 0, 2 and 3 are emulated")
    least = -1 if drop_pad_mode == 3 else 0
    if drop_pad_mode == 3:
        need(rows.dim() == 3 and rows.is_contiguous(), "drop_pad_mode 3: rows are (experts, capacity, H)")
        need(scales is not None and rows.shape[0] >= scales.shape[1], "fewer experts than a token has")
        rows = rows.flatten(0, 1)
    need(
        rows.dim() == 2 and row_idx.shape == rows.shape[:1],
        f"expanded_src_to_dst_row {tuple(row_idx.shape)} for {tuple(rows.shape)}",
    )
    need(skip1 is not None or skip2 is None, "skip2 without skip1")
    choices = scales.shape[1] if scales is not None else k or 1
    need(row_idx.numel() % choices == 0, f"{row_idx.numel()} rows for {choices} choices")
    tokens = row_idx.numel() // choices
    for name, tensor in (("skip1", skip1), ("skip2", skip2), ("bias", bias)):
        need(tensor is None or tensor.dtype == rows.dtype, f"{name} has another dtype than the rows")
        need(name == "bias" or tensor is None or tensor.shape == (tokens, rows.shape[1]), f"{name}: shape")
    # bfloat16 rows with float32 scales: moe_finalize_routing_v2_def.cpp of ops-transformer (c29bc10)
    wide = (torch.float32,) if rows.dtype == torch.bfloat16 else ()
    need(scales is None or scales.dtype in (rows.dtype, *wide), "scales has another dtype than the rows")
    need(scales is None or scales.shape[0] == tokens, "scales have a row for each token")
    need_values(
        lambda: ((row_idx >= least) & (row_idx < rows.shape[0])).all(),
        f"a row outside {least} .. {rows.shape[0] - 1}",
    )
    places = (
        row_idx.long().view(choices, tokens).t()
        if drop_pad_mode == 0
        else row_idx.long().view(tokens, choices)
    )
    values = rows.float()[places.clamp(0, max(0, rows.shape[0] - 1))].masked_fill(places[..., None] < 0, 0)
    if bias is not None:
        need(expert_idx is not None, "bias needs export_for_source_row")
        assert expert_idx is not None
        values = values + bias.float()[expert_idx.long()]
    if scales is not None:
        values = values * scales.float()[..., None]
    total = values.sum(1)
    for skip in (skip1, skip2):
        total = total if skip is None else total + skip.float()
    return total.to(rows.dtype)


@operator("npu::npu_moe_token_permute")
def token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """npu_moe_token_permute."""
    need(
        tokens.dim() == 2 and indices.dim() in (1, 2) and indices.shape[0] == tokens.shape[0],
        "tokens 2-D, indices 1-D or 2-D",
    )
    need_dtype("tokens", tokens, *FLOATS)
    need_dtype("indices", indices, torch.int32, torch.int64)
    need(not padded_mode, "padded_mode is False")
    need(indices.numel() < 16777215, "fewer than 16777215 indices")
    need_values(lambda: ((indices >= 0) & (indices < 16777215)).all(), "an index below 0")
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    order = indices.flatten().sort(stable=True).indices
    places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
    kept = order[: num_out_tokens or None]
    return tokens[kept // choices], places.to(torch.int32)


@operator("npu::_npu_moe_token_unpermute")
def token_unpermute(
    permuted: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """What npu_moe_token_unpermute consists of; the second result is for training."""
    need_dtype("permuted_tokens", permuted, *FLOATS)
    need_dtype("sorted_indices", sorted_indices, torch.int32)
    need(not padded_mode and restore_shape is None, "padded_mode is False, restore_shape None")
    need(permuted.dim() == 2 and sorted_indices.dim() == 1, "permuted_tokens 2-D, sorted_indices 1-D")
    choices = 1 if probs is None else probs.shape[-1]
    need(
        choices <= 512 and sorted_indices.numel() % choices == 0,
        f"{sorted_indices.numel()} indices for {choices} choices: at most 512",
    )
    need(
        probs is None or probs.dim() == 2 and probs.shape[0] * choices == sorted_indices.numel(),
        "probs are (tokens, choices)",
    )
    need_values(lambda: (sorted_indices >= 0).all(), "a negative index")
    places = sorted_indices.long()
    there = places < permuted.shape[0]  # those that permute cut off count nothing
    values = (
        permuted.float()[places.masked_fill(~there, 0)]
        .masked_fill(~there[:, None], 0)
        .unflatten(0, (-1, choices))
    )
    return (values.sum(1) if probs is None else (values * probs.float()[..., None]).sum(1)).to(
        permuted.dtype
    ), permuted
