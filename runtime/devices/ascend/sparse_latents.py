"""Sparse latent attention on Ascend (DeepSeek V3.2), in two operators for all rows of a step:

    npu_lightning_indexer         for each query the positions of the `top_k` tokens with the best index
                                  scores among those that it sees; -1 behind them where it sees fewer
    npu_sparse_flash_attention    absorbed latent attention of each query to these positions

Both read pages through a block table and take lengths as tensors of the device, so decode rows and prompts
are one call, and a replayed step needs no lengths from the host. Caches are three, because both operators
want contiguous keys: latents, rotary keys, index keys.

With --npu-int8-index index keys are int8 codes with a scale for each token, npu_dynamic_quant's, and the
indexer is npu_quant_lightning_indexer, which multiplies integers. The cache of codes has the bytes of the
model's dtype, half as many of its numbers, and a fourth cache has the scales.

Documented for A2 and A3 (CANN's ops-transformer, op-plugin): latents of 512, rotary parts of 64, a power of
two of heads up to 128, index keys of 128, up to 64 index heads, and at most 2,048 positions, or one of
WIDE_COUNTS. Of 8 bits: weights and scales in float16, and at most 2,048 positions.
"""

from dataclasses import dataclass

import torch
import torch_npu
from torch import Tensor

from runtime.devices.ascend import mla
from runtime.devices.ascend.ops import AscendOps
from runtime.devices.ascend.sparse_plan import SparsePlan
from runtime.devices.base import AttentionPlan
from runtime.errors import ModelError
from runtime.models.config.mla_config import MlaConfig

MAX_COUNT, WIDE_COUNTS = 2048, (3072, 4096, 5120, 6144, 7168, 8192)
Rows = dict[str, Tensor | str | int]  # named arguments of an operator
CAUSAL = 3  # sparse mode: a row's last query sees all keys, each one before it one less
ABSORBED = 2  # attention mode


class AscendSparseLatents:
    """SparseLatentOps (devices/sparse_latents.py) of one NPU."""

    def __init__(self, ops: AscendOps) -> None:
        self.ops = ops

    def cache_dims(self, mla: MlaConfig) -> tuple[int, ...]:
        """Latents, rotary keys and index keys, each a cache of its own; of index keys in 8 bits the scales as
        well."""
        assert mla.indexer is not None
        kept = mla.kv_rank, mla.rope_dim
        if not self.ops.has_int8_index:
            return *kept, mla.indexer.dim
        return *kept, mla.indexer.dim // self.ops.dtype.itemsize, 1

    def open(self, up: Tensor, mla: MlaConfig, scale: float) -> "AscendSparseLayer":
        """The attention of a layer. Raises ModelError for sizes that the operators do not take."""
        assert mla.indexer is not None
        top_k, is_int8 = mla.indexer.top_k, self.ops.has_int8_index
        if top_k > MAX_COUNT and (is_int8 or top_k not in WIDE_COUNTS):
            wide = "" if is_int8 else f", or one of {', '.join(map(str, WIDE_COUNTS))}"
            raise ModelError(
                f"this model's tokens attend to {top_k} others (index_topk), and the indexer of npu chooses "
                f"up to {MAX_COUNT}{wide}; "
                + ("leave --npu-int8-index out" if is_int8 else "take another --device")
            )
        index = Int8Index(self.ops.dtype) if is_int8 else PlainIndex()
        return AscendSparseLayer(self.ops, self.ops.pack_latent(up, mla.nope_dim), index, top_k, scale)


class PlainIndex:
    """Index keys in the dtype of the model."""

    def store(self, keys: Tensor, caches: tuple[Tensor, ...], locations: Tensor) -> None:
        """Writes keys [T, 1, I] to the one cache [num_locations, 1, I]."""
        torch_npu.npu_scatter_nd_update_(caches[0], locations.unsqueeze(1), keys)

    def choose(
        self, queries: Tensor, weights: Tensor, caches: tuple[Tensor, ...], page_size: int, rows: Rows
    ) -> Tensor:
        """Positions, int32 [T, 1, sparse_count], for queries [T, J, I] and weights [T, J]. `rows`: the
        operator's arguments for the rows of the step."""
        keys = caches[0].view(-1, page_size, 1, caches[0].shape[2])
        return torch_npu.npu_lightning_indexer(queries, keys, weights, **rows)[0]


class Int8Index:
    """Index keys as int8 with a scale for each."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of the model, whose caches hold the bytes."""
        self.scale_dtype = torch.float16 if dtype.itemsize == 2 else dtype

    def store(self, keys: Tensor, caches: tuple[Tensor, ...], locations: Tensor) -> None:
        """Writes keys [T, 1, I] to the caches of codes and of scales."""
        codes, scales = torch_npu.npu_dynamic_quant(keys)
        at = locations.unsqueeze(1)
        torch_npu.npu_scatter_nd_update_(caches[0].view(torch.int8), at, codes)
        torch_npu.npu_scatter_nd_update_(
            caches[1].view(self.scale_dtype), at, scales.unsqueeze(2).to(self.scale_dtype)
        )

    def choose(
        self, queries: Tensor, weights: Tensor, caches: tuple[Tensor, ...], page_size: int, rows: Rows
    ) -> Tensor:
        """See PlainIndex.choose."""
        codes, scales = torch_npu.npu_dynamic_quant(queries)
        keys = caches[0].view(torch.int8)
        return torch_npu.npu_quant_lightning_indexer(
            codes,
            keys.view(-1, page_size, 1, keys.shape[2]),
            weights.to(self.scale_dtype),
            scales.to(self.scale_dtype),
            caches[1].view(self.scale_dtype).view(-1, page_size, 1),
            query_quant_mode=0,
            key_quant_mode=0,
            **rows,
        )


@dataclass(frozen=True, slots=True)
class AscendSparseLayer:
    """SparseLayer (devices/sparse_latents.py) of one layer."""

    ops: AscendOps
    up: mla.UpProjection
    index: PlainIndex | Int8Index
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
        self.index.store(index_keys, caches[2:], locations)

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
        latents, ropes = (cache.view(-1, plan.page_size, 1, cache.shape[2]) for cache in caches[:2])
        rows: Rows = {
            "actual_seq_lengths_query": plan.ends,
            "block_table": plan.table,
            "layout_query": "TND",
            "sparse_mode": CAUSAL,
        }
        keys: Rows = {
            "actual_seq_lengths_key": plan.lengths,
            "layout_key": "PA_BSND",
            "sparse_count": self.top_k,
        }
        positions = self.index.choose(index_queries, index_weights, caches[2:], plan.page_size, rows | keys)
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
