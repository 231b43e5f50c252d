"""Decoders as data (devices/decoder_spec.py), read from the layers of models that have such a form."""

import torch
from msgspec import structs
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
from runtime.layers.feed_forward import FeedForward, ScaledFeedForward
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.norm import RMSNorm
from runtime.layers.weight import Layer
from runtime.models.base import AttentionLayer, DecoderLayer, Model
from runtime.models.deepseek import DeepSeek, MlaSelfAttention
from runtime.models.gated_attention import GatedSelfAttention
from runtime.models.gpt_oss import FeedForward as GptOssFeedForward
from runtime.models.gpt_oss import GptOss, GptOssDecoderLayer
from runtime.models.hybrid import GraniteHybrid, HybridDecoder, HybridDecoderLayer
from runtime.models.linear_spec import linear_spec
from runtime.models.llama import Llama, LlamaDecoderLayer
from runtime.models.mixer_specs import mixer_spec
from runtime.models.self_attention import SelfAttention


def decoder_spec(model: Model) -> DecoderSpec | None:
    """The spec of a loaded model, or of one stage of its layers; None: a stage has several ranks, or it has
    something that specs do not have."""
    if type(model) not in (Llama, DeepSeek, GptOss, HybridDecoder, GraniteHybrid):
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
    if type(layer) is HybridDecoderLayer:
        return _hybrid_layer_spec(layer)
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


def _hybrid_layer_spec(layer: HybridDecoderLayer) -> DecoderLayerSpec | None:
    """A layer with a recurrent mixer, attention, both, or a feed-forward alone, and factors on these."""
    factors, scale, first = layer.multipliers, layer.scale, layer.input_layernorm
    if not (_is_plain(first) and _is_plain(layer.post_attention_layernorm)):
        return None
    attention = mixer = feed_forward = None
    if layer.mixer is not None:
        norm = _norm(first, factors.mixer_in)
        mixer = mixer_spec(layer.mixer, norm, factors.mixer_out * scale)
    if layer.self_attn is not None:
        attention = _attention(layer.self_attn, factors.attention_out * scale)
    if layer.mlp is not None:
        feed_forward = _feed_forward(layer.mlp, scale)
    parts = (layer.mixer, mixer), (layer.self_attn, attention), (layer.mlp, feed_forward)
    if any(part is not None and spec is None for part, spec in parts):
        return None
    before_feed_forward = first if layer.post_attention_layernorm is None else layer.post_attention_layernorm
    return DecoderLayerSpec(
        before_attention=None if attention is None else _norm(first, factors.attention_in),
        attention=attention,
        after_attention=None,
        before_feed_forward=None if feed_forward is None else _norm(before_feed_forward),
        feed_forward=feed_forward,
        after_feed_forward=None,
        mixer=mixer,
    )


def _is_plain(norm: Layer | None) -> bool:
    """Whether a norm, if there is one, is RMSNorm without a bias."""
    return norm is None or (isinstance(norm, RMSNorm) and norm.shift is None)


def _attention(attention: AttentionLayer, out_scale: float = 1.0) -> AttentionSpec | LatentSpec | None:
    """With a factor on what it returns. None: it has norms, a rotation or a scale that specs do not have."""
    if type(attention) is MlaSelfAttention:
        norms = attention.q_a_layernorm, attention.kv_a_layernorm
        is_plain = attention.position_scale is None and all(map(_is_plain, norms))
        return _latent_spec(attention, out_scale) if is_plain else None
    if type(attention) not in (SelfAttention, GatedSelfAttention):
        return None
    assert isinstance(attention, SelfAttention)
    if attention.position_scale is not None or attention.projection_norm is not None:
        return None
    if attention.norm_kind not in ("none", "head") or attention.attention.chunk:
        return None
    return _attention_spec(attention, out_scale)


def _feed_forward(mlp: object, scale: float = 1.0) -> DenseSpec | ExpertsSpec | None:
    """With a factor on what it returns. None: the layer has a feed-forward of its own kind, experts with
    routing that programs do not know, or only some of the experts are on this rank."""
    if isinstance(mlp, FeedForward):
        return _dense(mlp, scale)
    if isinstance(mlp, GptOssFeedForward):
        return _clamped_experts(mlp)
    if not isinstance(mlp, SparseFeedForward) or mlp.sequence_parallel is not None or mlp.packed is None:
        return None
    router, shared = mlp.gate, mlp.shared_expert or mlp.shared_experts
    bias, routing = router.e_score_correction_bias, router.routing
    if (
        mlp.local.size < mlp.local.full
        or mlp.table is not None
        or mlp.routed is not None
        or routing.score == "sparsemixer"
        or routing.scales_inputs
    ):
        return None
    return ExpertsSpec(
        router=LinearSpec(router.packed, None, router.hidden, router.num_experts, None),
        correction_bias=None if bias is None else bias.tensor,
        routing=structs.replace(routing, scale=routing.scale * scale),
        packed=mlp.packed,
        shared=None if shared is None else _dense(shared, scale),
        shared_gate=None if mlp.shared_expert_gate is None else linear_spec(mlp.shared_expert_gate),
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


def _dense(mlp: FeedForward, scale: float) -> DenseSpec:
    gate_scale = 1.0
    if isinstance(mlp, ScaledFeedForward):
        gate_scale, scale = mlp.gate_scale, mlp.out_scale * scale
    gate_up, down = linear_spec(mlp.gate_up_proj, gate_scale), linear_spec(mlp.down_proj, scale)
    return DenseSpec(gate_up, mlp.activation, down)


def _attention_spec(attention: SelfAttention, out_scale: float) -> AttentionSpec:
    q_heads, kv_heads, _ = attention.qkv_proj.heads
    return AttentionSpec(
        qkv=linear_spec(attention.qkv_proj),
        o=linear_spec(attention.o_proj, out_scale),
        num_heads=q_heads,
        num_kv_heads=kv_heads,
        dim=attention.attention.key_dim,
        q_norm=_head_norm(attention.q_norm),
        k_norm=_head_norm(attention.k_norm),
        scores=attention.attention.scores,
        pool=attention.attention.pool,
        cache_scales=attention.attention.cache_scales or (1.0, 1.0),
        has_gate=isinstance(attention, GatedSelfAttention),
    )


def _latent_spec(attention: MlaSelfAttention, out_scale: float) -> LatentSpec:
    assert attention.qkv_a_proj is not None and attention.up is not None
    q_norm, queries = attention.q_a_layernorm, attention.q_b_proj
    return LatentSpec(
        down=linear_spec(attention.qkv_a_proj),
        q_norm=None if q_norm is None else _norm(q_norm),
        queries=None if queries is None else linear_spec(queries),
        kv_norm=_norm(attention.kv_a_layernorm),
        up=attention.up,
        o=linear_spec(attention.o_proj, out_scale),
        rank=attention.mla.kv_rank,
        rope_dim=attention.mla.rope_dim,
        scale=attention.attention.scale,
    )


def _head_norm(norm: Layer | None) -> NormSpec | None:
    return None if norm is None else _norm(norm)


def _norm(norm: Layer, scale: float = 1.0) -> NormSpec:
    """With a factor on what it returns."""
    assert isinstance(norm, RMSNorm)
    weight = norm.weight.tensor
    return NormSpec(weight if scale == 1.0 else weight.float() * scale, norm.eps)
