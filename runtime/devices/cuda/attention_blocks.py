"""Caches as kernels of attention read them: formats of numbers, and with TMA descriptors of blocks of tokens
within a page."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from runtime.devices.cuda.attention_tiles import Tile
from runtime.devices.cuda.kernels.launch import FP8_KINDS, INTERPRETER, Gpu, dot_type

ROLES_DTYPE = torch.bfloat16


def _pages_of(cache: Tensor, page_size: int) -> Tensor:
    """[tokens, heads, dim] as [pages, page_size, heads * dim], without a copy."""
    return cache.flatten(1).unflatten(0, (-1, page_size))


def as_arguments(caches: list[Tensor | None], page_size: int, tile: Tile) -> list[Tensor | TensorDescriptor]:
    """Keys, values and rotary parts as paged_attention_kernel takes them; keys in place of rotary parts that
    there are not."""
    found = [x for x in caches if x is not None]
    arguments: list[Tensor | TensorDescriptor] = [*found]
    if tile.walk.tma:
        arguments = [
            TensorDescriptor.from_tensor(_pages_of(x, page_size), [1, tile.n, x.shape[2]]) for x in found
        ]
    return arguments if len(found) == len(caches) else [*arguments, arguments[0]]


def cache_formats(kv_dtype: torch.dtype, dtype: torch.dtype, gpu: Gpu) -> tuple[str, tl.dtype]:
    """How a kernel reads caches of `kv_dtype` ("" for a cache in the dtype of queries, else as from_fp8), and
    the dtype of its products with queries of `dtype`.

    8-bit floats become float16, which holds each of them exactly, and so are products where queries have 16
    bits: a product of bfloat16 numbers would take another conversion of every key and value.
    """
    kind = FP8_KINDS.get(kv_dtype, "")
    if kind and dtype == torch.bfloat16 and gpu != INTERPRETER and not knobs.runtime.interpret:
        return "native" if kind == "e4m3" and gpu.has_fp8 else kind, tl.float16
    return kind, dot_type(dtype)


def launch_with_roles(
    out: Tensor,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    lists: tuple[Tensor, Tensor, Tensor],
    first: int,
    page_size: int,
    scale: float,
    tile: Tile,
    gpu: Gpu,
) -> None:
    """Attention of q [n, H, DIM] over bfloat16 caches [tokens, K, DIM] -> out [n, H, DIM], by warps with
    roles. `lists`: the page table, rows and tiles of paged_attention_kernel; `first`: the step's number of
    the first query; `scale`: of scores, times log2(e)."""
    # an experimental part of Triton, which is imported where it is chosen alone
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    from runtime.devices.cuda.kernels.attention_roles import DIM, KEYS, prompt_attention_kernel

    kv_heads = caches[0].shape[1]
    group = q.shape[1] // kv_heads
    heads = min(group, tile.m)
    block = [1, KEYS.value, DIM.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    blocks = [GluonDescriptor.from_tensor(_pages_of(x, page_size), block, layout) for x in caches]
    table, rows, tiles = lists
    programs = tiles.shape[1] * kv_heads * triton.cdiv(group, heads)
    prompt_attention_kernel[(min(programs, gpu.num_cores) if tile.walk.persists else programs,)](
        out,
        q,
        *blocks,
        table,
        rows,
        tiles,
        rows.stride(0),
        tiles.shape[1],
        first,
        table.stride(0),
        q.stride(0),
        q.stride(1),
        scale,
        GROUP=group,
        HEADS=heads,
        KV_HEADS=kv_heads,
        PAGE=page_size,
        GROUPS=tile.walk.groups,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def launch_latents_with_roles(
    result: tuple[Tensor, Tensor],
    queries: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    lists: tuple[Tensor, Tensor, Tensor | None],
    grid: tuple[int, int, int],
    heads: int,
    first: int,
    page_size: int,
    scale: float,
    tile: Tile,
) -> None:
    """Absorbed latent attention by warps with roles: queries [n, H, R] and [n, H, P] over bfloat16 caches
    [tokens, 1, R] and [tokens, 1, P]. `result`: what paged_attention_kernel has as `out` and `lse`; `lists`:
    the page table, rows and tiles of it, None where a tile is a row; `grid`: tiles, parts of the heads, and
    splits; `heads`: query heads of a tile; `first` and `scale`: see launch_with_roles."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    from runtime.devices.cuda.kernels.latent_roles import HALF, KEYS, ROPE, latent_attention_kernel

    blocks = []
    for cache, width in zip(caches, (HALF.value, ROPE.value), strict=True):
        block = [1, KEYS.value, width]
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        blocks.append(GluonDescriptor.from_tensor(_pages_of(cache, page_size), block, layout))
    table, rows, tiles = lists
    latent_attention_kernel[grid](
        *result,
        *queries,
        *blocks,
        table,
        rows,
        rows if tiles is None else tiles,
        rows.stride(0),
        grid[0],
        first,
        table.stride(0),
        queries[0].stride(0),
        queries[0].stride(1),
        queries[1].stride(0),
        queries[1].stride(1),
        scale,
        GROUP=queries[0].shape[1],
        HEADS=heads,
        TILED=tiles is not None,
        SPLIT=grid[2] > 1,
        PAGE=page_size,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
