"""Multi-head latent attention on Ascend (DeepSeek-V2, 2024), over pages of latents and rotary key parts.

    rows of one token     absorbed: queries go to the latents, which are keys and values of one head, and sums of latents become values
                          afterwards. BSND, a query length of 1: the call whose lengths a replayed step can change.
    rows of a few         absorbed too, TND, sparse mode 3: the operator takes 16 queries of a sequence at most, so a row is several
                          sequences that see more and more of the same pages.
    rows of many          expanded: keys and values of all heads are made from the rows' latents, in parts of the heads that fit the
                          memory set aside; then TND without pages, which is documented for bfloat16: float16 is always absorbed.

Expanding costs once for each row, absorbing makes each query dearer. All rows of a kind are one call. The
operator is documented for latents of 512, rotary parts of 64, heads of 128, and heads in powers of two.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.attention import (
    CAUSAL,
    DTYPES,
    AttentionPlan,
    Seen,
    Several,
    Singles,
    singles_of,
    where_of,
)
from runtime.errors import ModelError
from runtime.layers.upload import upload_int64
from runtime.messages.steps import StepPlan
from runtime.models.mla_config import MAX_EXPANDED

LENGTHS = "actual_seq_kvlen"  # what the operator's second form calls the lengths of keys
MOST_QUERIES = 16  # of a sequence, absorbed
MOST_HEADS, ANY = 128, 1 << 30
LANES = 16  # numbers of 16 bits in a line of NZ
TILE, LINE = 16, 65536  # npu_transpose_batchmatmul: sizes are multiples of it, a row of all heads is shorter


@dataclass(frozen=True, slots=True)
class Up:
    """What makes keys and values from latents, of this rank's heads."""

    keys: Tensor  # [H, N, R]
    values: Tensor  # [H, R, V]


@dataclass(frozen=True, slots=True)
class Many:
    """Rows that are expanded, one behind the other."""

    where: slice | Tensor  # their queries in the step
    # int64 [L]: of their keys in the cache, oldest first; in NZ pages, and places within them
    places: Tensor | tuple[Tensor, Tensor]
    ends: list[int]  # of their queries
    key_ends: list[int]


@dataclass(frozen=True, slots=True)
class LatentPlan(AttentionPlan):
    """AttentionPlan, with rows of several tokens by kind in place of `several`."""

    few: Several | None = None
    many: Many | None = None


def pack_latent(up: Tensor, nope_dim: int) -> Up:
    heads = len(up)
    if heads & (heads - 1) or heads > MOST_HEADS:
        raise ModelError(
            f"a rank's {heads} heads are no power of two up to {MOST_HEADS}, which is what the latent attention of npu takes; "
            "take another --tensor-parallel-size or --device"
        )
    return Up(up[:, :nope_dim].contiguous(), up[:, nope_dim:].transpose(1, 2).contiguous())


def most_absorbed(up: Up) -> int:
    """Queries of a row up to which absorbing is cheaper, the length of the row being a factor on both sides,
    or the only way."""
    rank, made = up.keys.shape[2], up.keys.shape[1] + up.values.shape[2]
    if up.keys.dtype not in DTYPES:
        return ANY
    return rank * made // max(1, 2 * rank - made) if 2 * rank > made else MOST_QUERIES


def plan_latents(
    plan: StepPlan, page_table: Tensor, page_size: int, mask: Tensor, most: int, *, is_nz: bool
) -> LatentPlan:
    """Rows of up to `most` queries are absorbed."""
    counts = plan.counts.astype(np.int64)
    offsets = counts.cumsum() - counts
    one, few, many = (
        np.flatnonzero(kind) for kind in (counts == 1, (counts > 1) & (counts <= most), counts > max(1, most))
    )
    return LatentPlan(
        page_size,
        mask,
        {0: singles_of(plan, page_table, page_size, 0, one, offsets[one])} if len(one) else {},
        {},
        few=_plan_few(plan, few, counts, offsets, page_size, page_table) if len(few) else None,
        many=_plan_many(plan, many, counts, offsets, page_size, page_table, is_nz) if len(many) else None,
    )


def _queries(
    rows: np.ndarray, counts: np.ndarray, offsets: np.ndarray, torch_device: torch.device
) -> slice | Tensor:
    return where_of(
        np.concatenate([np.arange(offsets[row], offsets[row] + counts[row]) for row in rows]), torch_device
    )


