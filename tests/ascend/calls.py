"""A right call of each operator, and calls that differ from it in one place and that CANN documents as wrong:
the table of test_refusals.py. A wrong call replaces arguments of the right one: by name, or by position as
"0", "1" ..."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DEVICE = "npu"
BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Random numbers on the NPU."""
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    """Integers on the NPU."""
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def int8(*shape: int) -> Tensor:
    """Random int8 numbers on the NPU."""
    return torch.randint(-100, 100, shape, dtype=torch.int32).to(torch.int8).to(DEVICE)


@dataclass(frozen=True)
class Case:
    """An operator of torch.ops.npu (or atb), its right call, and wrong ones. `source`: the file of CANN's
    public tiling code that the wrong ones are from; empty: documents, see the operator's emulation."""

    name: str
    right: Callable[[], tuple[list[Any], dict[str, Any]]]
    # a part of the reason, what differs
    wrong: list[tuple[str, Callable[[], dict[str, Any]]]] = field(default_factory=list)
    source: str = ""

    def call(self, changes: dict[str, Any]) -> Any:
        """Calls the operator with the right arguments, some of them replaced by `changes`."""
        args, named = self.right()
        for name, value in changes.items():
            if name.isdigit():
                args[int(name)] = value
            else:
                named[name] = value
        space, _, name = self.name.partition("::")
        return getattr(getattr(torch.ops, space), name)(*args, **named)


def mask(size: int = 2048) -> Tensor:
    """The mask of sparse modes 2 to 4."""
    return torch.ones(size, size, dtype=torch.bool, device=DEVICE).triu(1)


def paged(**more: Any) -> tuple[list[Any], dict[str, Any]]:
    """Five and two queries over 200 and 30 keys in pages of 128; 8 heads, 2 key heads."""
    named: dict[str, Any] = {
        "atten_mask": mask(),
        "block_table": ints([0, 1], [2, 3]),
        "actual_seq_lengths": [5, 7],
        "actual_seq_lengths_kv": [200, 30],
        "input_layout": "TND",
        "block_size": 128,
        "num_heads": 8,
        "num_key_value_heads": 2,
        "scale": 0.1,
        "sparse_mode": 3,
    }
    return [randn(7, 8, 128), randn(4, 128, 256), randn(4, 128, 256)], named | more


