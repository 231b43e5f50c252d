"""Recurrent layers of a model: which layers they are, and what a sequence keeps in them in place of keys and
values. Torch-free; hybrid_config.py reads them from config.json.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from runtime.errors import ModelError
from runtime.models.config.renames import Renames
from runtime.models.config.shares import channel_part, even_part, head_parts, most_channels, most_heads

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
        """Numbers in one state tensor of a sequence."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class ShortConv(Struct, frozen=True, kw_only=True):
    """A gated causal convolution over the last `kernel` tokens of each channel (LFM 2)."""

    width: int
    kernel: int
    has_bias: bool

    def states(self, ranks: int, rank: int = 0) -> tuple[StateTensor, ...]:
        """What a sequence keeps in one layer on a rank of `ranks`; rank 0 has most of it."""
        return (StateTensor((channel_part(self.width, ranks, rank).size, self.kernel - 1)),)

    def draft_numbers(self, ranks: int) -> tuple[int, int]:
        """What a layer keeps of a draft until it is known whether it is accepted: numbers in the dtype of the
        activations, for the convolution (its share of the row's tail included), and float32 ones."""
        return most_channels(self.width, ranks) * self.kernel, 0

    def num_floats(self, ranks: int) -> int:
        """Numbers of num_weights that are float32 whatever the dtype."""
        return 0

    def num_weights(self, hidden: int, ranks: int) -> int:
        """Numbers that one rank holds of the mixer of a layer."""
        width = most_channels(self.width, ranks)
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

    def heads(self, ranks: int) -> tuple[int, int]:
        """Heads and groups of the rank that has most; a rank has a part of a group where ranks outnumber
        them."""
        return most_heads(self.num_heads, self.num_groups, ranks)

    def states(self, ranks: int, rank: int = 0) -> tuple[StateTensor, ...]:
        """What a sequence keeps in one layer on a rank of `ranks`; rank 0 has most of it."""
        heads, groups = head_parts(self.num_heads, self.num_groups, ranks, rank)
        channels = heads.size * self.head_dim + 2 * groups.size * self.state_dim
        return (
            StateTensor((channels, self.kernel - 1)),
            StateTensor((heads.size, self.head_dim, self.state_dim), is_wide=True),
        )

    def draft_numbers(self, ranks: int) -> tuple[int, int]:
        """See ShortConv.draft_numbers; inputs, vectors and time steps of the scan."""
        heads, groups = self.heads(ranks)
        channels = heads * self.head_dim + 2 * groups * self.state_dim
        return channels * self.kernel, channels + heads

    def num_floats(self, ranks: int) -> int:
        """Numbers of num_weights that are float32 whatever the dtype."""
        return 3 * self.heads(ranks)[0]

    def num_weights(self, hidden: int, ranks: int) -> int:
        """Numbers that one rank holds of the mixer of a layer."""
        heads, groups = self.heads(ranks)
        inner = heads * self.head_dim
        channels = inner + 2 * groups * self.state_dim
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
    # how the projections are stored: those of a key head together; queries, keys and values of all heads in
    # one tensor, and gates for themselves; or each for itself
    layout: Literal["by_head", "qkv", "apart"]
    max_rate: float = 1.0  # rates are sigmoids times this

    def heads(self, ranks: int, rank: int = 0) -> tuple[int, int]:
        """Key heads of a rank, and their value heads."""
        keys = even_part(self.key_heads, ranks, rank).size
        return keys, keys * (self.value_heads // self.key_heads)

    def states(self, ranks: int, rank: int = 0) -> tuple[StateTensor, ...]:
        """What a sequence keeps in one layer on a rank of `ranks`; rank 0 has most of it."""
        keys, values = self.heads(ranks, rank)
        return (
            StateTensor((2 * keys * self.key_dim + values * self.value_dim, self.kernel - 1)),
            StateTensor((values, self.key_dim, self.value_dim), is_wide=True),
        )

    def draft_numbers(self, ranks: int) -> tuple[int, int]:
        """See ShortConv.draft_numbers; queries, keys, values, decays and rates of the delta rule."""
        keys, values = self.heads(ranks)
        channels = 2 * keys * self.key_dim + values * self.value_dim
        return channels * self.kernel, values * (2 * self.key_dim + self.value_dim + 2)

    def num_floats(self, ranks: int) -> int:
        """Numbers of num_weights that are float32 whatever the dtype."""
        return 2 * self.heads(ranks)[1]

    def num_weights(self, hidden: int, ranks: int) -> int:
        """Numbers that one rank holds of the mixer of a layer."""
        key_heads, heads = self.heads(ranks)
        keys, values = key_heads * self.key_dim, heads * self.value_dim
        return (
            hidden * (2 * keys + 3 * values + 2 * heads)
            + (2 * keys + values) * self.kernel
            + 2 * heads
            + self.value_dim
        )


class Mamba1(Struct, frozen=True, kw_only=True):
    """A selective state-space mixer (Mamba; Gu and Dao, 2023)."""

    inner: int  # channels
    state_dim: int
    step_rank: int  # width of the projection that time steps are made of
    kernel: int
    has_conv_bias: bool
    has_bias: bool
    # of time steps, B and C by root mean square: none, without weights, or with them
    norm: Literal["none", "unit", "weighted"] = "none"
    eps: float = 1e-6

    @property
    def projected(self) -> int:
        """Width of time steps, B and C."""
        return self.step_rank + 2 * self.state_dim

    def states(self, ranks: int, rank: int = 0) -> tuple[StateTensor, ...]:
        """What a sequence keeps in one layer on a rank of `ranks`; rank 0 has most of it."""
        inner = channel_part(self.inner, ranks, rank).size
        return (StateTensor((inner, self.kernel - 1)), StateTensor((inner, self.state_dim), is_wide=True))

    def draft_numbers(self, ranks: int) -> tuple[int, int]:
        """See ShortConv.draft_numbers; inputs, time steps and vectors of the scan."""
        inner = most_channels(self.inner, ranks)
        return inner * self.kernel, 2 * (inner + self.state_dim)

    def num_floats(self, ranks: int) -> int:
        """Numbers of num_weights that are float32 whatever the dtype."""
        return most_channels(self.inner, ranks) * (self.state_dim + 2)

    def num_weights(self, hidden: int, ranks: int) -> int:
        """Numbers that one rank holds of the mixer of a layer."""
        inner = most_channels(self.inner, ranks)
        return (
            3 * hidden * inner
            + (2 * inner + hidden) * self.has_bias
            + inner * (self.kernel + self.has_conv_bias + self.projected + self.step_rank)
            + self.num_floats(ranks)
            + self.projected * (self.norm == "weighted")
        )


class KimiDelta(Struct, frozen=True, kw_only=True):
    """A delta rule with a decay for each channel of a key (Kimi Linear; Moonshot AI, 2025) behind a causal
    convolution."""

    num_heads: int
    head_dim: int  # of keys and of values; also the width that decays and gates are made of
    kernel: int
    eps: float

    def states(self, ranks: int, rank: int = 0) -> tuple[StateTensor, ...]:
        """What a sequence keeps in one layer on a rank of `ranks`; rank 0 has most of it."""
        heads = even_part(self.num_heads, ranks, rank).size
        return (
            StateTensor((3 * heads * self.head_dim, self.kernel - 1)),
            StateTensor((heads, self.head_dim, self.head_dim), is_wide=True),
        )

    def draft_numbers(self, ranks: int) -> tuple[int, int]:
        """See ShortConv.draft_numbers; queries, keys, values, decays and rates of the delta rule."""
        heads = even_part(self.num_heads, ranks).size
        return 3 * heads * self.head_dim * self.kernel, heads * (4 * self.head_dim + 1)

    def num_floats(self, ranks: int) -> int:
        """Numbers of num_weights that are float32 whatever the dtype."""
        return even_part(self.num_heads, ranks).size * (1 + self.head_dim)

    def num_weights(self, hidden: int, ranks: int) -> int:
        """Numbers that one rank holds of the mixer of a layer."""
        heads, dim = even_part(self.num_heads, ranks).size, self.head_dim
        inner = heads * dim
        return (
            hidden * (4 * inner + 2 * dim + heads)
            + inner * (2 * dim + 3 * self.kernel)
            + self.num_floats(ranks)
            + dim
        )


Mixer = ShortConv | Mamba1 | Mamba2 | GatedDelta | KimiDelta


class Multipliers(Struct, frozen=True, kw_only=True):
    """Factors on what the parts of a layer are given and return (Falcon-H1)."""

    mixer_in: float = 1.0
    mixer_out: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    gate: float = 1.0  # of the feed-forward, before its activation
    feed_forward_out: float = 1.0


class Recurrent(Struct, frozen=True, kw_only=True):
    """The layers of a model that has recurrent ones."""

    kinds: tuple[LayerKind, ...]
    mixer: Mixer
    has_feed_forward: bool = True  # mixers are followed by a feed-forward in the same layer
    gates_attention: bool = False  # the query projection makes a gate on the attention output as well
    multipliers: Multipliers | None = None  # None: all are 1
    # blocks of a next-token layer (next_token_layers.py); (): the checkpoint has none that are known
    next_token_kinds: tuple[LayerKind, ...] = ("attention",)

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

    def draft_bytes(self, ranks: int, item: int) -> int:
        """Bytes that all layers of one rank keep of a token in a row of drafts that may be refused."""
        numbers, floats = self.mixer.draft_numbers(ranks)
        return self.num_recurrent_layers * (numbers * item + floats * 4)


def draft_nodes(max_slots: int) -> int:
    """Tokens that a step may have in rows of drafts that may be refused, where a model has recurrent layers:
    eight for each sequence, and no more than 1024."""
    return min(8 * max_slots, 1024)


def renames_in(recurrent: Recurrent, kind: LayerKind, old: str, new: str) -> Renames:
    """Names below layers of one kind that are `old` in checkpoints, and `new` here."""
    return tuple(
        (f"layers.{i}.{old}.", f"layers.{i}.{new}.") for i, one in enumerate(recurrent.kinds) if one == kind
    )


def mixer_renames(recurrent: Recurrent) -> Renames:
    """Names of mixers in checkpoints of Kimi Linear, which have attention and mixers under one name."""
    return renames_in(recurrent, "recurrent", "self_attn", "mixer")


def kinds_of(
    names: Sequence[str], meanings: dict[str, LayerKind], field: str, num_layers: int
) -> tuple[LayerKind, ...]:
    """The kinds of layers that config.json names in `field`. Raises ModelError for a name without meaning,
    and for more or fewer names than layers."""
    if len(names) != num_layers:
        raise ModelError(f"config.json: {field} names {len(names)} layers of {num_layers}")
    if unknown := sorted(set(names) - meanings.keys()):
        raise ModelError(
            f"config.json: {field} has {', '.join(unknown)}, which is not supported; supported are "
            f"{', '.join(sorted(meanings))}"
        )
    return tuple(meanings[name] for name in names)
