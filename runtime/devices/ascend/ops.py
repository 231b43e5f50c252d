"""Ops of Ascend NPUs, in operators of torch_npu."""

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional as F

from runtime.devices.ascend import attention, mla
from runtime.devices.ascend.attention import AttentionPlan
from runtime.devices.ascend.formats import to_nz, written_pages
from runtime.devices.ascend.grouped_scales import GroupQuantWeight, group_quant_matmul, pack_group_quant
from runtime.devices.ascend.prefetch import WeightPrefetch
from runtime.devices.ascend.quantized import Int8Weight, QuantizedInputs, int8_matmul, pack_int8
from runtime.devices.ascend.sampling import FILTERS, sample
from runtime.devices.ascend.sparse_plan import SparsePlan, plan_sparse
from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.base import Gate, Quantized
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.attention import sdpa
from runtime.layers.attention.spans import SpanPlan, attend_spans, plan_spans
from runtime.layers.sampling.sampler import mask
from runtime.models.config.quantization_schemes import PackedInt

WRITES = ("Norm", "PA_NZ")  # values of cache_mode, by whether pages are in NZ


class AscendOps:
    """Ops (devices/base.py) of one NPU. The host reads nothing from the device, so a step can be captured."""

    packs_rows = False

    def __init__(
        self,
        dtype: torch.dtype,
        page_size: int,
        torch_device: torch.device,
        *,
        is_nz: bool = False,
        is_sparse: bool = False,
        has_int8_index: bool = False,
        has_int8_cache: bool = False,
        in_torch: bool = False,
        prefetch: WeightPrefetch | None = None,
        sampling: str = "ascend",
    ) -> None:
        """`is_nz`: pages are stored in NZ. `is_sparse`: tokens attend to those that an indexer chooses, of
        keys in 8 bits with `has_int8_index`. `has_int8_cache`: pages of heads hold int8, in units that the
        layers have scales for. `in_torch`: attention is computed in torch, because no operator has its
        scores. `prefetch` is told of the products. `sampling`: one of FILTERS."""
        self.dtype = dtype
        self.page_size = page_size
        self.is_nz = is_nz
        self.is_sparse, self.has_int8_index = is_sparse, has_int8_index
        self.token_filter = FILTERS[sampling]
        self.triangle = attention.triangle(torch_device)
        # the most queries of a row whose MLA is absorbed; 0: the model has no MLA
        self.max_absorbed = 0
        self.prefetch, self.in_torch = prefetch, in_torch
        self.quantized = QuantizedInputs()
        # the scale of pages in int8 for the attention operator, [1]; None: pages are not in int8
        self.unit = torch.ones(1, dtype=dtype, device=torch_device) if has_int8_cache else None
        self._ones: dict[int, Tensor] = {}  # size -> ones

    def plan_attention(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> AttentionPlan | SparsePlan | SpanPlan | sdpa.AttentionPlan:
        """The attention plan of a step."""
        if plan.spans:
            return plan_spans(plan, page_tables, page_size, windows, self.dtype, self.plan_attention)
        if self.in_torch:
            return sdpa.plan_attention(plan, page_tables, page_size, windows, self.dtype)
        if self.is_sparse:
            return plan_sparse(plan, page_tables[0], page_size)
        if self.max_absorbed:
            return mla.plan_mla(
                plan, page_tables[0], page_size, self.triangle, self.max_absorbed, is_nz=self.is_nz
            )
        reads_all = self.unit is not None
        return attention.plan_attention(
            plan, page_tables, page_size, windows, self.triangle, reads_all=reads_all
        )

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: AttentionPlan | SpanPlan | sdpa.AttentionPlan,
        scores: Scores,
    ) -> Tensor:
        """Paged attention, q [T, H, D] -> [T, H, D]."""
        if isinstance(plan, SpanPlan):
            return attend_spans(q, k_cache, v_cache, plan, scores, self.attention)
        if isinstance(plan, sdpa.AttentionPlan):
            return sdpa.attend(q, k_cache, v_cache, plan, scores)
        return attention.attend(q, k_cache, v_cache, plan, scores, self.unit, is_nz=self.is_nz)

    def pack_latent(self, up: Tensor, nope_dim: int) -> mla.UpProjection:
        """Projections from latents to keys and values of this rank's heads. Raises ModelError."""
        packed = mla.pack_latent(up, nope_dim)
        self.max_absorbed = mla.max_absorbed(packed)
        return packed

    def latent_attention(
        self,
        q: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        ropes: Tensor,
        up: mla.UpProjection,
        plan: AttentionPlan,
        scale: float,
    ) -> Tensor:
        """MLA over pages, q [T, H, N] and q_rope [T, H, P] -> [T, H, V]."""
        return mla.mla_attention(q, q_rope, latents, ropes, up, plan, scale, self.is_nz)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor) -> None:
        """Writes keys and values to the cache. In int8 they are rounded, and saturate."""
        if k_cache.dtype == torch.int8:
            k, v = (torch_npu.npu_quantize(x, self.unit, None, torch.qint8, -1, False) for x in (k, v))
        pages = [written_pages(cache, self.page_size, self.is_nz) for cache in (k_cache, v_cache)]
        torch_npu.npu_scatter_pa_kv_cache(
            k.contiguous(), v.contiguous(), *pages, locations, cache_mode=WRITES[self.is_nz]
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension."""
        if weight.dim() == 1:
            return torch_npu.npu_rms_norm(x, weight, eps)[0]
        size = x.shape[-1]  # the operator takes the mean over all dimensions of its weight
        if size not in self._ones:
            self._ones[size] = torch.ones(size, dtype=weight.dtype, device=weight.device)
        return torch_npu.npu_rms_norm(x, self._ones[size], eps)[0] * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """RMS norm of x + residual, and that sum."""
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def rotary_tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Tables of npu_rotary_mul, [1, T, 1, D] each."""
        tables = [torch.cat((half, half), 1).to(self.dtype)[None, :, None] for half in (cos, sin)]
        return tables[0], tables[1]

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions of x [T, heads, D]."""
        return torch_npu.npu_rotary_mul(x.unsqueeze(0), cos, sin).squeeze(0)

    def act_and_mul(self, x: Tensor, kind: Gate) -> Tensor:
        """Gated activation."""
        if kind == "silu":
            return torch_npu.npu_swiglu(x, dim=-1)
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def pack_linear(self, weight: Tensor) -> Tensor:
        """The weight in FRACTAL_NZ where possible."""
        return to_nz(weight)

    def pack_quantized(self, weight: Quantized) -> Int8Weight | GroupQuantWeight:
        """A quantized weight. Raises ModelError for what the operators do not support."""
        return (
            pack_group_quant(weight, self.dtype)
            if isinstance(weight.scheme, PackedInt)
            else pack_int8(weight)
        )

    def linear(
        self, x: Tensor, packed: Tensor | Int8Weight | GroupQuantWeight, bias: Tensor | None
    ) -> Tensor:
        """x [N, in] -> [N, out]. x may be codes that AscendFusedOps made for this weight."""
        if self.prefetch is not None:
            self.prefetch.follow(packed if isinstance(packed, Tensor) else packed.weight)
        if isinstance(packed, GroupQuantWeight):
            return group_quant_matmul(x, packed, bias)
        if isinstance(packed, Int8Weight):
            dtype = self.dtype if x.dtype == torch.int8 else x.dtype
            return int8_matmul(x, packed, bias, self.quantized, dtype)
        return F.linear(x, packed, bias)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """A token id for each row, int64 [N]."""
        return sample(logits, inputs, self.token_filter)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Bans tokens by bit masks, in place."""
        mask(logits, rows, bits)
