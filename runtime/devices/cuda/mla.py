"""Multi-head latent attention on the GPU (DeepSeek-V2, 2024), over pages of latents and rotary key parts.

Decode rows and short chunks are absorbed: queries are projected to the latents, so that all heads share one
key, and the sums of latents are projected to values afterwards. Long chunks expand keys and values of all
heads from the row's latents, as many heads at a time as fit the memory set aside (EXPANDED).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.cuda.attention import ONE_PAGE, AttentionLaunch, AttentionPlan, launch_attention
from runtime.devices.cuda.kernels.launch import FP8_KINDS, Gpu, next_power_of_2
from runtime.models.config.mla_config import MAX_EXPANDED

EXPANDED_PAGE = 64  # tokens of which expanded rows have room for a power of two of


class AttendExpanded(Protocol):
    """Attention of a row's last queries [n, H, N + P] over the first `length` of its expanded keys and
    values, [room, H, N + P] and [room, H, V] -> [n, H, V]. The room is EXPANDED_PAGE times a power of two,
    and zeros are behind the keys."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, length: int, scale: float) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class UpProjection:
    """Projections from latents to keys and values of this rank's heads."""

    keys: Tensor  # [H, N, R]
    values: Tensor  # [H, R, V]

    def absorbs(self, count: int) -> bool:
        """Whether `count` queries of a row are cheaper absorbed. The length of the row is a factor of both
        costs and does not matter."""
        rank, expanded = self.keys.shape[2], self.keys.shape[1] + self.values.shape[2]
        return count * (2 * rank - expanded) < rank * expanded


def pack_latent(up: Tensor, nope_dim: int) -> UpProjection:
    """Splits kv_b [H, N + V, R] into projections of keys and values."""
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
    counters: Tensor | None = None,
    *,
    lists: bool = False,
    attend: AttendExpanded | None = None,
) -> Tensor:
    """Attention of q [T, H, N] and q_rope [T, H, P] -> [T, H, V]; see Ops.latent_attention. `counters` and
    `lists`: as of `attention` (attention.py). `attend`: attention of expanded rows; None: our own kernel."""
    out = q.new_empty(*q.shape[:2], up.values.shape[2])
    for launch in plan.launches:
        for rows in _launches_of(launch, plan, up):
            tokens = rows.queries
            if rows.ends is None or up.absorbs(rows.num_queries):
                queries = torch.bmm(q[tokens].transpose(0, 1), up.keys).transpose(0, 1)  # [n, H, R]
                attended = q.new_empty(queries.shape)
                launch_attention(
                    attended,
                    queries,
                    latents,
                    latents,
                    rows,
                    plan,
                    Scores(scale),
                    gpu,
                    q_rope[tokens],
                    ropes,
                    counters,
                    lists=lists,
                )
                torch.bmm(attended.transpose(0, 1), up.values, out=out[tokens].transpose(0, 1))
            else:
                _attend_expanded(
                    torch.cat((q[tokens], q_rope[tokens]), 2),
                    latents,
                    ropes,
                    up,
                    rows,
                    plan,
                    Scores(scale),
                    gpu,
                    out[tokens],
                    attend,
                )
    return out


def _launches_of(launch: AttentionLaunch, plan: AttentionPlan, up: UpProjection) -> list[AttentionLaunch]:
    """One launch where every row is absorbed, else a launch for each row."""
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


def _read(cache: Tensor, locations: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, 1, D] of a cache; torch's index kernels do not support fp8."""
    if cache.dtype in FP8_KINDS:
        return cache.view(torch.uint8).index_select(0, locations).view(cache.dtype).to(dtype)
    return cache.index_select(0, locations).to(dtype)


def expanded_room(length: int) -> int:
    """Tokens that a row of `length` has room for where others attend."""
    return next_power_of_2(-(-length // EXPANDED_PAGE)) * EXPANDED_PAGE


def expanded_heads(dim: int, room: int) -> int:
    """Heads that are expanded at once, of which a token's key and value have `dim` numbers together."""
    return max(1, MAX_EXPANDED // (dim * room))


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
    attend: AttendExpanded | None,
) -> None:
    """Attention of one row over expanded keys and values: q [n, H, N + P] -> out [n, H, V]."""
    positions = torch.arange(launch.max_kv_len, device=q.device)
    slot = launch.rows[0].long()
    pages = plan.page_tables[0, slot, positions // plan.page_size].long()
    locations = pages * plan.page_size + positions % plan.page_size
    row_latents, row_ropes = _read(latents, locations, q.dtype).squeeze(1), _read(ropes, locations, q.dtype)
    num_heads, nope_dim, _ = up.keys.shape
    dim, value_dim = q.shape[2], up.values.shape[2]
    table = torch.zeros(1, 1, 1, dtype=torch.int32, device=q.device).expand(1, plan.page_tables.shape[1], 1)
    row_plan = AttentionPlan((launch,), table, ONE_PAGE)
    length = launch.max_kv_len
    room = length if attend is None else expanded_room(length)
    step = expanded_heads(dim + value_dim, room)
    for at in range(0, num_heads, step):
        heads = slice(at, min(at + step, num_heads))
        num = heads.stop - at
        keys, values = (row_latents.new_empty(room, num, size) for size in (dim, value_dim))
        keys[length:], values[length:] = 0, 0
        keys[:length, :, :nope_dim] = (row_latents @ up.keys[heads].flatten(0, 1).T).unflatten(
            1, (num, nope_dim)
        )
        keys[:length, :, nope_dim:] = row_ropes
        values[:length] = torch.matmul(row_latents, up.values[heads]).transpose(0, 1)
        if attend is not None:
            out[:, heads] = attend(q[:, heads], keys, values, length, scores.scale)
            continue
        attended = q.new_empty(len(q), num, value_dim)
        launch_attention(attended, q[:, heads], keys, values, launch, row_plan, scores, gpu)
        out[:, heads] = attended
