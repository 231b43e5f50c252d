"""Paged attention on Ascend: CANN's fused operator, one call for the rows of one token, one for the others.

Both calls read pages through a block table, whose ids the operator does not check. The documents decide the
form of each call:

    decode rows   one token each. BSND with a query length of 1: the operator's incremental branch, made for
                  decoding, for every dtype and head size. It has no sparse mode, so a sliding window is a
                  mask over the few pages that the window touches.
    extend rows   several tokens each. TND, all rows in one call, where the operator is documented for heads
                  and dtype (`takes_tnd`); else BSND, a call for each row. Sparse mode 3 (causal,
                  aligned at the lower right) or 4 (a band). The operator refuses a call whose rows have more
                  pages together than the cache, so rows that share a long prefix may need several calls.

Pages in int8 (--kv-cache-dtype int8) are read by the first form alone, which dequantizes them; the keys of
extend rows are gathered and converted first, and are not in pages then.

The cache is what every device has, [pages * page_size, K, D], and the operator sees it as [pages, page_size,
K * D], which both forms take; or, with --npu-nz-cache, as [pages, K, D / 16, page_size, 16]. CANN's tiling
(fused_infer_attention_score_tiling_check_feature.cpp, July 2026) takes that layout for heads of 64 and 128,
the documents for latents alone. Lengths are lists on the host: the operator takes them as arguments of its
launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.facts import MAX_KEYS
from runtime.devices.ascend.formats import LANES
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.layers.upload import upload, upload_int64

# the size of the mask that the operator takes for its sparse modes 2 to 4, whatever the rows' lengths
TRIANGLE = 2048
CAUSAL, BAND = 3, 4  # sparse modes
LENGTHS = "actual_seq_lengths_kv"  # the operator's argument for the lengths of keys
# Pages in TND, as op-plugin's document of the operator's second form has it for A2 and A3: heads of 128 in
# bfloat16, and where each query head has a key head of its own, heads of 64 or 128 in bfloat16 and float16.
# float32 goes where bfloat16 goes, where the operator takes it at all.
GROUPED_DIMS, OWN_DIMS = (128,), (64, 128)
DTYPES = (torch.bfloat16, torch.float32)


def takes_tnd(dtype: torch.dtype, dim: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether the operator takes pages of such heads in TND. `dim`: size of a head."""
    if num_heads == num_kv_heads:
        return dim in OWN_DIMS
    return dim in GROUPED_DIMS and dtype in DTYPES


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one query each, as the layers of one window see them."""

    queries: slice | Tensor  # which queries of the step are theirs
    table: Tensor  # int32 [rows, pages], from the first page that a row sees
    lengths: list[int]  # keys in these pages
    mask: Tensor | None  # bool [rows, 1, 1, pages * page_size], true where not seen


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """Rows of several queries each, concatenated, as the layers of one window see them."""

    queries: slice | Tensor  # which queries of the step are theirs
    table: Tensor  # int32 [rows, pages], from the first page that a row sees
    lengths: list[int]  # keys in these pages
    ends: list[int]  # end of each row's queries among theirs
    # int64 [keys of all rows], where the keys of each row are in the cache; None: the operator reads pages
    locations: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Made once a step. The sliding window decides which pages a row sees, so rows are listed by window."""

    page_size: int
    triangle: Tensor
    decodes: dict[int, DecodeRows]
    extends: dict[int, ExtendRows]
    # of each decode call so far, the name of its argument with the lengths, and its window; see graphs.py
    lengths_args: list[tuple[str, int]] = field(default_factory=list)


def triangle(torch_device: torch.device) -> Tensor:
    """The mask of sparse modes 2 to 4: true above the diagonal."""
    return torch.ones(TRIANGLE, TRIANGLE, dtype=torch.bool, device=torch_device).triu_(1)


