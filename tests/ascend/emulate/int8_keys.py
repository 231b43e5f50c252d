"""Limits of attention over keys and values in int8, which npu_fused_infer_attention_score dequantizes with
one scale each (antiquant modes 0). Source: op-plugin's document of its first form (517f2e7)."""

from typing import TYPE_CHECKING

import torch

from tests.ascend.emulate.table import need, need_dtype

if TYPE_CHECKING:
    from tests.ascend.emulate.score import Score


def check_int8(score: "Score") -> None:
    """Raises Refused."""
    need_dtype("value", score.value, torch.int8)
    is_single = score.layout_in != "TND" and max(score.query_lengths()) == 1 and score.query_rope is None
    need(is_single, "int8 keys: one query a row, no TND, no query_rope")
    for scale in (score.key_antiquant_scale, score.value_antiquant_scale):
        need(scale is not None, "int8 keys need key_antiquant_scale and value_antiquant_scale")
        assert scale is not None
        need(tuple(scale.shape) == (1,), f"emulated: one antiquant scale, not {tuple(scale.shape)}")
        need(scale.dtype == score.query.dtype, f"antiquant scales are {scale.dtype}")
    size = score.query.shape[-1] // (score.num_heads if score.layout_in == "BSH" else 1)
    need(size % 32 == 0, f"int8 keys: head size {size} is a multiple of 32")
    need(score.block_table is None or score.block_size % 32 == 0, f"int8 keys: pages of {score.block_size}")
