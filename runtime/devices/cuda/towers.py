"""Attention in towers of images and sounds by our own kernel: `--mm-attention-backend triton_attn`."""

from dataclasses import dataclass
from typing import NamedTuple

import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.devices.cuda.kernels.attention_splits import LOG2E
from runtime.devices.cuda.kernels.launch import INTERPRETER, Gpu, dot_type, next_power_of_2
from runtime.devices.cuda.kernels.tower_attention import tower_attention_kernel

MOST_DIM = 128  # of a head; torch computes larger ones
BLOCK = 64  # numbers of a head beyond which it is two blocks, if it has no power of two


class TowerTile(NamedTuple):
    """Sizes of a program: queries, keys at a time, warps, and stages of the pipeline that reads keys."""

    m: int
    n: int
    warps: int
    stages: int


def select_tower_tile(num_queries: int, dim: int, itemsize: int, gpu: Gpu) -> TowerTile:
    """Sizes for so many queries of a group, chosen by what the compiler reports of registers and shared
    memory."""
    if gpu == INTERPRETER:
        return TowerTile(64, 64, 4, 1)
    if itemsize == 4:
        return TowerTile(32, 16, 4, 2)
    if num_queries <= 64:
        return TowerTile(16 if num_queries <= 16 else 64, 64, 4, 2)
    return TowerTile(128, 128 if gpu.is_hopper else 64 if dim <= 96 else 32, 8, 2)


@dataclass(frozen=True, slots=True)
class TritonTowers:
    """Device.tower_attention of a GPU."""

    gpu: Gpu

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [..., heads, L, D] over k and v [..., heads, L', D] -> as q; the scale is 1 / sqrt(D)."""
        whole, dim = q.shape, q.shape[-1]
        if dim > MOST_DIM:
            return scaled_dot_product_attention(q, k, v)
        q, k, v = (_rows_of(x) for x in (q, k, v))
        groups, heads, count, _ = q.shape
        # rows of all heads one behind the other, as the projection behind it reads them
        out = q.new_empty(groups, count, heads, dim).transpose(1, 2)
        block = next_power_of_2(dim, 16)
        if BLOCK < dim < block:
            block //= 2
        strides = [stride for x in (out, q, k, v) for stride in x.stride()[:3]]
        # heads of 72 numbers: 16 bytes, where Triton itself looks for multiples of 16 numbers
        unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
        tile = select_tower_tile(count, dim, q.itemsize, self.gpu)
        tower_attention_kernel[(triton.cdiv(count, tile.m), heads, groups)](
            out,
            q,
            k,
            v,
            count,
            k.shape[2],
            dim**-0.5 * LOG2E.value,
            *(stride // unit for stride in strides),
            M=tile.m,
            N=tile.n,
            DIM=dim,
            BLOCK=block,
            REST=0 if block >= dim else next_power_of_2(dim - block, 16),
            DOT=dot_type(q.dtype),
            UNIT=unit,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return out.view(whole) if len(whole) == 4 else out.unflatten(0, whole[:-3])


def _rows_of(x: Tensor) -> Tensor:
    """[groups, heads, L, D], whose numbers stand one behind the other."""
    x = x.reshape(-1, *x.shape[-3:])
    return x if x.stride(3) == 1 else x.contiguous()


def open_towers(backend: str, gpu: Gpu) -> TritonTowers | None:
    """Attention of towers by the name of --mm-attention-backend; None: that of torch."""
    return TritonTowers(gpu) if backend == "triton_attn" else None
