"""Multi-head latent attention around the attention itself. Limits: op-plugin's documents (517f2e7) and the wheel's docstrings."""

import math
from typing import Any

import torch
from torch import Tensor

from tests.ascend.emulate.cache import nz_write, write
from tests.ascend.emulate.memory import NZ, format_of
from tests.ascend.emulate.norms import FLOATS, interleaved, normed
from tests.ascend.emulate.table import need, need_contiguous, need_dtype, need_half, need_shape, need_strictly, operator

PAGED = ("PA", "PA_BNSD", "PA_NZ")


def write_pages(cache: Tensor, rows: Tensor, slots: Tensor, nz: bool) -> None:
    """`cache` (pages, page size, 1, size) is named so whatever its layout; in NZ its memory is (pages, size / 16, page size, 16)."""
    pages, page_size, _, size = cache.shape
    if nz:
        nz_write(cache.view(pages, size // 16, page_size, 16), rows, slots)
    else:
        write(cache.view(pages * page_size, size), rows, slots)


@operator("npu::npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor, *,
                          k_rope_scale: Tensor | None = None, c_kv_scale: Tensor | None = None, k_rope_offset: Tensor | None = None,
                          c_kv_offset: Tensor | None = None, v: Tensor | None = None, epsilon: float = 1e-5, cache_mode: str = "Norm",
                          is_output_kv: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
        need(log.dim() == 1 and out.dim() == 2 and out.shape[0] == log.shape[0] and out.shape == local_out[0].shape,
             f"lse {tuple(log.shape)} and local_out {tuple(out.shape)}: (rows) and (rows, head size)")
    logs = torch.stack(lse)
    logs = logs.masked_fill(logs.isinf(), -math.inf)
    total = logs.logsumexp(0)
    shares = (logs - total.masked_fill(total.isinf(), 0)).exp()
    out = (torch.stack([each.float() for each in local_out]) * shares[..., None]).sum(0)
    return out.to(local_out[0].dtype), total if update_type == 1 else torch.empty(0)


def check_prolog(x: Tensor, matrices: dict[str, Tensor], heads: int, sizes: dict[str, int], page_size: int) -> None:
    need_strictly(x.dtype == torch.bfloat16, f"token_x is {x.dtype}: bfloat16")
    for name, matrix in matrices.items():
        need(matrix.dtype == x.dtype, f"{name} is {matrix.dtype}, token_x {x.dtype}")
        need(format_of(matrix) == NZ, f"{name} is in FRACTAL_NZ")
    need(heads in (1, 2, 4, 8, 16, 32, 64, 128), f"{heads} heads: a power of 2 up to 128")
    need(page_size in (16, 128), f"pages of {page_size}: 16 or 128")
    need_strictly(sizes["hidden"] in (6144, 7168, 7680), f"hidden size {sizes['hidden']}: 6144, 7168 or 7680")
    for name, want in (("q_rank", 1536), ("kv_rank", 512), ("nope", 128), ("rope", 64)):
        need_strictly(sizes[name] == want, f"{name} size {sizes[name]}: {want}")


def prolog(x: Tensor, w_dq: Tensor, w_uq_qr: Tensor, w_uk: Tensor, w_dkv_kr: Tensor, gamma_cq: Tensor, gamma_ckv: Tensor, sin: Tensor,
           cos: Tensor, kv_cache: Tensor, kr_cache: Tensor, cache_index: Tensor | None, eps: tuple[float, float],
           cache_mode: str) -> tuple[Tensor, Tensor]:
    """Queries brought to the latents (..., heads, rank) and their rotary parts; both caches are written."""
    need(cache_mode in ("PA_BSND", "PA_NZ"), f"cache_mode {cache_mode!r}")
    need(cache_index is not None, "cache_index is needed for pages")
    assert cache_index is not None
    need_dtype("cache_index", cache_index, torch.int64)
    need(x.dim() in (2, 3) and cache_index.shape == x.shape[:-1], f"cache_index {tuple(cache_index.shape)} for token_x {tuple(x.shape)}")
    heads, nope, rank = w_uk.shape
    rope = cos.shape[-1]
    need(cos.shape == sin.shape == (*x.shape[:-1], rope), "rope_cos and rope_sin have a row for each token")
    need_shape("weight_uq_qr", w_uq_qr, w_dq.shape[1], heads * (nope + rope))
    need_shape("weight_dkv_kr", w_dkv_kr, x.shape[-1], rank + rope)
    sizes = {"hidden": x.shape[-1], "q_rank": w_dq.shape[1], "kv_rank": rank, "nope": nope, "rope": rope}
    check_prolog(x, {"weight_dq": w_dq, "weight_uq_qr": w_uq_qr, "weight_dkv_kr": w_dkv_kr}, heads, sizes, kv_cache.shape[1])
    compressed = normed((x.float() @ w_dq.float()).to(x.dtype), gamma_cq, eps[0])[0]
    q = (compressed.float() @ w_uq_qr.float()).to(x.dtype).unflatten(-1, (heads, nope + rope))
    query = torch.einsum("...hd,hdr->...hr", q[..., :nope].float(), w_uk.float()).to(x.dtype)
    query_rope = interleaved(q[..., nope:], cos.unsqueeze(-2), sin.unsqueeze(-2))
    latent = (x.float() @ w_dkv_kr.float()).to(x.dtype)
    slots, nz = cache_index.flatten(), cache_mode == "PA_NZ"
    write_pages(kv_cache, normed(latent[..., :rank], gamma_ckv, eps[1])[0].reshape(-1, rank), slots, nz)
    write_pages(kr_cache, interleaved(latent[..., rank:], cos, sin).reshape(-1, rope), slots, nz)
    return query, query_rope


EPSILONS = ("rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv")


@operator("npu::npu_mla_prolog_v3")
def mla_prolog_v3(*tensors: Tensor, cache_index: Tensor | None = None, cache_mode: str = "PA_BSND", **rest: Any) -> tuple[Tensor, ...]:
    eps = (rest.pop(EPSILONS[0], 1e-5), rest.pop(EPSILONS[1], 1e-5))
    plain = {"tile_size": 128, "qc_qr_scale": 1.0, "kc_scale": 1.0}
    odd = [name for name, given in rest.items() if given not in (None, 0, False) and given != plain.get(name)]
    need(not odd, f"not emulated: {odd}")
    query, query_rope = prolog(*tensors, cache_index, eps, cache_mode)  # type: ignore[call-arg, arg-type]
    return query, query_rope, torch.zeros(1), query.new_zeros(1), torch.zeros(1)


@operator("npu::npu_mla_prolog_v2")
def mla_prolog_v2(*tensors: Tensor, cache_mode: str = "PA_BSND", **rest: Any) -> tuple[Tensor, ...]:
    """Deprecated for v3; cache_index stands before the caches, which it writes and returns."""
    eps = (rest.pop(EPSILONS[0], 1e-5), rest.pop(EPSILONS[1], 1e-5))
    odd = [name for name, given in rest.items() if given is not None]
    need(not odd, f"not emulated: {odd}")
    *before, cache_index, kv_cache, kr_cache = tensors
    query, query_rope = prolog(*before, kv_cache, kr_cache, cache_index, eps, cache_mode)  # type: ignore[call-arg]
    return query, query_rope, kv_cache, kr_cache, torch.zeros(1)
