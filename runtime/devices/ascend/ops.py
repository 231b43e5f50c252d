"""Arithmetic of Ascend NPUs, in operators of torch_npu. See devices/base.py for what each one means."""

import torch
import torch_npu
from torch import Tensor
from torch.nn import functional as F

from runtime.devices.ascend import attention
from runtime.devices.ascend import mla as latent
from runtime.devices.ascend.attention import AttentionPlan
from runtime.devices.ascend.formats import in_tiles
from runtime.devices.ascend.grouped_scales import Coded, multiply_coded, pack_coded
from runtime.devices.ascend.quantized import Int8Weight, multiply, pack_int8
from runtime.devices.ascend.sampling import CUTS, choose
from runtime.devices.attention_scores import Scores
from runtime.devices.base import Gate, Quantized, SamplingInputs
from runtime.layers.sampling.sampler import mask
from runtime.messages.steps import StepPlan
from runtime.models.quantization_schemes import PackedInt

WRITES = ("Norm", "PA_NZ")  # cache_mode, by whether pages are in NZ


class AscendOps:
    """Ops of one NPU. Nothing here reads the device, so that a step can be captured."""

    def __init__(
        self,
        dtype: torch.dtype,
        page_size: int,
        torch_device: torch.device,
        *,
        is_nz: bool = False,
        sampling: str = "ascend",
    ) -> None:
        """`is_nz`: latents are kept in NZ; `sampling`: of CUTS."""
        self.dtype = dtype
        self.page_size = page_size
        self.is_nz = is_nz
        self.cut = CUTS[sampling]
        self.triangle = attention.triangle(torch_device)
        # queries of a row whose latent attention is absorbed; 0: the model's attention is another
        self.most_absorbed = 0
        self._ones: dict[int, Tensor] = {}  # by size

    def plan_attention(
        self, plan: StepPlan, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> AttentionPlan:
        if self.most_absorbed:
            return latent.plan_latents(
                plan, page_tables[0], page_size, self.triangle, self.most_absorbed, is_nz=self.is_nz
            )
        return attention.plan_attention(plan, page_tables, page_size, windows, self.triangle)

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, scores: Scores
    ) -> Tensor:
        return attention.attend(q, k_cache, v_cache, plan, scores)

    def pack_latent(self, up: Tensor, nope_dim: int) -> latent.Up:
        packed = latent.pack_latent(up, nope_dim)
        self.most_absorbed = latent.most_absorbed(packed)
        return packed

    def latent_attention(
        self,
        q: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        ropes: Tensor,
        up: latent.Up,
        plan: AttentionPlan,
        scale: float,
    ) -> Tensor:
        return latent.attend_latents(q, q_rope, latents, ropes, up, plan, scale, self.is_nz)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor) -> None:
        if self.is_nz:
            pages = [
                cache.view(-1, cache.shape[2] // latent.LANES, self.page_size, latent.LANES)
                for cache in (k_cache, v_cache)
            ]
        else:
            pages = [cache.view(-1, self.page_size, *cache.shape[1:]) for cache in (k_cache, v_cache)]
        torch_npu.npu_scatter_pa_kv_cache(
            k.contiguous(), v.contiguous(), *pages, locations, cache_mode=WRITES[self.is_nz]
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dim() == 1:
            return torch_npu.npu_rms_norm(x, weight, eps)[0]
        size = x.shape[-1]  # the operator takes the mean over all dimensions of its weight
        if size not in self._ones:
            self._ones[size] = torch.ones(size, dtype=weight.dtype, device=weight.device)
        return torch_npu.npu_rms_norm(x, self._ones[size], eps)[0] * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, _, total = torch_npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def rotary_tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[1, T, 1, D] each."""
        return tuple(torch.cat((half, half), 1).to(self.dtype)[None, :, None] for half in (cos, sin))  # type: ignore[return-value]

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch_npu.npu_rotary_mul(x.unsqueeze(0), cos, sin).squeeze(0)

    def act_and_mul(self, x: Tensor, kind: Gate) -> Tensor:
        if kind == "silu":
            return torch_npu.npu_swiglu(x, dim=-1)
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def pack_linear(self, weight: Tensor) -> Tensor:
        return in_tiles(weight)

    def pack_quantized(self, weight: Quantized) -> Int8Weight | Coded:
        return pack_coded(weight, self.dtype) if isinstance(weight.scheme, PackedInt) else pack_int8(weight)

    def linear(self, x: Tensor, packed: Tensor | Int8Weight | Coded, bias: Tensor | None) -> Tensor:
        if isinstance(packed, Coded):
            return multiply_coded(x, packed, bias)
        return multiply(x, packed, bias) if isinstance(packed, Int8Weight) else F.linear(x, packed, bias)

    def sample(self, logits: Tensor, draw: SamplingInputs) -> Tensor:
        return choose(logits, draw, self.cut)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        mask(logits, rows, bits)
