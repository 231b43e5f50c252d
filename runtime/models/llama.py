"""The Llama line of decoders: Llama, Mistral, Qwen2, Qwen3, and the MoE models of the last two.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward. The families
differ in data only, which model_config.py reads: Qwen2 has biases on q, k and v; Qwen3 normalizes each head
of q and k; Mistral and Qwen have sliding windows.
"""

from dataclasses import replace

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.embedding import Embedding, Head
from runtime.layers.feed_forward import FeedForward
from runtime.layers.linear import Linear, QkvLinear, Reduction
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.parallel.sequence_parallel import SequenceParallel
from runtime.layers.pooling import PoolingMetadata
from runtime.layers.rotary import Rotary
from runtime.layers.weight import Layer, PackedModules, SourceTensor, Weight, even_shard, kv_cache_scale
from runtime.models.base import AttentionLayer, CompiledLayer, DecoderLayer, Pieces
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.registry import decoder_family


def reduction_of(device: Device) -> Reduction:
    """How half layers end: with the sum over ranks of all tokens, or of each rank's shard of the tokens."""
    return "all_reduce" if device.all_to_all is None else "reduce_scatter"


class SelfAttention(Layer):
    """Projections, optional head norms, rotary positions, attention."""

    gathers_tokens = False

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        heads, dim = config.num_heads, config.head_dim
        self.qkv_proj = QkvLinear(
            device, dtype, config.hidden_size, heads, config.num_kv_heads, dim, bias=config.qkv_bias
        )
        self.o_proj = Linear(
            device,
            dtype,
            heads * dim,
            {"": config.hidden_size},
            shard="row",
            bias=config.o_bias,
            reduction=reduction_of(device),
        )
        self.q_norm = (
            RMSNorm(device, dtype, dim, config.rms_norm_eps, may_have_bias=False) if config.qk_norm else None
        )
        self.k_norm = (
            RMSNorm(device, dtype, dim, config.rms_norm_eps, may_have_bias=False) if config.qk_norm else None
        )
        # both norms in one: weight [query and key heads, head size], and eps
        self.qk_norm: tuple[Tensor, float] | None = None
        is_quantized = config.quantization is not None
        self.k_scale, self.v_scale = (kv_cache_scale() if is_quantized else None for _ in range(2))
        own = even_shard(heads, device.collectives, "attention heads")
        self.sinks = (
            Weight.empty(
                (own.size,), {"": SourceTensor((heads,), 0, own)}, torch.float32, device.torch_device
            )
            if config.has_sinks
            else None
        )
        scores = Scores(config.score_scale, config.windows[index], config.score_cap)
        self.attention = Attention(device, index, self.qkv_proj.heads[1], dim, scores)

    def finish_loading(self) -> None:
        """Hands sinks and cache scales to the attention, and joins the head norms."""
        if self.sinks is not None:
            self.attention.scores = replace(self.attention.scores, sinks=self.sinks.tensor)
        if self.q_norm is not None and self.k_norm is not None:
            q_heads, kv_heads, _ = self.qkv_proj.heads
            norms = (
                self.q_norm.weight.tensor.expand(q_heads, -1),
                self.k_norm.weight.tensor.expand(kv_heads, -1),
            )
            self.qk_norm = torch.cat(norms), self.q_norm.eps
        if self.k_scale is not None and self.v_scale is not None:
            scales = self.k_scale.tensor.item(), self.v_scale.tensor.item()
            self.attention.cache_scales = None if scales == (1, 1) else scales
            self.k_scale = self.v_scale = None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """x [T, hidden] -> (queries [T, H, D],); keys and values go to the cache."""
        return (self.attention.prepare(self.qkv_proj.forward(x), self.qk_norm, cos, sin, batch),)

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """Attention output [T, H * D], before `o_proj`."""
        return self.attention.forward(*queries, batch)


def feed_forward(
    device: Device, dtype: torch.dtype, config: ModelConfig, index: int
) -> FeedForward | SparseFeedForward:
    """The feed-forward of a layer, with experts or without."""
    if config.moe is not None and config.moe.layers[index]:
        return SparseFeedForward(device, dtype, config.hidden_size, config.moe)
    return FeedForward(
        device,
        dtype,
        config.hidden_size,
        config.intermediate_size,
        bias=config.mlp_bias,
        reduction=reduction_of(device),
    )


