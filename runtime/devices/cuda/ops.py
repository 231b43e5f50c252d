"""Ops of the cuda device: Triton kernels, and cuBLAS through torch for matrix products in full precision."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.base import Gate, Quantized
from runtime.devices.cuda import attention as paged
from runtime.devices.cuda import gemm
from runtime.devices.cuda.attention import AttentionPlan
from runtime.devices.cuda.attention_backends import HybridAttentionBackend, PhasePlans
from runtime.devices.cuda.kernels.activation import act_and_mul
from runtime.devices.cuda.kernels.gemv import gemv, takes_gemv
from runtime.devices.cuda.kernels.launch import Gpu, starts_early
from runtime.devices.cuda.kernels.logits import mask
from runtime.devices.cuda.kernels.norm import add_rms_norm, rms_norm
from runtime.devices.cuda.kernels.rotary import rotary
from runtime.devices.cuda.kernels.sampling import sample
from runtime.devices.cuda.kernels.store import store_kv
from runtime.devices.cuda.mla import UpProjection, mla_attention, pack_latent
from runtime.devices.cuda.options import GEMV_ROWS, KernelFusion
from runtime.devices.cuda.prepared import PreparedInputs
from runtime.devices.cuda.weights import PackedWeight, pack
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers import torch_ops
from runtime.layers.attention.spans import SpanPlan, attend_spans, plan_spans


class SplitCounters(NamedTuple):
    """By which programs find the last one; None: splits are merged in launches of their own."""

    attention: Tensor | None
    products: Tensor | None
    lists: bool = False  # decode rows are divided among programs by a list on the device

    @classmethod
    def of(
        cls, fusion: KernelFusion, gpu: Gpu, torch_device: torch.device, *, lists: bool = False
    ) -> "SplitCounters":
        """Those that `fusion` asks for, or decodes that are listed."""
        if fusion != "all" and not lists:
            return cls(None, None)
        attention = paged.split_counters(gpu, torch_device, lists=lists)
        return cls(attention, gemm.split_counters(gpu, torch_device), lists)


class CudaOps:
    """Ops (devices/base.py) of one GPU. Runs where its tensors are."""

    packs_rows = False

    def __init__(
        self,
        dtype: torch.dtype,
        gpu: Gpu,
        fp8_gemm: str = "by_rows",
        attention_backend: HybridAttentionBackend | None = None,
        fusion: KernelFusion = "safe",
        counters: SplitCounters | None = None,
        gemv_rows: int = GEMV_ROWS,
    ) -> None:
        """`fp8_gemm`: one of gemm_tiles.NAMES. `attention_backend`: None for the Triton kernels. `fusion`:
        see KernelFusion. `counters`: by which the last programs merge splits. `gemv_rows`: the most rows of
        products with weights in full that our kernel computes; cuBLAS has those of more."""
        self.dtype = dtype
        self.gpu = gpu
        self.fp8_gemm = fp8_gemm
        self.attention_backend = attention_backend
        self.fusion = fusion
        self.counters = counters or SplitCounters(None, None)
        self.gemv_rows = gemv_rows
        self.early = starts_early(gpu)
        # None: each product quantizes its own inputs
        self.prepared = None if fusion == "off" else PreparedInputs()

    def plan_attention(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> AttentionPlan | PhasePlans | SpanPlan:
        """The attention plan of a step."""
        plan = plan.by_query() if plan.block_size else plan
        if plan.spans:
            return plan_spans(plan, page_tables, page_size, windows, self.dtype, self.plan_attention)
        if self.attention_backend is not None:
            return self.attention_backend.plan(plan, page_tables, page_size, windows)
        return paged.plan_attention(plan, page_tables, page_size)

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: AttentionPlan | PhasePlans | SpanPlan,
        scores: Scores,
    ) -> Tensor:
        """Paged attention, q [T, H, D] -> [T, H, D]."""
        if isinstance(plan, SpanPlan):
            return attend_spans(q, k_cache, v_cache, plan, scores, self.attention)
        if isinstance(plan, tuple):
            assert self.attention_backend is not None, "only backends plan phases"
            return self.attention_backend.attend(q, k_cache, v_cache, plan, scores)
        counters = self.counters
        return paged.attention(
            q, k_cache, v_cache, plan, scores, self.gpu, counters.attention, lists=counters.lists
        )

    def pack_latent(self, up: Tensor, nope_dim: int) -> UpProjection:
        """Projections from latents to keys and values of this rank's heads."""
        return pack_latent(up, nope_dim)

    def latent_attention(
        self,
        q: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        ropes: Tensor,
        up: UpProjection,
        plan: AttentionPlan | PhasePlans,
        scale: float,
    ) -> Tensor:
        """MLA over pages, q [T, H, N] and q_rope [T, H, P] -> [T, H, V]."""
        if isinstance(plan, tuple):
            assert self.attention_backend is not None, "only backends plan phases"
            return self.attention_backend.attend_latents(q, q_rope, latents, ropes, up, plan, scale)
        counters = self.counters.attention
        lists = self.counters.lists
        return mla_attention(q, q_rope, latents, ropes, up, plan, scale, self.gpu, counters, lists=lists)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor) -> None:
        """Writes keys and values to the cache."""
        store_kv(k, v, k_cache, v_cache, locations)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm; in torch's operators where torch compiles."""
        return (
            torch_ops.rms_norm(x, weight, eps) if torch.compiler.is_compiling() else rms_norm(x, weight, eps)
        )

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """RMS norm of x + residual, and that sum."""
        if torch.compiler.is_compiling():
            return torch_ops.add_rms_norm(x, residual, weight, eps)
        return add_rms_norm(x, residual, weight, eps, early=self.early)

    def rotary_tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The tables as they are."""
        return cos, sin

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions of x [T, heads, D]."""
        return rotary(x, cos, sin)

    def act_and_mul(self, x: Tensor, kind: Gate) -> Tensor:
        """Gated activation; in torch's operators where torch compiles."""
        return torch_ops.act_and_mul(x, kind) if torch.compiler.is_compiling() else act_and_mul(x, kind)

    def pack_linear(self, weight: Tensor) -> Tensor:
        """The weight as it is."""
        return weight

    def pack_quantized(self, weight: Quantized) -> PackedWeight:
        """A quantized weight as gemm_kernel reads it."""
        return pack(weight)

    def linear(self, x: Tensor, packed: Tensor | PackedWeight, bias: Tensor | None) -> Tensor:
        """x [N, in] -> [N, out]."""
        if isinstance(packed, PackedWeight):
            inputs = None if self.prepared is None else self.prepared.take(x, packed)
            counters = self.counters.products
            return gemm.linear(x, packed, bias, self.gpu, self.fp8_gemm, inputs, counters)
        if takes_gemv(x, packed, self.gemv_rows):
            return gemv(x, packed, bias, self.gpu)
        return F.linear(x, packed, bias)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """A token id for each row, int64 [N]."""
        return sample(logits, inputs)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Bans tokens by bit masks, in place."""
        mask(logits, rows, bits)
