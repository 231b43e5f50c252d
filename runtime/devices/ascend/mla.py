"""Multi-head latent attention (MLA) on Ascend (DeepSeek-V2, 2024), over pages of latents and rotary key
parts.

    decode rows    absorbed: queries are projected to the latents, which are keys and values of one head, and
                   sums of latents are projected to values afterwards. BSND with a query length of 1: the
                   call whose lengths a replayed step can change.
    absorbed rows  a few tokens each: absorbed too, TND, sparse mode 3. The operator takes at most 16 queries
                   of a sequence, so a row becomes several sequences that see more and more of its pages.
    expanded rows  many tokens each: keys and values of all heads are computed from the rows' latents, as
                   many heads at a time as fit the memory set aside; then TND without pages, which is
                   documented for bfloat16. float16 is always absorbed.

Expanding costs once for each row, absorbing makes each query more expensive. All rows of a kind are one call,
unless expanded rows have more than MAX_KEYS keys together.
The operator is documented for latents of 512, rotary parts of 64, heads of 128, and heads in powers of two.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.attention import (
    CAUSAL,
    DTYPES,
    AttentionPlan,
    DecodeRows,
    ExtendRows,
    VisiblePages,
    plan_decode_rows,
    query_index,
    runs_within,
)
from runtime.devices.ascend.facts import MAX_KEYS
from runtime.devices.ascend.formats import LANES
from runtime.devices.attention_rows import AttentionRows
from runtime.errors import ModelError
from runtime.layers.upload import upload_int64
from runtime.models.config.mla_config import MAX_EXPANDED

LENGTHS = "actual_seq_kvlen"  # the operator's argument for the lengths of keys, in its second form
MAX_QUERIES = 16  # the most queries of a sequence, absorbed
MAX_HEADS, ANY = 128, 1 << 30
TILE, MAX_ROW = (
    16,
    65536,
)  # npu_transpose_batchmatmul: sizes are multiples of TILE, a row of all heads is shorter than MAX_ROW


@dataclass(frozen=True, slots=True)
class UpProjection:
    """Projections from latents to keys and values of this rank's heads."""

    keys: Tensor  # [H, N, R]
    values: Tensor  # [H, R, V]


@dataclass(frozen=True, slots=True)
class ExpandedRows:
    """Rows whose keys and values are expanded, concatenated."""

    queries: slice | Tensor  # which queries of the step are theirs
    # int64 [L]: locations of their keys in the cache, oldest first; in NZ, pages and offsets within them
    locations: Tensor | tuple[Tensor, Tensor]
    ends: list[int]  # end of each row's queries among theirs
    key_ends: list[int]


@dataclass(frozen=True, slots=True)
class MlaPlan(AttentionPlan):
    """An AttentionPlan for MLA: extend rows are absorbed or expanded."""

    absorbed: ExtendRows | None = None
    expanded: tuple[ExpandedRows, ...] = ()  # one for each call


def pack_latent(up: Tensor, nope_dim: int) -> UpProjection:
    """Splits kv_b [H, N + V, R] into projections of keys and values. Raises ModelError for other numbers of
    heads than the operator takes."""
    heads = len(up)
    if heads & (heads - 1) or heads > MAX_HEADS:
        raise ModelError(
            f"a rank's {heads} heads are no power of two up to {MAX_HEADS}, which is what the latent "
            "attention of "
            "npu takes; take another --tensor-parallel-size or --device"
        )
    return UpProjection(up[:, :nope_dim].contiguous(), up[:, nope_dim:].transpose(1, 2).contiguous())


def max_absorbed(up: UpProjection) -> int:
    """The most queries of a row that are absorbed: up to there it is cheaper, or it is the only way. The
    length of the row is a factor of both costs and does not matter."""
    rank, expanded_size = up.keys.shape[2], up.keys.shape[1] + up.values.shape[2]
    if up.keys.dtype not in DTYPES:
        return ANY
    return (
        rank * expanded_size // max(1, 2 * rank - expanded_size) if 2 * rank > expanded_size else MAX_QUERIES
    )


