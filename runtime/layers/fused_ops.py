"""FusedOps in plain Ops and torch: what devices without a fused kernel do in several steps, and the
specification of those kernels."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from runtime.devices.base import Device, Gate, Ops
from runtime.devices.operands import DecodeRows, FusedOps, NormInputs, Seen, SlotParams, SlotTensors
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.sampling.sampler import uniform


class UnfusedOps:
    """FusedOps on any device, as several operators."""

    sums_ranks = False

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
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """See FusedOps.add_rms_norm_wide."""
        normed, total = self.add_rms_norm(x, residual, weight, eps, None)
        return normed, None, total

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, feeds: object
    ) -> tuple[Tensor, Tensor]:
        """See FusedOps.add_rms_norm."""
        return self.ops.add_rms_norm(x, residual, weight, eps)

    def add_rms_norm_of_ranks(self, inputs: NormInputs, feeds: object) -> tuple[Tensor, Tensor] | None:
        """None: the sum first."""
        return None

    def act_and_mul(self, x: Tensor, kind: Gate, feeds: object) -> Tensor:
        """See FusedOps.act_and_mul."""
        return self.ops.act_and_mul(x, kind)

    def quantized_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, feeds: object
    ) -> tuple[Tensor, Tensor] | None:
        """None: the product quantizes its inputs."""
        return None

    def quantized_act(self, x: Tensor, kind: Gate, feeds: object) -> Tensor | None:
        """None: the product quantizes its inputs."""
        return None

    def gated_product(self, x: Tensor, packed: object, kind: Gate) -> Tensor | None:
        """None: one after the other."""
        return None

    def gated_product_of_norm(
        self, inputs: NormInputs, packed: object, kind: Gate
    ) -> tuple[Tensor, Tensor] | None:
        """None: one after the other."""
        return None

    def router_logits_of_norm(
        self, inputs: NormInputs, packed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """None: one after the other."""
        return None

    def pack_router(self, weight: Tensor) -> Tensor:
        """float32."""
        return weight.float()

    def router_logits(self, x: Tensor, packed: Tensor) -> Tensor:
        """See FusedOps.router_logits."""
        return linear(x.float(), packed)

    def begin_decodes(self, packed: Tensor, slots: SlotTensors, page_size: int) -> DecodeRows:
        """See FusedOps.begin_decodes."""
        rows, *updates = packed.long()
        for pool, table in enumerate(slots.page_tables):
            at, row, ids = updates[3 * pool : 3 * pool + 3]
            table.index_put_((at, row), ids.int())
        positions = slots.lengths[rows]
        found = locations(slots.page_tables, rows, positions, page_size)
        return DecodeRows(rows, positions, slots.last_token[rows], found)

    def sampling_inputs(
        self, slots: Tensor, lengths: Tensor, params: SlotParams, filters: tuple[int, bool]
    ) -> SamplingInputs:
        """See FusedOps.sampling_inputs."""
        temperature, top_p, min_p = params.floats.index_select(1, slots).unbind()
        numbers = uniform(params.seeds.index_select(0, slots), lengths)
        top_k = params.top_k.index_select(0, slots)
        return SamplingInputs(temperature, top_p, top_k, min_p, numbers, *filters)

    def penalise(self, logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
        """See Fused.penalise."""
        penalise(logits, rows, seen, at)


def locations(tables: Tensor, slots: Tensor, positions: Tensor, page_size: int) -> tuple[Tensor, ...]:
    """Where the tokens at `positions` of `slots` are in the cache, int64 [N] for each pool of `tables`."""
    pages = tables[:, slots, positions // page_size].long()
    return (pages * page_size + positions % page_size).unbind()


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
