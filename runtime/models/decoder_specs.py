"""Decoders as data (devices/decoder_spec.py), read from the layers of models that have such a form."""

import torch
from torch import Tensor

from runtime.devices.decoder_spec import (
    AttentionSpec,
    DecoderLayerSpec,
    DecoderSpec,
    DenseSpec,
    ExpertsSpec,
    HeadSpec,
    LatentSpec,
    LinearSpec,
    NormSpec,
)
from runtime.devices.packed import PackedRows
from runtime.layers.feed_forward import FeedForward
from runtime.layers.linear import Linear
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.norm import RMSNorm
from runtime.layers.weight import Layer
from runtime.models.base import AttentionLayer, DecoderLayer, Model
from runtime.models.deepseek import DeepSeek, MlaSelfAttention
from runtime.models.gpt_oss import FeedForward as GptOssFeedForward
from runtime.models.gpt_oss import GptOss, GptOssDecoderLayer
from runtime.models.llama import Llama, LlamaDecoderLayer
from runtime.models.self_attention import SelfAttention


def decoder_spec(model: Model) -> DecoderSpec | None:
    """The spec of a loaded model, or of one stage of its layers; None: a stage has several ranks, or it has
    something that specs do not have."""
    if type(model) not in (Llama, DeepSeek, GptOss):
        return None
    assert isinstance(model, Llama)
    rows, width = _embedding(model), model.hidden_size
    layers = [_layer_spec(layer) for layer in model.layers]
    known = tuple(layer for layer in layers if layer is not None)
    if rows is None or len(known) < len(layers) or len(model.rotaries) > 1:
        return None
    return DecoderSpec(width, rows, model.embed_scale, known, model.rotaries[0].angles, _head(model))


def _embedding(model: Llama) -> Tensor | PackedRows | None:
    """Rows by token. Behind the first stage one row, of zeros, which hidden states replace. None: there are
    several ranks in a stage."""
    if model.ranks.size > 1:
        return None
    if not model.stage.is_first:
        return torch.zeros(1, model.hidden_size)
    embed = model.embed_tokens
    if embed is None:
        return None
    return embed.packed if embed.weight is None else embed.weight.tensor


def _head(model: Llama) -> HeadSpec | None:
    """None: the model pools, does something with its logits, or has a head that the device did not pack."""
    head = model.lm_head
    is_plain = type(model).logits is Llama.logits and _is_plain(model.norm)
    is_plain = is_plain and model.logit_scale == 1.0 and not model.logit_cap
    if not is_plain or head is None or head.bias is not None or not isinstance(head.packed, PackedRows):
        return None
    return HeadSpec(_norm(model.norm), head.packed, head.vocab_size)


def _layer_spec(layer: DecoderLayer) -> DecoderLayerSpec | None:
    if type(layer) not in (LlamaDecoderLayer, GptOssDecoderLayer):
        return None
    assert isinstance(layer, LlamaDecoderLayer | GptOssDecoderLayer)
    after_attention = after_feed_forward = None
    if isinstance(layer, LlamaDecoderLayer):
        if layer.is_parallel or layer.residual_scale != 1.0:
            return None
        after_attention, after_feed_forward = layer.attention_output_norm, layer.mlp_output_norm
    attention = _attention(layer.self_attn)
    feed_forward = _feed_forward(layer.mlp)
    norms = layer.input_layernorm, after_attention, layer.post_attention_layernorm, after_feed_forward
    if attention is None or feed_forward is None or any(not _is_plain(norm) for norm in norms):
        return None
    return DecoderLayerSpec(
        before_attention=_norm(layer.input_layernorm),
        attention=attention,
        after_attention=None if after_attention is None else _norm(after_attention),
        before_feed_forward=_norm(layer.post_attention_layernorm),
        feed_forward=feed_forward,
        after_feed_forward=None if after_feed_forward is None else _norm(after_feed_forward),
    )


def _is_plain(norm: Layer | None) -> bool:
    """Whether a norm, if there is one, is RMSNorm without a bias."""
    return norm is None or (isinstance(norm, RMSNorm) and norm.shift is None)


