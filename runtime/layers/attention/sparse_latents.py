"""Sparse latent attention (DeepSeek V3.2, 2025): a token attends to the `top_k` tokens that an indexer
chooses for it.

The indexer has a few small query heads and one key, which the cache holds for each token behind its rotary
key. The score of a token is the sum over heads of weight * relu(query . key). Where no more than `top_k`
tokens are visible, attention is dense.

Computed in torch, over keys that are gathered row by row, so devices need to have such a plan; others have
operators of their own (Device.sparse_latents).
"""

from dataclasses import replace

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.base import AttentionPlan, Ops
from runtime.layers.attention import sdpa
from runtime.layers.attention.gathered import GatheredPlan
from runtime.layers.attention.kv_dtype import read_as
from runtime.models.config.mla_config import MlaConfig


class TorchSparseLatents:
    """SparseLatentOps (devices/sparse_latents.py) in torch."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def cache_dims(self, mla: MlaConfig) -> tuple[int, ...]:
        """Latents; and rotary keys followed by index keys."""
        assert mla.indexer is not None
        return mla.kv_rank, mla.rope_dim + mla.indexer.dim

    def open(self, up: Tensor, mla: MlaConfig, scale: float) -> "SparseLatents":
        """See SparseLatentOps.open."""
        assert mla.indexer is not None
        keys, values = up[:, : mla.nope_dim].contiguous(), up[:, mla.nope_dim :].transpose(1, 2).contiguous()
        return SparseLatents(self.ops, (keys, values), mla.rope_dim, mla.indexer.top_k, scale)


class SparseLatents:
    """SparseLayer (devices/sparse_latents.py) of one layer over latents [num_locations, 1, R] and, for each
    of them, a rotary key followed by an index key, [num_locations, 1, P + I]. `keys` [H, N, R] and `values`
    [H, R, V] make keys and values from latents."""

    def __init__(self, ops: Ops, up: tuple[Tensor, Tensor], rope_dim: int, top_k: int, scale: float) -> None:
        """`up`: `keys` and `values`."""
        self.ops = ops
        self.keys, self.values = up
        self.rope_dim, self.top_k, self.scores = rope_dim, top_k, Scores(scale)

    def store(
        self,
        latents: Tensor,
        ropes: Tensor,
        index_keys: Tensor,
        caches: tuple[Tensor, ...],
        locations: Tensor,
    ) -> None:
        """See SparseLayer.store."""
        self.ops.store_kv(latents, torch.cat((ropes, index_keys), 2), *caches, locations)

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor,
        index_queries: Tensor,
        index_weights: Tensor,
        caches: tuple[Tensor, ...],
        plan: AttentionPlan | None,
    ) -> Tensor:
        """See SparseLayer.attend."""
        assert isinstance(plan, GatheredPlan), "a plan without the rows' locations"
        return self._attend(q, q_rope, index_queries, index_weights.float(), caches, plan.gathered)

    def _attend(
        self,
        q: Tensor,
        q_rope: Tensor,
        index_queries: Tensor,
        index_weights: Tensor,
        caches: tuple[Tensor, ...],
        plan: sdpa.AttentionPlan,
    ) -> Tensor:
        queries = torch.cat((torch.bmm(q.transpose(0, 1), self.keys).transpose(0, 1), q_rope), 2)
        out = torch.empty_like(queries)
        for group in plan.decodes[0]:
            rows = slice(0, plan.num_decodes) if group.rows is None else group.rows
            keys, index_keys = self._gather(caches, group.gather, q.dtype)
            ranks = index_scores(
                index_queries[rows].unsqueeze(1),
                index_weights[rows].unsqueeze(1),
                index_keys.unflatten(0, (group.num_rows, -1)),
            )
            mask = None if group.mask is None else group.mask[:, 0]
            chosen = selected(ranks, mask, self.top_k, q.dtype)
            part = replace(group, mask=None if chosen is None else chosen.unsqueeze(1))
            out[rows] = sdpa.attend_decodes(queries[rows], keys, keys, part, self.scores)
        for row in plan.extends[0]:
            keys, index_keys = self._gather(caches, row.gather, q.dtype)
            for at in range(0, row.count, sdpa.TILE):
                tile = slice(row.first + at, row.first + min(at + sdpa.TILE, row.count))
                num = tile.stop - tile.start
                end = row.seen(at + num)
                corner = plan.masks[0] if row.mask is None else row.mask[: at + num]
                corner = corner[len(corner) - num :, corner.shape[1] - end :]
                ranks = index_scores(index_queries[tile], index_weights[tile], index_keys[:end])
                chosen = selected(ranks, corner, self.top_k, q.dtype)
                assert chosen is not None
                sdpa.attend_extend(queries[tile], keys[:end], keys[:end], chosen, self.scores, out[tile])
        latents = out[..., : self.values.shape[1]]
        return torch.bmm(latents.transpose(0, 1), self.values).transpose(0, 1)

    def _gather(
        self, caches: tuple[Tensor, ...], locations: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """What all heads see as their key, and with the first R as their value, [n, 1, R + P]; and the index
        keys, [n, I]."""
        others = read_as(caches[1], locations, dtype)
        keys = torch.cat((read_as(caches[0], locations, dtype), others[..., : self.rope_dim]), 2)
        return keys, others[:, 0, self.rope_dim :]


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Queries [..., n, J, I], weights float32 [..., n, J] and keys [..., length, I] -> float32 [..., n,
    length]."""
    products = torch.matmul(queries.float().flatten(-3, -2), keys.float().transpose(-1, -2))
    by_head = products.unflatten(-2, queries.shape[-3:-1]).relu()  # [..., n, J, length]
    return torch.matmul(weights.unsqueeze(-2), by_head).squeeze(-2)


def selected(ranks: Tensor, mask: Tensor | None, top_k: int, dtype: torch.dtype) -> Tensor | None:
    """The mask (0 or -inf, as `ranks`) that leaves the `top_k` largest of what `mask` leaves, by row."""
    if ranks.shape[-1] <= top_k:
        return mask
    ranks = ranks if mask is None else ranks + mask
    hidden = torch.full(ranks.shape, -torch.inf, dtype=dtype, device=ranks.device)
    hidden.scatter_(-1, ranks.topk(top_k).indices, 0)
    return hidden if mask is None else hidden + mask
