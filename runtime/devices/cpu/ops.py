"""Arithmetic of the cpu device in plain torch. It is the specification of Ops: tests compare other devices
with it."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from runtime.devices.attention_rows import AttentionRows
from runtime.devices.attention_scores import Scores
from runtime.devices.base import Gate, Quantized
from runtime.devices.cpu.attention_plan import CpuAttentionPlan
from runtime.devices.cpu.latents import LatentAttention, PackedUp, can_pack_up, pack_up
from runtime.devices.cpu.matrices import NUMBERS, Matrix, Threads, can_pack, pack, pack_quantized
from runtime.devices.cpu.mla import Up, attend_latents
from runtime.devices.cpu.paged_attention import PagedAttention
from runtime.devices.cpu.products import Products
from runtime.devices.cpu.quantized import multiply
from runtime.devices.cpu.sampling import CpuLogitsOps
from runtime.devices.sampling_inputs import SamplingInputs
from runtime.layers.attention.kv_dtype import store_as
from runtime.layers.attention.sdpa import attend
from runtime.layers.sampling.sampler import BANNED, clean, sample_tokens

_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
# upper limits of the logits of 8 tokens, by their byte of a mask
_MOST = np.where(_BYTES, np.float32(-BANNED), np.float32(BANNED))


def padded_rows(num_rows: int) -> int:
    """The number of rows that oneDNN is given for a product of `num_rows`. It compiles kernels for each
    number that it meets, about 0.6 MB for each weight's shape, and keeps them for good."""
    step = 1 if num_rows <= 8 else 8 if num_rows <= 64 else 32
    return -(-num_rows // step) * step


class CpuOps:
    """Ops (devices/base.py): products and attention by the kernels where they are built, all else in plain
    torch."""

    def __init__(self, dtype: torch.dtype, threads: Threads | None = None) -> None:
        """`threads`: those that run kernels; None: torch multiplies."""
        self.dtype = dtype
        self.threads = threads
        self.packs_rows = threads is not None
        self.products = None if threads is None else Products(threads)
        self.paged = None if threads is None else PagedAttention(threads)
        self.latents = None if threads is None else LatentAttention(threads)
        self.logits_ops = None if threads is None else CpuLogitsOps(threads)
        # without kernels: oneDNN's own weight layout reads memory at nearly twice the speed of a plain bf16
        # matrix when there are few rows
        self.packs = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def plan_attention(
        self, plan: AttentionRows, page_tables: Tensor, page_size: int, windows: tuple[int, ...]
    ) -> CpuAttentionPlan:
        """The step's rows, and on demand their gathers for layers/attention/sdpa.py."""
        return CpuAttentionPlan(plan, page_tables, page_size, windows, self.dtype)

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: CpuAttentionPlan, scores: Scores
    ) -> Tensor:
        """See Ops.attention."""
        if self.paged is not None and self.paged.takes(k_cache, plan):
            return self.paged.attend(q, k_cache, v_cache, plan, scores)
        return attend(q, k_cache, v_cache, plan.gathered, scores)

    def pack_latent(self, up: Tensor, nope_dim: int) -> Up | PackedUp:
        """The kernels' layout; without kernels the up-projection split into keys and transposed values."""
        if self.threads is not None and can_pack_up(up, nope_dim):
            return pack_up(self.threads, up, nope_dim)
        return Up(up[:, :nope_dim].contiguous(), up[:, nope_dim:].transpose(1, 2).contiguous())

    def latent_attention(
        self,
        q: Tensor,
        q_rope: Tensor,
        latents: Tensor,
        ropes: Tensor,
        up: Up | PackedUp,
        plan: CpuAttentionPlan,
        scale: float,
    ) -> Tensor:
        """See Ops.latent_attention."""
        if isinstance(up, PackedUp):
            assert self.latents is not None, "a packed projection without kernels"
            if self.latents.takes(latents, ropes, plan):
                return self.latents.attend(q, q_rope, (latents, ropes), up, plan, scale)
            up = up.unpacked(q.dtype)
        return attend_latents(q, q_rope, latents, ropes, up, plan.gathered, scale)

    def store_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, locations: Tensor) -> None:
        """See Ops.store_kv. Caches of another dtype are converted to."""
        for x, cache in ((k, k_cache), (v, v_cache)):
            if x.dtype == cache.dtype:
                cache.index_copy_(0, locations, x)
            else:
                store_as(x, cache, locations)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Ops.rms_norm."""
        # torch's own rms_norm measured 2 to 10 times slower
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(torch.tensor(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Ops.add_rms_norm; overwrites `residual`."""
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def rotary_tables(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[T, 1, D] each; sines for the first half are negated, so that a roll is all that is left to do."""
        return (
            torch.cat((cos, cos), 1).unsqueeze(1).to(self.dtype),
            torch.cat((-sin, sin), 1).unsqueeze(1).to(self.dtype),
        )

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See Ops.rotary."""
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    def act_and_mul(self, x: Tensor, kind: Gate) -> Tensor:
        """See Ops.act_and_mul."""
        gate, up = x.chunk(2, dim=-1)
        return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)

    def pack_linear(self, weight: Tensor) -> Tensor | Matrix:
        """The kernels' layout; without kernels oneDNN's in bfloat16, else the weight itself."""
        if self.threads is not None and weight.dtype in NUMBERS:
            return pack(self.threads, weight)
        return torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self.packs else weight

    def pack_quantized(self, weight: Quantized) -> Quantized | Matrix:
        """The kernels' layout where they compute the weight's scheme, else the weight itself."""
        if self.threads is not None and can_pack(weight, self.dtype):
            return pack_quantized(self.threads, weight)
        return weight

    def linear(self, x: Tensor, packed: Tensor | Quantized | Matrix, bias: Tensor | None) -> Tensor:
        """See Ops.linear."""
        if isinstance(packed, Matrix):
            assert self.products is not None, "a packed matrix without kernels"
            return self.products.multiply(x, packed, bias)
        if isinstance(packed, Quantized):
            return multiply(x, packed, bias)
        if packed.is_mkldnn:
            num_rows = x.shape[0]
            padded = F.pad(x, (0, 0, 0, more)) if (more := padded_rows(num_rows) - num_rows) else x
            return torch.ops.mkldnn._linear_pointwise(padded, packed, bias, "none", [], "")[:num_rows]
        return F.linear(x, packed, bias)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """See Ops.sample."""
        if self.logits_ops is not None:
            return self.logits_ops.choose(logits, inputs)
        return sample_tokens(logits, inputs)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """See Ops.mask."""
        if self.logits_ops is not None:
            if logits.is_contiguous():
                return self.logits_ops.mask(logits, rows, bits)
            clean(logits)  # else what is not finite would stay
        limits = _MOST.take(bits.numpy().view(np.uint8), axis=0).reshape(len(rows), -1)[:, : logits.shape[1]]
        values = logits.numpy()  # numpy: the threads of torch wait for each other longer than this takes
        if len(rows) == len(values):  # the same rows, in the same order
            np.minimum(values, limits, out=values)
        else:
            indices = rows.numpy()
            values[indices] = np.minimum(values[indices], limits)