def _attention(attention: AttentionLayer) -> AttentionSpec | LatentSpec | None:
    """None: it has norms, a rotation or a scale that specs do not have."""
    if type(attention) is MlaSelfAttention:
        norms = attention.q_a_layernorm, attention.kv_a_layernorm
        is_plain = attention.position_scale is None and all(map(_is_plain, norms))
        return _latent_spec(attention) if is_plain else None
    if type(attention) is not SelfAttention or attention.position_scale is not None:
        return None
    if attention.norm_kind not in ("none", "head") or attention.attention.chunk:
        return None
    return _attention_spec(attention)


def _feed_forward(mlp: object) -> DenseSpec | ExpertsSpec | None:
    """None: the layer has a feed-forward of its own kind, experts with routing that programs do not know, or
    only some of the experts are on this rank."""
    if isinstance(mlp, FeedForward):
        return _dense(mlp)
    if isinstance(mlp, GptOssFeedForward):
        return _clamped_experts(mlp)
    if not isinstance(mlp, SparseFeedForward) or mlp.sequence_parallel is not None or mlp.packed is None:
        return None
    router, shared = mlp.gate, mlp.shared_expert or mlp.shared_experts
    bias, routing = router.e_score_correction_bias, router.routing
    if (
        mlp.local.size < mlp.local.full
        or mlp.table is not None
        or routing.score == "sparsemixer"
        or routing.scales_inputs
    ):
        return None
    return ExpertsSpec(
        router=LinearSpec(router.packed, None, router.hidden, router.num_experts, None),
        correction_bias=None if bias is None else bias.tensor,
        routing=routing,
        packed=mlp.packed,
        shared=None if shared is None else _dense(shared),
        shared_gate=None if mlp.shared_expert_gate is None else _linear(mlp.shared_expert_gate),
        counts=lambda: mlp.counts,
    )


def _clamped_experts(mlp: GptOssFeedForward) -> ExpertsSpec | None:
    weight, bias = mlp.router.weight.tensor, mlp.router.bias
    if mlp.experts.packed is None or mlp.packed_router is None or bias is None:
        return None
    return ExpertsSpec(
        router=LinearSpec(mlp.packed_router, bias.tensor, weight.shape[1], weight.shape[0], None),
        correction_bias=None,
        routing=mlp.routing,
        packed=mlp.experts.packed,
        shared=None,
        shared_gate=None,
        counts=lambda: None,
    )


def _dense(mlp: FeedForward) -> DenseSpec:
    return DenseSpec(_linear(mlp.gate_up_proj), mlp.activation, _linear(mlp.down_proj))


def _attention_spec(attention: SelfAttention) -> AttentionSpec:
    q_heads, kv_heads, _ = attention.qkv_proj.heads
    return AttentionSpec(
        qkv=_linear(attention.qkv_proj),
        o=_linear(attention.o_proj),
        num_heads=q_heads,
        num_kv_heads=kv_heads,
        dim=attention.attention.key_dim,
        q_norm=_head_norm(attention.q_norm),
        k_norm=_head_norm(attention.k_norm),
        scores=attention.attention.scores,
        pool=attention.attention.pool,
        cache_scales=attention.attention.cache_scales or (1.0, 1.0),
    )


def _latent_spec(attention: MlaSelfAttention) -> LatentSpec:
    assert attention.qkv_a_proj is not None and attention.up is not None
    q_norm, queries = attention.q_a_layernorm, attention.q_b_proj
    return LatentSpec(
        down=_linear(attention.qkv_a_proj),
        q_norm=None if q_norm is None else _norm(q_norm),
        queries=None if queries is None else _linear(queries),
        kv_norm=_norm(attention.kv_a_layernorm),
        up=attention.up,
        o=_linear(attention.o_proj),
        rank=attention.mla.kv_rank,
        rope_dim=attention.mla.rope_dim,
        scale=attention.attention.scale,
    )


def _head_norm(norm: Layer | None) -> NormSpec | None:
    return None if norm is None else _norm(norm)


def _norm(norm: Layer) -> NormSpec:
    assert isinstance(norm, RMSNorm)
    return NormSpec(norm.weight.tensor, norm.eps)


def _linear(linear: Linear) -> LinearSpec:
    bias = None if linear.bias is None else linear.bias.tensor
    lora = None if linear.lora is None else linear.lora.weights
    return LinearSpec(linear.packed, bias, linear.inputs.size, linear.size, lora)
