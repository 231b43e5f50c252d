"""What differs between the blocks of decoders, as data. Torch-free; models/llama.py computes it."""

from typing import Literal

from msgspec import Struct

from runtime.models.config.rope_config import Rope

# How a norm computes (layers/norm.py):
#   rms             root mean square
#   rms_offset      the same, with weights stored less 1
#   layer           mean and variance, with a bias
#   layer_unbiased  the same without a bias
#   layer_offset    mean and variance, with a bias and with weights stored less 1
#   layer_plain     mean and variance, without weights
NormKind = Literal["rms", "rms_offset", "layer", "layer_unbiased", "layer_offset", "layer_plain"]

# Where norms are, as x -> x + ...:
#   pre       attention(norm(x)), then feed_forward(norm(x))
#   both      norm(attention(norm(x))), then norm(feed_forward(norm(x)))
#   post      norm(attention(x)), then norm(feed_forward(x))
#   parallel  attention(norm(x)) + feed_forward(norm(x)), of one norm
#   parallel_two_norms  the same, with a norm for each
Placement = Literal["pre", "both", "post", "parallel", "parallel_two_norms"]

# What of queries and keys is normalized:
#   none        nothing
#   head        each head, before it is rotated
#   rotated     each head, after it is rotated
#   projection  all heads together, before they are rotated
#   unit        as rotated, with weights of 1, in layers that rotate
#   head_layer  each head by mean and variance, with weights of its own for each head, before it is rotated
QkNorm = Literal["none", "head", "rotated", "projection", "unit", "head_layer"]

# gelu is the exact one, gelu_tanh its approximation, relu2 the square of relu; xielu has numbers of its own
# in each layer (layers/xielu.py)
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"]

# names of config.json -> ours
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


class LearnedPositions(Struct, frozen=True, kw_only=True):
    """A table of embeddings of positions, which are added to those of tokens."""

    count: int  # rows of the table
    offset: int = 0  # row of position 0


class PositionScale(Struct, frozen=True, kw_only=True):
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + offset) / interval)), so that
    attention stays sharp over long contexts (Llama 4, 2025)."""

    beta: float
    interval: float
    offset: int = 0


class DraftBlock(Struct, frozen=True, kw_only=True):
    """The block of one next-token layer, in what it differs from the model's own blocks."""

    window: int = 0  # sliding window; 0: none
    rope: Rope | None = None  # None: the model's
    limit: float = 0.0  # clamp of the activation of its feed-forward; 0: none


class Alibi(Struct, frozen=True, kw_only=True):
    """Linear biases by distance: a head's score of a key loses slope * distance of its position from the
    query's (ALiBi, Press et al., 2022). The models have no other positions."""

    max_bias: float = 8.0  # the last of 2^k heads has the slope 2^-max_bias
    factor: float = 1.0  # on slopes

    def slopes(self, num_heads: int) -> list[float]:
        """The slope of each head. Of 2^k heads 2^(-max_bias / 2^k), its square and so on; of another number
        those of the next lower power of two, then every second of the next higher one."""
        lower = 1 << (num_heads.bit_length() - 1)
        exponents = [(i + 1) / lower for i in range(lower)]
        exponents += [(2 * i + 1) / (2 * lower) for i in range(num_heads - lower)]
        return [self.factor * 2.0 ** (-self.max_bias * exponent) for exponent in exponents]


class ScoreKind(Struct, frozen=True, kw_only=True):
    """What a model's attention scores have besides their scale, and which there are."""

    cap: float = 0.0  # bound of scores; 0: none
    has_sinks: bool = False  # heads have sinks: a learned logit among their scores
    is_biased: bool = False  # biases by distance are added (Alibi)
    chunk: int = 0  # tokens of a chunk that attention of some layers stays within; 0: no chunks
