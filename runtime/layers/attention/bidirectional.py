"""Bidirectional attention, as encoders have it: every token sees its whole row, before and behind it.

Rows of similar length are attended together, padded to the longest of them. Everything else in an encoder
runs over the tokens of all rows without padding, so that padding costs time in attention alone. Plain torch,
the same on every device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.layers.upload import upload

MIN_FILL = 0.75  # the shortest row of a group has at least this part of the longest one's tokens
MIN_TILE = 128  # queries that are attended at once, at least, where there is a window
GROUP_TOKENS = 1 << 14  # most padded tokens of a group


@dataclass(frozen=True, slots=True)
class PaddedGroup:
    """Rows of similar length: `num_rows` rows, padded to `longest` tokens each."""

    num_rows: int
    longest: int
    tokens: Tensor  # int64 [rows * longest]: index of each padded token in the step; any token for padding
    mask: Tensor | None  # bool [rows, 1, 1, longest]: which are no padding; None: none is padding
    real: Tensor | None  # int64 [N]: which of the padded tokens are real; None: all
    targets: Tensor  # int64 [N]: index of each real token in the step


@dataclass(frozen=True, slots=True)
class BidirectionalPlan:
    """How the rows of a step are attended. It is made once a step, and every layer uses it."""

    groups: list[PaddedGroup]


def plan_bidirectional(counts: np.ndarray, torch_device: torch.device) -> BidirectionalPlan:
    """`counts`: tokens of each row, int64 [R]."""
    starts = counts.cumsum() - counts
    order = np.argsort(-counts, kind="stable")
    groups, at = [], 0
    while at < len(order):
        longest = int(counts[order[at]])
        similar = int(np.searchsorted(-counts[order[at:]], -longest * MIN_FILL, side="right"))
        rows = order[at : at + min(similar, max(1, GROUP_TOKENS // longest))]
        groups.append(_padded_group(starts[rows], counts[rows], longest, torch_device))
        at += len(rows)
    return BidirectionalPlan(groups)


def _padded_group(
    starts: np.ndarray, counts: np.ndarray, longest: int, torch_device: torch.device
) -> PaddedGroup:
    offsets = np.arange(longest)
    is_real = offsets < counts[:, None]
    tokens = np.where(is_real, starts[:, None] + offsets, starts[:, None]).ravel()
    is_full = bool(is_real.all())
    real = np.flatnonzero(is_real)
    return PaddedGroup(
        len(counts),
        longest,
        upload(tokens, torch_device),
        None if is_full else upload(is_real[:, None, None], torch_device),
        None if is_full else upload(real, torch_device),
        upload(tokens[real], torch_device),
    )


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BidirectionalPlan, window: int = 0, *, is_causal: bool = False
) -> Tensor:
    """q, k, v [T, H, D] -> [T, H * D]; the scale is 1/sqrt(D). `window`: tokens that each token sees on both
    sides of itself; 0: all. `is_causal`: each sees itself and those before it alone."""
    out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    for group in plan.groups:
        shape = (group.num_rows, group.longest, *q.shape[1:])
        queries, keys, values = (
            x.index_select(0, group.tokens).view(shape).transpose(1, 2) for x in (q, k, v)
        )
        if is_causal:  # what fills a row up stands behind its tokens, which do not see it
            attended = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        elif window and window < group.longest - 1:
            attended = windowed(queries, keys, values, group.mask, window)
        else:
            attended = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
        attended = attended.transpose(1, 2).reshape(-1, out.shape[1])
        out[group.targets] = attended if group.real is None else attended.index_select(0, group.real)
    return out


def windowed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int) -> Tensor:
    """Attention of q, k, v [rows, H, L, D] where each token sees `window` tokens on both sides of itself.
    Tiles of queries are attended to the keys that any of them sees, so time grows with L * window. `mask`:
    see PaddedGroup. -> [rows, H, L, D]"""
    length, tile, parts = q.shape[2], max(MIN_TILE, window), []
    for begin in range(0, length, tile):
        end = min(begin + tile, length)
        first, last = max(0, begin - window), min(length, end + window)
        queries, keys = (torch.arange(*part, device=q.device) for part in ((begin, end), (first, last)))
        seen = (queries.unsqueeze(1) - keys).abs() <= window
        if mask is not None:
            # a padded query may see padding alone, and its output, which is dropped, must be a number
            seen = (seen & mask[..., first:last]) | (queries.unsqueeze(1) == keys)
        parts.append(
            scaled_dot_product_attention(
                q[:, :, begin:end], k[:, :, first:last], v[:, :, first:last], attn_mask=seen
            )
        )
    return torch.cat(parts, 2)