ATTENTION = [
    Case(
        "npu::npu_fused_infer_attention_score",
        paged,
        [
            ("input_layout", lambda: {"input_layout": "TDN"}),
            ("input_layout", lambda: {"input_layout": "TND_NTD"}),  # v2's
            ("int8 keys: one query", lambda: {"1": int8(4, 128, 256), "2": int8(4, 128, 256)}),
            ("antiquant scales are", lambda: {"key_antiquant_scale": randn(1)}),
            ("query, key and value differ in dtype", lambda: {"1": randn(4, 128, 256, dtype=torch.float16)}),
            ("query is torch.int8", lambda: {"0": int8(7, 8, 128)}),
            ("key must be contiguous", lambda: {"1": randn(4, 256, 128).transpose(1, 2)}),
            ("no multiple, up to 64", lambda: {"num_key_value_heads": 3}),
            ("num_heads is 4", lambda: {"num_heads": 4}),
            ("TND needs", lambda: {"actual_seq_lengths": None}),
            ("rise", lambda: {"actual_seq_lengths": [5, 4]}),
            ("rise", lambda: {"actual_seq_lengths": [5, 8]}),
            ("2 sequences", lambda: {"actual_seq_lengths_kv": [200]}),
            ("block_table is torch.int64", lambda: {"block_table": ints([0, 1], [2, 3], dtype=torch.int64)}),
            ("block_table", lambda: {"block_table": ints([0, 1])}),
            ("block_table of 2 for 300", lambda: {"actual_seq_lengths_kv": [300, 30]}),
            ("pages .* in a cache of 4", lambda: {"block_table": ints([0, 1], [4, 3])}),
            (
                "4 pages of all rows in a cache of 3",
                lambda: {
                    "1": randn(3, 128, 256),
                    "2": randn(3, 128, 256),
                    "block_table": ints([0, 1], [0, 2]),
                    "actual_seq_lengths_kv": [256, 256],
                },
            ),
            ("pages of 128, block_size is 256", lambda: {"block_size": 256}),
            ("block_size 64", lambda: {"block_size": 64, "1": randn(4, 64, 256), "2": randn(4, 64, 256)}),
            ("2048 x 2048", lambda: {"atten_mask": mask(1024)}),
            ("2048 x 2048", lambda: {"atten_mask": None}),
            ("atten_mask is torch.float32", lambda: {"atten_mask": mask().float()}),
            ("sparse_mode 5", lambda: {"sparse_mode": 5}),
            ("sparse_mode 2 is not", lambda: {"sparse_mode": 2}),
            ("without mask", lambda: {"sparse_mode": 0}),
            ("no more queries than keys", lambda: {"actual_seq_lengths_kv": [200, 1]}),
            (
                "at most 65535",
                lambda: {"1": randn(1, 128, 65536), "2": randn(1, 128, 65536), "num_key_value_heads": 2},
            ),
            ("head size", lambda: {"0": randn(7, 8, 120)}),
            ("not emulated", lambda: {"pse_shift": randn(1)}),
        ],
    ),
    Case(
        "npu::npu_fused_infer_attention_score",
        lambda: (
            [randn(2, 1, 1024), randn(4, 128, 256), randn(4, 128, 256)],
            {
                "block_table": ints([0, 1], [2, 3]),
                "actual_seq_lengths_kv": [200, 30],
                "input_layout": "BSH",
                "block_size": 128,
                "num_heads": 8,
                "num_key_value_heads": 2,
            },
        ),
        [
            ("multiple of 16", lambda: {"block_size": 120, "1": randn(4, 120, 256), "2": randn(4, 120, 256)}),
            ("only", lambda: {"1": randn(4, 2, 128, 128), "2": randn(4, 2, 128, 128)}),
            ("need actual_seq_lengths_kv", lambda: {"actual_seq_lengths_kv": None}),
            ("query is", lambda: {"0": randn(2, 8, 1, 128)}),
        ],
    ),
    Case(
        "npu::npu_fused_infer_attention_score",
        lambda: (  # decoding with keys in int8
            [randn(2, 1, 8, 128), int8(4, 128, 256), int8(4, 128, 256)],
            {
                "key_antiquant_scale": randn(1),
                "value_antiquant_scale": randn(1),
                "block_table": ints([0, 1], [2, 3]),
                "actual_seq_lengths_kv": [200, 30],
                "input_layout": "BSND",
                "block_size": 128,
                "num_heads": 8,
                "num_key_value_heads": 2,
            },
        ),
        [
            ("need key_antiquant", lambda: {"key_antiquant_scale": None}),
            ("one antiquant scale", lambda: {"value_antiquant_scale": randn(2)}),
            ("scales are torch.float32", lambda: {"value_antiquant_scale": randn(1).float()}),
            ("value is", lambda: {"2": randn(4, 128, 256)}),
        ],
    ),
    Case(
        "npu::npu_fused_infer_attention_score",
        lambda: (  # decoding with latents
            [randn(2, 1, 32, 512), randn(4, 128, 512), randn(4, 128, 512)],
            {
                "query_rope": randn(2, 1, 32, 64),
                "key_rope": randn(4, 128, 64),
                "block_table": ints([0, 1], [2, 3]),
                "actual_seq_lengths_kv": [200, 30],
                "input_layout": "BSND",
                "block_size": 128,
                "num_heads": 32,
                "num_key_value_heads": 1,
            },
        ),
        [
            ("go together", lambda: {"query_rope": None}),
            ("one key head", lambda: {"num_key_value_heads": 2}),
            (
                "block_size 64",
                lambda: {
                    "block_size": 64,
                    "1": randn(4, 64, 512),
                    "2": randn(4, 64, 512),
                    "key_rope": randn(4, 64, 64),
                },
            ),
            (
                "at most 16 query tokens",
                lambda: {
                    "0": randn(2, 17, 32, 512),
                    "query_rope": randn(2, 17, 32, 64),
                    "sparse_mode": 3,
                    "atten_mask": mask(),
                },
            ),
            ("differs from query", lambda: {"query_rope": randn(2, 1, 16, 64)}),
        ],
    ),
    Case(
        "npu::npu_attention_update",
        lambda: ([[randn(6, dtype=torch.float32)] * 2, [randn(6, 16)] * 2, 1], {}),
        [
            ("as many lse", lambda: {"1": [randn(6, 16)]}),
            ("lse.0. is", lambda: {"0": [randn(6)] * 2}),
            ("update_type", lambda: {"2": 2}),
        ],
    ),
]