def plan_attention(
    plan: AttentionRows,
    page_tables: Tensor,
    page_size: int,
    windows: tuple[int, ...],
    mask: Tensor,
    *,
    reads_all: bool = False,
) -> AttentionPlan:
    """The plan of a step; see Ops.plan_attention. `mask`: of `triangle`. `reads_all`: extend rows read their
    keys before the operator is called."""
    counts = plan.counts.astype(np.int64)
    offsets = counts.cumsum() - counts
    single, several = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1)
    decodes, extends = {}, {}
    for window in windows:
        table = page_tables[-1 if window else 0]
        if len(single):
            decodes[window] = plan_decode_rows(plan, table, page_size, window, single, offsets[single])
        if len(several):
            seen = VisiblePages(plan, several, page_size, window)
            queries = np.concatenate(
                [
                    np.arange(at, at + count)
                    for at, count in zip(offsets[several], counts[several], strict=True)
                ]
            )
            queries, ends = query_index(queries, table.device), counts[several].cumsum()
            pages = seen.table(table)
            read = key_locations(pages, seen.lengths, page_size) if reads_all else None
            extends[window] = ExtendRows(queries, pages, seen.lengths.tolist(), ends.tolist(), read)
    return AttentionPlan(page_size, mask, decodes, extends)


def key_locations(pages: Tensor, lengths: np.ndarray, page_size: int) -> Tensor:
    """Where the first lengths[r] keys in the pages [rows, width] of each row r are, int64 [keys of all
    rows]."""
    offsets = torch.arange(page_size, device=pages.device)
    every = (pages.long().unsqueeze(2) * page_size + offsets).flatten()
    width = pages.shape[1] * page_size
    index = np.concatenate([row * width + np.arange(length) for row, length in enumerate(lengths)])
    return every.index_select(0, upload_int64(index, pages.device))


