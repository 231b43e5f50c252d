"""npu_mla_prolog: from hidden states to absorbed queries and the cache, in bfloat16, with int8 queries, or
all in int8.

Limits: the wheel's docstrings of the three forms, CANN's document of aclnnMlaPrologV3WeightNz, whose
table says which arguments belong to which kind of quantisation, and mla_prolog_tiling_check.cpp in its public
ops-transformer repository (c29bc10). Quantised caches are not emulated.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.ascend.emulate.latent import write_pages
from tests.ascend.emulate.linears import quantised_rows
from tests.ascend.emulate.memory import NZ, format_of
from tests.ascend.emulate.norms import interleaved, normed
from tests.ascend.emulate.table import need, need_contiguous, need_dtype, need_shape, need_strictly, operator

EPSILONS = ("rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv")
SCALES = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr")
PLAIN = {"tile_size": 128, "qc_qr_scale": 1.0, "kc_scale": 1.0}
TOKENS = 1048576
MAX_BATCH = 65536


@dataclass(frozen=True)
class Prolog:
    """One call, in the order of v3's arguments."""

    x: Tensor
    w_dq: Tensor
    w_uq_qr: Tensor
    w_uk: Tensor
    w_dkv_kr: Tensor
    gamma_cq: Tensor
    gamma_ckv: Tensor
    sin: Tensor
    cos: Tensor
    kv_cache: Tensor
    kr_cache: Tensor
    cache_index: Tensor
    scales: dict[str, Tensor]
    eps: tuple[float, float]
    cache_mode: str

    @classmethod
    def of(
        cls, tensors: tuple[Tensor, ...], cache_index: Tensor | None, cache_mode: str, rest: dict[str, Any]
    ) -> "Prolog":
        """`rest`: the other arguments."""
        need(cache_index is not None, "cache_index is needed for pages")
        assert cache_index is not None
        eps = (rest.pop(EPSILONS[0], 1e-5), rest.pop(EPSILONS[1], 1e-5))
        scales = {name: given for name in SCALES if (given := rest.pop(name, None)) is not None}
        odd = [
            name for name, given in rest.items() if given not in (None, 0, False) and given != PLAIN.get(name)
        ]
        need(not odd, f"not emulated: {odd}")
        return cls(*tensors, cache_index, scales, eps, cache_mode)

    @property
    def num_int8(self) -> int:
        """How many of the three matrices are int8."""
        return sum(matrix.dtype == torch.int8 for matrix in (self.w_dq, self.w_uq_qr, self.w_dkv_kr))


