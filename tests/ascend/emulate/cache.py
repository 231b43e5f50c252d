"""Writes to paged caches. Limits: the wheel's docstrings, and scatter_pa_kv_cache_tiling.cpp in CANN's public
ops-transformer repository (001b95e)."""

import math

import torch
from torch import Tensor

from tests.ascend.emulate.table import need, need_contiguous, need_dtype, need_values, operator


@operator("npu::npu_scatter_nd_update_")
def scatter_nd_update_(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """npu_scatter_nd_update_."""
    need_dtype("input", x, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.int64, torch.int8)
    need_dtype("indices", indices, torch.int32, torch.int64)
    need(x.dtype == updates.dtype, f"updates are {updates.dtype}, input {x.dtype}")
    depth = indices.shape[-1]
    need(
        indices.dim() >= 2 and 0 < depth <= x.dim(),
        f"indices {tuple(indices.shape)} for input {tuple(x.shape)}",
    )
    need(
        updates.shape == indices.shape[:-1] + x.shape[depth:],
        f"updates {tuple(updates.shape)} for indices {tuple(indices.shape)}",
    )
    need_values(
        lambda: ((indices >= 0) & (indices < torch.tensor(x.shape[:depth]))).all(),
        "an index points outside the input",
    )
    x[tuple(indices.long().unbind(-1))] = updates
    return x


def write(x: Tensor, tokens: Tensor, slots: Tensor) -> None:
    """`x` [slots, ...]; a slot below 0 is not written."""
    need_values(lambda: (slots < x.shape[0]).all(), "a slot lies outside the cache")
    kept = slots >= 0
    places, values = single(slots[kept].long(), tokens[: slots.numel()][kept])
    x[places] = values


def single(places: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Slots that are given twice get NaN, or 113: the documents do not say which write wins."""
    _, inverse, counts = places.unique(return_inverse=True, return_counts=True)
    twice = counts[inverse] > 1
    if not twice.any():
        return places, values
    return places, values.masked_fill(
        twice.view(-1, *[1] * (values.dim() - 1)), math.nan if values.is_floating_point() else 113
    )


@operator("atb::_npu_reshape_and_cache")
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """_npu_reshape_and_cache of ATB."""
    need_dtype("slot_indices", slot_indices, torch.int32)
    need(
        key_cache.dim() == 4 and key.shape[1:] == key_cache.shape[2:],
        "the cache is (pages, page size, heads, head size)",
    )
    need(
        value_cache.dim() == 4 and value.shape[1:] == value_cache.shape[2:],
        "the cache is (pages, page size, heads, head size)",
    )
    write(key_cache.view(-1, *key_cache.shape[2:]), key, slot_indices)
    write(value_cache.view(-1, *value_cache.shape[2:]), value, slot_indices)


def nz_write(cache: Tensor, tokens: Tensor, slots: Tensor) -> None:
    """Writes tokens to pages in NZ."""
    pages, page_size = cache.shape[0], cache.shape[2]
    need_values(lambda: (slots < pages * page_size).all(), "a slot lies outside the cache")
    kept = slots >= 0
    at, rows = single(slots[kept].long(), tokens[: slots.numel()][kept])
    cache[at // page_size, :, at % page_size] = rows.reshape(rows.shape[0], cache.shape[1], cache.shape[3])


@operator("npu::npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """npu_scatter_pa_kv_cache."""
    need(
        compress_lens is None and compress_seq_offsets is None and seq_lens is None,
        "compression is not emulated",
    )
    need(cache_mode in ("Norm", "PA_NZ"), f"cache_mode {cache_mode!r}")
    need_dtype("slot_mapping", slot_mapping, torch.int32, torch.int64)
    need(
        slot_mapping.dim() == 1 and slot_mapping.shape[0] == key.shape[0] == value.shape[0],
        "slot_mapping has one slot for each token",
    )
    need(key.dim() == value.dim() == 3, "key and value are (tokens, heads, head size)")
    need(key.shape[1] == value.shape[1], f"{key.shape[1]} heads in key, {value.shape[1]} in value")
    need(key_cache.dim() == value_cache.dim() == 4, "the caches are 4-D: pages, page size, heads, head size")
    at = 1 if cache_mode == "Norm" else 2
    pages, size = key_cache.shape[0], key_cache.shape[at]
    need(
        value_cache.shape[0] == pages and value_cache.shape[at] == size,
        f"the caches have {pages} pages of {size} and {value_cache.shape[0]} of {value_cache.shape[at]}",
    )
    need(pages * size >= key.shape[0], f"{key.shape[0]} tokens for a cache of {pages} pages of {size}")
    need_contiguous(key=key, value=value)
    need_values(lambda: (slot_mapping >= 0).all(), "a slot lies outside the cache: it is negative")
    for tokens, cache in ((key, key_cache), (value, value_cache)):
        need(tokens.dtype == cache.dtype, f"the cache is {cache.dtype}, tokens {tokens.dtype}")
        if cache_mode == "Norm":
            need(
                cache.dim() == 4 and cache.shape[2:] == tokens.shape[1:],
                "Norm: the cache is (pages, page size, heads, head size)",
            )
            write(cache.view(-1, *cache.shape[2:]), tokens, slot_mapping)
        else:
            # of float32, which is not documented, as of 16 bits
            lanes = 32 if cache.dtype == torch.int8 else 16
            need(
                cache.dim() == 4
                and cache.shape[3] == lanes
                and cache.shape[1] * lanes == tokens.shape[1] * tokens.shape[2],
                f"PA_NZ: the cache is (pages, heads * head size / {lanes}, page size, {lanes})",
            )
            nz_write(cache, tokens, slot_mapping)
