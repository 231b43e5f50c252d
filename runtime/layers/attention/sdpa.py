"""Paged attention in plain torch, on any device: gathers a row's keys and values, then calls torch's scaled
dot product attention. The CPU uses it, and `--attention-backend torch_native` elsewhere.

The plan is made once a step on the host and used by every layer. Decode rows are attended together, padded,
in groups whose lengths differ by less than a factor of two, so that one long row does not make the others
expensive. Extend rows are attended one by one, in tiles of queries, so that a mask has at most TILE rows.
Grouped queries need no repeated keys: the queries of a key head are rows of the kernel's query dimension
(decode), or share their key head with stride 0 (extend).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.layers.attention.kv_dtype import read_as
from runtime.layers.upload import upload, upload_int64

TILE = 256  # queries of an extend row attended at once
GROUP_TOKENS = 1 << 15  # most padded keys of a group of decode rows; a single row may have more


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """`num_rows` decode rows whose keys are gathered to [rows, length]."""

    rows: (
        Tensor | None
    )  # int64 [rows]: indices of the decode rows; None: all decode rows of the step, in order
    num_rows: int
    gather: Tensor  # int64 [rows * length] locations in the cache; 0, the padding page, where masked
    mask: Tensor | None  # [rows, 1, 1, length], 0 or -inf; None: nothing is masked


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """An extend row: queries [first, first + count) of the step, the last of which stands at the last of the
    positions whose keys are gathered."""

    first: int
    count: int
    gather: Tensor  # int64 [length] locations of the keys, oldest first
    # 0 or -inf: [count, length] of a row whose queries form a tree; [tile, length] of one with strides, as
    # AttentionPlan.masks; of one whose queries see each other, [count, length]; None: a chain, which has a
    # shared mask
    mask: Tensor | None = None
    stride: int = 1  # positions from one query to the next
    ahead: int = 0  # keys behind the last query's own, which it sees as well

    def seen(self, num_queries: int) -> int:
        """Keys that the last of the row's first `num_queries` queries sees."""
        return len(self.gather) - (self.count - num_queries) * self.stride


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How the rows of a step are attended, by sliding window: the window decides which keys are gathered."""

    num_decodes: int
    decodes: dict[int, list[DecodeGroup]]
    extends: dict[int, list[ExtendRow]]
    masks: dict[
        int, Tensor
    ]  # [tile, longest]: the mask of all extend tiles, aligned at the lower right corner


def plan_attention(
    plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...], dtype: torch.dtype
) -> AttentionPlan:
    """The attention plan of a step. `page_tables`: int32 [pools, max_slots, pages]; `windows`: the layers'
    sliding windows, 0 for none; `dtype`: of the masks."""
    plan = plan.by_query() if plan.block_size else plan
    tables = {window: page_tables[-1 if window else 0] for window in windows}
    decodes = {
        window: _plan_decodes(plan, table, page_size, window, dtype) for window, table in tables.items()
    }
    extends = {
        window: _plan_extends(plan, table, page_size, window, dtype) for window, table in tables.items()
    }
    masks = {
        window: _tile_mask(extends[window], window, dtype, page_tables.device)
        for window in windows
        if extends[window]
    }
    return AttentionPlan(plan.num_decodes, decodes, extends, masks)


def _locations(page_table: Tensor, slots: Tensor, first: Tensor, num_pages: int, page_size: int) -> Tensor:
    """Cache locations of `num_pages` pages from page `first` on, for each slot: int64 [slots, num_pages *
    page_size]."""
    torch_device = page_table.device
    columns = (first.unsqueeze(1) + torch.arange(num_pages, device=torch_device)).clamp_max(
        page_table.shape[1] - 1
    )
    pages = page_table[slots.unsqueeze(1), columns].long()
    return (pages.unsqueeze(2) * page_size + torch.arange(page_size, device=torch_device)).flatten(1)


def _plan_decodes(
    plan: AttentionRows, page_table: Tensor, page_size: int, window: int, dtype: torch.dtype
) -> list[DecodeGroup]:
    if plan.num_decodes == 0:
        return []
    slots = plan.slots[: plan.num_decodes].astype(np.int64)
    ends = plan.starts[: plan.num_decodes].astype(np.int64) + 1
    begins = np.maximum(ends - window, 0) if window else np.zeros_like(ends)
    first = begins // page_size
    num_pages = -(-ends // page_size) - first
    torch_device = page_table.device
    if len(slots) == 1:
        all_of_row = _locations(
            page_table, upload(slots, torch_device), upload(first, torch_device), int(num_pages[0]), page_size
        )[0]
        skip = int(begins[0] - first[0] * page_size)
        return [DecodeGroup(None, 1, all_of_row[skip : skip + int(ends[0] - begins[0])], None)]
    groups = []
    for rows in _similar(num_pages, page_size):
        length = int(num_pages[rows].max())
        from_page = upload(first[rows], torch_device)
        gather = _locations(page_table, upload(slots[rows], torch_device), from_page, length, page_size)
        positions = from_page.unsqueeze(1) * page_size + torch.arange(length * page_size, device=torch_device)
        begin, end = (
            upload(begins[rows], torch_device).unsqueeze(1),
            upload(ends[rows], torch_device).unsqueeze(1),
        )
        is_seen = (positions >= begin) & (positions < end)
        mask = torch.zeros(is_seen.shape, dtype=dtype, device=torch_device).masked_fill_(~is_seen, -torch.inf)
        is_all = len(rows) == len(slots)
        groups.append(
            DecodeGroup(
                None if is_all else upload_int64(rows, torch_device),
                len(rows),
                torch.where(is_seen, gather, 0).flatten(),
                mask[:, None, None],
            )
        )
    return groups


def _similar(num_pages: np.ndarray, page_size: int) -> list[np.ndarray]:
    """Splits rows into groups of similar size (the same power of two, rounded up) with at most GROUP_TOKENS
    keys. -> indices of each group's rows, ascending"""
    sizes = np.ceil(np.log2(num_pages)).astype(np.int64)
    groups: list[np.ndarray] = []
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        most = max(1, GROUP_TOKENS // (int(2**size) * page_size))
        groups.extend(rows[i : i + most] for i in range(0, len(rows), most))
    return groups


def _plan_extends(
    plan: AttentionRows, page_table: Tensor, page_size: int, window: int, dtype: torch.dtype
) -> list[ExtendRow]:
    rows, query = [], plan.num_decodes
    for row in range(plan.num_decodes, len(plan.slots)):
        start, count, end = int(plan.starts[row]), int(plan.counts[row]), int(plan.ends[row])
        if plan.spans is not None and row in plan.spans:
            rows += _plan_spans(plan, row, query, page_table, page_size, window, dtype)
            query += count
            continue
        begin, stride = max(start - window + 1, 0) if window else 0, 1
        locations = _keys_between(page_table, int(plan.slots[row]), begin, end, page_size)
        mask = None
        if plan.parents is not None and row in plan.parents:
            is_hidden = upload(~tree_mask(plan.parents[row], start - begin, window), page_table.device)
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=page_table.device)
            mask.masked_fill_(is_hidden, -torch.inf)
        elif plan.strides is not None and plan.strides[row] > 1:
            stride = int(plan.strides[row])
            mask = _corner_mask(min(TILE, count), len(locations), stride, window, dtype, page_table.device)
        rows.append(ExtendRow(query, count, locations, mask, stride))
        query += count
    return rows


