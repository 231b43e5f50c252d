"""As calls.py: what comes before latent attention, in full sizes and few heads."""

from typing import Any

import torch
from torch import Tensor

from tests.ascend.calls import BF16, DEVICE, Case, int8, ints, randn
from tests.ascend.calls_linears import FP16, FP32, nz

HIDDEN, Q_RANK, RANK, NOPE, ROPE, HEADS, TOKENS = 6144, 1536, 512, 128, 64, 2, 3
SHAPES = ((HIDDEN, Q_RANK), (Q_RANK, HEADS * (NOPE + ROPE)), (HIDDEN, RANK + ROPE))  # down, queries, latents


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Zeros on the NPU."""
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def prolog(num_int8: int) -> tuple[list[Any], dict[str, Any]]:
    """With that many of the three matrices in int8: none, that of queries, or all."""
    kinds = {0: (BF16, BF16, BF16), 1: (BF16, torch.int8, BF16), 3: (torch.int8,) * 3}[num_int8]
    down, queries, latents = (
        nz(zeros(*shape, dtype=kind)) for shape, kind in zip(SHAPES, kinds, strict=True)
    )
    scales = {
        f"dequant_scale_{name}": randn(1, shape[1], dtype=FP32).abs()
        for name, shape, kind in zip(("w_dq", "w_uq_qr", "w_dkv_kr"), SHAPES, kinds, strict=True)
        if kind == torch.int8
    }
    if num_int8 == 3:
        scales["dequant_scale_x"] = randn(TOKENS, 1, dtype=FP32).abs()
    x = int8(TOKENS, HIDDEN) if num_int8 == 3 else randn(TOKENS, HIDDEN)
    given = [
        x,
        down,
        queries,
        randn(HEADS, NOPE, RANK),
        latents,
        randn(Q_RANK),
        randn(RANK),
        randn(TOKENS, ROPE),
        randn(TOKENS, ROPE),
        zeros(4, 128, 1, RANK),
        zeros(4, 128, 1, ROPE),
    ]
    return given, {
        "cache_index": ints(0, 130, 511, dtype=torch.int64),
        "cache_mode": "PA_NZ",
        "weight_quant_mode": {0: 0, 1: 1, 3: 2}[num_int8],
    } | scales


LATENTS = [
    Case(
        "npu::npu_mla_prolog_v3",
        lambda: prolog(0),
        [
            ("cache_index is torch.int32", lambda: {"cache_index": ints(0, 130, 511)}),
            ("cache_index .* for token_x", lambda: {"cache_index": ints(0, 130, dtype=torch.int64)}),
            ("cache_index is needed", lambda: {"cache_index": None}),
            ("slot lies outside", lambda: {"cache_index": ints(0, 130, 512, dtype=torch.int64)}),
            ("cache_mode", lambda: {"cache_mode": "PA_BNSD"}),
            ("w_dq is in FRACTAL_NZ", lambda: {"1": zeros(*SHAPES[0])}),
            ("weight_uq_qr is", lambda: {"2": nz(zeros(*SHAPES[0]))}),
            ("weight_dkv_kr is", lambda: {"4": nz(zeros(HIDDEN, RANK))}),
            ("w_dq is torch.float16", lambda: {"1": nz(zeros(*SHAPES[0], dtype=FP16))}),
            ("3 heads", lambda: {"2": nz(zeros(Q_RANK, 3 * (NOPE + ROPE))), "3": randn(3, NOPE, RANK)}),
            ("rope_cos and rope_sin", lambda: {"8": randn(1, TOKENS, ROPE)}),
            ("pages of 64", lambda: {"9": zeros(8, 64, 1, RANK), "10": zeros(8, 64, 1, ROPE)}),
            ("kr_cache is", lambda: {"10": zeros(4, 128, ROPE)}),
            ("token_x must be contiguous", lambda: {"0": randn(TOKENS, 2 * HIDDEN)[:, ::2]}),
            ("gamma_cq is torch.float32", lambda: {"5": randn(Q_RANK, dtype=FP32)}),
            ("scales .* given, and 0", lambda: {"dequant_scale_w_uq_qr": randn(1, SHAPES[1][1], dtype=FP32)}),
            ("weight_quant_mode 1 with 0", lambda: {"weight_quant_mode": 1}),
            ("not emulated", lambda: {"kv_cache_quant_mode": 1}),
        ],
    ),
    Case(
        "npu::npu_mla_prolog_v3",
        lambda: prolog(1),
        [
            ("scales .* given, and 1", lambda: {"dequant_scale_w_uq_qr": None}),
            ("weight_quant_mode 0 with 1", lambda: {"weight_quant_mode": 0}),
            ("dequant_scale_w_uq_qr is", lambda: {"dequant_scale_w_uq_qr": randn(SHAPES[1][1], dtype=FP32)}),
        ],
    ),
    Case(
        "npu::npu_mla_prolog_v3",
        lambda: prolog(3),
        [
            ("w_uq_qr is torch.bfloat16, token_x torch.int8", lambda: {"2": nz(zeros(*SHAPES[1]))}),
            ("w_dq is torch.int8, token_x torch.bfloat16", lambda: {"0": randn(TOKENS, HIDDEN)}),
            ("scales .* given, and 3", lambda: {"dequant_scale_x": None}),
            ("dequant_scale_x is torch.bfloat16", lambda: {"dequant_scale_x": randn(TOKENS, 1)}),
            ("dequant_scale_x is", lambda: {"dequant_scale_x": randn(TOKENS, dtype=FP32)}),
        ],
    ),
]
