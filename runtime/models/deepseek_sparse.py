"""DeepSeek V3.2: DeepSeek V3 whose tokens attend to those that an indexer chooses
(devices/sparse_latents.py).

The indexer's queries come from the query latents, its keys from the hidden states, and both have a rotary
part in front. Every rank computes all of it, and chooses the same tokens.
"""

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.devices.sparse_latents import SparseLayer
from runtime.layers.attention.paged import begin_attention
from runtime.layers.attention.sparse_latents import TorchSparseLatents
from runtime.layers.linear import Linear
from runtime.layers.norm import LayerNorm
from runtime.layers.weight import Layer
from runtime.models.config.mla_config import IndexerConfig, MlaConfig
from runtime.models.config.model_config import ModelConfig
from runtime.models.deepseek import EPS, DeepSeek, MlaSelfAttention, reorder


class Indexer(Layer):
    """Index keys, queries and weights of the tokens of a step."""

    def __init__(
        self, device: Device, dtype: torch.dtype, hidden: int, mla: MlaConfig, indexer: IndexerConfig
    ) -> None:
        assert mla.q_rank is not None
        heads, dim = indexer.num_heads, indexer.dim
        self.ops, self.rope_dim, self.heads = device.ops, mla.rope_dim, heads
        self.wq_b = Linear(device, dtype, mla.q_rank, {"": heads * dim}, shard="replicated")
        self.wk = Linear(device, dtype, hidden, {"": dim}, shard="replicated")
        self.k_norm = LayerNorm(device, dtype, dim, EPS)
        self.weights_proj = Linear(device, dtype, hidden, {"": heads}, shard="replicated")
        self.is_interleaved = indexer.is_interleaved

    def finish_loading(self) -> None:
        """Brings the rotary rows of queries and keys into order: rows i and i + P / 2 rotate together."""
        if not self.is_interleaved:
            return
        for layer, heads in ((self.wq_b, self.heads), (self.wk, 1)):
            for rows in layer.row_tensors():
                reorder(rows.unflatten(0, (heads, -1))[:, : self.rope_dim], to_pairs=False)
        assert self.k_norm.bias is not None
        for weight in (self.k_norm.weight, self.k_norm.bias):
            reorder(weight.tensor[: self.rope_dim].unsqueeze(0), to_pairs=False)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, hidden] -> [T, 1, I]."""
        return self._rotated(self.k_norm.forward(self.wk.forward(x)).unsqueeze(1), cos, sin)

    def queries(self, latents: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Query latents [T, Q] -> [T, J, I]."""
        return self._rotated(self.wq_b.forward(latents).unflatten(1, (self.heads, -1)), cos, sin)

    def weights(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, J]. The factor that scores have in the paper changes no choice and is left
        out."""
        return self.weights_proj.forward(x)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = self.ops.rotary(x[..., : self.rope_dim], cos, sin)
        return torch.cat((turned, x[..., self.rope_dim :]), -1)


class SparseMlaSelfAttention(MlaSelfAttention):
    """Latent attention to the tokens that the indexer chooses."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        super().__init__(device, dtype, config, index)
        mla = self.mla
        assert mla.indexer is not None
        self.gathers_tokens = False  # the indexer wants hidden states of all tokens
        self.indexer = Indexer(device, dtype, config.hidden_size, mla, mla.indexer)
        self.sparse_latents = device.sparse_latents or TorchSparseLatents(device.ops)
        self.attention.cache_dims = self.sparse_latents.cache_dims(mla)
        self.sparse: SparseLayer | None = None  # once the weights are loaded

    def finish_loading(self) -> None:
        """Packs kv_b_proj, and brings the rotary rows of the weights into order."""
        assert self.kv_b_proj is not None
        up = self.kv_b_proj.full_weight().unflatten(0, (self.num_heads, -1))
        self.sparse = self.sparse_latents.open(up, self.mla, self.attention.scale)
        self.kv_b_proj = None
        self.reorder_rotary_rows(queries=False, keys=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """x -> queries [T, H, N], their rotary parts [T, H, P], index queries [T, J, I] and weights [T, J];
        latents, rotary keys and index keys go to the cache."""
        assert self.qkv_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
        assert self.sparse is not None, "a step before the weights are complete"
        mla = self.mla
        sizes = self.qkv_a_proj.outputs["q"].size, mla.kv_rank, mla.rope_dim
        latents, kv, rope = self.qkv_a_proj.forward(x).split(sizes, dim=1)
        latents = self.q_a_layernorm.forward(latents)
        q = self.q_b_proj.forward(latents).unflatten(1, (self.num_heads, -1))
        q, q_rope = q.split((mla.nope_dim, mla.rope_dim), dim=2)
        caches, locations = self.attention.cache_targets(batch)
        rope = self.device.ops.rotary(rope.unsqueeze(1), cos, sin)
        entries = self.kv_a_layernorm.forward(kv).unsqueeze(1), rope, self.indexer.keys(x, cos, sin)
        if batch.part is not None:
            sizes = [entry.shape[2] for entry in entries]
            entries = batch.part.all_tokens(torch.cat(entries, 2)).split(sizes, 2)
        self.sparse.store(*entries, caches, locations)
        index = self.indexer.queries(latents, cos, sin), self.indexer.weights(x)
        return q, self.device.ops.rotary(q_rope, cos, sin), *index

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Attention output [T, H * V], before `o_proj`."""
        assert self.sparse is not None, "a step before the weights are complete"
        begin_attention(batch, self.attention.index)
        q, q_rope, index_queries, index_weights = queries
        caches = batch.kv[self.attention.index]
        return self.sparse.attend(q, q_rope, index_queries, index_weights, caches, batch.attention).flatten(1)


class SparseDeepSeek(DeepSeek):
    """DeepSeek V3.2. See GenerativeModel."""

    attention_class = SparseMlaSelfAttention
