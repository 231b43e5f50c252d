"""What lies between the projection of queries, keys and values and attention, in few launches on Ascend."""

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend.formats import written_pages
from runtime.devices.ascend.ops import AscendOps
from runtime.devices.ascend.quantized import swiglu_quant, takes_token_codes
from runtime.devices.base import Gate
from runtime.layers.fused_ops import UnfusedOps

HALVES = (torch.float16, torch.bfloat16)
ROTATED_TOGETHER = (64, 128)  # head sizes of npu_apply_rotary_pos_emb, as documented for A2 and A3
STORED_TOGETHER = 128  # the head size of npu_qkv_rms_norm_rope_cache


class AscendFusedOps(UnfusedOps):
    """FusedOps (devices/operands.py) of one NPU.

    Norms and rotations read views of the projection and write queries and keys of their own, so neither is
    copied. Queries and keys that have been normalized are rotated in one launch, in place. Where pages are in
    NZ, norms, rotations and the store are one launch.
    """

    ops: AscendOps

    def add_rms_norm_wide(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See FusedOps.add_rms_norm_wide."""
        if x.dtype not in HALVES or weight.dtype != x.dtype:  # as the operator is documented
            return super().add_rms_norm_wide(x, residual, weight, eps)
        wide, normed, _, total = torch_npu.npu_add_rms_norm_cast(x, residual, weight, eps)
        return normed, wide, total

    def quantized_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, feeds: object
    ) -> tuple[Tensor, Tensor] | None:
        """See FusedOps.quantized_norm."""
        if not takes_token_codes(feeds) or weight.dtype != x.dtype:
            return None
        codes, _, total, scales, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
            x, residual, weight, epsilon=eps, output_mask=[True, False]
        )
        return self.ops.quantized.put(codes, scales), total

    def quantized_act(self, x: Tensor, kind: Gate, feeds: object) -> Tensor | None:
        """See FusedOps.quantized_act."""
        if kind != "silu" or not takes_token_codes(feeds):
            return None
        return self.ops.quantized.put(*swiglu_quant(x))

    def prepare_heads(
        self,
        qkv: Tensor,
        norm: tuple[Tensor, float] | None,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        locations: Tensor,
    ) -> Tensor:
        """See FusedOps.prepare_heads."""
        kv_heads, dim = k_cache.shape[1:]
        heads = qkv.view(len(qkv), -1, dim)
        q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        if norm is not None:
            weight, eps = norm
            if self.ops.is_nz and dim == cos.shape[-1] == STORED_TOGETHER:
                return self._store_together(qkv, norm, cos, sin, k_cache, v_cache, locations)
            q, k = self.ops.rms_norm(q, weight[0], eps), self.ops.rms_norm(k, weight[-1], eps)
        if norm is not None and dim in ROTATED_TOGETHER:
            torch_npu.npu_apply_rotary_pos_emb(q.unsqueeze(0), k.unsqueeze(0), cos, sin)
        else:
            q, k = self.ops.rotary(q, cos, sin), self.ops.rotary(k, cos, sin)
        self.ops.store_kv(k, v, k_cache, v_cache, locations)
        return q

    def _store_together(
        self,
        qkv: Tensor,
        norm: tuple[Tensor, float],
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        locations: Tensor,
    ) -> Tensor:
        """prepare_heads in one operator, for pages in NZ and heads of STORED_TOGETHER numbers."""
        kv_heads, dim = k_cache.shape[1:]
        (weight, eps), count = norm, len(qkv)
        heads = qkv.shape[1] // dim
        q = torch.empty(count, (heads - 2 * kv_heads) * dim, dtype=qkv.dtype, device=qkv.device)
        torch_npu.npu_qkv_rms_norm_rope_cache(
            qkv,
            weight[0],
            weight[-1],
            cos.view(count, dim),
            sin.view(count, dim),
            locations,
            q,
            written_pages(k_cache, self.ops.page_size, True),
            written_pages(v_cache, self.ops.page_size, True),
            [1, count, heads, dim],
            [heads - 2 * kv_heads, kv_heads, kv_heads],
            epsilon=eps,
            cache_mode="PA_NZ",
        )
        return q.view(count, -1, dim)
