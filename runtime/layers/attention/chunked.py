"""Attention within chunks (Llama 4, 2025): a token at position p sees itself and the tokens before it from
position p - p % chunk on. Computed in torch over keys that are gathered row by row."""

from dataclasses import replace

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.layers.attention import sdpa
from runtime.layers.attention.kv_dtype import read_as


def attend_chunks(
    q: Tensor, caches: tuple[Tensor, Tensor], plan: sdpa.AttentionPlan, scores: Scores, chunk: int
) -> Tensor:
    """q [T, H, D] over caches [num_locations, K, D] -> [T, H, D]."""
    out = torch.empty_like(q)
    for group in plan.decodes[0]:
        rows = slice(0, plan.num_decodes) if group.rows is None else group.rows
        keys, values = (read_as(cache, group.gather, q.dtype) for cache in caches)
        length = len(group.gather) // group.num_rows
        mask = torch.zeros(1, length, dtype=q.dtype, device=q.device) if group.mask is None else group.mask
        places = torch.arange(length, device=q.device)
        part = replace(group, mask=within_chunks(mask, places, chunk).view(-1, 1, 1, length))
        out[rows] = sdpa.attend_decodes(q[rows], keys, values, part, scores)
    for row in plan.extends[0]:
        keys, values = (read_as(cache, row.gather, q.dtype) for cache in caches)
        before = len(keys) - row.count
        places = torch.arange(len(keys), device=q.device)
        if row.mask is not None:  # of a tree, in which several tokens have one position
            places[before:] = (row.mask == 0).sum(-1) - 1
        for at in range(0, row.count, sdpa.TILE):
            tile = slice(row.first + at, row.first + min(at + sdpa.TILE, row.count))
            num = tile.stop - tile.start
            end = before + at + num
            corner = plan.masks[0] if row.mask is None else row.mask[: at + num]
            mask = within_chunks(corner[len(corner) - num :, corner.shape[1] - end :], places[:end], chunk)
            sdpa.attend_extend(q[tile], keys[:end], values[:end], mask, scores, out[tile])
    return out


def within_chunks(mask: Tensor, places: Tensor, chunk: int) -> Tensor:
    """`mask` [..., length] (0 or -inf) of queries over keys at positions `places` [length], with keys before
    a query's chunk masked as well. The position of a query is the number of keys that it sees, less 1."""
    positions = (mask == 0).sum(-1, keepdim=True) - 1
    return mask.masked_fill(places < positions - positions % chunk, -torch.inf)
