"""Limits that CANN's public tiling code has, as right and wrong calls like those of calls.py; each case names
the file that it was read from. The operators that exchange experts have theirs in test_tiling.py, for they
need a group of ranks."""

from typing import Any

import torch

from tests.ascend.calls import BF16, DEVICE, Case, int8, ints, mask, paged, randn
from tests.ascend.calls_latents import HEADS, HIDDEN, NOPE, Q_RANK, RANK, ROPE, prolog, zeros
from tests.ascend.calls_linears import FP32, counts, narrow, nz, words_of

TRANSFORMER, NN = "ops-transformer c29bc10 ", "ops-nn e5c3fa9 "
FIA = TRANSFORMER + "attention/fused_infer_attention_score/op_host/fused_infer_attention_score_tiling_check_"
PFA = TRANSFORMER + "attention/prompt_flash_attention/op_host/prompt_flash_attention_tiling.cpp"
IFA = TRANSFORMER + "attention/incre_flash_attention/op_host/incre_flash_attention_tiling_check.cpp"
PROLOG = TRANSFORMER + "attention/mla_prolog/op_host/mla_prolog_tiling_check.cpp"
GROUPED = TRANSFORMER + "gmm/grouped_matmul/op_host/op_tiling/grouped_matmul_tiling.cpp"
QUANT = NN + "matmul/quant_batch_matmul_v3/op_host/op_tiling/quant_batch_matmul_v3_tiling.cpp"
LATENT_CACHE = (
    "ops-transformer 4b68592 posembedding/kv_rms_norm_rope_cache/op_host/kv_rms_norm_rope_cache_ds_tiling.cpp"
)
NZ_PAGES = (
    "ops-transformer 3a280bc attention/fused_infer_attention_score/op_host/arch22/"
    "fused_infer_attention_score_tiling_check_feature.cpp"
)
STORE = (
    "ops-transformer 3a280bc posembedding/qkv_rms_norm_rope_cache/op_host/qkv_rms_norm_rope_cache_tiling.cpp"
)
SCATTER = "ops-transformer 001b95e attention/scatter_pa_kv_cache/op_host/scatter_pa_kv_cache_tiling.cpp"
DISPATCH = (
    TRANSFORMER + "mc2/moe_distribute_dispatch_v2/op_host/op_tiling/moe_distribute_dispatch_v2_tiling.cpp"
)


def unpaged(**more: Any) -> tuple[list[Any], dict[str, Any]]:
    """Five and two queries over 20 and 10 keys without pages; 4 heads of their own."""
    named: dict[str, Any] = {
        "atten_mask": mask(),
        "actual_seq_lengths": [5, 7],
        "actual_seq_lengths_kv": [20, 30],
        "input_layout": "TND",
        "num_heads": 4,
        "num_key_value_heads": 4,
        "scale": 0.1,
        "sparse_mode": 3,
    }
    return [randn(7, 4, 128), randn(30, 4, 128), randn(30, 4, 128)], named | more


def single(**more: Any) -> tuple[list[Any], dict[str, Any]]:
    """Two decode rows over 200 and 30 keys; 8 heads, 2 key heads."""
    named: dict[str, Any] = {
        "block_table": ints([0, 1], [2, 3]),
        "actual_seq_lengths_kv": [200, 30],
        "input_layout": "BSND",
        "block_size": 128,
        "num_heads": 8,
        "num_key_value_heads": 2,
    }
    return [randn(2, 1, 8, 128), randn(4, 128, 256), randn(4, 128, 256)], named | more


def in_nz() -> tuple[list[Any], dict[str, Any]]:
    """Two decode rows over pages in NZ."""
    args, named = single()
    return [args[0], *(zeros(4, 2, 8, 128, 16) for _ in range(2))], named


def latents(**more: Any) -> tuple[list[Any], dict[str, Any]]:
    """Five and two queries over latents in pages; 32 heads."""
    named: dict[str, Any] = {
        "query_rope": randn(7, 32, 64),
        "key_rope": randn(4, 128, 64),
        "atten_mask": mask(),
        "block_table": ints([0, 1], [2, 3]),
        "actual_seq_qlen": [5, 7],
        "actual_seq_kvlen": [200, 30],
        "input_layout": "TND",
        "block_size": 128,
        "num_query_heads": 32,
        "num_key_value_heads": 1,
        "softmax_scale": 0.1,
        "sparse_mode": 3,
    }
    return [randn(7, 32, 512), randn(4, 128, 512), randn(4, 128, 512)], named | more


