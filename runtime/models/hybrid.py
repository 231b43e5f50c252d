"""Decoders with recurrent layers, alone or among layers of attention.

A layer mixes tokens by attention, by the recurrent mixer of the model (layers/recurrent/), by both side by
side, or not at all, and has a feed-forward behind that where the family has one (Recurrent.kinds).
"""

import torch
from torch import Tensor

from runtime.devices.base import Device, ForwardBatch
from runtime.layers.attention.paged import Attention, MlaAttention
from runtime.layers.feed_forward import ScaledFeedForward
from runtime.layers.linear import Reduction
from runtime.layers.moe.feed_forward import SparseFeedForward
from runtime.layers.moe.plain_experts import PlainExperts
from runtime.layers.norm import NORMS, NoNorm, Norm
from runtime.layers.parallel.context_parallel import of_all_parts, own_tokens
from runtime.layers.parallel.sequence_parallel import all_tokens, open_sequence_parallel
from runtime.layers.recurrent.gated_delta import GatedDeltaMixer
from runtime.layers.recurrent.kimi_delta import KimiDeltaMixer
from runtime.layers.recurrent.mamba1 import Mamba1Mixer
from runtime.layers.recurrent.mamba2 import Mamba2Mixer
from runtime.layers.recurrent.short_conv import ShortConvMixer
from runtime.layers.weight import Layer, PackedModules
from runtime.models.base import AttentionLayer, CompiledLayer, Pieces
from runtime.models.config.model_config import ModelConfig
from runtime.models.config.recurrent_config import (
    GatedDelta,
    KimiDelta,
    Mamba1,
    Mamba2,
    Mixer,
    Multipliers,
    Recurrent,
    ShortConv,
    renames_in,
)
from runtime.models.feed_forwards import FeedForwards, dense_reduction, feed_forward, shared_tokens
from runtime.models.gated_attention import GatedSelfAttention
from runtime.models.llama import Llama
from runtime.models.self_attention import reduction_of

Mixers = ShortConvMixer | GatedDeltaMixer | KimiDeltaMixer | Mamba1Mixer | Mamba2Mixer


def open_mixer(
    device: Device, dtype: torch.dtype, hidden: int, config: Mixer, place: int, reduction: Reduction
) -> Mixers:
    """The recurrent mixer of the layer that is number `place` among the recurrent ones. The ranks of an
    attention group share it, as its states are of their sequences."""
    device = device.of_group()
    match config:
        case ShortConv():
            return ShortConvMixer(device, dtype, hidden, config, place, reduction)
        case GatedDelta():
            return GatedDeltaMixer(device, dtype, hidden, config, place, reduction)
        case KimiDelta():
            return KimiDeltaMixer(device, dtype, hidden, config, place, reduction)
        case Mamba1():
            return Mamba1Mixer(device, dtype, hidden, config, place, reduction)
        case Mamba2():
            return Mamba2Mixer(device, dtype, hidden, config, place, reduction)
    raise AssertionError(f"no layer for {config}")