def _keys_between(page_table: Tensor, slot: int, begin: int, end: int, page_size: int) -> Tensor:
    """Cache locations of the positions [begin, end) of a slot, int64 [end - begin]."""
    first = begin // page_size
    slots, pages = upload(np.array([[slot], [first]], np.int64), page_table.device)
    locations = _locations(page_table, slots, pages, -(-end // page_size) - first, page_size)[0]
    return locations[begin - first * page_size : end - first * page_size]


def _plan_spans(
    plan: AttentionRows,
    row: int,
    query: int,
    page_table: Tensor,
    page_size: int,
    window: int,
    dtype: torch.dtype,
) -> list[ExtendRow]:
    """A row with spans, whose first query is the step's query `query`, as rows of a part each: chains, and
    tiles of spans, whose queries see the span to its end."""
    assert plan.spans is not None, "a row with spans"
    start, slot, rows = int(plan.starts[row]), int(plan.slots[row]), []
    for first, stop, end, is_span in span_parts(int(plan.counts[row]), plan.spans[row].tolist()):
        begin = max(start + first - window + 1, 0) if window else 0
        keys = _keys_between(page_table, slot, begin, start + end, page_size)
        mask = None
        if is_span:
            mask = torch.zeros(stop - first, len(keys), dtype=dtype, device=page_table.device)
            if window:
                queries = torch.arange(start + first, start + stop, device=page_table.device).unsqueeze(1)
                places = torch.arange(begin, start + end, device=page_table.device)
                mask.masked_fill_(places <= queries - window, -torch.inf)
        rows.append(ExtendRow(query + first, stop - first, keys, mask, 1, end - stop))
    return rows


def span_parts(count: int, spans: list[list[int]]) -> list[tuple[int, int, int, bool]]:
    """The parts of a row of `count` queries: first query, that behind the last, the query behind the last one
    that they see, and whether they are of a span. Those of spans have TILE queries at most."""
    parts, at = list[tuple[int, int, int, bool]](), 0
    for first, end in [*spans, [count, count]]:
        if at < first:
            parts.append((at, first, first, False))
        parts += [(tile, min(tile + TILE, end), end, True) for tile in range(first, end, TILE)]
        at = end
    return parts


def tree_mask(parents: np.ndarray, num_before: int, window: int) -> np.ndarray:
    """bool [count, num_before + count]: which of the keys before the row, and of the row's own, each query of
    a tree sees. `parents`: which query each one follows, -1 for the first."""
    count = len(parents)
    assert count <= TILE, "a tree of more queries than a tile has"
    is_own = np.zeros((count, count), bool)
    depths = np.zeros(count, np.int64)
    for node, parent in enumerate(parents.tolist()):
        if node:
            is_own[node] = is_own[parent]
            depths[node] = depths[parent] + 1
        is_own[node, node] = True
    is_before = np.ones((count, num_before), bool)
    if window:
        is_before = num_before + depths[:, None] - np.arange(num_before) < window
        is_own &= depths[:, None] - depths < window
    return np.concatenate((is_before, is_own), axis=1)


def _tile_mask(rows: list[ExtendRow], window: int, dtype: torch.dtype, torch_device: torch.device) -> Tensor:
    """The mask of extend rows, [tile, longest]: the last query of a tile sees the last key, the query above
    it one key less. Whether a key is seen depends only on its distance from the lower right corner, so
    corners of this mask serve all tiles of all rows."""
    tile, longest = min(TILE, max(row.count for row in rows)), max(len(row.gather) for row in rows)
    return _corner_mask(tile, longest, 1, window, dtype, torch_device)


def _corner_mask(
    num_queries: int, num_keys: int, stride: int, window: int, dtype: torch.dtype, torch_device: torch.device
) -> Tensor:
    """[queries, keys], 0 or -inf: the last query stands at the last key, the one above it `stride` before."""
    # of the rows above the last, and of columns left of the last, the distance to these
    above = stride * torch.arange(num_queries - 1, -1, -1, device=torch_device).unsqueeze(1)
    left = torch.arange(num_keys - 1, -1, -1, device=torch_device)
    is_seen = left >= above
    if window:
        is_seen &= left < above + window
    hidden = torch.zeros(num_queries, num_keys, dtype=dtype, device=torch_device)
    return hidden.masked_fill_(~is_seen, -torch.inf)


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scores: Scores) -> Tensor:
    """Attention of a step: q [T, H, D] over caches [num_locations, K, D] -> [T, H, D]."""
    groups, rows = plan.decodes[scores.window], plan.extends[scores.window]
    if not rows and len(groups) == 1:
        return _attend_group(q, k_cache, v_cache, groups[0], scores)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decodes = q[: plan.num_decodes]
    for group in groups:
        if group.rows is None:
            out[: plan.num_decodes] = _attend_group(decodes, k_cache, v_cache, group, scores)
        else:
            out[group.rows] = _attend_group(decodes[group.rows], k_cache, v_cache, group, scores)
    for row in rows:
        part = slice(row.first, row.first + row.count)
        keys, values = read_as(k_cache, row.gather, q.dtype), read_as(v_cache, row.gather, q.dtype)
        mask = plan.masks[scores.window] if row.mask is None else row.mask
        attend_extend(q[part], keys, values, mask, scores, out[part], row.stride, row.ahead)
    return out


def _attend_group(q: Tensor, k_cache: Tensor, v_cache: Tensor, group: DecodeGroup, scores: Scores) -> Tensor:
    return attend_decodes(
        q, read_as(k_cache, group.gather, q.dtype), read_as(v_cache, group.gather, q.dtype), group, scores
    )


def attend_decodes(q: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, scores: Scores) -> Tensor:
    """q [rows, H, D] over the group's gathered keys and values [rows * length, K, D] -> [rows, H, D]."""
    kv_heads, dim = keys.shape[1:]
    shape = (group.num_rows, -1, kv_heads, dim)
    # [rows, K, length, D]
    keys, values = keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
    queries = q.reshape(group.num_rows, kv_heads, -1, dim)  # [rows, K, H / K, D]
    mask = group.mask
    if scores.slopes is not None:
        mask = _with_decode_biases(mask, keys.shape[2], scores.slopes.view(kv_heads, -1, 1))
    elif mask is not None:
        mask = mask.expand(-1, -1, queries.shape[2], -1)
    sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1, 1)
    return scaled_attention(queries, keys, values, mask, scores, sinks).reshape(q.shape)


