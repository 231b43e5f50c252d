"""Multi-head latent attention around the attention itself. Limits: op-plugin's documents (517f2e7), the
wheel's docstrings, and kv_rms_norm_rope_cache_base_tiling.cpp in CANN's public ops-transformer repository
(4b68592)."""

import math

import torch
from torch import Tensor

from tests.ascend.emulate.cache import nz_write, write
from tests.ascend.emulate.norms import FLOATS, interleaved, normed
from tests.ascend.emulate.table import (
    need,
    need_contiguous,
    need_dtype,
    need_half,
    need_shape,
    need_strictly,
    operator,
)

PAGED = ("PA", "PA_BNSD", "PA_NZ")


def write_pages(cache: Tensor, rows: Tensor, slots: Tensor, nz: bool) -> None:
    """`cache` (pages, page size, 1, size) is named so whatever its layout; in NZ its memory is (pages, size /
    16, page size, 16)."""
    pages, page_size, _, size = cache.shape
    if nz:
        nz_write(cache.view(pages, size // 16, page_size, 16), rows, slots)
    else:
        write(cache.view(pages * page_size, size), rows, slots)


@operator("npu::npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    v: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Writes both caches in place."""
    quantised = (k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset, v)
    need(all(given is None for given in quantised), "quantised caches are not emulated")
    need(cache_mode in PAGED, f"cache_mode {cache_mode!r}: emulated are {PAGED}")
    need_half(kv=kv, gamma=gamma, cos=cos, sin=sin, k_cache=k_cache, ckv_cache=ckv_cache)
    need(kv.dim() == 4 and kv.shape[1] == 1, f"kv {tuple(kv.shape)}: (batch, 1, tokens, size)")
    rms, rope = gamma.shape[0], cos.shape[-1]
    batch, _, tokens, size = kv.shape
    need(size == rms + rope, f"kv holds {size}, gamma and cos {rms} + {rope}")
    need_strictly((rms, rope) == (512, 64), f"sizes {rms} and {rope}: 512 and 64")
    need_shape("cos", cos, batch, 1, tokens, rope)
    need_shape("sin", sin, batch, 1, tokens, rope)
    need_dtype("index", index, torch.int64)
    need_shape("index", index, batch * tokens)
    need_contiguous(kv=kv, cos=cos, sin=sin, index=index, k_cache=k_cache, ckv_cache=ckv_cache)
    pages, page_size = ckv_cache.shape[:2]
    need(page_size % 16 == 0, f"pages of {page_size}: a multiple of 16")
    need_shape("k_cache", k_cache, pages, page_size, 1, rope)
    need_shape("ckv_cache", ckv_cache, pages, page_size, 1, rms)
    need(pages >= -(-tokens // page_size) * batch, f"{pages} pages for {batch} x {tokens} tokens")
    latent = normed(kv[..., :rms], gamma, epsilon)[0]
    turned = interleaved(kv[..., rms:], cos, sin)
    write_pages(k_cache, turned.reshape(-1, rope), index, cache_mode == "PA_NZ")
    write_pages(ckv_cache, latent.reshape(-1, rms), index, cache_mode == "PA_NZ")
    empty = kv.new_empty(0)
    return k_cache, ckv_cache, turned if is_output_kv else empty, latent if is_output_kv else empty


@operator("npu::npu_attention_update")
def attention_update(lse: list[Tensor], local_out: list[Tensor], update_type: int) -> tuple[Tensor, Tensor]:
    """Joins parts of one attention by their log-sum-exps; a part that saw nothing has an infinite one."""
    need(len(lse) == len(local_out) > 0, "as many lse as local_out")
    need(update_type in (0, 1), f"update_type {update_type}")
    for index, (log, out) in enumerate(zip(lse, local_out, strict=True)):
        need_dtype(f"lse[{index}]", log, torch.float32)
        need_dtype(f"local_out[{index}]", out, *FLOATS)
        need(
            log.dim() == 1
            and out.dim() == 2
            and out.shape[0] == log.shape[0]
            and out.shape == local_out[0].shape,
            f"lse {tuple(log.shape)} and local_out {tuple(out.shape)}: (rows) and (rows, head size)",
        )
    logs = torch.stack(lse)
    logs = logs.masked_fill(logs.isinf(), -math.inf)
    total = logs.logsumexp(0)
    shares = (logs - total.masked_fill(total.isinf(), 0)).exp()
    out = (torch.stack([each.float() for each in local_out]) * shares[..., None]).sum(0)
    return out.to(local_out[0].dtype), total if update_type == 1 else torch.empty(0)