class LlamaDecoderLayer(Layer):
    """One block. See DecoderLayer."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        self.input_layernorm = RMSNorm(device, dtype, config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention_class(device, dtype, config, index)
        self.post_attention_layernorm = RMSNorm(device, dtype, config.hidden_size, config.rms_norm_eps)
        self.mlp = feed_forward(device, dtype, config, index)
        self.sequence_parallel = None if device.all_to_all is None else SequenceParallel(device.collectives)

    def before_attention(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """See DecoderLayer.before_attention."""
        x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn.project(
            x if self.self_attn.gathers_tokens else self.all_tokens(x, batch), cos, sin, batch
        ), residual

    def after_attention(
        self, attended: Tensor, residual: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """See DecoderLayer.after_attention."""
        x, residual = self.post_attention_layernorm.add(self.self_attn.o_proj.forward(attended), residual)
        if isinstance(self.mlp, SparseFeedForward):
            return self.mlp.forward(x, batch), residual
        return self.mlp.forward(self.all_tokens(x, batch)), residual

    def all_tokens(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] of all tokens: x itself, or gathered where x is this rank's shard [P, hidden]."""
        return (
            x
            if self.sequence_parallel is None
            else self.sequence_parallel.all_gather(x, len(batch.positions))
        )


class Llama(Layer):
    """A decoder. See GenerativeModel; with a pooling task it has no language model head."""

    packed_modules: PackedModules = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }
    ignored_weights: tuple[str, ...] = ()
    attention_class: type[AttentionLayer] = SelfAttention
    layer_class: type[DecoderLayer] = LlamaDecoderLayer
    norm_class: type[RMSNorm] = RMSNorm

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        self.renames = decoder_family(config.architecture).renames
        self.embed_tokens = Embedding(device, dtype, config.vocab_size, config.hidden_size)
        self.layers = [
            self.layer_class(device.of_layer(i), dtype, config, i, self.attention_class)
            for i in range(config.num_layers)
        ]
        self.norm = self.norm_class(device, dtype, config.hidden_size, config.rms_norm_eps)
        self.lm_head: Head | None = None
        self.score: ReplicatedLinear | None = None  # a classifier's head
        if config.pooling is None:
            tied = self.embed_tokens if config.is_tied else None
            self.lm_head = Head(
                device,
                torch.float32 if config.has_wide_head else dtype,
                config.vocab_size,
                config.hidden_size,
                tied,
                is_quantized=config.quantization is not None and config.quantization.rounds_head,
            )
        elif config.pooling.task == "classify":
            self.score = ReplicatedLinear(device, dtype, config.hidden_size, config.pooling.size, bias=False)
        self.sequence_parallel = None if device.all_to_all is None else SequenceParallel(device.collectives)
        self.rotary = Rotary(config.rope, config.head_dim, device.ops, device.torch_device)

    @property
    def attentions(self) -> list[Attention | MlaAttention]:
        """The attentions that need a key/value cache, in order."""
        return [layer.self_attn.attention for layer in self.layers]

    def forward(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Tensor:
        """Hidden states [T, hidden] before the last norm."""
        pieces = self.piecewise(batch, compiled)
        attention, queries = next(pieces)
        try:
            while True:
                attention, queries = pieces.send(attention.attend(queries, batch))
        except StopIteration as end:
            hidden: Tensor = end.value
            return hidden

    def piecewise(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Pieces:
        """See GenerativeModel.piecewise."""
        cos, sin = self.rotary.tables(batch.positions)
        x = self.embed(batch.token_ids)
        if batch.embeds is not None:
            x = x.index_copy(0, batch.embeds[0], batch.embeds[1].to(x.dtype))
        x = x if self.sequence_parallel is None else self.sequence_parallel.shard(x)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            queries, residual = layer.before_attention(x, residual, cos, sin, batch)
            attended = yield layer.self_attn, queries
            x, residual = (
                layer.after_attention(attended, residual, batch)
                if compiled is None
                else compiled(layer, attended, residual, batch)
            )
        x = x + residual
        return (
            x
            if self.sequence_parallel is None
            else self.sequence_parallel.all_gather(x, len(batch.positions))
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] -> what the first layer is given, [T, hidden]."""
        return self.embed_tokens.forward(token_ids)

    def hidden_states(self, hidden: Tensor) -> Tensor:
        """See GenerativeModel.hidden_states."""
        return self.norm.forward(hidden).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocabulary]."""
        assert self.lm_head is not None, "logits of a model that pools"
        return self.lm_head.forward(self.norm.forward(hidden))

    def pool(self, hidden: Tensor, pooling: PoolingMetadata) -> Tensor:
        """Embeddings or class scores, float32 [N, size]."""
        if pooling.mode == "mean":
            return pooling.mean(self.norm.forward(hidden))
        selected = self.norm.forward(pooling.select(hidden))
        return (selected if self.score is None else self.score.forward(selected)).float()
