"""Decoders with recurrent layers, alone or among layers of attention.

A layer mixes tokens by attention, by the recurrent mixer of the model (layers/recurrent/), by both side by
side, or not at all, and has a feed-forward behind that where the family has one (Recurrent.kinds).
"""

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.linear import Reduction
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.norm import NORMS
from runtime.layers.parallel.sequence_parallel import SequenceParallel
from runtime.layers.recurrent.gated_delta import GatedDeltaMixer
from runtime.layers.recurrent.mamba2 import Mamba2Mixer
from runtime.layers.recurrent.short_conv import ShortConvMixer
from runtime.layers.weight import Layer
from runtime.models.base import AttentionLayer, CompiledLayer, Pieces
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.recurrent_config import GatedDelta, Mamba2, Mixer, Recurrent, ShortConv
from runtime.models.gated_attention import GatedSelfAttention
from runtime.models.llama import Llama, feed_forward
from runtime.models.self_attention import reduction_of

Mixers = ShortConvMixer | GatedDeltaMixer | Mamba2Mixer


def open_mixer(
    device: Device, dtype: torch.dtype, hidden: int, config: Mixer, place: int, reduction: Reduction
) -> Mixers:
    """The recurrent mixer of the layer that is number `place` among the recurrent ones."""
    match config:
        case ShortConv():
            return ShortConvMixer(device, dtype, hidden, config, place, reduction)
        case GatedDelta():
            return GatedDeltaMixer(device, dtype, hidden, config, place, reduction)
        case Mamba2():
            return Mamba2Mixer(device, dtype, hidden, config, place, reduction)
    raise AssertionError(f"no layer for {config}")


class HybridDecoderLayer(Layer):
    """One block of any kind."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        recurrent = recurrent_of(config)
        kind, hidden = recurrent.kinds[index], config.hidden_size
        self.input_layernorm = NORMS[config.norm](device, dtype, hidden, config.rms_norm_eps)
        self.scale = config.residual_scale
        self.mixer = self.self_attn = self.mlp = self.post_attention_layernorm = None
        if kind in ("recurrent", "parallel"):
            place = sum(before in ("recurrent", "parallel") for before in recurrent.kinds[:index])
            self.mixer = open_mixer(device, dtype, hidden, recurrent.mixer, place, reduction_of(device))
        if kind in ("attention", "parallel"):
            kind_class = GatedSelfAttention if recurrent.gates_attention else attention_class
            self.self_attn = kind_class(device, dtype, config, index)
            # which cache is its own: there are none for other layers
            self.self_attn.attention.index = sum(
                before in ("attention", "parallel") for before in recurrent.kinds[:index]
            )
        if kind == "none" or recurrent.has_feed_forward:
            self.mlp = feed_forward(device, dtype, config, index)
        if kind != "none" and recurrent.has_feed_forward:
            self.post_attention_layernorm = NORMS[config.norm](device, dtype, hidden, config.rms_norm_eps)
        self.sequence_parallel = None if device.all_to_all is None else SequenceParallel(device.collectives)

    def piecewise(
        self, x: Tensor, residual: Tensor, tables: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> Pieces:
        """From the pair that the previous block returned to that of the next one, as DecoderLayer; yields
        where the layer attends."""
        x, residual = self.input_layernorm.add(x, residual)
        mixed = None
        if self.mixer is not None:
            mixed = self.mixer.forward(self.all_tokens(x, batch), batch)
        if self.self_attn is not None:
            attended = yield self.self_attn, self.self_attn.project(self.all_tokens(x, batch), *tables, batch)
            attended = self.self_attn.o_proj.forward(attended)
            mixed = attended if mixed is None else mixed + attended
        if mixed is not None:
            mixed = self.scaled(mixed)
            if self.post_attention_layernorm is None:
                return mixed, residual
            x, residual = self.post_attention_layernorm.add(mixed, residual)
        if isinstance(self.mlp, SparseFeedForward):
            return self.scaled(self.mlp.forward(x, batch)), residual
        assert self.mlp is not None, "a layer that does nothing"
        return self.scaled(self.mlp.forward(self.all_tokens(x, batch))), residual

    def scaled(self, x: Tensor) -> Tensor:
        """What half a layer adds to the residual."""
        return x if self.scale == 1.0 else x * self.scale

    def all_tokens(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] of all tokens: x itself, or gathered where x is this rank's shard [P, hidden]."""
        if self.sequence_parallel is None:
            return x
        return self.sequence_parallel.all_gather(x, len(batch.positions))


def recurrent_of(config: ModelConfig) -> Recurrent:
    """The configuration's recurrent layers, which it has."""
    assert config.recurrent is not None, "a hybrid model without recurrent layers"
    return config.recurrent


class HybridDecoder(Llama):
    """A decoder with recurrent layers. See GenerativeModel."""

    layer_class = HybridDecoderLayer

    @property
    def attentions(self) -> list[Attention | MlaAttention]:
        """The attentions that need a key/value cache, in order."""
        return [layer.self_attn.attention for layer in self.layers if layer.self_attn is not None]

    def piecewise(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Pieces:
        """See GenerativeModel.piecewise. `compiled` is not used."""
        tables = [rotary.tables(batch.positions) for rotary in self.rotaries]
        x = self.embed(batch.token_ids)
        if batch.embeds is not None:
            x = x.index_copy(0, batch.embeds[0], batch.embeds[1].to(x.dtype))
        x = x if self.sequence_parallel is None else self.sequence_parallel.shard(x)
        residual = torch.zeros_like(x)
        for layer, kind in zip(self.layers, self.rotary_of_layer, strict=True):
            x, residual = yield from layer.piecewise(x, residual, tables[kind], batch)
        x = x + residual
        if self.sequence_parallel is None:
            return x
        return self.sequence_parallel.all_gather(x, len(batch.positions))
