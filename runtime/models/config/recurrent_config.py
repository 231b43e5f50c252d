"""Recurrent layers of a model: which layers they are, and what a sequence keeps in them in place of keys and
values. Torch-free; hybrid_config.py reads them from config.json.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from runtime.errors import ModelError

# What mixes the tokens of a layer:
#   attention  attention over pages
#   recurrent  the recurrent mixer of the model
#   parallel   both, side by side, and their sum
#   none       nothing: the layer is a feed-forward alone
LayerKind = Literal["attention", "recurrent", "parallel", "none"]


class StateTensor(Struct, frozen=True):
    """One tensor of a sequence's state in a layer, on one rank."""

    shape: tuple[int, ...]
    is_wide: bool = False  # in the dtype of --mamba-ssm-dtype; else in that of the activations

    @property
    def count(self) -> int:
        """Its numbers."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class ShortConv(Struct, frozen=True, kw_only=True):
    """A gated causal convolution over the last `kernel` tokens of each channel (LFM 2)."""

    width: int
    kernel: int
    has_bias: bool

    def states(self, ranks: int) -> tuple[StateTensor, ...]:
        """What a sequence keeps in one layer on one of `ranks` ranks."""
        return (StateTensor((self.width // ranks, self.kernel - 1)),)

    def num_floats(self, ranks: int) -> int:
        """Numbers of num_weights that are float32 whatever the dtype."""
        return 0

    def num_weights(self, hidden: int, ranks: int) -> int:
        """Numbers that one rank holds of the mixer of a layer."""
        width = self.width // ranks
        return (
            4 * hidden * width + width * (self.kernel + self.has_bias) + (3 * width + hidden) * self.has_bias
        )


class Mamba2(Struct, frozen=True, kw_only=True):
    """A selective state-space mixer (Mamba 2; Dao and Gu, 2024)."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int  # of heads that share inputs and outputs of the state
    kernel: int
    has_conv_bias: bool = True
    has_bias: bool = False
    # the gated norm behind the scan: of the gated output, of the output before the gate, or none
    norm: Literal["gated", "before_gate", "none"] = "gated"
    eps: float = 1e-5
    step_limits: tuple[float, float] = (0.0, float("inf"))
    # factors on the projections to gate, input, B, C and time step (Falcon-H1)
    multipliers: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Width of the scan's inputs."""
        return self.num_heads * self.head_dim

    def groups(self, ranks: int) -> int:
        """Groups on one rank: a share of them, or one where ranks outnumber them."""
        return max(1, self.num_groups // ranks)

    def states(self, ranks: int) -> tuple[StateTensor, ...]:
        """What a sequence keeps in one layer on one of `ranks` ranks."""
        channels = self.inner // ranks + 2 * self.groups(ranks) * self.state_dim
        return (
            StateTensor((channels, self.kernel - 1)),
            StateTensor((self.num_heads // ranks, self.head_dim, self.state_dim), is_wide=True),
        )

    def num_floats(self, ranks: int) -> int:
        """Numbers of num_weights that are float32 whatever the dtype."""
        return 3 * self.num_heads // ranks

    def num_weights(self, hidden: int, ranks: int) -> int:
        """Numbers that one rank holds of the mixer of a layer."""
        inner, heads = self.inner // ranks, self.num_heads // ranks
        channels = inner + 2 * self.groups(ranks) * self.state_dim
        outs = inner + channels + heads
        return (
            hidden * (outs + inner)
            + channels * (self.kernel + self.has_conv_bias)
            + (outs + hidden) * self.has_bias
            + 3 * heads
            + inner * (self.norm != "none")
        )


class GatedDelta(Struct, frozen=True, kw_only=True):
    """A gated delta rule (Yang et al., 2024) behind a causal convolution."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int
    value_dim: int
    kernel: int
    eps: float
    # how the projections are stored: those of a key head together, or each projection for itself
    layout: Literal["by_head", "apart"]

    def states(self, ranks: int) -> tuple[StateTensor, ...]:
        """What a sequence keeps in one layer on one of `ranks` ranks."""
        keys, values = self.key_heads // ranks, self.value_heads // ranks
        return (
            StateTensor((2 * keys * self.key_dim + values * self.value_dim, self.kernel - 1)),
            StateTensor((values, self.key_dim, self.value_dim), is_wide=True),
        )

    def num_floats(self, ranks: int) -> int:
        """Numbers of num_weights that are float32 whatever the dtype."""
        return 2 * self.value_heads // ranks

    def num_weights(self, hidden: int, ranks: int) -> int:
        """Numbers that one rank holds of the mixer of a layer."""
        keys, values = self.key_heads * self.key_dim // ranks, self.value_heads * self.value_dim // ranks
        heads = self.value_heads // ranks
        return (
            hidden * (2 * keys + 3 * values + 2 * heads)
            + (2 * keys + values) * self.kernel
            + 2 * heads
            + self.value_dim
        )


Mixer = ShortConv | Mamba2 | GatedDelta


class Recurrent(Struct, frozen=True, kw_only=True):
    """The layers of a model that has recurrent ones."""

    kinds: tuple[LayerKind, ...]
    mixer: Mixer
    has_feed_forward: bool = True  # mixers are followed by a feed-forward in the same layer
    gates_attention: bool = False  # the query projection makes a gate on the attention output as well

    @property
    def num_recurrent_layers(self) -> int:
        """Layers whose sequences keep a state."""
        return sum(kind in ("recurrent", "parallel") for kind in self.kinds)

    @property
    def num_attention_layers(self) -> int:
        """Layers whose sequences keep keys and values."""
        return sum(kind in ("attention", "parallel") for kind in self.kinds)

    def float_count(self, ranks: int) -> int:
        """Numbers of the mixers on one rank that are float32 whatever the dtype."""
        return self.num_recurrent_layers * self.mixer.num_floats(ranks)

    def state_bytes(self, ranks: int, item: int, wide_item: int) -> int:
        """Bytes of a sequence's states in all layers on one rank, where a number of the activations has
        `item` bytes, and one of --mamba-ssm-dtype `wide_item`."""
        return self.num_recurrent_layers * sum(
            tensor.count * (wide_item if tensor.is_wide else item) for tensor in self.mixer.states(ranks)
        )


def kinds_of(names: Sequence[str], meanings: dict[str, LayerKind], field: str) -> tuple[LayerKind, ...]:
    """The kinds of layers that config.json names in `field`. Raises ModelError for a name without meaning."""
    if unknown := sorted(set(names) - meanings.keys()):
        raise ModelError(
            f"config.json: {field} has {', '.join(unknown)}, which is not supported; supported are "
            f"{', '.join(sorted(meanings))}"
        )
    return tuple(meanings[name] for name in names)