def plan_mla(
    plan: AttentionRows, page_table: Tensor, page_size: int, mask: Tensor, most: int, *, is_nz: bool
) -> MlaPlan:
    """The plan of a step; see Ops.plan_attention. Rows of up to `most` queries are absorbed."""
    counts = plan.counts.astype(np.int64)
    offsets = counts.cumsum() - counts
    single, absorbed, expanded = (
        np.flatnonzero(kind) for kind in (counts == 1, (counts > 1) & (counts <= most), counts > max(1, most))
    )
    return MlaPlan(
        page_size,
        mask,
        {0: plan_decode_rows(plan, page_table, page_size, 0, single, offsets[single])} if len(single) else {},
        {},
        absorbed=_plan_absorbed(plan, absorbed, counts, offsets, page_size, page_table)
        if len(absorbed)
        else None,
        expanded=tuple(
            _plan_expanded(plan, expanded[rows], counts, offsets, page_size, page_table, is_nz)
            for rows in runs_within((plan.starts[expanded] + counts[expanded]).tolist(), MAX_KEYS)
            if len(expanded)
        ),
    )


def _queries(
    rows: np.ndarray, counts: np.ndarray, offsets: np.ndarray, torch_device: torch.device
) -> slice | Tensor:
    return query_index(
        np.concatenate([np.arange(offsets[row], offsets[row] + counts[row]) for row in rows]), torch_device
    )