def _plan_few(
    plan: StepPlan,
    rows: np.ndarray,
    counts: np.ndarray,
    offsets: np.ndarray,
    page_size: int,
    page_table: Tensor,
) -> Several:
    """Each row as sequences of at most MOST_QUERIES, which have the queries before them among their keys."""
    tiles = -(-counts[rows] // MOST_QUERIES)
    row_of = np.repeat(np.arange(len(rows)), tiles)
    nth = np.arange(len(row_of)) - np.repeat(tiles.cumsum() - tiles, tiles)
    share = counts[rows][row_of], tiles[row_of]
    # within the row, of equal sizes: of a single query the operator wants another mask
    ends = (nth + 1) * share[0] // share[1]
    sizes = ends - nth * share[0] // share[1]
    lengths = plan.starts[rows].astype(np.int64)[row_of] + ends
    table = Seen(plan, rows, page_size, 0).table(page_table)
    if len(row_of) > len(rows):
        table = table.index_select(0, upload_int64(row_of, page_table.device))
    return Several(
        _queries(rows, counts, offsets, page_table.device), table, lengths.tolist(), sizes.cumsum().tolist()
    )


def _plan_many(
    plan: StepPlan,
    rows: np.ndarray,
    counts: np.ndarray,
    offsets: np.ndarray,
    page_size: int,
    page_table: Tensor,
    is_nz: bool,
) -> Many:
    lengths = plan.starts[rows].astype(np.int64) + counts[rows]
    row_of = np.repeat(np.arange(len(rows)), lengths)
    position = np.arange(len(row_of)) - np.repeat(lengths.cumsum() - lengths, lengths)
    slots = plan.slots[rows].astype(np.int64)[row_of]
    torch_device = page_table.device
    pages = page_table[
        upload_int64(slots, torch_device), upload_int64(position // page_size, torch_device)
    ].long()
    within = upload_int64(position % page_size, torch_device)
    return Many(
        _queries(rows, counts, offsets, torch_device),
        (pages, within) if is_nz else pages * page_size + within,
        counts[rows].cumsum().tolist(),
        lengths.cumsum().tolist(),
    )


def attend_latents(
    q: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    ropes: Tensor,
    up: Up,
    plan: AttentionPlan,
    scale: float,
    is_nz: bool,
) -> Tensor:
    """See Ops.latent_attention. Queries that prolog.py has made are at the latents already, [T, H, R], and no
    row is expanded then."""
    caches = _paged(latents, plan.page_size, is_nz), _paged(ropes, plan.page_size, is_nz)
    is_absorbed = q.shape[2] != up.keys.shape[1]
    kinds: list[tuple[slice | Tensor, Any]] = [(rows.where, rows) for rows in plan.singles.values()]
    if isinstance(plan, LatentPlan):
        kinds += [(rows.where, rows) for rows in (plan.few, plan.many) if rows is not None]

    def attend(q: Tensor, q_rope: Tensor, rows: Singles | Several | Many) -> Tensor:
        if isinstance(rows, Many):
            assert not is_absorbed
            return _attend_expanded(q, q_rope, caches, up, rows, plan.triangle, scale)
        return _attend(q if is_absorbed else _by_head(q, up.keys), q_rope, caches, up, rows, plan, scale)

    if len(kinds) == 1:
        return attend(q, q_rope, kinds[0][1])
    out = q.new_empty(*q.shape[:2], up.values.shape[2])
    for where, rows in kinds:
        out[where] = attend(q[where], q_rope[where], rows)
    return out


def _paged(cache: Tensor, page_size: int, is_nz: bool) -> Tensor:
    """[pages, page size, size]; in NZ a page is [1, size / 16, page size, 16]."""
    if is_nz:
        return cache.view(-1, 1, cache.shape[2] // LANES, page_size, LANES)
    return cache.view(-1, page_size, cache.shape[2])


def _attend(
    queries: Tensor,
    q_rope: Tensor,
    caches: tuple[Tensor, Tensor],
    up: Up,
    rows: Singles | Several,
    plan: AttentionPlan,
    scale: float,
) -> Tensor:
    latents, ropes = caches
    turned = q_rope.contiguous()
    common: dict[str, Any] = {
        "key_rope": ropes,
        "block_table": rows.table,
        LENGTHS: rows.lengths,
        "num_query_heads": queries.shape[1],
        "num_key_value_heads": 1,
        "softmax_scale": scale,
        "block_size": plan.page_size,
    }
    if isinstance(rows, Singles):
        plan.called.append((LENGTHS, 0))
        found = torch_npu.npu_fused_infer_attention_score_v2(
            queries.unsqueeze(1),
            latents,
            latents,
            query_rope=turned.unsqueeze(1),
            input_layout="BSND",
            **common,
        )[0].squeeze(1)
    else:
        found = torch_npu.npu_fused_infer_attention_score_v2(
            queries,
            latents,
            latents,
            query_rope=turned,
            actual_seq_qlen=rows.ends,
            atten_mask=plan.triangle,
            sparse_mode=CAUSAL,
            input_layout="TND",
            **common,
        )[0]
    return _by_head(found, up.values)


def _rows_of(cache: Tensor, rows: Many) -> Tensor:
    """[L, size]"""
    if isinstance(rows.places, Tensor):
        return cache.flatten(0, 1).index_select(0, rows.places)
    pages, within = rows.places
    return cache.squeeze(1)[pages, :, within].flatten(1)


def _attend_expanded(
    q: Tensor, q_rope: Tensor, caches: tuple[Tensor, Tensor], up: Up, rows: Many, mask: Tensor, scale: float
) -> Tensor:
    latents, ropes = (_rows_of(cache, rows) for cache in caches)  # [L, R] and [L, P]
    num_heads, made = q.shape[1], up.keys.shape[1] + up.values.shape[2] + ropes.shape[1]
    step = max(1, MAX_EXPANDED // (made * len(latents)))
    parts = []
    for at in range(0, num_heads, step):
        heads = slice(at, min(at + step, num_heads))
        num = heads.stop - at
        keys = (latents @ up.keys[heads].flatten(0, 1).t()).unflatten(1, (num, -1))
        values = torch.matmul(latents, up.values[heads]).transpose(0, 1).contiguous()
        parts.append(
            torch_npu.npu_fused_infer_attention_score_v2(
                q[:, heads].contiguous(),
                keys,
                values,
                query_rope=q_rope[:, heads].contiguous(),
                key_rope=ropes.unsqueeze(1).expand(-1, num, -1).contiguous(),
                atten_mask=mask,
                sparse_mode=CAUSAL,
                actual_seq_qlen=rows.ends,
                actual_seq_kvlen=rows.key_ends,
                num_query_heads=num,
                num_key_value_heads=num,
                softmax_scale=scale,
                input_layout="TND",
            )[0]
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x [n, H, in] times a matrix for each head [H, in, out] -> [n, H, out], one behind the other."""
    heads, ins, outs = matrices.shape
    if ins % TILE == 0 and outs % TILE == 0 and ins * heads < LINE:
        return torch_npu.npu_transpose_batchmatmul(
            x, matrices, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
        )
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1).contiguous()
