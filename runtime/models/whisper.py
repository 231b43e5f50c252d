"""Whisper (Radford et al., 2022): a decoder with learned positions whose layers attend to the encoding of a
sound, between their attention to text and their feed-forward.

Keys and values of a sound are made once, in the step that has the first token of its sequence, and stay with
the slot (ranks/cross_cache.py).
"""

import torch
from torch import Tensor

from runtime.devices.attention_scores import Scores
from runtime.devices.base import Device, ForwardBatch
from runtime.layers.linear import Linear, QkvLinear
from runtime.layers.norm import NORMS
from runtime.layers.weight import FormatLookup, Layer, scaled_shard
from runtime.models.base import AttentionLayer
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.whisper_config import DECODER_NAMES
from runtime.models.learned_positions import PositionedDecoder
from runtime.models.llama import LlamaDecoderLayer
from runtime.models.loader import target_name
from runtime.models.self_attention import SelfAttention, reduction_of


class UnbiasedKeys(QkvLinear):
    """Queries, keys and values, of which keys have no bias."""

    def allocate(self, formats: FormatLookup) -> None:
        """As Linear.allocate, with zeros for the bias of keys."""
        super().allocate(formats)
        assert self.bias is not None, "queries and values have a bias"
        self.bias.target(self.bias.sources.pop("k")).zero_()


class WhisperSelfAttention(SelfAttention):
    """Attention to the text so far."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int) -> None:
        super().__init__(device, dtype, config, index)
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = UnbiasedKeys(device, dtype, config.hidden_size, *heads, bias=True)


class CrossAttention(Layer):
    """Attention to the sound of a sequence. Each rank has the heads of its attention to text."""

    def __init__(
        self, device: Device, dtype: torch.dtype, config: ModelConfig, index: int, own: QkvLinear
    ) -> None:
        """`own`: the projections of the layer's attention to text."""
        self.ops, self.index, self.head_dim = device.ops, index, config.head_dim
        self.num_heads = own.heads[0]
        self.scores = Scores(config.score_scale, 0, 0.0)
        size = config.hidden_size
        shard = scaled_shard(own.query_heads, config.head_dim)

        def projection(*, bias: bool) -> Linear:
            return Linear(
                device, dtype, size, {"": shard}, shard="column", bias=bias, ranks=device.head_ranks
            )

        self.query, self.key, self.value = (projection(bias=bias) for bias in (True, False, True))
        self.output = Linear(
            device,
            dtype,
            shard,
            {"": size},
            shard="row",
            bias=True,
            reduction=reduction_of(device),
            ranks=device.head_ranks,
        )

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] -> [T, hidden]. Keys and values of sounds that are new are stored first."""
        cross = batch.cross
        assert cross is not None, "a step without sounds"
        k_cache, v_cache = cross.kv[self.index]
        if cross.sounds is not None and cross.locations is not None:
            sounds = cross.sounds.flatten(0, 1)
            k, v = (self._heads(layer.forward(sounds)) for layer in (self.key, self.value))
            self.ops.store_kv(k, v, k_cache, v_cache, cross.locations)
        q = self._heads(self.query.forward(x))
        found = self.ops.attention(q, k_cache, v_cache, cross.attention, self.scores)
        return self.output.forward(found.flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        """[N, heads * D] -> [N, heads, D]."""
        return x.view(len(x), self.num_heads, self.head_dim)


class WhisperDecoderLayer(LlamaDecoderLayer):
    """One block. See DecoderLayer."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        super().__init__(device, dtype, config, index, attention_class)
        assert isinstance(self.self_attn, WhisperSelfAttention)
        self.cross_attention_norm = NORMS[config.norm](device, dtype, config.hidden_size, config.rms_norm_eps)
        self.cross_attention = CrossAttention(device, dtype, config, index, self.self_attn.qkv_proj)

    def after_attention(
        self, attended: Tensor, residual: Tensor, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """See DecoderLayer.after_attention."""
        x, residual = self.cross_attention_norm.add(self.self_attn.o_proj.forward(attended), residual)
        return self.feed_forward(self.cross_attention.forward(x, batch), residual, batch)


class Whisper(PositionedDecoder):
    """See GenerativeModel."""

    attention_class = WhisperSelfAttention
    layer_class = WhisperDecoderLayer
    ignored_weights = (*PositionedDecoder.ignored_weights, r"^proj_out\.")  # the head shares the embedding

    def checkpoint_key(self, tensor_name: str) -> tuple[str, str]:
        """See NamesTensors: layers of the encoder and of the decoder have the same names."""
        name = tensor_name.removeprefix("model.")
        below = name.removeprefix("encoder.")
        if below == name:
            return target_name(name, self.packed_modules, DECODER_NAMES)
        below = below.replace("layer_norm.", "norm.") if below.startswith("layer_norm.") else f"tower.{below}"
        return target_name(f"media_encoder.{below}", self.packed_modules)