CACHE = [
    Case(
        "npu::npu_scatter_pa_kv_cache",
        lambda: (
            [randn(3, 2, 64), randn(3, 2, 64), randn(4, 128, 2, 64), randn(4, 128, 2, 64), ints(0, 130, 511)],
            {"cache_mode": "Norm"},
        ),
        [
            ("PA_NZ", lambda: {"cache_mode": "PA_NZ"}),
            ("cache_mode", lambda: {"cache_mode": "ND"}),
            ("slot lies outside", lambda: {"4": ints(0, 1, 512)}),
            ("slot lies outside", lambda: {"4": ints(0, 1, -1)}),
            ("one slot for each token", lambda: {"4": ints(0, 1)}),
            ("slot_mapping is torch.float32", lambda: {"4": randn(3, dtype=torch.float32)}),
            ("key must be contiguous", lambda: {"0": randn(3, 64, 2).transpose(1, 2)}),
            ("the cache is torch.bfloat16", lambda: {"0": randn(3, 2, 64, dtype=torch.float16)}),
            ("pages, page size, heads", lambda: {"2": randn(4, 128, 128)}),
        ],
    ),
    Case(
        "npu::npu_scatter_nd_update_",
        lambda: ([randn(512, 1, 64), ints([0], [130]), randn(2, 1, 64)], {}),
        [
            ("indices is", lambda: {"1": ints([0], [130]).float()}),
            ("updates", lambda: {"2": randn(2, 64)}),
            ("updates are", lambda: {"2": randn(2, 1, 64, dtype=torch.float16)}),
            ("points outside", lambda: {"1": ints([0], [512])}),
            ("input is torch.int32", lambda: {"0": ints(*range(9)), "1": ints([0]), "2": ints(1)}),
        ],
    ),
    Case(
        "atb::_npu_reshape_and_cache",
        lambda: (
            [randn(2, 2, 64), randn(2, 2, 64), randn(4, 128, 2, 64), randn(4, 128, 2, 64), ints(0, 130)],
            {},
        ),
        [
            ("slot_indices is torch.int64", lambda: {"4": ints(0, 130, dtype=torch.int64)}),
            ("pages, page size", lambda: {"2": randn(4, 128, 128)}),
            ("slot lies outside", lambda: {"4": ints(0, 512)}),
        ],
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
            {"cache_mode": "PA_BNSD"},
        ),
        [
            ("index is torch.int32", lambda: {"4": ints(0, 130)}),
            ("cache_mode", lambda: {"cache_mode": "PA_ND"}),
            ("kv holds 570", lambda: {"0": randn(2, 1, 1, 570)}),
            ("slot lies outside", lambda: {"4": ints(0, 512, dtype=torch.int64)}),
            ("k_cache is", lambda: {"5": randn(4, 128, 64)}),
            ("cos is", lambda: {"2": randn(2, 64)}),
        ],
    ),
]

