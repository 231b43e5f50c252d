"""Right and wrong calls, as in calls.py, of quantized products and of operators for MoE layers."""

from typing import Any

import torch
import torch_npu
from torch import Tensor

from tests.ascend.calls import Case, int8, ints, randn

FP16, FP32 = torch.float16, torch.float32


def counts(*values: int) -> Tensor:
    """int64 numbers on the NPU."""
    return ints(*values, dtype=torch.int64)


def nz(weight: Tensor) -> Tensor:
    """The weight in FRACTAL_NZ."""
    return torch_npu.npu_format_cast(weight, 29)


def product() -> tuple[list[Any], dict[str, Any]]:
    """Arguments of npu_quant_matmul."""
    return [int8(4, 64), int8(64, 96), randn(96, dtype=FP32)], {
        "pertoken_scale": randn(4, dtype=FP32),
        "output_dtype": torch.bfloat16,
    }


LINEARS = [
    Case(
        "npu::npu_format_cast",
        lambda: ([randn(64, 96), 29], {}),
        [
            ("no multiple of 16 x 16", lambda: {"0": randn(64, 90)}),
            ("no multiple of 16 x 32", lambda: {"0": int8(64, 48)}),
            ("2-D or 3-D", lambda: {"0": randn(64)}),
            ("format 30", lambda: {"1": 30}),
        ],
    ),
    Case(
        "npu::npu_prefetch",
        lambda: ([nz(randn(64, 96)), None, 4096], {}),
        [
            ("max_size", lambda: {"2": 0}),
            ("offset", lambda: {"offset": 64 * 96 * 2}),
            ("empty", lambda: {"0": randn(0, 96)}),
        ],
    ),
    Case(
        "npu::npu_dynamic_quant",
        lambda: ([randn(4, 64)], {}),
        [
            ("input is torch.int8", lambda: {"0": int8(4, 64)}),
            ("at least two", lambda: {"0": randn(64)}),
            ("smooth_scales are", lambda: {"smooth_scales": randn(64, dtype=FP16)}),
            ("smooth_scales is", lambda: {"smooth_scales": randn(32)}),
        ],
    ),
    Case(
        "npu::npu_quantize",
        lambda: ([randn(4, 64), randn(64), randn(64), torch.qint8, -1, False], {}),
        [
            ("input is", lambda: {"0": int8(4, 64)}),
            ("scales .* for", lambda: {"1": randn(32), "2": randn(32)}),
            ("zero_points have", lambda: {"2": randn(64, dtype=FP32)}),
        ],
    ),
    Case(
        "npu::npu_quant_matmul",
        product,
        [
            ("int8, not", lambda: {"0": randn(4, 64)}),
            ("inner dimensions", lambda: {"0": int8(4, 32)}),
            ("scale .*: 1 or n", lambda: {"2": randn(64, dtype=FP32)}),
            ("scale is torch.float16", lambda: {"2": randn(96, dtype=FP16)}),
            ("pertoken_scale is", lambda: {"pertoken_scale": randn(3, dtype=FP32)}),
            ("pertoken_scale is torch.bfloat16", lambda: {"pertoken_scale": randn(4)}),
            ("output torch.int8 with", lambda: {"output_dtype": torch.int8}),
            ("bias is torch.float16", lambda: {"bias": randn(96, dtype=FP16)}),
            ("bias .*: n", lambda: {"bias": ints(*range(4))}),
            (
                "65535",
                lambda: {
                    "0": int8(1, 65536),
                    "1": int8(65536, 1),
                    "2": randn(1, dtype=FP32),
                    "pertoken_scale": randn(1, dtype=FP32),
                },
            ),
        ],
    ),
    Case(
        "npu::npu_weight_quant_batchmatmul",
        lambda: ([randn(4, 64), int8(64, 96), randn(96)], {}),
        [
            ("x is", lambda: {"0": int8(4, 64)}),
            ("inner dimensions", lambda: {"0": randn(4, 32)}),
            ("antiquant_scale is torch.float32", lambda: {"2": randn(96, dtype=FP32)}),
            ("1 or n", lambda: {"2": randn(64)}),
            ("multiple of 32", lambda: {"antiquant_group_size": 48, "2": randn(2, 96)}),
            ("multiple of 32", lambda: {"antiquant_group_size": 64, "2": randn(1, 96)}),
        ],
    ),
    Case(
        "npu::npu_transpose_batchmatmul",
        lambda: ([randn(5, 4, 32), randn(4, 32, 16)], {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]}),
        [
            ("perms", lambda: {"perm_y": [0, 1, 2]}),
            ("perms", lambda: {"perm_x2": [0, 2, 1]}),
            (" x ", lambda: {"0": randn(5, 4, 16)}),
            ("multiples of 16", lambda: {"1": randn(4, 32, 10)}),
        ],
    ),
]


