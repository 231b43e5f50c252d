"""Latent attention by the kernels (kernels/latent.h): the up-projection packed head by head, and attention of
one layer at a time, outside of a decoder's program."""

import ctypes
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.devices.cpu.attention_plan import CpuAttentionPlan
from runtime.devices.cpu.cache_numbers import CACHE_NUMBERS, MAX_DIM
from runtime.devices.cpu.kernels.library import Latents, Step
from runtime.devices.cpu.matrices import NUMBERS, Matrix, Threads, pack
from runtime.devices.cpu.mla import Up


@dataclass(frozen=True, slots=True)
class PackedUp:
    """What makes keys [H, N, R] and values [H, R, V] from latents, a matrix for each head."""

    keys: Matrix  # [H * R, N], R padded to whole blocks of outputs
    values: Matrix  # [H * V, R], V padded likewise
    num_heads: int
    value_dim: int

    @property
    def nope_dim(self) -> int:
        """Numbers of a head's key, without the rotary part."""
        return self.keys.inputs

    @property
    def rank(self) -> int:
        """Numbers of a latent."""
        return self.values.inputs

    def unpacked(self, dtype: torch.dtype) -> Up:
        """Both matrices as plain tensors, for attention in torch; made anew in each call."""
        keys, values = (
            matrix.rows(torch.arange(matrix.outputs)).unflatten(0, (self.num_heads, -1)).to(dtype)
            for matrix in (self.keys, self.values)
        )
        return Up(
            keys[:, : self.rank].transpose(1, 2).contiguous(),
            values[:, : self.value_dim].transpose(1, 2).contiguous(),
        )


def can_pack_up(up: Tensor, nope_dim: int) -> bool:
    """Whether the kernels compute with this up-projection [H, N + V, R]."""
    sizes = (nope_dim, up.shape[1] - nope_dim, up.shape[2])
    return up.dtype in NUMBERS and max(sizes) <= MAX_DIM


def pack_up(threads: Threads, up: Tensor, nope_dim: int) -> PackedUp:
    """The up-projection [H, N + V, R], for which `can_pack_up` holds."""
    block = threads.library.outputs

    def heads(weights: Tensor) -> Matrix:
        """[H, outputs, inputs], outputs padded."""
        num_heads, outputs, inputs = weights.shape
        padded = weights.new_zeros(num_heads, -(-outputs // block) * block, inputs)
        padded[:, :outputs] = weights
        return pack(threads, padded.flatten(0, 1))

    keys, values = heads(up[:, :nope_dim].transpose(1, 2)), heads(up[:, nope_dim:])
    return PackedUp(keys, values, up.shape[0], up.shape[1] - nope_dim)


def latents_of(up: PackedUp, latents: Tensor, ropes: Tensor, scale: float) -> Latents:
    """A layer for the kernels, without what prepares its cache."""
    return Latents(
        num_heads=up.num_heads,
        nope_dim=up.nope_dim,
        rope_dim=ropes.shape[2],
        rank=up.rank,
        value_dim=up.value_dim,
        keys=up.keys.handle,
        values=up.values.handle,
        latents=latents.data_ptr(),
        ropes=ropes.data_ptr(),
        kind=CACHE_NUMBERS[latents.dtype],
        scale=scale,
    )


def fits(rank: int, rope_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels read a cache of such latents and rotary keys."""
    return dtype in CACHE_NUMBERS and rank + rope_dim <= MAX_DIM - 32  # both are padded


class LatentAttention:
    """Latent attention of one layer after another, in memory that they share."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.functions = threads.functions
        self.calls: dict[tuple[int, ...], int] = {}  # latent::Call* by the sizes of a layer

    def takes(self, latents: Tensor, ropes: Tensor, plan: CpuAttentionPlan) -> bool:
        """Whether the kernels read these caches, and the step has no trees of drafts."""
        return fits(latents.shape[2], ropes.shape[2], latents.dtype) and not plan.rows.parents

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor,
        caches: tuple[Tensor, Tensor],
        up: PackedUp,
        plan: CpuAttentionPlan,
        scale: float,
    ) -> Tensor:
        """See Ops.latent_attention. Raises torch.OutOfMemoryError."""
        num_tokens = len(q)
        rows = torch.cat((q, q_rope), 2).float().contiguous()
        out = torch.empty(num_tokens, up.num_heads, up.value_dim)
        layer = latents_of(up, *caches, scale)
        slots, starts, counts = plan.row_arrays
        table = plan.page_tables[0].contiguous()
        step = Step(
            num_tokens=num_tokens,
            num_rows=len(slots),
            slots=slots.ctypes.data,
            starts=starts.ctypes.data,
            counts=counts.ctypes.data,
            pages_per_slot=table.shape[1],
            page_size=plan.page_size,
            input=rows.data_ptr(),
            output=out.data_ptr(),
        )
        step.page_tables[0] = table.data_ptr()
        arguments = (self._call(layer), ctypes.addressof(layer), ctypes.addressof(step))
        if num_tokens and self.functions.kernels_attend_latents(self.threads.handle, *arguments):
            raise torch.OutOfMemoryError(f"no memory for attention of {num_tokens} tokens")
        return out.to(q.dtype)

    def _call(self, layer: Latents) -> int:
        sizes = (layer.num_heads, layer.nope_dim, layer.rope_dim, layer.rank, layer.value_dim)
        if sizes not in self.calls:
            handle = self.functions.kernels_latent(self.threads.handle, ctypes.addressof(layer))
            weakref.finalize(self, self.functions.kernels_free_latent, handle).atexit = False
            self.calls[sizes] = handle
        return self.calls[sizes]