ATTENTION = [
    Case(
        "npu::npu_fused_infer_attention_score",
        in_nz,
        [
            (
                "NZ: heads of 256",
                lambda: {"0": randn(2, 1, 8, 256)} | {at: zeros(4, 2, 16, 128, 16) for at in "12"},
            ),
            ("NZ: .pages", lambda: {"1": zeros(4, 2, 4, 128, 32), "2": zeros(4, 2, 4, 128, 32)}),
            ("num_key_value_heads is 4", lambda: {"num_key_value_heads": 4}),
        ],
        source=NZ_PAGES,
    ),
    Case(
        "npu::npu_fused_infer_attention_score",
        paged,
        [
            ("rise, up to 8", lambda: {"0": randn(8, 8, 128)}),
            ("block_size 640", lambda: {"block_size": 640, "1": randn(1, 640, 256), "2": randn(1, 640, 256)}),
            ("block_size 192", lambda: {"block_size": 192, "1": randn(4, 192, 256), "2": randn(4, 192, 256)}),
            ("2 sequences", lambda: {"actual_seq_lengths_kv": [200, 30, 1]}),
            ("differ in shape", lambda: {"2": randn(5, 128, 256)}),
            (
                "head size 96",
                lambda: {"0": randn(7, 8, 96), "1": randn(4, 128, 192), "2": randn(4, 128, 192)},
            ),
            ("pre_tokens", lambda: {"sparse_mode": 4, "pre_tokens": -9, "next_tokens": 0}),
        ],
        source=PFA,
    ),
    Case(
        "npu::npu_fused_infer_attention_score",
        unpaged,
        [
            ("rise, up to 31", lambda: {"1": randn(31, 4, 128), "2": randn(31, 4, 128)}),
            ("rise, up to 30", lambda: {"actual_seq_lengths_kv": [20, 10]}),
            ("as many kv ends", lambda: {"actual_seq_lengths_kv": [30]}),
            (
                "values of 192",
                lambda: {
                    "0": randn(7, 4, 192),
                    "1": randn(30, 2, 192),
                    "2": randn(30, 2, 192),
                    "num_key_value_heads": 2,
                },
            ),
            (
                "over 1M",
                lambda: {
                    "0": randn(7, 1, 128),
                    **{name: torch.empty((1 << 20) + 1, 1, 128, dtype=BF16, device=DEVICE) for name in "12"},
                    "num_heads": 1,
                    "num_key_value_heads": 1,
                },
            ),
        ],
        source=PFA,
    ),
    Case(
        "npu::npu_fused_infer_attention_score",
        single,
        [
            ("up to 64", lambda: {"0": randn(2, 1, 256, 128), "num_heads": 256}),
            ("head size 528", lambda: {"0": randn(2, 1, 8, 528)}),
            ("multiple of 16", lambda: {"block_size": 24, "1": randn(20, 24, 256), "2": randn(20, 24, 256)}),
            ("block_table is torch.int64", lambda: {"block_table": ints([0, 1], [2, 3]).long()}),
            ("block_table", lambda: {"block_table": ints(0, 1)}),
        ],
        source=IFA,
    ),
    Case(
        "npu::npu_fused_infer_attention_score_v2",
        latents,
        [
            ("rise, up to 8", lambda: {"0": randn(8, 32, 512), "query_rope": randn(8, 32, 64)}),
            (
                "at most 16 query tokens",
                lambda: {
                    "0": randn(17, 32, 512),
                    "query_rope": randn(17, 32, 64),
                    "actual_seq_qlen": [17, 17],
                },
            ),
            ("sparse_mode 0", lambda: {"sparse_mode": 4}),
            ("one key head", lambda: {"num_key_value_heads": 2}),
            (
                "24 heads",
                lambda: {"0": randn(7, 24, 512), "query_rope": randn(7, 24, 64), "num_query_heads": 24},
            ),
            ("head sizes 256", lambda: {"0": randn(7, 32, 256)}),
            ("dtype of query", lambda: {"query_rope": randn(7, 32, 64, dtype=torch.float16)}),
            (
                "block_size 32",
                lambda: {
                    "block_size": 32,
                    "1": randn(16, 32, 512),
                    "2": randn(16, 32, 512),
                    "key_rope": randn(16, 32, 64),
                },
            ),
        ],
        source=FIA + "feature.cpp",
    ),
]

