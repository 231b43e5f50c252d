"""A decoder as data: what a device needs to know to compute its whole forward pass in one call. Torch-free at
run time.

    x = embedding[token] * embed_scale
    of each layer:  x = x + [after_attention](o(attention(qkv(before_attention(x)))))
                    x = x + [after_feed_forward](feed_forward(before_feed_forward(x)))

    A layer may have a recurrent mixer in place of attention, or beside it: both read the same x. It may lack
    the feed-forward, or all but that.

    feed_forward(x):  down(act(gate) * up), where gate and up are the halves of gate_up(x)
                      or the same of the experts that the router chooses, weighted, and of shared experts

Norms in brackets may be missing. Norms are RMSNorm (Zhang and Sennrich, 2019) without bias; attention is
grouped-query attention with rotary positions, its queries and keys behind norms of heads if there are any,
with a gate on its output if there is one, or latent attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from runtime.devices.all_to_all import PackedExperts
from runtime.devices.attention_scores import Scores
from runtime.devices.lora import LoraWeights
from runtime.devices.packed import PackedLatent, PackedRows, PackedWeight
from runtime.devices.recurrent import RecurrentKernel
from runtime.models.config.moe_config import Routing

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from runtime.devices.base import ForwardBatch


@dataclass(frozen=True, slots=True)
class NormSpec:
    """x / sqrt(mean(x²) + eps) * weight."""

    weight: "Tensor"
    eps: float


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """scale * (x Wᵀ + bias). Of a product that makes gates and ups, the gates alone are scaled."""

    packed: PackedWeight | None
    bias: "Tensor | None"
    inputs: int
    outputs: int
    lora: LoraWeights | None  # of adapters, in memory that stays; their tokens get what they add
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Heads of one layer. `qkv` makes queries, keys and values of `dim` numbers a head, in this order; with
    `has_gate` a number for each of the output behind them, whose sigmoid it is multiplied with."""

    qkv: LinearSpec
    o: LinearSpec
    num_heads: int
    num_kv_heads: int
    dim: int
    q_norm: NormSpec | None
    k_norm: NormSpec | None
    scores: Scores
    pool: int  # of the key/value cache: 0 or -1, the last one
    cache_scales: tuple[float, float]  # a cache of 8 bits holds keys and values divided by them
    has_gate: bool = False


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention of one layer (DeepSeek-V2, 2024); see layers/attention/mla_prolog.py. Numbers i and
    i + rope_dim / 2 of rotary parts rotate together."""

    down: LinearSpec  # to queries, or to their latents; then to a latent and a rotary key
    q_norm: NormSpec | None  # of query latents
    queries: LinearSpec | None  # from query latents to queries; None: `down` makes queries
    kv_norm: NormSpec
    up: PackedLatent  # from latents to keys and values
    o: LinearSpec
    rank: int  # of a latent
    rope_dim: int
    scale: float
    pool: int = 0  # of the cache


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of the outputs of one projection, times a factor."""

    projection: int
    begin: int
    count: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """A recurrent layer with its projections: o(kernel(columns of the projections of norm(x))); see
    devices/recurrent.py. Of a convolution alone, `input_gate` multiplies its inputs and `gate` its
    outputs."""

    norm: NormSpec
    projections: tuple[LinearSpec, ...]
    kernel: RecurrentKernel
    place: int  # of its states among those of the recurrent layers
    mixed: tuple[Columns, ...]
    gate: tuple[Columns, ...]
    rate: tuple[Columns, ...]
    step: tuple[Columns, ...]
    input_gate: tuple[Columns, ...]
    o: LinearSpec


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A feed-forward that all tokens pass."""

    gate_up: LinearSpec
    gate: Literal["silu", "gelu_tanh"]
    down: LinearSpec


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A feed-forward of experts, all of which are on this rank. See Experts in devices/base.py."""

    router: LinearSpec  # its weight is float32
    correction_bias: (
        "Tensor | None"  # float32 [experts]: counts when experts are chosen, not in their weights
    )
    routing: Routing
    packed: PackedExperts
    shared: DenseSpec | None
    shared_gate: LinearSpec | None  # of one output: its sigmoid weights the shared experts
    # int32 [experts] to which the routed tokens of each step are added, or None
    counts: "Callable[[], Tensor | None]"


@dataclass(frozen=True, slots=True)
class DecoderLayerSpec:
    """One block. Attention and feed-forward have a norm in front of them where the layer has them."""

    before_attention: NormSpec | None
    attention: AttentionSpec | LatentSpec | None
    after_attention: NormSpec | None
    before_feed_forward: NormSpec | None
    feed_forward: DenseSpec | ExpertsSpec | None
    after_feed_forward: NormSpec | None
    mixer: MixerSpec | None = None


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Logits: packed(norm(x)), from inputs that are not rounded."""

    norm: NormSpec
    packed: "PackedRows"  # [vocabulary, width]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder on one rank."""

    width: int  # of the hidden states
    embedding: "Tensor | PackedRows"  # [vocabulary, width]
    embed_scale: float
    layers: tuple[DecoderLayerSpec, ...]
    # positions int64 [T] -> cosines and sines, float32 [T, dim / 2] each
    angles: "Callable[[Tensor], tuple[Tensor, Tensor]]"
    head: HeadSpec | None  # None: the model makes its logits otherwise


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a forward pass gives."""

    hidden: "Tensor"  # of the tokens before the last norm, [T, hidden]
    logits: "Tensor | None" = (
        None  # of the samples, float32 [N, vocabulary]; None: they are the caller's to make
    )


class ForwardProgram(Protocol):
    """The forward pass of one decoder in one call."""

    def forward(
        self, batch: "ForwardBatch", samples: "np.ndarray", lora_slots: "np.ndarray | None"
    ) -> Forwarded | None:
        """None: the layers have to compute this step. `samples`: int64 [N], places of the tokens behind which
        something is sampled; `lora_slots`: int32 [T], -1 for tokens without an adapter; None: no token has
        one."""
        ...


class ForwardPrograms(Protocol):
    """Forward passes that a device computes in one call, in place of a model's layers."""

    def open(self, spec: DecoderSpec, kv: "list[tuple[Tensor, ...]]") -> ForwardProgram | None:
        """The program of a decoder with keys and values of its layers with attention, in order; None: the
        layers have to compute it."""
        ...