def _with_decode_biases(mask: Tensor | None, length: int, slopes: Tensor) -> Tensor:
    """The mask [rows, 1, 1, length] of decode rows with their linear biases by distance, float32 [rows, K,
    H / K, length]. `slopes`: [K, H / K, 1]. The newest key that a row sees is its query's own."""
    places = torch.arange(length, device=slopes.device)
    if mask is None:
        return (slopes * (places - (length - 1))).unsqueeze(0)
    newest = torch.where(mask == 0, places, 0).amax(-1, keepdim=True)
    return mask + slopes * (places - newest)


def _with_extend_biases(mask: Tensor, slopes: Tensor) -> Tensor:
    """The mask [n, length] of an extend tile with its linear biases by distance, float32 [K, H / K, n,
    length]. `slopes`: [K, H / K, 1, 1]. The last n keys are those of the queries; a query's position is the
    number of keys that it sees, less 1, in a chain and in a tree."""
    positions = (mask == 0).sum(-1, keepdim=True) - 1
    places = torch.arange(mask.shape[1], device=mask.device)
    places[mask.shape[1] - len(mask) :] = positions.squeeze(1)
    return mask + slopes * (places - positions)


def attend_extend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scores: Scores,
    out: Tensor,
    stride: int = 1,
    ahead: int = 0,
) -> None:
    """The last queries of a row, q [count, H, D], `stride` positions apart, over its keys and values [length,
    K, D], written to out [count, H, D]. `ahead`: see ExtendRow."""
    count, length, kv_heads, dim = len(q), len(keys), *keys.shape[1:]
    per_group = q.shape[1] // kv_heads
    keys, values = keys.transpose(0, 1).unsqueeze(1), values.transpose(0, 1).unsqueeze(1)  # [K, 1, length, D]
    queries = q.unflatten(1, (kv_heads, per_group)).permute(1, 2, 0, 3)  # [K, H / K, count, D]
    sinks, slopes = (
        None if x is None else x.view(kv_heads, per_group, 1, 1) for x in (scores.sinks, scores.slopes)
    )
    window = scores.window
    for at in range(0, count, TILE):
        num = min(TILE, count - at)
        end = length - (count - at - num) * stride
        begin = max(0, end - ahead - (num - 1) * stride - window) if window else 0
        corner = mask[mask.shape[0] - num :, mask.shape[1] - (end - begin) :]
        if slopes is not None:
            corner = _with_extend_biases(corner, slopes)
        seen = (kv_heads, per_group, end - begin, dim)
        part = scaled_attention(
            queries[:, :, at : at + num],
            keys[:, :, begin:end].expand(seen),
            values[:, :, begin:end].expand(seen),
            corner,
            scores,
            sinks,
        )
        out[at : at + num] = part.permute(2, 0, 1, 3).flatten(1, 2)


