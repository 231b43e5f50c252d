"""A step's rows where every token sees all of its row, before and behind: attention of encoders, and what is
pooled of each row.

Rows of like length are attended together, padded to the longest of them; everything else in an encoder runs
over the tokens of all rows in one line, so that padding costs in attention alone. Plain torch, the same on
every device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.layers.upload import upload
from runtime.models.pooling import Mode

LIKE = 0.75  # of the longest row in a group, the shortest one
GROUP_TOKENS = 1 << 14  # most padded tokens of a group


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of like length: `num_rows` of `longest` tokens each, padded."""

    num_rows: int
    longest: int
    tokens: Tensor  # int64 [rows * longest]: which tokens of the step; any one where there is none
    mask: Tensor | None  # bool [rows, 1, 1, longest]: which there are; None: all
    kept: Tensor | None  # int64 [tokens]: places of the padded ones that exist; None: all
    places: Tensor  # int64 [tokens]: where in the step those go


@dataclass(frozen=True, slots=True)
class Rows:
    """Made once a step; every layer uses it."""

    groups: list[Group]


def plan_rows(counts: np.ndarray, torch_device: torch.device) -> Rows:
    """`counts`: tokens of each row, int64 [R]."""
    starts = counts.cumsum() - counts
    order = np.argsort(-counts, kind="stable")
    groups, at = [], 0
    while at < len(order):
        longest = int(counts[order[at]])
        like = int(np.searchsorted(-counts[order[at:]], -longest * LIKE, side="right"))
        rows = order[at : at + min(like, max(1, GROUP_TOKENS // longest))]
        groups.append(_group(starts[rows], counts[rows], longest, torch_device))
        at += len(rows)
    return Rows(groups)


def _group(starts: np.ndarray, counts: np.ndarray, longest: int, torch_device: torch.device) -> Group:
    offsets = np.arange(longest)
    exists = offsets < counts[:, None]
    tokens = np.where(exists, starts[:, None] + offsets, starts[:, None]).ravel()
    is_full = bool(exists.all())
    kept = np.flatnonzero(exists)
    return Group(
        len(counts),
        longest,
        upload(tokens, torch_device),
        None if is_full else upload(exists[:, None, None], torch_device),
        None if is_full else upload(kept, torch_device),
        upload(tokens[kept], torch_device),
    )


def attend_rows(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> Tensor:
    """q, k, v [T, H, D] -> [T, H * D]; scale 1/sqrt(D)."""
    out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    for group in rows.groups:
        shape = (group.num_rows, group.longest, *q.shape[1:])
        queries, keys, values = (
            x.index_select(0, group.tokens).view(shape).transpose(1, 2) for x in (q, k, v)
        )
        part = (
            scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
            .transpose(1, 2)
            .reshape(-1, out.shape[1])
        )
        out[group.places] = part if group.kept is None else part.index_select(0, group.kept)
    return out


@dataclass(frozen=True, slots=True)
class Picks:
    """The rows of a step that are complete, whose tokens make a result."""

    mode: Mode
    starts: Tensor  # int64 [N]: places of their first tokens
    counts: Tensor  # int64 [N]

    def pick(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> [N, hidden]: of one token each."""
        return hidden.index_select(0, self.starts + self.counts - 1 if self.mode == "last" else self.starts)

    def mean(self, hidden: Tensor) -> Tensor:
        """[T, hidden] -> float32 [N, hidden]: over all tokens of each."""
        owners = torch.repeat_interleave(torch.arange(len(self.counts), device=hidden.device), self.counts)
        offsets = torch.arange(len(owners), device=hidden.device) - (
            self.counts.cumsum(0) - self.counts
        ).repeat_interleave(self.counts)
        tokens = hidden.index_select(0, self.starts.repeat_interleave(self.counts) + offsets).float()
        sums = torch.zeros(len(self.counts), hidden.shape[1], device=hidden.device).index_add_(
            0, owners, tokens
        )
        return sums / self.counts.unsqueeze(1)


def plan_picks(mode: Mode, counts: np.ndarray, rows: np.ndarray, torch_device: torch.device) -> Picks:
    """`rows`: those that are complete, of all with `counts` tokens."""
    starts = counts.cumsum() - counts
    return Picks(mode, upload(starts[rows], torch_device), upload(counts[rows], torch_device))
