"""Multi-head latent attention on the cpu, over pages of latents and rotary key parts, one row of each for a
token.

Two ways to the same sums. *Absorbed*: the matrices that make a head's keys and values from a latent move to
the query and to the result, and all heads attend to the latents themselves, as to one key head. *Expanded*:
keys and values of all heads are made from the latents of the row, then it is plain attention. Expanding costs
once for each row, absorbing makes each query dearer: decodes and short chunks absorb, long ones expand.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.attention_scores import Scores
from runtime.layers.attention.kv_dtype import read_as
from runtime.layers.attention.sdpa import AttentionPlan, attend_decodes, attend_extend
from runtime.models.config.mla_config import MAX_EXPANDED


@dataclass(frozen=True, slots=True)
class Up:
    """What makes keys and values from latents, of this rank's heads, laid out as decodes multiply with it."""

    keys: Tensor  # [H, N, R]
    values: Tensor  # [H, R, V]

    def absorbs(self, count: int) -> bool:
        """Whether `count` queries of a row are cheaper absorbed; the cost of both is
        proportional to the length of the row."""
        rank, made = self.keys.shape[2], self.keys.shape[1] + self.values.shape[2]
        return count * (2 * rank - made) < rank * made


def attend_latents(
    q: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor, up: Up, plan: AttentionPlan, scale: float
) -> Tensor:
    """q [T, H, N], q_rope [T, H, P] over caches [num_locations, 1, R] and [num_locations, 1, P] -> [T, H,
    V]."""
    out = q.new_empty(*q.shape[:2], up.values.shape[2])
    if plan.num_decodes:
        queries = _absorbed(q[: plan.num_decodes], q_rope[: plan.num_decodes], up)
        out_latents = torch.empty_like(queries)
        for group in plan.decodes[0]:
            keys = _gather_keys(latents, ropes, group.gather, q.dtype)
            indices = slice(None) if group.rows is None else group.rows
            out_latents[indices] = attend_decodes(queries[indices], keys, keys, group, Scores(scale))
        out[: plan.num_decodes] = _valued(out_latents, up)
    for row in plan.extends[0]:
        part = slice(row.first, row.first + row.count)
        keys = _gather_keys(latents, ropes, row.gather, q.dtype)
        mask = plan.masks[0] if row.mask is None else row.mask
        if up.absorbs(row.count):
            queries = _absorbed(q[part], q_rope[part], up)
            out_latents = torch.empty_like(queries)
            attend_extend(queries, keys, keys, mask, Scores(scale), out_latents, row.stride)
            out[part] = _valued(out_latents, up)
        else:
            queries = torch.cat((q[part], q_rope[part]), 2)
            _attend_expanded(queries, keys.squeeze(1), up, mask, scale, out[part], row.stride)
    return out


def _gather_keys(latents: Tensor, ropes: Tensor, locations: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, 1, R + P]: what all heads see as their key, and with the first R as their value."""
    return torch.cat((read_as(latents, locations, dtype), read_as(ropes, locations, dtype)), 2)


def _absorbed(q: Tensor, q_rope: Tensor, up: Up) -> Tensor:
    return torch.cat((torch.bmm(q.transpose(0, 1), up.keys).transpose(0, 1), q_rope), 2)  # [n, H, R + P]


def _valued(out_latents: Tensor, up: Up) -> Tensor:
    """Sums of latents [n, H, R + P] -> sums of values [n, H, V]."""
    return torch.bmm(out_latents[..., : up.values.shape[1]].transpose(0, 1), up.values).transpose(0, 1)


def _attend_expanded(
    q: Tensor, seen: Tensor, up: Up, mask: Tensor, scale: float, out: Tensor, stride: int
) -> None:
    """q [count, H, N + P], `stride` positions apart, over seen [length, R + P]. Sizes are padded to one, for
    which torch has a kernel that keeps no scores."""
    num_heads, nope_dim, rank = up.keys.shape
    dim, value_dim = q.shape[2], up.values.shape[2]
    size = max(dim, value_dim)
    step = max(1, MAX_EXPANDED // (2 * size * len(seen)))
    for at in range(0, num_heads, step):
        heads = slice(at, min(at + step, num_heads))
        keys = seen.new_zeros(len(seen), heads.stop - at, size)
        keys[..., :nope_dim] = torch.matmul(seen[:, :rank], up.keys[heads].transpose(1, 2)).transpose(0, 1)
        keys[..., nope_dim:dim] = seen[:, None, rank:]
        values = seen.new_zeros(keys.shape)
        values[..., :value_dim] = torch.matmul(seen[:, :rank], up.values[heads]).transpose(0, 1)
        out_latents = q.new_empty(len(q), heads.stop - at, size)
        queries = pad(q[:, heads], (0, size - dim))
        attend_extend(queries, keys, values, mask, Scores(scale), out_latents, stride)
        out[:, heads] = out_latents[..., :value_dim]
