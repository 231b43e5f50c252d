"""DeepSeek sparse attention: the indexer that chooses positions, and attention over the chosen ones. TND
queries over paged keys; lengths are tensors of the device here. Limits: op-plugin's documents (517f2e7)."""

from typing import Any

import torch
from torch import Tensor

from tests.ascend.emulate.attention import attend, paged_tokens
from tests.ascend.emulate.table import (
    Limits,
    need,
    need_contiguous,
    need_dtype,
    need_half,
    need_shape,
    need_strictly,
    need_values,
    operator,
    shapes_only,
)

WIDE_COUNTS = (3072, 4096, 5120, 6144, 7168, 8192)
UNLIMITED = 2**63 - 1


def sequences(
    query: Tensor, q_ends: Tensor | None, kv_lengths: Tensor | None, table: Tensor | None, page_size: int
) -> list[tuple[slice, int, Tensor]]:
    """Of each: its queries, the number of its keys, its pages."""
    need(
        q_ends is not None and kv_lengths is not None and table is not None,
        "TND over pages needs both lengths and block_table",
    )
    assert q_ends is not None and kv_lengths is not None and table is not None
    for name, given in (
        ("actual_seq_lengths_query", q_ends),
        ("actual_seq_lengths of keys", kv_lengths),
        ("block_table", table),
    ):
        need_dtype(name, given, torch.int32)
    need(
        q_ends.dim() == kv_lengths.dim() == 1 and q_ends.shape == kv_lengths.shape,
        "as many query lengths as key lengths",
    )
    need(
        table.dim() == 2 and table.shape[0] == q_ends.numel(),
        f"block_table {tuple(table.shape)} for {q_ends.numel()} sequences",
    )
    need(0 < page_size <= 1024 and page_size % 16 == 0, f"pages of {page_size}: multiples of 16 up to 1024")
    if shapes_only():
        return []
    ends, lengths = q_ends.tolist(), kv_lengths.tolist()
    need_values(
        lambda: all(a <= b for a, b in zip([0, *ends], ends, strict=False)) and ends[-1] <= query.shape[0],
        f"query ends {ends} rise, within {query.shape[0]}",
    )
    need_values(
        lambda: max(-(-length // page_size) for length in lengths) <= table.shape[1],
        f"block_table is too narrow: {lengths}",
    )
    return [
        (slice(start, end), length, table[row, : -(-length // page_size)])
        for row, (start, end, length) in enumerate(zip([0, *ends], ends, lengths, strict=False))
    ]


def seen_keys(mode: int, queries: int, length: int) -> Tensor:
    """How many keys each query may see."""
    every = torch.full((queries,), length)
    return every if mode == 0 else (torch.arange(queries) + 1 + length - queries).clamp(0, length)


def best_positions(
    query: Tensor, key: Tensor, weights: Tensor, where: list[tuple[slice, int, Tensor]], count: int, mode: int
) -> Tensor:
    """For each query the positions of the `count` keys with the largest sum over heads of weight * relu(q k),
    then -1: int32 [T, 1, count]. `where`: of `sequences`."""
    found = torch.full((query.shape[0], 1, count), -1, dtype=torch.int32)
    for rows, length, pages in where:
        keys = paged_tokens(key.flatten(2), pages, length, 1)[:, 0].float()
        scores = (
            torch.einsum("snd,td->snt", query[rows].float(), keys).relu() * weights[rows].float()[..., None]
        ).sum(1)
        for at, visible in enumerate(seen_keys(mode, scores.shape[0], length).tolist()):
            best = scores[at, :visible].sort(dim=-1, descending=True, stable=True).indices[:count]
            found[rows.start + at, 0, : best.numel()] = best.to(torch.int32)
    return found


@operator("npu::npu_lightning_indexer")
def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    return_value: bool = False,
) -> tuple[Tensor, Tensor]:
    """Of each query the positions of the keys with the largest sum over heads of weight * relu(q k), then
    -1."""
    need(
        (layout_query, layout_key) == ("TND", "PA_BSND"), "emulated: layout_query TND and layout_key PA_BSND"
    )
    need(
        1 <= sparse_count <= 2048 or sparse_count in WIDE_COUNTS,
        f"sparse_count {sparse_count}: 1 .. 2048, or {WIDE_COUNTS}",
    )
    need(sparse_mode in (0, 3) and not return_value, "sparse_mode is 0 or 3, values are for training")
    need(pre_tokens == next_tokens == UNLIMITED, "pre_tokens and next_tokens keep their defaults")
    need_half(query=query, key=key)
    need_contiguous(query=query, key=key, weights=weights)
    need(
        query.dim() == 3 and key.dim() == 4 and key.shape[2] == 1,
        "query is (tokens, heads, 128), key (pages, page size, 1, 128)",
    )
    need(
        query.dtype == key.dtype and weights.dtype in (query.dtype, torch.float32),
        "query, key and weights differ in dtype",
    )
    need(
        query.shape[1] <= 64 and query.shape[2] == key.shape[3],
        f"{query.shape[1]} heads of {query.shape[2]}: at most 64",
    )
    need_strictly(query.shape[2] == 128, f"head size {query.shape[2]}: 128")
    need_shape("weights", weights, *query.shape[:2])
    where = sequences(query, actual_seq_lengths_query, actual_seq_lengths_key, block_table, key.shape[1])
    found = best_positions(query, key, weights, where, sparse_count, sparse_mode)
    return found, torch.empty(0, dtype=query.dtype)


@operator("npu::npu_quant_lightning_indexer")
def quant_lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    **rest: Any,
) -> Tensor:
    """npu_lightning_indexer for int8 queries and keys with a scale for each token and head."""
    need(set(rest.values()) <= {None, UNLIMITED}, f"not emulated: {rest}")
    need(query_quant_mode == key_quant_mode == 0, "quant modes are 0")
    need_dtype("query", query, torch.int8)
    need_dtype("key", key, torch.int8)
    halves = (torch.float16,) if Limits.strict else (torch.float16, torch.float32)
    for name, scale in (
        ("weights", weights),
        ("query_dequant_scale", query_dequant_scale),
        ("key_dequant_scale", key_dequant_scale),
    ):
        need_dtype(name, scale, *halves)
    need(1 <= sparse_count <= 2048, f"sparse_count {sparse_count}: 1 .. 2048")
    need(sparse_mode in (0, 3), f"sparse_mode {sparse_mode}: 0 or 3")
    need(
        (layout_query, layout_key) == ("TND", "PA_BSND"), "emulated: layout_query TND and layout_key PA_BSND"
    )
    need(
        query.dim() == 3 and key.dim() == 4 and key.shape[2:] == (1, query.shape[2]),
        "query is (tokens, heads, 128), key (pages, page size, 1, 128)",
    )
    need(query.shape[1] <= 64, f"{query.shape[1]} heads: at most 64")
    need_strictly(query.shape[2] == 128, f"head size {query.shape[2]}: 128")
    need_contiguous(query=query, key=key, weights=weights)
    need_shape("weights", weights, *query.shape[:2])
    need_contiguous(query_dequant_scale=query_dequant_scale, key_dequant_scale=key_dequant_scale)
    need_shape("query_dequant_scale", query_dequant_scale, *query.shape[:2])
    need_shape("key_dequant_scale", key_dequant_scale, *key.shape[:3])
    scaled = (weights.float() * query_dequant_scale.float()).abs().nan_to_num(0)
    need_values(
        lambda: scaled.numel() == 0 or scaled.max() <= torch.finfo(torch.float16).max,
        "weights times query_dequant_scale are beyond float16",
    )
    where = sequences(query, actual_seq_lengths_query, actual_seq_lengths_key, block_table, key.shape[1])
    return best_positions(
        query.float() * query_dequant_scale.float()[..., None],
        key.float() * key_dequant_scale.float()[..., None],
        weights,
        where,
        sparse_count,
        sparse_mode,
    )


@operator("npu::npu_sparse_flash_attention")
def sparse_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    sparse_indices: Tensor,
    scale_value: float,
    *,
    block_table: Tensor | None = None,
    actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    attention_mode: int = 0,
    **rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Absorbed latent attention of each query over its own positions."""
    need(not any(rest.values()), f"not emulated: {list(rest)}")
    need((layout_query, layout_kv) == ("TND", "PA_BSND"), "emulated: layout_query TND and layout_kv PA_BSND")
    need(
        attention_mode == 2 and sparse_block_size == 1 and sparse_mode in (0, 3),
        "attention_mode 2, sparse_block_size 1, mode 0 or 3",
    )
    need(pre_tokens == next_tokens == UNLIMITED, "pre_tokens and next_tokens keep their defaults")
    need(
        value is not None and query_rope is not None and key_rope is not None,
        "value, query_rope and key_rope are needed",
    )
    assert value is not None and query_rope is not None and key_rope is not None
    need_half(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    need_contiguous(query=query, key=key, value=value, query_rope=query_rope, sparse_indices=sparse_indices)
    need(
        query.dim() == 3 and query.shape[1] in (1, 2, 4, 8, 16, 32, 64, 128),
        f"query {tuple(query.shape)}: (tokens, 2**n heads, size)",
    )
    need_strictly(
        (query.shape[2], query_rope.shape[2]) == (512, 64),
        f"head sizes {query.shape[2]} and {query_rope.shape[2]}: 512 and 64",
    )
    need(
        key.dim() == 4 and key.shape[2] == 1 and key.shape == value.shape,
        "key and value are (pages, page size, 1, size)",
    )
    need(
        query_rope.shape[:2] == query.shape[:2] and key_rope.shape[:3] == key.shape[:3],
        "rope parts differ from query and key",
    )
    need_dtype("sparse_indices", sparse_indices, torch.int32)
    need_shape("sparse_indices", sparse_indices, query.shape[0], 1, None)
    out = torch.zeros(query.shape, dtype=query.dtype)
    for rows, length, pages in sequences(
        query, actual_seq_lengths_query, actual_seq_lengths_kv, block_table, key.shape[1]
    ):
        keys, ropes, values = (paged_tokens(x.flatten(2), pages, length, 1) for x in (key, key_rope, value))
        keys = torch.cat((keys, ropes), -1)
        visible = seen_keys(sparse_mode, rows.stop - rows.start, length).tolist()
        for at, limit in enumerate(visible, rows.start):
            chosen = positions(sparse_indices[at, 0], limit)
            if chosen.numel():
                q = torch.cat((query[at], query_rope[at]), -1)[None]
                out[at] = attend(q, keys[chosen], values[chosen], scale_value, None)[0][0].to(query.dtype)
    return out, torch.empty(0), torch.empty(0)


def positions(row: Tensor, limit: int) -> Tensor:
    """The valid ones of a row stand first, and within what the query sees."""
    count = int((row >= 0).sum())
    need_values(lambda: (row[:count] >= 0).all(), "a position after a -1")
    need_values(lambda: (row[:count] < limit).all(), f"a position beyond the {limit} keys that a query sees")
    return row[:count].long()
