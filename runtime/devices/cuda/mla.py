"""Multi-head latent attention on the GPU (DeepSeek-V2, 2024), over pages of latents and rotary key parts.

Decodes and short chunks are absorbed: queries go to the latents, all heads of a tile see one key, and the
sums of latents become values afterwards. Long chunks make keys and values of all heads from the row's
latents, in parts of the heads that fit the memory set aside.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.attention import AttentionPlan, AttentionLaunch, launch_attention
from runtime.devices.cuda.kernels.launch import FP8_KINDS, Gpu
from runtime.models.mla_config import MAX_EXPANDED

ONE_PAGE = 1 << 30  # a page that holds any sequence: keys that lie one behind the other


@dataclass(frozen=True, slots=True)
class UpProjection:
    """What makes keys and values from latents, of this rank's heads."""

    keys: Tensor  # [H, N, R]
    values: Tensor  # [H, R, V]

    def absorbs(self, count: int) -> bool:
        """Whether `count` queries of a row are cheaper absorbed; the length of the row is a factor on both
        sides."""
        rank, made = self.keys.shape[2], self.keys.shape[1] + self.values.shape[2]
        return count * (2 * rank - made) < rank * made


def pack_latent(up: Tensor, nope_dim: int) -> UpProjection:
    return UpProjection(up[:, :nope_dim].contiguous(), up[:, nope_dim:].transpose(1, 2).contiguous())


def mla_attention(
    q: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    ropes: Tensor,
    up: UpProjection,
    plan: AttentionPlan,
    scale: float,
    gpu: Gpu,
) -> Tensor:
    """See Ops.latent_attention."""
    out = q.new_empty(*q.shape[:2], up.values.shape[2])
    for launch in plan.launches:
        for part in _parts(launch, plan, up):
            lines = part.queries
            if part.ends is None or up.absorbs(part.num_queries):
                queries = torch.bmm(q[lines].transpose(0, 1), up.keys).transpose(0, 1)  # [n, H, R]
                found = q.new_empty(queries.shape)
                launch_attention(
                    found, queries, latents, latents, part, plan, Scores(scale), gpu, q_rope[lines], ropes
                )
                out[lines] = torch.bmm(found.transpose(0, 1), up.values).transpose(0, 1)
            else:
                _attend_expanded(
                    torch.cat((q[lines], q_rope[lines]), 2),
                    latents,
                    ropes,
                    up,
                    part,
                    plan,
                    Scores(scale),
                    gpu,
                    out[lines],
                )
    return out


def _parts(launch: AttentionLaunch, plan: AttentionPlan, up: UpProjection) -> list[AttentionLaunch]:
    """All of a span together where every row absorbs, else its rows one by one."""
    if launch.ends is None or up.absorbs(launch.num_queries):
        return [launch]
    parts, first = [], launch.first
    for row in range(launch.ends.shape[1]):
        ends = launch.ends[:, row : row + 1]
        count, length = int(ends[1, 0]), int(ends.sum())
        if first not in plan.row_launches:
            plan.row_launches[first] = AttentionLaunch(
                launch.rows[:, row : row + 1], first, count, length, ends
            )
        parts.append(plan.row_launches[first])
        first += count
    return parts


def _read(cache: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, 1, D] of a cache; torch's index kernels know no fp8."""
    if cache.dtype in FP8_KINDS:
        return cache.view(torch.uint8).index_select(0, places).view(cache.dtype).to(dtype)
    return cache.index_select(0, places).to(dtype)


def _attend_expanded(
    q: Tensor,
    latents: Tensor,
    ropes: Tensor,
    up: UpProjection,
    launch: AttentionLaunch,
    plan: AttentionPlan,
    scores: Scores,
    gpu: Gpu,
    out: Tensor,
) -> None:
    """One row: q [n, H, N + P] -> out [n, H, V]."""
    positions = torch.arange(launch.max_kv_len, device=q.device)
    slot = launch.rows[0].long()
    pages = plan.page_tables[0, slot, positions // plan.page_size].long()
    places = pages * plan.page_size + positions % plan.page_size
    seen, turned = _read(latents, places, q.dtype).squeeze(1), _read(ropes, places, q.dtype)
    num_heads, nope_dim, _ = up.keys.shape
    dim, value_dim = q.shape[2], up.values.shape[2]
    table = torch.zeros(1, 1, 1, dtype=torch.int32, device=q.device).expand(1, plan.page_tables.shape[1], 1)
    whole = AttentionPlan((launch,), table, ONE_PAGE)
    step = max(1, MAX_EXPANDED // ((dim + value_dim) * launch.max_kv_len))
    for at in range(0, num_heads, step):
        heads = slice(at, min(at + step, num_heads))
        num = heads.stop - at
        keys = seen.new_empty(launch.max_kv_len, num, dim)
        keys[..., :nope_dim] = (seen @ up.keys[heads].flatten(0, 1).T).unflatten(1, (num, nope_dim))
        keys[..., nope_dim:] = turned
        values = torch.matmul(seen, up.values[heads]).transpose(0, 1).contiguous()
        found = q.new_empty(len(q), num, value_dim)
        launch_attention(found, q[:, heads], keys, values, launch, whole, scores, gpu)
        out[:, heads] = found
