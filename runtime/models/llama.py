"""The Llama line of decoders: Llama, Mistral, Qwen2, Qwen3, and the mixtures of experts of the last two.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward. The families
differ in data only, which config.py reads: Qwen2 has biases on q, k and v; Qwen3 normalises each head of q
and k; Mistral and Qwen slide a window.
"""

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.base import Batch, Device
from runtime.layers.attention.bidirectional import Picks
from runtime.layers.attention.paged import Attention, LatentAttention
from runtime.layers.embedding import Embedding, Head
from runtime.layers.feed_forward import FeedForward
from runtime.layers.linear import Linear, QkvLinear, Sums
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.norm import RMSNorm
from runtime.layers.parallel.replicated import Dense
from runtime.layers.parallel.sequence_parallel import Parts
from runtime.layers.rotary import Rotary
from runtime.layers.weight import Layer, Part, Weight, cache_scale, even_share
from runtime.models.config import ModelConfig

# yields who attends and with what, is sent what was found
Pieces = Generator[tuple[Any, tuple[Tensor, ...]], Tensor, Tensor]


def sums_of(device: Device) -> Sums:
    """How layer halves end: with the sum of all tokens on all ranks, or of each one's part."""
    return True if device.exchanges is None else "parts"


class SelfAttention(Layer):
    """Projections, optional head norms, rotary positions, attention."""

    joins = False  # itself, where ranks have parts of a step's tokens: `project` is given all of them

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
            sums=sums_of(device),
        )
        self.q_norm = (
            RMSNorm(device, dtype, dim, config.rms_norm_eps, may_shift=False) if config.qk_norm else None
        )
        self.k_norm = (
            RMSNorm(device, dtype, dim, config.rms_norm_eps, may_shift=False) if config.qk_norm else None
        )
        # weight [query and key heads, head size], and eps: both norms in one
        self.qk_norm: tuple[Tensor, float] | None = None
        is_quantized = config.quantization is not None
        self.k_scale, self.v_scale = (cache_scale() if is_quantized else None for _ in range(2))
        own = even_share(heads, device.collectives, "attention heads")
        self.sinks = (
            Weight((own.size,), {"": Part((heads,), 0, own)}, torch.float32, device.torch_device)
            if config.has_sinks
            else None
        )
        scores = Scores(config.score_scale, config.windows[index], config.score_cap)
        self.attention = Attention(device, index, self.qkv_proj.heads[1], dim, scores)

    def finish(self) -> None:
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

    def project(self, x: Tensor, cos: Tensor, sin: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """-> what attention is asked with; keys and values go to the cache."""
        return (self.attention.prepare(self.qkv_proj.forward(x), self.qk_norm, cos, sin, batch),)

    def attend(self, queries: tuple[Tensor, ...], batch: Batch) -> Tensor:
        return self.attention.forward(*queries, batch)


def feed_forward(
    device: Device, dtype: torch.dtype, config: ModelConfig, index: int
) -> FeedForward | SparseFeedForward:
    """That of a layer: with experts, or without."""
    if config.moe is not None and config.moe.layers[index]:
        return SparseFeedForward(device, dtype, config.hidden_size, config.moe)
    return FeedForward(
        device,
        dtype,
        config.hidden_size,
        config.intermediate_size,
        bias=config.mlp_bias,
        sums=sums_of(device),
    )


class Decoder(Layer):
    """One block."""

    def __init__(
        self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int, attention: type[Any]
    ) -> None:
        self.input_layernorm = RMSNorm(device, dtype, config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention(device, dtype, config, index)
        self.post_attention_layernorm = RMSNorm(device, dtype, config.hidden_size, config.rms_norm_eps)
        self.mlp = feed_forward(device, dtype, config, index)
        self.parts = None if device.exchanges is None else Parts(device.collectives)

    def before(
        self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, batch: Batch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """`x` is what the previous block adds to `residual`; of all tokens, or of this rank's part of them.
        -> what attention is asked with, of all tokens, and the sum"""
        x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn.project(
            x if self.self_attn.joins else self.joined(x, batch), cos, sin, batch
        ), residual

    def after(self, attended: Tensor, residual: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """From what attention found to the pair that the next block begins with."""
        x, residual = self.post_attention_layernorm.add(self.self_attn.o_proj.forward(attended), residual)
        if isinstance(self.mlp, SparseFeedForward):
            return self.mlp.forward(x, batch), residual
        return self.mlp.forward(self.joined(x, batch)), residual

    def joined(self, x: Tensor, batch: Batch) -> Tensor:
        """All tokens."""
        return x if self.parts is None else self.parts.join(x, len(batch.positions))


class Llama(Layer):
    """`forward` gives hidden states; of those that somebody wants, `logits` the head over them, or `vectors`
    what is pooled of them."""

    fused = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", "gate"),
        "up_proj": ("gate_up_proj", "up"),
    }
    attention_layer: type[Any] = SelfAttention
    decoder: type[Any] = Decoder
    norm_layer: type[RMSNorm] = RMSNorm

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        self.embed_tokens = Embedding(device, dtype, config.vocab_size, config.hidden_size)
        self.layers = [
            self.decoder(device.of_layer(i), dtype, config, i, self.attention_layer)
            for i in range(config.num_layers)
        ]
        self.norm = self.norm_layer(device, dtype, config.hidden_size, config.rms_norm_eps)
        self.lm_head: Head | None = None
        self.score: Dense | None = None
        if config.pooling is None:
            tied = self.embed_tokens if config.is_tied else None
            self.lm_head = Head(
                device,
                torch.float32 if config.has_wide_head else dtype,
                config.vocab_size,
                config.hidden_size,
                tied,
            )
        elif config.pooling.task == "classify":
            self.score = Dense(device, dtype, config.hidden_size, config.pooling.size, bias=False)
        self.parts = None if device.exchanges is None else Parts(device.collectives)
        self.rotary = Rotary(config.rope, config.head_dim, device.ops, device.torch_device)
        self.compiled: Callable[..., tuple[Tensor, Tensor]] | None = None  # Decoder.after (ranks/compile.py)

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        """The layers that need a key/value cache, in order."""
        return [layer.self_attn.attention for layer in self.layers]

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden] before the last norm."""
        pieces = self.pieces(batch)
        attention, queries = next(pieces)
        try:
            while True:
                attention, queries = pieces.send(attention.attend(queries, batch))
        except StopIteration as end:
            hidden: Tensor = end.value
            return hidden

    def pieces(self, batch: Batch) -> Pieces:
        """The same with the attentions left to the caller: it runs from one to the next, which may lie in
        different graphs."""
        cos, sin = self.rotary.tables(batch.positions)
        x = self.embedded(batch.token_ids)
        if batch.embeds is not None:
            x = x.index_copy(0, batch.embeds[0], batch.embeds[1].to(x.dtype))
        x = x if self.parts is None else self.parts.cut(x)
        residual = torch.zeros_like(x)
        compiled = self.compiled if batch.is_compiled else None
        for layer in self.layers:
            queries, residual = layer.before(x, residual, cos, sin, batch)
            attended = yield layer.self_attn, queries
            x, residual = (
                layer.after(attended, residual, batch)
                if compiled is None
                else compiled(layer, attended, residual, batch)
            )
        x = x + residual
        return x if self.parts is None else self.parts.join(x, len(batch.positions))

    def embedded(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]"""
        return self.embed_tokens.forward(token_ids)

    def states(self, hidden: Tensor) -> Tensor:
        """What is told of hidden states: float32 [N, hidden], behind the last norm."""
        return self.norm.forward(hidden).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocabulary]."""
        assert self.lm_head is not None, "logits of a model that pools"
        return self.lm_head.forward(self.norm.forward(hidden))

    def vectors(self, hidden: Tensor, picks: Picks) -> Tensor:
        """float32 [N, size]"""
        if picks.mode == "mean":
            return picks.mean(self.norm.forward(hidden))
        picked = self.norm.forward(picks.pick(hidden))
        return (picked if self.score is None else self.score.forward(picked)).float()