def routing(**more: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of npu_moe_init_routing_v2."""
    return [randn(3, 32), ints([0, 2], [1, 2], [3, 0])], {
        "active_num": 6,
        "expert_num": 4,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 4],
        **more,
    }


GROUPED = {"group_list": counts, "split_item": 2, "group_type": 0, "group_list_type": 1}


def grouped(**more: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of npu_grouped_matmul in bfloat16."""
    return [[randn(6, 32)], [randn(3, 32, 48)]], {**GROUPED, "group_list": counts(2, 0, 4), **more}


def grouped4() -> tuple[list[Any], dict[str, Any]]:
    """Three experts of int4, eight in a word, with scales for groups of 16."""
    words = torch.randint(-(2**31), 2**31, (3, 32, 6)).to(torch.int32).npu()
    return [[randn(6, 32)], [words]], {
        "antiquant_scale": [randn(3, 2, 48)],
        "antiquant_offset": [randn(3, 2, 48)],
        "split_item": 2,
        "group_type": 0,
        "group_list": counts(2, 0, 4),
        "group_list_type": 1,
    }


def narrow() -> tuple[list[Any], dict[str, Any]]:
    """The same times int8: scales of outputs, in words of 64 bits, and what a bias of 8 on each half of an
    int8 takes."""
    words = torch.randint(-(2**31), 2**31, (3, 64, 6)).to(torch.int32).npu()
    codes = ints(*[[113] * 64] * 6, dtype=torch.int8)  # which is what the emulation overwrites them by
    return [[codes], [words]], {
        "scale": [words_of(3, 1, 48)],
        "bias": [randn(3, 48, dtype=FP32)],
        "per_token_scale": [randn(6, dtype=FP32)],
        "split_item": 2,
        "group_type": 0,
        "group_list": counts(2, 0, 4),
        "group_list_type": 1,
        "output_dtype": torch.bfloat16,
    }


def words_of(*shape: int) -> Tensor:
    """Scales as 64-bit words whose lower half is a float32."""
    return (torch.rand(shape).view(torch.int32).to(torch.int64) & 0xFFFFFFFF).npu()


def grouped8() -> tuple[list[Any], dict[str, Any]]:
    """Arguments of npu_grouped_matmul with int8 weights and activations."""
    return [[int8(6, 32)], [int8(3, 32, 64)]], {
        **GROUPED,
        "group_list": counts(2, 0, 4),
        "scale": [randn(3, 64)],
        "per_token_scale": [randn(6, dtype=FP32)],
        "output_dtype": torch.bfloat16,
    }


EXPERTS = [
    Case(
        "npu::npu_moe_gating_top_k",
        lambda: ([randn(3, 64), 6], {"k_group": 4, "group_count": 8, "norm_type": 1}),
        [
            ("2-D", lambda: {"0": randn(64)}),
            ("k 40", lambda: {"1": 40}),
            ("k_group 9", lambda: {"k_group": 9}),
            ("groups", lambda: {"group_count": 7}),
            ("groups", lambda: {"group_count": 32}),
            ("bias is", lambda: {"bias": randn(64, dtype=FP32)}),
            ("renorm", lambda: {"renorm": 1}),
        ],
    ),
    Case(
        "npu::npu_moe_gating_top_k_softmax",
        lambda: ([randn(3, 16)], {"k": 4}),
        [
            ("k 17", lambda: {"k": 17}),
            ("x is", lambda: {"0": ints([1, 2], [3, 4])}),
            ("finished", lambda: {"finished": ints(0, 0, 0)}),
        ],
    ),
    Case(
        "npu::npu_moe_init_routing_v2",
        routing,
        [
            ("expert_idx is torch.int64", lambda: {"1": ints([0, 2], [1, 2], [3, 0], dtype=torch.int64)}),
            ("as many rows", lambda: {"1": ints([0, 2])}),
            ("outside 0 .. 3", lambda: {"1": ints([0, 2], [1, 2], [4, 0])}),
            ("expert_num", lambda: {"expert_num": -1}),
            ("expert_tokens_num_type", lambda: {"expert_tokens_num_type": 0}),
            ("flag", lambda: {"expert_tokens_num_flag": False}),
            ("active_expert_range", lambda: {"active_expert_range": [2, 5]}),
            ("quant_mode", lambda: {"quant_mode": 0}),
            ("drop_pad_mode", lambda: {"drop_pad_mode": 1}),
        ],
    ),
    Case(
        "npu::npu_moe_finalize_routing",
        lambda: (
            [randn(6, 32), None, None, None, randn(3, 2), ints(0, 1, 2, 3, 4, 5), None],
            {"drop_pad_mode": 0},
        ),
        [
            ("is torch.int64", lambda: {"5": ints(0, 1, 2, 3, 4, 5, dtype=torch.int64)}),
            ("outside 0 .. 5", lambda: {"5": ints(0, 1, 2, 3, 4, 6)}),
            ("outside 0 .. 5", lambda: {"5": ints(0, 1, 2, 3, 4, -1)}),
            ("scales has|scales have", lambda: {"4": randn(3, 2, dtype=FP16)}),
            ("skip2 without", lambda: {"2": randn(3, 32)}),
            ("skip1: shape", lambda: {"1": randn(2, 32)}),
            ("experts, capacity", lambda: {"drop_pad_mode": 3}),
            (
                "outside -1 .. 5",
                lambda: {"0": randn(2, 3, 32), "5": ints(0, 1, 2, 3, 4, -2), "drop_pad_mode": 3},
            ),
            ("fewer experts", lambda: {"0": randn(1, 6, 32), "drop_pad_mode": 3}),
        ],
    ),
    Case(
        "npu::npu_moe_gating_top_k_softmax_v2",
        lambda: ([randn(3, 16)], {"k": 4, "renorm": 1}),
        [
            ("k 17", lambda: {"k": 17}),
            ("x is", lambda: {"0": ints([1, 2], [3, 4])}),
            ("renorm 2", lambda: {"renorm": 2}),
        ],
    ),
    Case(
        "npu::npu_moe_token_permute",
        lambda: ([randn(3, 32), ints([0, 2], [1, 2], [3, 0])], {}),
        [
            ("indices is", lambda: {"1": randn(3, 2)}),
            ("padded_mode", lambda: {"padded_mode": True}),
            ("below 0", lambda: {"1": ints([0, 2], [1, -1], [3, 0])}),
        ],
    ),
    Case(
        "npu::npu_moe_token_unpermute",
        lambda: ([randn(6, 32), ints(0, 1, 2, 3, 4, 5), randn(3, 2)], {}),
        [
            ("sorted_indices is", lambda: {"1": ints(0, 1, 2, 3, 4, 5, dtype=torch.int64)}),
            ("probs", lambda: {"2": randn(2, 2)}),
            ("padded_mode", lambda: {"padded_mode": True}),
        ],
    ),
    Case(
        "npu::npu_grouped_matmul",
        grouped,
        [
            ("group_list is torch.int32", lambda: {"group_list": ints(2, 0, 4)}),
            ("weights for", lambda: {"group_list": counts(2, 4)}),
            ("for 6 rows", lambda: {"group_list": counts(2, 1, 4)}),
            ("for 6 rows", lambda: {"group_list": counts(3, -1, 4)}),
            ("for 6 rows", lambda: {"group_list": counts(4, 2, 6), "group_list_type": 0}),
            ("split_item", lambda: {"split_item": 0}),
            ("group_type", lambda: {"group_type": 1}),
            ("k is 32", lambda: {"1": [randn(3, 16, 48)]}),
            ("not transposed", lambda: {"0": [randn(32, 6).t()]}),
            ("weight torch.float16", lambda: {"1": [randn(3, 32, 48, dtype=FP16)]}),
            ("one group", lambda: {"1": [randn(1, 32, 48)], "group_list": counts(6)}),
            ("scales are for int8", lambda: {"scale": [randn(3, 48)]}),
        ],
    ),
    Case(
        "npu::npu_grouped_matmul",
        lambda: grouped(bias=[randn(3, 48, dtype=FP32)]),
        [
            ("bias is torch.bfloat16", lambda: {"bias": [randn(3, 48)]}),
            ("a row for each group", lambda: {"bias": [randn(48, dtype=FP32)]}),
        ],
    ),
    Case(
        "npu::npu_grouped_matmul",
        grouped8,
        [
            ("weight torch.bfloat16", lambda: {"1": [randn(3, 32, 64)]}),
            ("per_token_scale", lambda: {"per_token_scale": [randn(6)]}),
            ("per_token_scale is", lambda: {"per_token_scale": [randn(5, dtype=FP32)]}),
            ("gives no", lambda: {"output_dtype": torch.int32}),
            ("without scale", lambda: {"scale": None}),
            ("scale is torch.bfloat16 for torch.float16", lambda: {"output_dtype": FP16}),
        ],
    ),
    Case(
        "npu::npu_grouped_matmul",
        grouped4,
        [
            ("antiquant_offset is like", lambda: {"antiquant_offset": None}),
            ("antiquant_scale like x", lambda: {"antiquant_scale": [randn(3, 2, 48, dtype=FP16)]}),
            ("by group are for int4", lambda: {"1": [int8(3, 32, 48)]}),
            (
                "3 groups of 32",
                lambda: {"antiquant_scale": [randn(3, 3, 48)], "antiquant_offset": [randn(3, 3, 48)]},
            ),
        ],
    ),
    Case(
        "npu::npu_grouped_matmul",
        narrow,
        [
            ("needs scale, bias", lambda: {"bias": None}),
            ("scale is int64", lambda: {"scale": [randn(3, 48, dtype=FP32)]}),
            ("upper half", lambda: {"scale": [words_of(3, 1, 48) << 8]}),
            ("bias is float32", lambda: {"bias": [ints(*[[0] * 48] * 3)]}),
            ("group_list_type 1", lambda: {"group_list": counts(2, 2, 6), "group_list_type": 0}),
            ("gives no torch.int8", lambda: {"output_dtype": torch.int8}),
        ],
    ),
    Case(
        "npu::npu_grouped_matmul_swiglu_quant",
        lambda: (
            [
                int8(6, 32),
                nz(int8(3, 32, 64)),
                counts(2, 2, 6),
                randn(3, 64, dtype=FP32),
                randn(6, dtype=FP32),
            ],
            {},
        ),
        [
            ("FRACTAL_NZ", lambda: {"1": int8(3, 32, 64)}),
            ("weight_scale is", lambda: {"3": randn(64, dtype=FP32)}),
            ("x_scale is torch.bfloat16", lambda: {"4": randn(6)}),
            ("for 6 rows", lambda: {"2": counts(2, 0, 4)}),
            ("groups for", lambda: {"2": counts(2, 6)}),
        ],
    ),
    Case(
        "npu::npu_grouped_matmul_swiglu_quant_v2",
        lambda: (
            [
                int8(6, 32),
                [nz(int8(3, 32, 64))],
                [randn(3, 64, dtype=FP32)],
                randn(6, dtype=FP32),
                counts(2, 0, 4),
            ],
            {"group_list_type": 1},
        ),
        [
            ("FRACTAL_NZ", lambda: {"1": [int8(3, 32, 64)]}),
            ("weight_scale is torch.bfloat16", lambda: {"2": [randn(3, 64)]}),
            ("x_scale is torch.bfloat16", lambda: {"3": randn(6)}),
            ("for 6 rows", lambda: {"4": counts(2, 1, 4)}),
            ("n at most 10240", lambda: {"1": [nz(int8(3, 32, 10272))], "2": [randn(3, 10272, dtype=FP32)]}),
        ],
    ),
    Case(
        "npu::npu_dequant_swiglu_quant",
        lambda: (
            [int8(4, 128).to(torch.int32)],
            {
                "weight_scale": randn(1, 128, dtype=FP32),
                "activation_scale": randn(4, dtype=FP32),
                "activate_left": True,
                "quant_mode": 1,
            },
        ),
        [
            ("even", lambda: {"0": ints([1, 2, 3])}),
            ("weight_scale is for", lambda: {"0": randn(4, 128)}),
            ("needs activation_scale", lambda: {"activation_scale": None}),
            ("weight_scale is", lambda: {"weight_scale": randn(128, dtype=FP32)}),
            ("group_index is", lambda: {"group_index": ints(4)}),
            ("ends at", lambda: {"group_index": counts(5)}),
        ],
    ),
]