LATENTS = [
    Case(
        "npu::npu_mla_prolog_v3",
        lambda: prolog(0),
        [
            (
                "hidden size 5120",
                lambda: {
                    "0": randn(3, 5120),
                    "1": nz(zeros(5120, Q_RANK)),
                    "4": nz(zeros(5120, RANK + ROPE)),
                },
            ),
            (
                "q_rank size 768",
                lambda: {
                    "1": nz(zeros(HIDDEN, 768)),
                    "2": nz(zeros(768, HEADS * (NOPE + ROPE))),
                    "5": randn(768),
                },
            ),
            ("weight_uk is torch.float16", lambda: {"3": randn(HEADS, NOPE, RANK, dtype=torch.float16)}),
            ("sin is torch.float16", lambda: {"7": randn(3, ROPE, dtype=torch.float16)}),
            (
                "at most 16 tokens",
                lambda: {
                    "0": randn(1, 17, HIDDEN),
                    "7": randn(1, 17, ROPE),
                    "8": randn(1, 17, ROPE),
                    "cache_index": ints([*range(17)], dtype=torch.int64),
                },
            ),
        ],
        source=PROLOG,
    ),
    Case(
        "npu::npu_kv_rmsnorm_rope_cache",
        lambda: (
            [
                randn(2, 1, 1, 576),
                randn(512),
                randn(2, 1, 1, 64),
                randn(2, 1, 1, 64),
                ints(0, 130, dtype=torch.int64),
                randn(4, 128, 1, 64),
                randn(4, 128, 1, 512),
            ],
            {"cache_mode": "PA_NZ"},
        ),
        [
            (
                "sizes 256 and 64",
                lambda: {"0": randn(2, 1, 1, 320), "1": randn(256), "6": randn(4, 128, 1, 256)},
            ),
            (
                "sizes 512 and 32",
                lambda: {
                    "0": randn(2, 1, 1, 544),
                    "2": randn(2, 1, 1, 32),
                    "3": randn(2, 1, 1, 32),
                    "5": randn(4, 128, 1, 32),
                },
            ),
            ("pages of 120", lambda: {"5": randn(5, 120, 1, 64), "6": randn(5, 120, 1, 512)}),
            ("4, 128, 1, 512", lambda: {"6": randn(4, 128, 2, 512)}),
            ("sin is", lambda: {"3": randn(2, 1, 1, 32)}),
            ("kv .*: .batch", lambda: {"0": randn(2, 1, 576)}),
        ],
        source=LATENT_CACHE,
    ),
]


def stored() -> tuple[list[Any], dict[str, Any]]:
    """Three tokens of 4 query heads and 2 key heads, to two pages of 32 in NZ."""
    norms, tables = [randn(128), randn(128)], [randn(3, 128), randn(3, 128)]
    pages = [zeros(2, 16, 32, 16), zeros(2, 16, 32, 16)]
    index = counts(0, 7, 40)
    return [randn(3, 1024), *norms, *tables, index, zeros(3, 512), *pages, [1, 3, 8, 128], [4, 2, 2]], {}


