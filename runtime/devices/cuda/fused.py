"""Fused kernels of the cuda device."""

import torch
from torch import Tensor

from runtime.devices.base import Gate
from runtime.devices.cuda.attention import plan_of_decodes
from runtime.devices.cuda.gemm import gated_product
from runtime.devices.cuda.kernels.activation import act_and_quantize
from runtime.devices.cuda.kernels.decode_rows import begin_decodes, sampling_inputs
from runtime.devices.cuda.kernels.gemv import gemv, takes_gemv
from runtime.devices.cuda.kernels.logits import apply_penalties
from runtime.devices.cuda.kernels.norm import add_rms_norm
from runtime.devices.cuda.kernels.norm_product import norm_product, takes_norm
from runtime.devices.cuda.kernels.rotary import prepare_heads
from runtime.devices.cuda.norm_sums import NormSums
from runtime.devices.cuda.ops import CudaOps
from runtime.devices.cuda.weights import PackedWeight
from runtime.devices.operands import DecodeRows, NormInputs, Seen, SlotParams, SlotTensors
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.fused_ops import UnfusedOps

MOST_ROWS = 1024  # of a step that one program begins
GATED_ROWS = 16  # the most rows of a product that applies the gate itself: one tile


class CudaFusedOps(UnfusedOps):
    """FusedOps (devices/operands.py) in Triton. What `ops.fusion` leaves out is computed as `ops` do."""

    ops: CudaOps

    def __init__(self, ops: CudaOps, norm_sums: NormSums | None = None) -> None:
        """`norm_sums`: memory of the ranks through which norms sum; None: ranks sum before."""
        super().__init__(ops)
        self.norm_sums = norm_sums
        self.sums_ranks = norm_sums is not None

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
        """One launch; see FusedOps.prepare_heads."""
        return prepare_heads(qkv, norm, cos, sin, k_cache, v_cache, locations, self.ops.early)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, feeds: object
    ) -> tuple[Tensor, Tensor]:
        """As Ops.add_rms_norm, and the norm in 8 bits where a quantized weight is fed."""
        prepared = self.ops.prepared
        codes = None if prepared is None else prepared.codes_for(len(x), feeds, x)
        if prepared is None or codes is None or torch.compiler.is_compiling():
            return self.ops.add_rms_norm(x, residual, weight, eps)
        normed, total = add_rms_norm(x, residual, weight, eps, codes, self.ops.early)
        assert isinstance(feeds, PackedWeight), "it has codes"
        prepared.put(normed, feeds, codes)
        return normed, total

    def add_rms_norm_of_ranks(self, inputs: NormInputs, feeds: object) -> tuple[Tensor, Tensor] | None:
        """One launch of few rows, with 8 bits as of `add_rms_norm`."""
        if self.norm_sums is None or not self.norm_sums.takes(inputs):
            return None
        prepared = self.ops.prepared
        codes = None if prepared is None else prepared.codes_for(len(inputs.x), feeds, inputs.x)
        normed, total = self.norm_sums.add(inputs, codes, early=self.ops.early)
        if prepared is not None and codes is not None:
            assert isinstance(feeds, PackedWeight), "it has codes"
            prepared.put(normed, feeds, codes)
        return normed, total

    def act_and_mul(self, x: Tensor, kind: Gate, feeds: object) -> Tensor:
        """As Ops.act_and_mul, and the result in 8 bits where a quantized weight is fed."""
        prepared = self.ops.prepared
        codes = None if prepared is None else prepared.codes_for(len(x), feeds, x)
        if prepared is None or codes is None or torch.compiler.is_compiling():
            return self.ops.act_and_mul(x, kind)
        gated = act_and_quantize(x, kind, codes)
        assert isinstance(feeds, PackedWeight), "it has codes"
        prepared.put(gated, feeds, codes)
        return gated

    def gated_product(self, x: Tensor, packed: object, kind: Gate) -> Tensor | None:
        """One launch of few rows with a weight in full; more rows are for cuBLAS."""
        if kind == "silu" and isinstance(packed, Tensor) and takes_gemv(x, packed, self.ops.gemv_rows):
            return gemv(x, packed, None, self.ops.gpu, is_gated=True)
        is_fused = self.ops.fusion == "all" and kind == "silu" and 0 < len(x) <= GATED_ROWS
        if not is_fused or not isinstance(packed, Tensor) or torch.compiler.is_compiling():
            return None
        return gated_product(x, packed, self.ops.gpu)

    def gated_product_of_norm(
        self, inputs: NormInputs, packed: object, kind: Gate
    ) -> tuple[Tensor, Tensor] | None:
        """One launch of few rows with a weight in full."""
        if self.ops.fusion != "all" or kind != "silu" or not takes_norm(inputs, packed):
            return None
        assert isinstance(packed, Tensor), "a weight in full"
        dtype = inputs.x.dtype
        gated, total, _ = norm_product(inputs, packed, self.ops.gpu, dtype, is_gated=True)
        return gated, total

    def router_logits_of_norm(
        self, inputs: NormInputs, packed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """One launch of few rows with a weight in the dtype of the model."""
        is_narrow = packed.dtype == inputs.x.dtype
        if self.ops.fusion != "all" or not is_narrow or not takes_norm(inputs, packed):
            return None
        return norm_product(inputs, packed, self.ops.gpu, torch.float32, keeps_norm=True)

    def pack_router(self, weight: Tensor) -> Tensor:
        """In the dtype of the model, half of what float32 reads, where torch's product has sums of another
        dtype."""
        is_narrow = self.ops.fusion == "all" and weight.dtype in (torch.bfloat16, torch.float16)
        return weight if is_narrow else super().pack_router(weight)

    def router_logits(self, x: Tensor, packed: Tensor) -> Tensor:
        """See FusedOps.router_logits. Products of 16-bit numbers are exact in float32."""
        if packed.dtype == torch.float32:
            return super().router_logits(x, packed)
        return torch.mm(x, packed.T, out_dtype=torch.float32)

    def begin_decodes(self, packed: Tensor, slots: SlotTensors, page_size: int) -> DecodeRows:
        """One launch; see FusedOps.begin_decodes."""
        if self.ops.fusion == "off" or packed.shape[1] > MOST_ROWS:
            return super().begin_decodes(packed, slots, page_size)
        ints, rows = begin_decodes(packed, slots, page_size)
        plan = None
        if self.ops.attention_backend is None:
            plan = plan_of_decodes(rows, slots.page_tables, page_size)
        numbers, positions, token_ids, *locations = ints.unbind()
        return DecodeRows(numbers, positions, token_ids, tuple(locations), plan)

    def sampling_inputs(
        self, slots: Tensor, lengths: Tensor, params: SlotParams, filters: tuple[int, bool]
    ) -> SamplingInputs:
        """One launch; see FusedOps.sampling_inputs."""
        if self.ops.fusion == "off":
            return super().sampling_inputs(slots, lengths, params, filters)
        return sampling_inputs(slots, lengths, params, filters)

    def penalise(self, logits: Tensor, rows: Tensor, seen: Seen, at: Tensor) -> None:
        """Penalties of repetition, frequency and presence, in place."""
        apply_penalties(logits, rows, seen, at)
