"""Sparse latent attention on Ascend (DeepSeek V3.2), in two operators for all rows of a step:

    npu_lightning_indexer         for each query the positions of the `top_k` tokens with the best index
                                  scores among those that it sees; -1 behind them where it sees fewer
    npu_sparse_flash_attention    absorbed latent attention of each query to these positions

Both read pages through a block table and take lengths as tensors of the device, so decode rows and prompts
are one call, and a replayed step needs no lengths from the host. Caches are three, because both operators
want contiguous keys: latents, rotary keys, index keys.

Documented for A2 and A3 (CANN's ops-transformer, op-plugin): latents of 512, rotary parts of 64, a power of
two of heads up to 128, index keys of 128, up to 64 index heads, and at most 2,048 positions, or one of
WIDE_COUNTS.
"""

from dataclasses import dataclass

import torch_npu
from torch import Tensor

from runtime.devices.ascend import mla
from runtime.devices.ascend.ops import AscendOps
from runtime.devices.ascend.sparse_plan import SparsePlan
from runtime.devices.base import AttentionPlan
from runtime.errors import ModelError
from runtime.models.config.mla_config import MlaConfig

MAX_COUNT, WIDE_COUNTS = 2048, (3072, 4096, 5120, 6144, 7168, 8192)
CAUSAL = 3  # sparse mode: a row's last query sees all keys, each one before it one less
ABSORBED = 2  # attention mode


class AscendSparseLatents:
    """SparseLatentOps (devices/sparse_latents.py) of one NPU."""

    def __init__(self, ops: AscendOps) -> None:
        self.ops = ops

    def cache_dims(self, mla: MlaConfig) -> tuple[int, ...]:
        """Latents, rotary keys and index keys, each a cache of its own."""
        assert mla.indexer is not None
        return mla.kv_rank, mla.rope_dim, mla.indexer.dim

    def open(self, up: Tensor, mla: MlaConfig, scale: float) -> "AscendSparseLayer":
        """The attention of a layer. Raises ModelError for sizes that the operators do not take."""
        assert mla.indexer is not None
        top_k = mla.indexer.top_k
        if top_k > MAX_COUNT and top_k not in WIDE_COUNTS:
            raise ModelError(
                f"this model's tokens attend to {top_k} others (index_topk), and the indexer of npu chooses "
                f"up to {MAX_COUNT}, or one of {', '.join(map(str, WIDE_COUNTS))}; take another --device"
            )
        return AscendSparseLayer(self.ops, self.ops.pack_latent(up, mla.nope_dim), top_k, scale)


@dataclass(frozen=True, slots=True)
class AscendSparseLayer:
    """SparseLayer (devices/sparse_latents.py) of one layer."""

    ops: AscendOps
    up: mla.UpProjection
    top_k: int  # tokens that a token attends to
    scale: float

    def store(
        self,
        latents: Tensor,
        ropes: Tensor,
        index_keys: Tensor,
        caches: tuple[Tensor, ...],
        locations: Tensor,
    ) -> None:
        """See SparseLayer.store."""
        self.ops.store_kv(latents, ropes, *caches[:2], locations)
        torch_npu.npu_scatter_nd_update_(caches[2], locations.unsqueeze(1), index_keys)

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor,
        index_queries: Tensor,
        index_weights: Tensor,
        caches: tuple[Tensor, ...],
        plan: AttentionPlan | None,
    ) -> Tensor:
        """See SparseLayer.attend."""
        assert isinstance(plan, SparsePlan), "a plan of another attention"
        latents, ropes, index_keys = (cache.view(-1, plan.page_size, 1, cache.shape[2]) for cache in caches)
        rows = {
            "actual_seq_lengths_query": plan.ends,
            "block_table": plan.table,
            "layout_query": "TND",
            "sparse_mode": CAUSAL,
        }
        positions = torch_npu.npu_lightning_indexer(
            index_queries,
            index_keys,
            index_weights,
            actual_seq_lengths_key=plan.lengths,
            layout_key="PA_BSND",
            sparse_count=self.top_k,
            **rows,
        )[0]
        found = torch_npu.npu_sparse_flash_attention(
            mla.by_head(q, self.up.keys),
            latents,
            latents,
            positions,
            self.scale,
            query_rope=q_rope.contiguous(),
            key_rope=ropes,
            actual_seq_lengths_kv=plan.lengths,
            layout_kv="PA_BSND",
            attention_mode=ABSORBED,
            **rows,
        )[0]
        return mla.by_head(found, self.up.values)
