"""FusedOps in plain Ops and torch: what devices without a fused kernel do in several steps, and the
specification of those kernels."""

import torch
from torch import Tensor

from runtime.devices.base import Device, Ops
from runtime.devices.operands import FusedOps, Seen


class UnfusedOps:
    """FusedOps on any device, as several operators."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

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
        """See Fused.prepare_heads."""
        q, k, v = split_and_rotate(self.ops, qkv, k_cache, norm, cos, sin)
        self.ops.store_kv(k, v, k_cache, v_cache, locations)
        return q

    def add_rms_norm_wide(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See FusedOps.add_rms_norm_wide."""
        normed, total = self.ops.add_rms_norm(x, residual, weight, eps)
        return normed, normed.float(), total

    def penalise(self, logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
        """See Fused.penalise."""
        penalise(logits, rows, seen, at)


def fused_ops_of(device: Device) -> FusedOps:
    """The device's fused operators, or the same as several operators."""
    return device.fused or UnfusedOps(device.ops)


def split_and_rotate(
    ops: Ops, qkv: Tensor, k_cache: Tensor, norm: tuple[Tensor, float] | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits the output of a QKV projection, [T, (H + 2 K) * D], into queries [T, H, D], keys and values [T,
    K, D]. Queries and keys are normalized, where there is a norm, and rotated. `k_cache` [..., K, D] gives
    the sizes."""
    kv_heads, dim = k_cache.shape[1:]
    heads = qkv.view(len(qkv), -1, dim)
    qk, v = heads.split((heads.shape[1] - kv_heads, kv_heads), dim=1)
    if norm is not None:
        qk = ops.rms_norm(qk, *norm)
    rotated = ops.rotary(qk, cos, sin)
    q, k = rotated.split((rotated.shape[1] - kv_heads, kv_heads), dim=1)
    return q, k, v


def penalise(logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
    """FusedOps.penalise in plain torch."""
    frequency, presence, repetition = seen.penalties[at].unsqueeze(2).unbind(1)
    generated = seen.generated[at]
    values = logits[rows]
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(seen.in_prompt[at] | (generated > 0), scaled, values)
    logits[rows] = values - frequency * generated - presence * (generated > 0)
