"""Limits of paged caches that attention reads. [v1] and the like: see score.py."""

from typing import TYPE_CHECKING

from torch import Tensor

from tests.ascend.emulate.table import need

if TYPE_CHECKING:
    from tests.ascend.emulate.score import Score


def check_cache(score: "Score", name: str, cache: Tensor) -> None:
    """Limits of the layout of a paged cache."""
    need(cache.dim() in (3, 4, 5), f"{name} cache is {cache.dim()}-D")
    at = {3: 1, 4: 2, 5: 3}[cache.dim()]
    need(
        cache.shape[at] == score.block_size,
        f"{name}: pages of {cache.shape[at]}, block_size is {score.block_size}",
    )
    if cache.dim() == 3:
        need(
            cache.shape[2] <= 65535,
            f"{name} (pages, page size, {cache.shape[2]}): heads * head size is at most 65535 [v1]",
        )
        need(
            cache.shape[2] % score.num_kv_heads == 0,
            f"{name}'s {cache.shape[2]} is no multiple of {score.num_kv_heads} heads",
        )
        return
    need(
        cache.shape[1] == score.num_kv_heads,
        f"{name}: {cache.shape[1]} heads, num_key_value_heads is {score.num_kv_heads}",
    )
    if cache.dim() == 4:
        need(
            score.layout_in in ("BNSD", "TND") or score.query_rope is not None,
            f"{score.layout_in} takes a cache (pages, page size, heads * head size) only [v1]",
        )
    else:
        need(cache.shape[4] == 16, f"{name} NZ: (pages, heads, head size / 16, page size, 16)")
        # heads: CheckFeatureHeadDim of fused_infer_attention_score_tiling_check_feature.cpp (3a280bc)
        size = 16 * cache.shape[2]
        need(score.query_rope is not None or size in (64, 128), f"{name} NZ: heads of {size}, not 64 or 128")
