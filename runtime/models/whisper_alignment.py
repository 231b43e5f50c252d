"""Which part of a sound each token of a transcription attends to: the cross-attention of a Whisper decoder
that is given the whole text at once, without pages.

Some heads of a published Whisper follow the sound as it is spoken (`alignment_heads` of its
generation_config.json). Their weights are brought to mean 0 and deviation 1 over the tokens, smoothed along
time by a median filter, and averaged, which is what OpenAI's and transformers' Whisper do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

from runtime.devices.base import Collectives
from runtime.models.whisper import CrossAttention, Whisper, WhisperDecoderLayer

Heads = Sequence[tuple[int, int]]  # layer, and head of all that this layer has


def alignment(
    model: Whisper,
    ranks: Collectives,
    token_ids: Tensor,
    sound: Tensor,
    heads: Heads,
    *,
    num_given: int,
    num_positions: int,
    filter_width: int,
) -> Tensor:
    """How well each token behind the first `num_given` goes with each of the sound's first positions,
    float32 [tokens, num_positions]. `token_ids`: int64 [T], from the decoder's first; `sound`: its encoding
    [positions, hidden]. `filter_width`: positions of the median, odd. All ranks call it together."""
    total = torch.zeros(len(token_ids) - num_given, num_positions, device=token_ids.device)
    places = torch.arange(len(token_ids), device=token_ids.device) + model.offset
    x = model.embed(token_ids) + embedding(places, model.embed_positions.weight.tensor)
    residual = torch.zeros_like(x)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, WhisperDecoderLayer)
        x, residual = layer.input_layernorm.add(x, residual)
        x, residual = layer.cross_attention_norm.add(_self_attention(layer, x), residual)
        x, weights = _cross_attention(layer.cross_attention, x, sound)
        first = layer.self_attn.qkv_proj.query_heads.start
        for number, head in heads:
            if number == index and first <= head < first + len(weights):
                own = weights[head - first, num_given:, :num_positions]
                total += smoothed(own, filter_width) / len(heads)
        x, residual = layer.post_attention_layernorm.add(x, residual)
        x = layer.mlp.forward(x)
    return ranks.all_reduce(total)


def smoothed(weights: Tensor, filter_width: int) -> Tensor:
    """One head's weights [tokens, positions] with mean 0 and deviation 1 over the tokens, and of each the
    median of `filter_width` positions around it."""
    deviation, mean = torch.std_mean(weights, dim=0, keepdim=True, unbiased=False)
    normal = (weights - mean) / deviation
    margin = filter_width // 2
    if normal.shape[1] <= margin:
        return normal
    wide = pad(normal[None], (margin, margin), mode="reflect")[0]
    return wide.unfold(1, filter_width, 1).sort()[0][..., margin]


def _self_attention(layer: WhisperDecoderLayer, x: Tensor) -> Tensor:
    """Normed [T, hidden] -> what attention to the text adds, [T, hidden]."""
    own = layer.self_attn
    sizes = [count * own.attention.key_dim for count in own.qkv_proj.heads]
    parts = own.qkv_proj.forward(x).split(sizes, dim=-1)
    q, k, v = (part.unflatten(-1, (-1, own.attention.key_dim)).transpose(0, 1) for part in parts)
    scale = own.attention.scores.scale
    found = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0]
    return own.o_proj.forward(found.transpose(0, 1).flatten(1))


def _cross_attention(layer: CrossAttention, x: Tensor, sound: Tensor) -> tuple[Tensor, Tensor]:
    """-> what attention to the sound adds, [T, hidden]; its weights, float32 [heads of this rank, T,
    positions]"""
    q, k, v = (
        part.forward(given).unflatten(-1, (-1, layer.head_dim)).transpose(0, 1)
        for part, given in ((layer.query, x), (layer.key, sound), (layer.value, sound))
    )
    weights = torch.softmax((q @ k.transpose(1, 2)).float() * layer.scores.scale, dim=-1)
    found = (weights.to(v.dtype) @ v).transpose(0, 1).flatten(1)
    return layer.output.forward(found), weights
