"""What lies between the first projection of latent attention and the second, in one launch: norms of query
latents, and norm, rotation and store of key/value latents."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from runtime.devices.cuda.kernels.fp8_bytes import to_fp8
from runtime.devices.cuda.kernels.launch import FP8_KINDS, next_power_of_2


class LatentNorms(NamedTuple):
    """Weights of the norms, and their eps. `queries` None: queries have no latents."""

    queries: Tensor | None
    query_eps: float
    keys: Tensor
    key_eps: float


@triton.jit
def _store(target: tl.tensor, x: tl.tensor, is_there: tl.tensor, KIND: tl.constexpr) -> None:
    """Stores what the caller has rounded to the dtype that it has between two kernels."""
    if KIND == "":
        tl.store(target, x.to(target.dtype.element_ty), mask=is_there)
    else:
        tl.store(target, to_fp8(x.to(tl.float32), KIND), mask=is_there)


@triton.jit
def _normed(
    x: tl.tensor, weight: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The RMS norm of SIZE numbers at `x`, in their dtype."""
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < SIZE, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    factors = tl.load(weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
    return (values * scale * factors).to(x.dtype.element_ty)


@triton.jit(do_not_specialize_on_alignment=["locations"])
def prepare_latents_kernel(
    x: tl.tensor,
    queries: tl.tensor,
    latents: tl.tensor,
    ropes: tl.tensor,
    locations: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    stride: tl.tensor,
    table_stride: tl.tensor,
    latent_stride: tl.tensor,
    rope_stride: tl.tensor,
    query_eps: tl.tensor,
    key_eps: tl.tensor,
    QUERY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    KIND: tl.constexpr,
) -> None:
    """Grid (tokens, 2): key/value latents and rotary keys, which stand behind QUERY numbers of x, then the
    query latents."""
    token = tl.program_id(0).to(tl.int64)
    row = x + token * stride
    if tl.program_id(1) == 0:
        location = tl.load(locations + token).to(tl.int64)
        columns = tl.arange(0, BLOCK_R)
        latent = _normed(row + QUERY, key_weight, key_eps, RANK, BLOCK_R)
        _store(latents + location * latent_stride + columns, latent, columns < RANK, KIND)
        at = tl.arange(0, BLOCK_H)
        is_there = at < HALF
        source = row + QUERY + RANK + at
        first = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=is_there, other=0.0).to(tl.float32)
        c = tl.load(cos + token * table_stride + at, mask=is_there, other=0.0)
        s = tl.load(sin + token * table_stride + at, mask=is_there, other=0.0)
        target = ropes + location * rope_stride + at
        _store(target, (first * c - second * s).to(x.dtype.element_ty), is_there, KIND)
        _store(target + HALF, (second * c + first * s).to(x.dtype.element_ty), is_there, KIND)
    else:
        places = tl.arange(0, BLOCK_Q)
        query = _normed(row, query_weight, query_eps, QUERY, BLOCK_Q)
        tl.store(queries + token * QUERY + places, query, mask=places < QUERY)


def prepare_latents(
    x: Tensor, norms: LatentNorms, cos: Tensor, sin: Tensor, caches: tuple[Tensor, Tensor], locations: Tensor
) -> Tensor | None:
    """x [T, Q + R + P], with latents of R numbers and rotary keys of P behind those of queries: stores normed
    latents and rotated keys in `caches`, [tokens, 1, R] and [tokens, 1, P]. -> normed query latents [T, Q];
    None: they have no norm. cos and sin float32 [T, P / 2]."""
    rank, rope = caches[0].shape[2], caches[1].shape[2]
    num_queries = x.shape[1] - rank - rope
    queries = None if norms.queries is None else x.new_empty(len(x), num_queries)
    if len(x):
        kind = FP8_KINDS.get(caches[0].dtype, "")
        prepare_latents_kernel[(len(x), 1 if queries is None else 2)](
            x,
            x if queries is None else queries,
            *(cache.view(torch.uint8) if kind else cache for cache in caches),
            locations,
            norms.keys if norms.queries is None else norms.queries,
            norms.keys,
            cos,
            sin,
            x.stride(0),
            cos.stride(0),
            *(cache.stride(0) for cache in caches),
            norms.query_eps,
            norms.key_eps,
            QUERY=num_queries,
            BLOCK_Q=next_power_of_2(num_queries, 16) if queries is not None else 16,
            RANK=rank,
            BLOCK_R=next_power_of_2(rank, 16),
            HALF=rope // 2,
            BLOCK_H=next_power_of_2(rope // 2, 16),
            KIND=kind,
            num_warps=4,
        )
    return queries