def scaled_feed_forward(
    device: Device, dtype: torch.dtype, config: ModelConfig, multipliers: Multipliers
) -> ScaledFeedForward:
    """The feed-forward of a layer with multipliers."""
    sizes = config.hidden_size, config.intermediate_size
    reduction = dense_reduction(device, has_bias=config.mlp_bias)
    mlp = ScaledFeedForward(device, dtype, *sizes, bias=config.mlp_bias, reduction=reduction)
    mlp.gate_scale, mlp.out_scale = multipliers.gate, multipliers.feed_forward_out
    return mlp


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
        self.input_layernorm: Norm = NORMS[config.norm](device, dtype, hidden, config.rms_norm_eps)
        self.scale = config.residual_scale
        self.multipliers = recurrent.multipliers or Multipliers()
        self.mixer: Mixers | None = None
        self.self_attn: AttentionLayer | None = None
        self.mlp: FeedForwards | None = None
        self.post_attention_layernorm: Norm | None = None
        if kind in ("recurrent", "parallel"):
            kinds = recurrent.kinds[device.stage.layers(config.num_layers).start : index]
            place = sum(before in ("recurrent", "parallel") for before in kinds)
            self.mixer = open_mixer(device, dtype, hidden, recurrent.mixer, place, reduction_of(device))
        if kind in ("attention", "parallel"):
            kind_class = GatedSelfAttention if recurrent.gates_attention else attention_class
            self.self_attn = kind_class(device, dtype, config, index)
            self.self_attn.attention.index = cache_index(recurrent, index)
        if kind == "none" or recurrent.has_feed_forward:
            self.mlp = (
                feed_forward(device, dtype, config, index)
                if recurrent.multipliers is None
                else scaled_feed_forward(device, dtype, config, recurrent.multipliers)
            )
        if kind != "none" and recurrent.has_feed_forward:
            self.post_attention_layernorm = NORMS[config.norm](device, dtype, hidden, config.rms_norm_eps)
        self.sequence_parallel = open_sequence_parallel(device)
        self.shares_prompts = device.prompt_split is not None  # with other ranks, in attention
        has_experts = config.moe is not None and config.moe.layers[index]
        self.shared = shared_tokens(device, config, self.mlp, has_experts=has_experts)

    def piecewise(
        self, x: Tensor, residual: Tensor, tables: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> Pieces:
        """From the pair that the previous block returned to that of the next one, as DecoderLayer; yields
        where tokens of a sequence meet."""
        x, residual = self.input_layernorm.add(x, residual)
        factors, mixed = self.multipliers, None
        if self.mixer is not None:
            given = scaled(self.all_tokens(x, batch), factors.mixer_in)
            mixed = yield self.mixer, self.mixer.project(given)
            mixed = scaled(self.mixer.out_proj.forward(mixed), factors.mixer_out)
        if self.self_attn is not None:
            given = x if self.self_attn.gathers_tokens else self.all_tokens(x, batch)
            given = own_tokens(batch.part, scaled(given, factors.attention_in))
            attended = yield self.self_attn, self.self_attn.project(given, *tables, batch)
            attended = self._joined(self.self_attn.o_proj.forward(attended), batch)
            attended = scaled(attended, factors.attention_out)
            mixed = attended if mixed is None else mixed + attended
        if mixed is not None:
            mixed = scaled(mixed, self.scale)
            if self.post_attention_layernorm is None:
                return mixed, residual
            x, residual = self.post_attention_layernorm.add(mixed, residual)
        given = self.shared.join(x, batch)
        if isinstance(self.mlp, PlainExperts):
            out = yield self.mlp, (given,)
        elif isinstance(self.mlp, SparseFeedForward):
            out = self.mlp.forward(given, batch)
        else:
            assert self.mlp is not None, "a layer that does nothing"
            out = self.mlp.forward(given)
        return scaled(self.shared.divide(out, batch), self.scale), residual

    def _joined(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """What attention returns of this rank's part of the prompts, as of all of them."""
        x = of_all_parts(batch.part, x)
        if self.shares_prompts and self.sequence_parallel is not None:
            return self.sequence_parallel.shard(x)
        return x

    def all_tokens(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, hidden] of all tokens: x itself, or gathered where x is this rank's shard [P, hidden]."""
        return all_tokens(self.sequence_parallel, x, len(batch.positions))


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a factor of the configuration."""
    return x if factor == 1.0 else x * factor


def cache_index(recurrent: Recurrent, index: int) -> int:
    """Which cache is that of layer `index`: there are none for layers without attention."""
    return sum(kind in ("attention", "parallel") for kind in recurrent.kinds[:index])


def recurrent_of(config: ModelConfig) -> Recurrent:
    """The configuration's recurrent layers, which it has."""
    assert config.recurrent is not None, "a hybrid model without recurrent layers"
    return config.recurrent


class HybridDecoder(Llama):
    """A decoder with recurrent layers. See GenerativeModel."""

    layer_class = HybridDecoderLayer
    packed_modules: PackedModules = {
        **Llama.packed_modules,
        "in_proj_a": ("in_proj_ba", "a"),
        "in_proj_b": ("in_proj_ba", "b"),
        **{f"in_{part}": ("in_proj_qkv", part) for part in ("q", "k", "v")},
        **{f"{part}_conv1d": ("conv1d", part) for part in ("q", "k", "v")},
    }

    @property
    def attentions(self) -> list[Attention | MlaAttention]:
        """The attentions that need a key/value cache, in order."""
        return [layer.self_attn.attention for layer in self.layers if layer.self_attn is not None]

    def piecewise(self, batch: ForwardBatch, compiled: CompiledLayer | None = None) -> Pieces:
        """See GenerativeModel.piecewise. `compiled` is not used."""
        positions = own_tokens(batch.part, batch.positions)
        tables = [rotary.tables(positions) for rotary in self.rotaries]
        x = self.inputs(batch)
        residual = torch.zeros_like(x)
        before: dict[int, Tensor] = {}
        for index, (layer, kind) in enumerate(zip(self.layers, self.rotary_of_layer, strict=True)):
            if index in self.aux_layers:
                before[index] = self._of_all_tokens(x + residual, batch)
            x, residual = yield from layer.piecewise(x, residual, tables[kind], batch)
        return self.with_aux(self._of_all_tokens(x + residual, batch), before)


class GraniteHybrid(HybridDecoder):
    """Granite 4, in which shared experts may be all there are. See GenerativeModel."""

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        shared = ".mlp." if config.moe is None else ".mlp.shared_experts."
        self.renames = (*self.renames, (".shared_mlp.", shared))


class OlmoHybridLayer(HybridDecoderLayer):
    """Norms are behind attention and the feed-forward of its layer; in recurrent layers they come first."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        config: ModelConfig,
        index: int,
        attention_class: type[AttentionLayer],
    ) -> None:
        super().__init__(device, dtype, config, index, attention_class)
        self.attention_output_norm = self.mlp_output_norm = None
        if self.self_attn is not None:
            self.input_layernorm = self.post_attention_layernorm = NoNorm()
            self.attention_output_norm, self.mlp_output_norm = (
                NORMS[config.norm](device, dtype, config.hidden_size, config.rms_norm_eps) for _ in range(2)
            )

    def piecewise(
        self, x: Tensor, residual: Tensor, tables: tuple[Tensor, Tensor], batch: ForwardBatch
    ) -> Pieces:
        """See HybridDecoderLayer.piecewise."""
        if self.self_attn is None or self.attention_output_norm is None or self.mlp_output_norm is None:
            return (yield from super().piecewise(x, residual, tables, batch))
        total = x + residual
        given = own_tokens(batch.part, self.all_tokens(total, batch))
        attended = yield self.self_attn, self.self_attn.project(given, *tables, batch)
        attended = of_all_parts(batch.part, self.self_attn.o_proj.forward(attended))
        total = total + self.attention_output_norm.forward(attended)
        out = self.shared.divide(self.mlp.forward(self.shared.join(total, batch)), batch)
        return self.mlp_output_norm.forward(out), total


class OlmoHybrid(HybridDecoder):
    """OLMo Hybrid. See GenerativeModel."""

    layer_class = OlmoHybridLayer

    def __init__(self, device: Device, dtype: torch.dtype, config: ModelConfig) -> None:
        super().__init__(device, dtype, config)
        # transformers reads this name, and writes the other
        written = renames_in(
            recurrent_of(config), "attention", "feedforward_layer_norm", "post_attention_layernorm"
        )
        self.renames = (*written, *self.renames)