CACHE = [
    Case(
        "npu::npu_scatter_pa_kv_cache",
        lambda: (
            [randn(3, 2, 64), randn(3, 2, 64), randn(1, 16, 2, 64), randn(1, 16, 2, 64), ints(0, 7, 15)],
            {"cache_mode": "Norm"},
        ),
        [
            (
                "17 tokens for a cache of 1 pages of 16",
                lambda: {"0": randn(17, 2, 64), "1": randn(17, 2, 64), "4": ints(*range(17))},
            ),
            ("pages of 16 and 2", lambda: {"3": randn(2, 16, 2, 64)}),
            ("heads in key", lambda: {"1": randn(3, 1, 128)}),
            ("one slot for each token", lambda: {"4": ints([0], [7], [15])}),
            ("head size", lambda: {"0": randn(3, 128)}),
            ("the cache is", lambda: {"2": randn(1, 16, 2, 32)}),
        ],
        source=SCATTER,
    ),
    Case(
        "npu::npu_scatter_pa_kv_cache",
        lambda: (
            [randn(3, 2, 64), randn(3, 2, 64), randn(1, 8, 16, 16), randn(1, 8, 16, 16), ints(0, 7, 15)],
            {"cache_mode": "PA_NZ"},
        ),
        [
            ("PA_NZ", lambda: {"2": randn(1, 4, 16, 32)}),
            ("the caches have", lambda: {"3": randn(1, 8, 8, 16)}),
        ],
        source=SCATTER,
    ),
    Case(
        "npu::npu_qkv_rms_norm_rope_cache",
        stored,
        [
            ("heads of 128", lambda: {"9": [1, 3, 8, 64]}),
            ("are not the 8 heads", lambda: {"10": [4, 2, 1]}),
            ("are not the 8 heads", lambda: {"10": [2, 2, 2]}),
            ("qkv is torch.float32", lambda: {"0": randn(3, 1024, dtype=FP32)}),
            ("index is torch.int32", lambda: {"5": ints(0, 7, 40)}),
            ("q_gamma is torch.float32", lambda: {"1": randn(128, dtype=FP32)}),
            ("cos is", lambda: {"3": randn(3, 1, 128)}),
            ("q_out is", lambda: {"6": randn(3, 4, 128)}),
            ("k_cache is", lambda: {"7": randn(2, 32, 2, 128)}),
            ("v_cache is", lambda: {"8": randn(3, 16, 32, 16)}),
            ("pages of 16", lambda: {"7": randn(2, 16, 16, 16), "8": randn(2, 16, 16, 16)}),
            ("pages of 32", lambda: {"9": [3, 1, 8, 128]}),
            ("cache_mode", lambda: {"cache_mode": "Norm"}),
        ],
        source=STORE,
    ),
]


def wide() -> tuple[list[Any], dict[str, Any]]:
    """Rows of bfloat16 times three experts in FRACTAL_NZ."""
    return [[randn(6, 32)], [nz(randn(3, 32, 48))]], {
        "split_item": 2,
        "group_type": 0,
        "group_list": counts(2, 0, 4),
        "group_list_type": 1,
    }


def deep(inner: int) -> dict[str, Any]:
    """Arguments of the product of int8 by int4 with so many inputs."""
    return {"0": [int8(6, inner)], "1": [torch.zeros(3, inner, 6, dtype=torch.int32).npu()]}


PRODUCTS = [
    Case(
        "npu::npu_grouped_matmul",
        narrow,
        [
            ("multiple of 64 up to 18432", lambda: deep(96)),
            ("multiple of 64 up to 18432", lambda: deep(18432 + 64)),
        ],
        source=GROUPED,
    ),
    Case(
        "npu::npu_grouped_matmul",
        wide,
        [
            ("group_type", lambda: {"group_type": 2}),
            ("group_list", lambda: {"group_list": None}),
            ("k is 32 in x", lambda: {"1": [nz(randn(3, 48, 48))]}),
        ],
        source=GROUPED,
    ),
    Case(
        "npu::npu_quant_matmul",
        lambda: (
            [int8(4, 64), nz(int8(64, 96)), randn(96, dtype=FP32)],
            {"pertoken_scale": randn(4, dtype=FP32), "output_dtype": torch.bfloat16},
        ),
        [
            ("pertoken_scale is", lambda: {"pertoken_scale": randn(4, 1, dtype=FP32)}),
            ("output torch.int32 with", lambda: {"output_dtype": torch.int32}),
            ("scale is torch.int64", lambda: {"2": words_of(96)}),
            ("scale is torch.bfloat16", lambda: {"2": randn(96), "output_dtype": torch.float16}),
            ("bias is torch.float16", lambda: {"bias": randn(96, dtype=torch.float16)}),
            ("bias .*: n", lambda: {"bias": ints(*range(95))}),
            ("scale .*: 1 or n", lambda: {"2": randn(2, dtype=FP32)}),
            ("int8, not", lambda: {"0": randn(4, 64)}),
        ],
        source=QUANT,
    ),
]

TILING = [*ATTENTION, *LATENTS, *CACHE, *PRODUCTS]