class VisiblePages:
    """The pages that rows see: from the oldest key in the first query's window to the last token."""

    def __init__(self, plan: AttentionRows, rows: np.ndarray, page_size: int, window: int) -> None:
        starts = plan.starts[rows].astype(np.int64)
        ends = starts + plan.counts[rows]
        self.slots = plan.slots[rows].astype(np.int64)
        self.begins = np.maximum(starts - window + 1, 0) if window else np.zeros_like(starts)
        self.first = self.begins // page_size
        self.lengths = ends - self.first * page_size
        self.width = int((-(-self.lengths // page_size)).max())

    def table(self, page_table: Tensor) -> Tensor:
        """Ids of these pages, int32 [rows, width]."""
        slots = upload_int64(self.slots, page_table.device)
        if not self.first.any():
            return page_table.index_select(0, slots)[:, : self.width].contiguous()
        columns = np.minimum(self.first[:, None] + np.arange(self.width), page_table.shape[1] - 1)
        return page_table[slots.unsqueeze(1), upload_int64(columns, page_table.device)]


def plan_decode_rows(
    plan: AttentionRows,
    page_table: Tensor,
    page_size: int,
    window: int,
    rows: np.ndarray,
    queries: np.ndarray,
) -> DecodeRows:
    """The decode rows of a step as the layers of one window see them. `queries`: their queries in the
    step."""
    seen, mask = VisiblePages(plan, rows, page_size, window), None
    if seen.begins.any():
        is_masked = np.arange(seen.width * page_size) < (seen.begins - seen.first * page_size)[:, None]
        mask = upload(is_masked[:, None, None], page_table.device)
    return DecodeRows(
        query_index(queries, page_table.device), seen.table(page_table), seen.lengths.tolist(), mask
    )


def runs_within(sizes: Sequence[int], limit: int) -> list[slice]:
    """Rows of each call: as many in a row as have `limit` or less together, and at least one."""
    runs, begin, total = [], 0, 0
    for row, size in enumerate(sizes):
        if row > begin and total + size > limit:
            runs.append(slice(begin, row))
            begin, total = row, 0
        total += size
    return [*runs, slice(begin, len(sizes))]


def query_index(queries: np.ndarray, torch_device: torch.device) -> slice | Tensor:
    """An index of rising queries: a slice where they are contiguous, else a tensor."""
    first, last = int(queries[0]), int(queries[-1])
    return slice(first, last + 1) if last - first + 1 == len(queries) else upload_int64(queries, torch_device)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scores: Scores,
    unit: Tensor | None = None,
    *,
    is_nz: bool = False,
) -> Tensor:
    """Attention of q [T, H, D] over caches [num_locations, K, D] -> [T, H, D]. `unit`: ones [1] in the dtype
    of q, where the caches are in int8. `is_nz`: pages are in NZ.

    Sinks are a logit in each head's softmax that has no value. The operator has them in few forms alone, but
    returns the logarithm of the sum that it has divided by, which says what share they would have taken.
    Scores with caps or biases are not its own: see AscendOps.in_torch.
    """
    assert not scores.cap and scores.slopes is None, "caps or biases of distance in the operator"
    window = scores.window
    caches = paged(k_cache, plan.page_size, is_nz), paged(v_cache, plan.page_size, is_nz)
    common: dict[str, object] = {
        "num_heads": q.shape[1],
        "num_key_value_heads": k_cache.shape[1],
        "scale": scores.scale,
        "block_size": plan.page_size,
    }
    if scores.sinks is not None:
        common["softmax_lse_flag"] = True
    decodes, extends = plan.decodes.get(window), plan.extends.get(window)
    if decodes is not None:
        plan.lengths_args.append((LENGTHS, window))
    scales = {} if unit is None else {"key_antiquant_scale": unit, "value_antiquant_scale": unit}
    if extends is None and decodes is not None:
        found = _attend_decodes(q.contiguous(), caches, decodes, common | scales)
        return _with_sinks(*found, scores.sinks)
    if decodes is None and extends is not None:
        found = _attend_extends(q.contiguous(), caches, extends, plan.triangle, window, common)
        return _with_sinks(*found, scores.sinks)
    assert decodes is not None and extends is not None, "a step without rows"
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    found = _attend_decodes(q[decodes.queries].contiguous(), caches, decodes, common | scales)
    out[decodes.queries] = _with_sinks(*found, scores.sinks)
    found = _attend_extends(q[extends.queries].contiguous(), caches, extends, plan.triangle, window, common)
    out[extends.queries] = _with_sinks(*found, scores.sinks)
    return out


def paged(cache: Tensor, page_size: int, is_nz: bool) -> Tensor:
    """A cache [pages * page_size, K, D] as the operator takes it: [pages, page_size, K * D], or in NZ [pages,
    K, D / 16, page_size, 16]."""
    heads, dim = cache.shape[1:]
    if is_nz:
        return cache.view(-1, heads, dim // LANES, page_size, LANES)
    return cache.view(-1, page_size, heads * dim)


def _pages_of(cache: Tensor, dim: int) -> tuple[int, int]:
    """Tokens of a page and heads of a cache that `paged` has viewed. `dim`: size of a head."""
    return (cache.shape[3], cache.shape[1]) if cache.dim() == 5 else (cache.shape[1], cache.shape[2] // dim)


Weighted = tuple[Tensor, Tensor]  # attention [T, H, D], and the logarithms of its sums, float32 [T, H, 1]


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention whose softmax has the sinks [H] as well. `lse`: undefined where there are none."""
    return out if sinks is None else out * (lse - sinks.unsqueeze(1)).sigmoid().to(out.dtype)


def _attend_decodes(
    q: Tensor, caches: tuple[Tensor, Tensor], rows: DecodeRows, common: dict[str, object]
) -> Weighted:
    out, lse = torch_npu.npu_fused_infer_attention_score(
        q.unsqueeze(1),
        *caches,
        atten_mask=rows.mask,
        block_table=rows.table,
        actual_seq_lengths_kv=rows.lengths,
        input_layout="BSND",
        **common,
    )
    return out.squeeze(1), lse.squeeze(2) if lse.dim() == 4 else lse


def _attend_extends(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    rows: ExtendRows,
    mask: Tensor,
    window: int,
    common: dict[str, object],
) -> Weighted:
    sparse = (
        {"sparse_mode": BAND, "pre_tokens": window - 1, "next_tokens": 0}
        if window
        else {"sparse_mode": CAUSAL}
    )
    if rows.locations is not None:
        return _attend_gathered(q, caches, rows, rows.locations, {"atten_mask": mask} | sparse | common)
    page_size, num_kv_heads = _pages_of(caches[0], q.shape[2])
    parts, begin = [], 0
    if takes_tnd(q.dtype, q.shape[2], q.shape[1], num_kv_heads):
        pages = [-(-length // page_size) for length in rows.lengths]
        for of_call in runs_within(pages, len(caches[0])):
            ends = rows.ends[of_call]
            parts.append(
                torch_npu.npu_fused_infer_attention_score(
                    q[begin : ends[-1]],
                    *caches,
                    atten_mask=mask,
                    block_table=rows.table[of_call],
                    actual_seq_lengths=[end - begin for end in ends],
                    actual_seq_lengths_kv=rows.lengths[of_call],
                    input_layout="TND",
                    **sparse,
                    **common,
                )
            )
            begin = ends[-1]
        return _joined(parts)
    for row, (end, length) in enumerate(zip(rows.ends, rows.lengths, strict=True)):
        parts.append(
            torch_npu.npu_fused_infer_attention_score(
                q[begin:end].unsqueeze(0),
                *caches,
                atten_mask=mask,
                block_table=rows.table[row : row + 1],
                actual_seq_lengths=[end - begin],
                actual_seq_lengths_kv=[length],
                input_layout="BSND",
                **sparse,
                **common,
            )
        )
        begin = end
    return _joined([_of_row(*part) for part in parts])


def _of_row(out: Tensor, lse: Tensor) -> Weighted:
    """The results of one row in BSND, [1, S, H, D] and [1, H, S, 1], if there are logarithms."""
    return out.squeeze(0), lse.squeeze(0).transpose(0, 1) if lse.dim() == 4 else lse


def _joined(parts: list[Weighted]) -> Weighted:
    """The results of several calls, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    out, lse = (torch.cat(some) for some in zip(*parts, strict=True))
    return out, lse


def _attend_gathered(
    q: Tensor, caches: tuple[Tensor, Tensor], rows: ExtendRows, locations: Tensor, common: dict[str, object]
) -> Weighted:
    """Extend rows over keys and values that are read and converted first: one call for rows that have
    MAX_KEYS or less together, where TND is documented for their heads, else one for each row."""
    dim = q.shape[2]
    k, v = (
        cache.view(-1, cache.shape[2] // dim, dim).index_select(0, locations).to(q.dtype) for cache in caches
    )
    common = common | {"block_size": 0}
    is_tnd = takes_tnd(q.dtype, dim, q.shape[1], k.shape[1])
    runs = runs_within(rows.lengths, MAX_KEYS) if is_tnd else [slice(i, i + 1) for i in range(len(rows.ends))]
    parts, begin, key_begin = [], 0, 0
    for run in runs:
        ends, key_ends = rows.ends[run], np.cumsum(rows.lengths[run]).tolist()
        given = (q[begin : ends[-1]], *(x[key_begin : key_begin + key_ends[-1]] for x in (k, v)))
        found = torch_npu.npu_fused_infer_attention_score(
            *(given if is_tnd else (x.unsqueeze(0) for x in given)),
            actual_seq_lengths=[end - begin for end in ends],
            actual_seq_lengths_kv=key_ends,
            input_layout="TND" if is_tnd else "BSND",
            **common,
        )
        parts.append(found if is_tnd else _of_row(*found))
        begin, key_begin = ends[-1], key_begin + key_ends[-1]
    return _joined(parts)


def tower_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in towers of images and sounds, by the fused operator: [..., heads, L, D] -> the same."""
    parts = (x.reshape(-1, *x.shape[-3:]).contiguous() for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    found = torch_npu.npu_fusion_attention(*parts, q.shape[-3], "BNSD", scale=scale)[0]
    return found.view(q.shape)
