"""What devices without a kernel for it do in several steps: the specification of Fused."""

import torch
from torch import Tensor

from runtime.devices.base import Device, Ops
from runtime.devices.operands import Fused, Seen


class Unfused:
    """Fused on any device."""

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
        q, k, v = turned_heads(self.ops, qkv, k_cache, norm, cos, sin)
        self.ops.store_kv(k, v, k_cache, v_cache, locations)
        return q

    def penalise(self, logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
        penalise(logits, rows, seen, at)


def fused_of(device: Device) -> Fused:
    return device.fused or Unfused(device.ops)


def turned_heads(
    ops: Ops, qkv: Tensor, cache: Tensor, norm: tuple[Tensor, float] | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a projection made, as queries [T, H, D], keys and values [T, K, D], the first two normalised and
    turned. `cache`: of keys."""
    kv_heads, dim = cache.shape[1:]
    heads = qkv.view(len(qkv), -1, dim)
    qk, v = heads.split((heads.shape[1] - kv_heads, kv_heads), dim=1)
    if norm is not None:
        qk = ops.rms_norm(qk, *norm)
    turned = ops.rotary(qk, cos, sin)
    q, k = turned.split((turned.shape[1] - kv_heads, kv_heads), dim=1)
    return q, k, v


def penalise(logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
    """Fused.penalise in plain torch."""
    frequency, presence, repetition = seen.penalties[at].unsqueeze(2).unbind(1)
    generated = seen.generated[at]
    found = logits[rows]
    scaled = torch.where(found > 0, found / repetition, found * repetition)
    found = torch.where(seen.in_prompt[at] | (generated > 0), scaled, found)
    logits[rows] = found - frequency * generated - presence * (generated > 0)