def check(call: Prolog, quant_mode: int | None) -> None:
    """Documented limits."""
    x, (heads, nope, rank), rope = call.x, call.w_uk.shape, call.cos.shape[-1]
    need(call.cache_mode in ("PA_BSND", "PA_NZ"), f"cache_mode {call.cache_mode!r}")
    need_dtype("cache_index", call.cache_index, torch.int64)
    need(
        x.dim() in (2, 3) and call.cache_index.shape == x.shape[:-1],
        f"cache_index {tuple(call.cache_index.shape)} for token_x {tuple(x.shape)}",
    )
    need(x.dim() == 2 or x.shape[1] <= 16, f"token_x {tuple(x.shape)}: at most 16 tokens of a sequence")
    need(x.dim() == 2 or x.shape[0] <= MAX_BATCH, f"token_x {tuple(x.shape)}: at most {MAX_BATCH} sequences")
    need(x.numel() // x.shape[-1] <= TOKENS, f"token_x {tuple(x.shape)}: at most {TOKENS} tokens")
    need(
        call.cos.shape == call.sin.shape == (*x.shape[:-1], rope),
        "rope_cos and rope_sin have a row for each token",
    )
    hidden, q_rank = x.shape[-1], call.w_dq.shape[1]
    need_shape("weight_dq", call.w_dq, hidden, q_rank)
    need_shape("weight_uq_qr", call.w_uq_qr, q_rank, heads * (nope + rope))
    need_shape("weight_dkv_kr", call.w_dkv_kr, hidden, rank + rope)
    need_shape("rmsnorm_gamma_cq", call.gamma_cq, q_rank)
    need_shape("rmsnorm_gamma_ckv", call.gamma_ckv, rank)
    pages, page_size = call.kv_cache.shape[:2]
    need_shape("kv_cache", call.kv_cache, pages, page_size, 1, rank)
    need_shape("kr_cache", call.kr_cache, pages, page_size, 1, rope)
    need_contiguous(
        token_x=x,
        weight_uk=call.w_uk,
        rope_sin=call.sin,
        rope_cos=call.cos,
        kv_cache=call.kv_cache,
        kr_cache=call.kr_cache,
    )
    need(heads in (1, 2, 4, 8, 16, 32, 64, 128), f"{heads} heads: a power of 2 up to 128")
    need(page_size in (16, 128), f"pages of {page_size}: 16 or 128")
    need_strictly(hidden in (6144, 7168, 7680), f"hidden size {hidden}: 6144, 7168 or 7680")
    for name, size, want in (
        ("q_rank", q_rank, 1536),
        ("kv_rank", rank, 512),
        ("nope", nope, 128),
        ("rope", rope, 64),
    ):
        need_strictly(size == want, f"{name} size {size}: {want}")
    check_dtypes(call, quant_mode)


def check_dtypes(call: Prolog, quant_mode: int | None) -> None:
    """`quant_mode`: weight_quant_mode, which v2 does not have."""
    made = call.w_uk.dtype
    need_strictly(made == torch.bfloat16, f"weight_uk is {made}: bfloat16")
    for name in ("gamma_cq", "gamma_ckv", "sin", "cos", "kv_cache", "kr_cache"):
        need(getattr(call, name).dtype == made, f"{name} is {getattr(call, name).dtype}, weight_uk {made}")
    for name in ("w_dq", "w_uq_qr", "w_dkv_kr"):
        matrix = getattr(call, name)
        is_int8 = call.x.dtype == torch.int8 or name == "w_uq_qr" and matrix.dtype == torch.int8
        need(
            matrix.dtype == (torch.int8 if is_int8 else made),
            f"{name} is {matrix.dtype}, token_x {call.x.dtype}",
        )
        need(format_of(matrix) == NZ, f"{name} is in FRACTAL_NZ")
    need(call.x.dtype in (made, torch.int8), f"token_x is {call.x.dtype}, weight_uk {made}")
    wanted = {0: (), 1: SCALES[2:3], 3: SCALES}[call.num_int8]
    need(
        set(call.scales) == set(wanted),
        f"scales {sorted(call.scales)} given, and {call.num_int8} matrices are int8: {sorted(wanted)}",
    )
    sizes = dict(
        zip(
            SCALES,
            (
                (call.cache_index.numel(), 1),
                *((1, m.shape[1]) for m in (call.w_dq, call.w_uq_qr, call.w_dkv_kr)),
            ),
            strict=True,
        )
    )
    for name, scale in call.scales.items():
        need_dtype(name, scale, torch.float32)
        need_shape(name, scale, *sizes[name])
    need(
        quant_mode is None or quant_mode == {0: 0, 1: 1, 3: 2}[call.num_int8],
        f"weight_quant_mode {quant_mode} with {call.num_int8} matrices in int8: 0 for none, 1 for that of "
        "queries, 2 for all",
    )


def product(
    x: Tensor, of_tokens: Tensor | None, weight: Tensor, of_columns: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """With the scales of rows and columns, where both are int8."""
    if of_tokens is None or of_columns is None:
        return (x.float() @ weight.float()).to(dtype)
    total = (x.double() @ weight.double()).float()  # sums of int8 products, exact
    return (total * of_tokens.view(*x.shape[:-1], 1) * of_columns.view(-1)).to(dtype)


def prolog(call: Prolog) -> tuple[Tensor, Tensor]:
    """Queries brought to the latents (..., heads, rank) and their rotary parts; both caches are written."""
    (heads, nope, rank), rope, dtype = call.w_uk.shape, call.cos.shape[-1], call.w_uk.dtype
    of_x, of_dq, of_uq, of_dkv = (call.scales.get(name) for name in SCALES)
    made: Tensor = normed(product(call.x, of_x, call.w_dq, of_dq, dtype), call.gamma_cq, call.eps[0])[0]
    of_made = None
    if of_uq is not None:
        made, of_made = quantised_rows(made.float())
    q = product(made, of_made, call.w_uq_qr, of_uq, dtype).unflatten(-1, (heads, nope + rope))
    query = torch.einsum("...hd,hdr->...hr", q[..., :nope].float(), call.w_uk.float()).to(dtype).contiguous()
    query_rope = interleaved(q[..., nope:], call.cos.unsqueeze(-2), call.sin.unsqueeze(-2)).contiguous()
    latent = product(call.x, of_x, call.w_dkv_kr, of_dkv, dtype)
    slots, nz = call.cache_index.flatten(), call.cache_mode == "PA_NZ"
    write_pages(
        call.kv_cache, normed(latent[..., :rank], call.gamma_ckv, call.eps[1])[0].reshape(-1, rank), slots, nz
    )
    write_pages(
        call.kr_cache, interleaved(latent[..., rank:], call.cos, call.sin).reshape(-1, rope), slots, nz
    )
    return query, query_rope


@operator("npu::npu_mla_prolog_v3")
def mla_prolog_v3(
    *tensors: Tensor, cache_index: Tensor | None = None, cache_mode: str = "PA_BSND", **rest: Any
) -> tuple[Tensor, ...]:
    """npu_mla_prolog_v3."""
    mode = rest.pop("weight_quant_mode", 0)
    call = Prolog.of(tensors, cache_index, cache_mode, rest)
    check(call, mode)
    query, query_rope = prolog(call)
    return query, query_rope, torch.zeros(1), query.new_zeros(1), torch.zeros(1)


@operator("npu::npu_mla_prolog_v2")
def mla_prolog_v2(*tensors: Tensor, cache_mode: str = "PA_BSND", **rest: Any) -> tuple[Tensor, ...]:
    """Deprecated for v3; cache_index stands before the caches, which it writes and returns."""
    *before, cache_index, kv_cache, kr_cache = tensors
    call = Prolog.of((*before, kv_cache, kr_cache), cache_index, cache_mode, rest)
    check(call, None)
    need_strictly(call.x.shape[-1] == 7168, f"hidden size {call.x.shape[-1]}: 7168 [v2]")
    query, query_rope = prolog(call)
    return query, query_rope, kv_cache, kr_cache, torch.zeros(1)