NORMS = [
    Case(
        "npu::npu_rms_norm",
        lambda: ([randn(3, 64), randn(64)], {}),
        [
            ("not the end", lambda: {"1": randn(32)}),
            ("gamma is", lambda: {"1": randn(64, dtype=torch.float16)}),
            ("x is torch.int32", lambda: {"0": ints([1, 2], [3, 4])}),
            ("empty", lambda: {"0": randn(0, 64)}),
        ],
    ),
    Case(
        "npu::npu_add_rms_norm",
        lambda: ([randn(3, 64), randn(3, 64), randn(64)], {}),
        [("differ", lambda: {"1": randn(1, 64)}), ("not the end", lambda: {"2": randn(65)})],
    ),
    Case(
        "npu::npu_add_rms_norm_cast",
        lambda: ([randn(3, 64), randn(3, 64), randn(64)], {}),
        [
            ("differ", lambda: {"1": randn(1, 64)}),
            ("not the end", lambda: {"2": randn(65)}),
            ("gamma is", lambda: {"2": randn(64).float()}),
        ],
    ),
    Case(
        "npu::npu_add_rms_norm_dynamic_quant",
        lambda: ([randn(3, 64), randn(3, 64), randn(64)], {"output_mask": [True, False]}),
        [
            ("differ", lambda: {"1": randn(1, 64)}),
            ("gamma is", lambda: {"2": randn(64).float()}),
            ("output_mask", lambda: {"output_mask": [True, True]}),
            ("1 dimensions", lambda: {"0": randn(64), "1": randn(64)}),
        ],
    ),
    Case(
        "npu::npu_gemma_rms_norm",
        lambda: ([randn(3, 64), randn(64)], {}),
        [("not the end", lambda: {"1": randn(32)})],
    ),
    Case(
        "npu::npu_clipped_swiglu",
        lambda: ([randn(3, 64)], {"interleaved": False}),
        [
            ("even", lambda: {"0": randn(3, 63)}),
            ("even", lambda: {"0": randn(64)}),
            ("x is torch.int8", lambda: {"0": int8(3, 64)}),
            ("must be contiguous", lambda: {"0": randn(64, 3).t()}),
            ("limit", lambda: {"limit": 0.0}),
        ],
    ),
    Case("npu::npu_swiglu", lambda: ([randn(3, 64)], {}), [("odd", lambda: {"0": randn(3, 63)})]),
    Case(
        "npu::npu_rotary_mul",
        lambda: ([randn(1, 5, 8, 64), randn(1, 5, 1, 64), randn(1, 5, 1, 64)], {}),
        [
            ("4-D", lambda: {"0": randn(5, 8, 64)}),
            ("last dimension", lambda: {"1": randn(1, 5, 1, 32), "2": randn(1, 5, 1, 32)}),
            ("broadcast", lambda: {"1": randn(1, 4, 1, 64), "2": randn(1, 4, 1, 64)}),
            ("rotary_mode", lambda: {"rotary_mode": "quarter"}),
            (
                "below 896",
                lambda: {"0": randn(1, 5, 8, 896), "1": randn(1, 5, 1, 896), "2": randn(1, 5, 1, 896)},
            ),
        ],
    ),
    Case(
        "npu::npu_apply_rotary_pos_emb",
        lambda: ([randn(5, 8, 64), randn(5, 2, 64), randn(5, 1, 64), randn(5, 1, 64)], {"layout": "TND"}),
        [
            ("BSND or TND", lambda: {"layout": "BNSD"}),
            ("4-D", lambda: {"layout": "BSND"}),
            ("half on A2", lambda: {"rotary_mode": "interleave"}),
            ("differ in dtype", lambda: {"2": randn(5, 1, 64, dtype=torch.float32)}),
            ("one head", lambda: {"2": randn(5, 8, 64), "3": randn(5, 8, 64)}),
            ("before the heads", lambda: {"1": randn(4, 2, 64)}),
        ],
    ),
    Case(
        "npu::npu_interleave_rope",
        lambda: ([randn(2, 8, 1, 64), randn(2, 1, 1, 64), randn(2, 1, 1, 64)], {}),
        [
            ("batch, heads", lambda: {"0": randn(2, 8, 64)}),
            (
                "x must be contiguous",
                lambda: {"0": randn(2, 8, 64, 1).transpose(2, 3)[:, :, :, ::1].expand(2, 8, 1, 64)[:, ::2]},
            ),
            ("tokens or 1", lambda: {"1": randn(2, 8, 1, 64), "2": randn(2, 8, 1, 64)}),
        ],
    ),
]

SAMPLING = [
    Case(
        "npu::npu_top_k_top_p",
        lambda: (
            [randn(2, 2000, dtype=torch.float32), randn(2, dtype=torch.float32).sigmoid(), ints(5, 1024)],
            {},
        ),
        [
            ("p or k", lambda: {"1": None, "2": None}),
            ("k is torch.int64", lambda: {"2": ints(5, 10, dtype=torch.int64)}),
            ("outside 1 .. 1024", lambda: {"2": ints(5, 1025)}),
            ("outside 1 .. 1024", lambda: {"2": ints(0, 10)}),
            ("p is torch.bfloat16", lambda: {"1": randn(2).sigmoid()}),
            ("k is", lambda: {"2": ints(5)}),
            ("outside 0 .. 1", lambda: {"1": randn(2, dtype=torch.float32).abs() + 1}),
            ("2-D", lambda: {"0": randn(2000, dtype=torch.float32)}),
        ],
    )
]
