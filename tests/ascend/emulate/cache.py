"""Writes to paged caches. Limits: the wheel's docstrings, and scatter_pa_kv_cache_tiling.cpp (001b95e) and
qkv_rms_norm_rope_cache_tiling.cpp (3a280bc) in CANN's public ops-transformer repository."""

import math

import torch
from torch import Tensor

from tests.ascend.emulate.norms import normed, turned
from tests.ascend.emulate.table import (
    need,
    need_contiguous,
    need_dtype,
    need_half,
    need_shape,
    need_values,
    operator,
)


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


@operator("npu::npu_qkv_rms_norm_rope_cache")
def qkv_rms_norm_rope_cache(
    qkv: Tensor,
    q_gamma: Tensor,
    k_gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv_size: list[int],
    head_nums: list[int],
    *,
    epsilon: float = 1e-6,
    cache_mode: str = "PA_NZ",
    is_output_qkv: bool = False,
    **scales: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norms and rotary positions of queries and keys, and the store of keys and values in NZ: pages of the
    dtype of qkv; scales for pages in int8 are not emulated."""
    need(not is_output_qkv and all(scale is None for scale in scales.values()), "emulated: without scales")
    need(cache_mode == "PA_NZ", f"cache_mode {cache_mode!r}: PA_NZ")
    batch, length, heads, dim = qkv_size
    num_q, num_k, num_v = head_nums
    need(min(qkv_size) > 0 and dim == 128, f"qkv_size {qkv_size}: heads of 128")
    need(num_k == num_v and num_q + num_k + num_v == heads, f"{head_nums} are not the {heads} heads of qkv")
    need_half(qkv=qkv)
    tokens = batch * length
    need_shape("qkv", qkv, tokens, heads * dim)
    need_dtype("index", index, torch.int64)
    need_shape("index", index, tokens)
    for name, tensor, shape in (
        ("q_gamma", q_gamma, (dim,)),
        ("k_gamma", k_gamma, (dim,)),
        ("cos", cos, (tokens, dim)),
        ("sin", sin, (tokens, dim)),
        ("q_out", q_out, (tokens, num_q * dim)),
    ):
        need_dtype(name, tensor, qkv.dtype)
        need_shape(name, tensor, *shape)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        need_dtype(name, cache, qkv.dtype)
        need_shape(name, cache, k_cache.shape[0], num_k * dim // 16, k_cache.shape[2], 16)
    pages, size = k_cache.shape[0], k_cache.shape[2]
    need(size % 32 == 0, f"pages of {size}: a multiple of 32")
    need(pages >= -(-length // size) * batch, f"{length} tokens of {batch} rows for {pages} pages of {size}")
    q, k, v = qkv.view(tokens, heads, dim).split(head_nums, 1)
    q, k = (
        x * cos[:, None].float() + turned(x, "half") * sin[:, None].float()
        for x in (normed(q, q_gamma, epsilon)[0].float(), normed(k, k_gamma, epsilon)[0].float())
    )
    q_out.copy_(q.flatten(1))
    nz_write(k_cache, k.to(v.dtype), index)
    nz_write(v_cache, v, index)
    unwritten = qkv.new_empty(0)
    return unwritten, unwritten, unwritten