def aligned(mask: Tensor) -> Tensor:
    """A mask each of whose rows begins at a multiple of 16 bytes, as torch's kernels of GPUs read them. They
    do not check it: the corner of a larger mask ended a process on an H100 (misaligned address)."""
    step, *others = 16 // mask.itemsize, *mask.stride()[:-1]
    if mask.data_ptr() % 16 == 0 and mask.stride(-1) == 1 and not any(stride % step for stride in others):
        return mask
    length = mask.shape[-1]
    return mask.new_empty(*mask.shape[:-1], -(-length // step) * step)[..., :length].copy_(mask)


def scaled_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """Attention of q [..., n, D] over keys and values [..., length, D]. `sinks` broadcasts with the first
    dimensions of the scores, and `mask` has linear biases by distance, if there are any. torch's kernels know
    neither caps nor sinks, and round biases: with one of them the scores are materialized, in float32."""
    if not scores.cap and sinks is None and scores.slopes is None:
        if mask is not None and not mask.is_cpu:
            mask = aligned(mask)
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scores.scale)
    products = torch.matmul(q.float(), keys.float().transpose(-1, -2)) * scores.scale
    if scores.cap:
        products = scores.cap * torch.tanh(products / scores.cap)
    if mask is not None:
        products = products + mask
    if sinks is not None:
        products = torch.cat((products, sinks.float().expand(*products.shape[:-1], 1)), -1)
    shares = products.softmax(-1)[..., : keys.shape[-2]]
    return torch.matmul(shares, values.float()).to(q.dtype)