def _plan_absorbed(
    plan: AttentionRows,
    rows: np.ndarray,
    counts: np.ndarray,
    offsets: np.ndarray,
    page_size: int,
    page_table: Tensor,
) -> ExtendRows:
    """Each row as sequences of at most MOST_QUERIES, which have the queries before them among their keys."""
    tiles = -(-counts[rows] // MAX_QUERIES)
    row_of = np.repeat(np.arange(len(rows)), tiles)
    nth = np.arange(len(row_of)) - np.repeat(tiles.cumsum() - tiles, tiles)
    share = counts[rows][row_of], tiles[row_of]
    # within the row, of equal sizes: of a single query the operator wants another mask
    ends = (nth + 1) * share[0] // share[1]
    sizes = ends - nth * share[0] // share[1]
    lengths = plan.starts[rows].astype(np.int64)[row_of] + ends
    table = VisiblePages(plan, rows, page_size, 0).table(page_table)
    if len(row_of) > len(rows):
        table = table.index_select(0, upload_int64(row_of, page_table.device))
    return ExtendRows(
        _queries(rows, counts, offsets, page_table.device), table, lengths.tolist(), sizes.cumsum().tolist()
    )


def _plan_expanded(
    plan: AttentionRows,
    rows: np.ndarray,
    counts: np.ndarray,
    offsets: np.ndarray,
    page_size: int,
    page_table: Tensor,
    is_nz: bool,
) -> ExpandedRows:
    lengths = plan.starts[rows].astype(np.int64) + counts[rows]
    row_of = np.repeat(np.arange(len(rows)), lengths)
    position = np.arange(len(row_of)) - np.repeat(lengths.cumsum() - lengths, lengths)
    slots = plan.slots[rows].astype(np.int64)[row_of]
    torch_device = page_table.device
    pages = page_table[
        upload_int64(slots, torch_device), upload_int64(position // page_size, torch_device)
    ].long()
    within = upload_int64(position % page_size, torch_device)
    return ExpandedRows(
        _queries(rows, counts, offsets, torch_device),
        (pages, within) if is_nz else pages * page_size + within,
        counts[rows].cumsum().tolist(),
        lengths.cumsum().tolist(),
    )


def mla_attention(
    q: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    ropes: Tensor,
    up: UpProjection,
    plan: AttentionPlan,
    scale: float,
    is_nz: bool,
) -> Tensor:
    """MLA of q [T, H, N] and q_rope [T, H, P] -> [T, H, V]; see Ops.latent_attention. Queries of the fused
    prolog are absorbed already, [T, H, R], and no row is expanded then."""
    caches = _paged(latents, plan.page_size, is_nz), _paged(ropes, plan.page_size, is_nz)
    is_absorbed = q.shape[2] != up.keys.shape[1]
    kinds: list[DecodeRows | ExtendRows | ExpandedRows] = list(plan.decodes.values())
    if isinstance(plan, MlaPlan):
        kinds += plan.expanded if plan.absorbed is None else (plan.absorbed, *plan.expanded)

    def attend(q: Tensor, q_rope: Tensor, rows: DecodeRows | ExtendRows | ExpandedRows) -> Tensor:
        if isinstance(rows, ExpandedRows):
            assert not is_absorbed
            return _attend_expanded(q, q_rope, caches, up, rows, plan.triangle, scale)
        return _attend(q if is_absorbed else by_head(q, up.keys), q_rope, caches, up, rows, plan, scale)

    if len(kinds) == 1:
        return attend(q, q_rope, kinds[0])
    out = q.new_empty(*q.shape[:2], up.values.shape[2])
    for rows in kinds:
        out[rows.queries] = attend(q[rows.queries], q_rope[rows.queries], rows)
    return out


def _paged(cache: Tensor, page_size: int, is_nz: bool) -> Tensor:
    """A cache as [pages, page size, size]; in NZ as [pages, 1, size / 16, page size, 16]."""
    if is_nz:
        return cache.view(-1, 1, cache.shape[2] // LANES, page_size, LANES)
    return cache.view(-1, page_size, cache.shape[2])


def _attend(
    queries: Tensor,
    q_rope: Tensor,
    caches: tuple[Tensor, Tensor],
    up: UpProjection,
    rows: DecodeRows | ExtendRows,
    plan: AttentionPlan,
    scale: float,
) -> Tensor:
    latents, ropes = caches
    rope = q_rope.contiguous()
    common: dict[str, object] = {
        "key_rope": ropes,
        "block_table": rows.table,
        LENGTHS: rows.lengths,
        "num_query_heads": queries.shape[1],
        "num_key_value_heads": 1,
        "softmax_scale": scale,
        "block_size": plan.page_size,
    }
    if isinstance(rows, DecodeRows):
        plan.lengths_args.append((LENGTHS, 0))
        found = torch_npu.npu_fused_infer_attention_score_v2(
            queries.unsqueeze(1),
            latents,
            latents,
            query_rope=rope.unsqueeze(1),
            input_layout="BSND",
            **common,
        )[0].squeeze(1)
    else:
        found = torch_npu.npu_fused_infer_attention_score_v2(
            queries,
            latents,
            latents,
            query_rope=rope,
            actual_seq_qlen=rows.ends,
            atten_mask=plan.triangle,
            sparse_mode=CAUSAL,
            input_layout="TND",
            **common,
        )[0]
    return by_head(found, up.values)


def _rows_of(cache: Tensor, rows: ExpandedRows) -> Tensor:
    """The rows' latents or rotary parts, [L, size]."""
    if isinstance(rows.locations, Tensor):
        return cache.flatten(0, 1).index_select(0, rows.locations)
    pages, within = rows.locations
    return cache.squeeze(1)[pages, :, within].flatten(1)


def _attend_expanded(
    q: Tensor,
    q_rope: Tensor,
    caches: tuple[Tensor, Tensor],
    up: UpProjection,
    rows: ExpandedRows,
    mask: Tensor,
    scale: float,
) -> Tensor:
    latents, ropes = (_rows_of(cache, rows) for cache in caches)  # [L, R] and [L, P]
    num_heads, expanded_size = q.shape[1], up.keys.shape[1] + up.values.shape[2] + ropes.shape[1]
    step = max(1, MAX_EXPANDED // (expanded_size * len(latents)))
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


def by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x [n, H, in] times a matrix for each head [H, in, out] -> [n, H, out], contiguous."""
    heads, ins, outs = matrices.shape
    if ins % TILE == 0 and outs % TILE == 0 and ins * heads < MAX_ROW:
        return torch_npu.npu_transpose_batchmatmul(
            x, matrices, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
        )
    return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1).contiguous()
