"""Rotary position embedding (Su et al., 2021) and the ways to stretch it over longer contexts.

    default   frequencies theta^(-2i/D)
    linear    all divided by `factor` (Chen et al., 2023)
    dynamic   theta grows once a position passes max_position_embeddings (NTK-aware scaling)
    yarn      high frequencies kept, low ones divided, a ramp between; scores rescaled (Peng et al., 2023)
    llama3    as yarn with a ramp over wavelengths, no rescaling (Llama 3.1)
    longrope  frequencies divided by searched factors, scores rescaled (Ding et al., 2024)
    none      no rotation: cosines are 1 and sines 0 (Kazemnejad et al., 2023)

`dynamic` is a pure function of the position here: position p is rotated as when a sequence of exactly p + 1
tokens is extended by its last token. That is what the reference implementation does when it decodes, and it
does not depend on chunks, on the rest of the batch or on restarts.

`longrope` has two lists of factors. transformers takes the short one while a sequence is within the original
context; here it is taken where max_position_embeddings is within it, and the long one otherwise, so that all
keys of a sequence, and of all that share a prefix, are rotated alike.

`mrope_section` (M-RoPE; Wang et al., 2024, Qwen2-VL): tokens of an image stand in a grid of frames, rows and
columns, and have a position in each. The first pairs of dimensions rotate with the frame, the next with the
row, the last with the column. Tokens of text have one position in all three; that after a grid is the first
one beyond its rows and columns. With `mrope_interleaved` (Qwen3-VL) pairs 1, 4, 7 ... rotate with the row and
2, 5, 8 ... with the column, as far as there are so many, and all others with the frame.

Where only part of a head is rotated (partial_rotary_factor), angles of the rest are 0. Attention layers put
the rows of queries and keys into the order in which dimension i rotates with dimension i + D / 2
(`row_order`), so devices know one form alone.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.devices.base import Ops
from runtime.errors import ModelError
from runtime.models.config.block import PositionScale
from runtime.models.config.rope_config import Rope


class Rotary:
    """Cosines and sines for the positions of a step. Frequencies are float32, as in the reference
    implementation."""

    def __init__(self, rope: Rope, head_dim: int, ops: Ops, torch_device: torch.device) -> None:
        self.rope = rope
        self.ops = ops
        size = rotary_dim(rope, head_dim)
        self.num_fixed = (head_dim - size) // 2  # pairs of dimensions that are not rotated
        self.exponents = (torch.arange(0, size, 2, dtype=torch.int64).float() / size).to(torch_device)
        self.frequencies = FREQUENCIES[rope.rope_type](rope, self.exponents)
        if rope.frequency_divisors:
            self.frequencies = self.frequencies / _divisors(rope, self.exponents, rope.frequency_divisors)
        # of each frequency, which of three positions it turns with
        self.axes = torch.tensor(section_axes(rope), dtype=torch.int64, device=torch_device)
        self.scale = SCALES.get(rope.rope_type, _no_scale)(rope)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 [T], or [T, 3] of tokens in grids -> cos and sin tables for Ops.rotary."""
        return self.ops.rotary_tables(*self.angles(positions))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 [T], or [T, 3] of tokens in grids -> cosines and sines, float32 [T, D / 2] each."""
        places = positions.float()
        places = places.unsqueeze(1) if positions.dim() == 1 else places[:, self.axes]
        angles = places * (self._dynamic(places) if self.rope.rope_type == "dynamic" else self.frequencies)
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        if self.num_fixed:
            cos, sin = pad(cos, (0, self.num_fixed), value=1.0), pad(sin, (0, self.num_fixed))
        return cos, sin

    def check_sections(self) -> None:
        """Raises ModelError where tokens in grids cannot be rotated."""
        if len(self.axes) != len(self.exponents) or len(self.rope.mrope_section) != 3:
            raise ModelError(
                f"config.json: mrope_section {list(self.rope.mrope_section)} must be three numbers that add "
                f"up to {len(self.exponents)}, half the dimensions of a head that are rotated; restore the "
                "file from the model's source"
            )

    def _dynamic(self, places: Tensor) -> Tensor:
        rope, dim = self.rope, 2 * len(self.exponents)
        if dim == 2:  # a single frequency of 1, whatever theta is
            return self.frequencies
        length = (places + 1).clamp_min(rope.max_position_embeddings)
        stretch = rope.factor * length / rope.max_position_embeddings - (rope.factor - 1)
        return 1.0 / ((rope.rope_theta * stretch ** (dim / (dim - 2))) ** self.exponents)


def section_axes(rope: Rope) -> list[int]:
    """Which of three positions each pair of dimensions rotates with (M-RoPE)."""
    section = rope.mrope_section
    if not rope.mrope_interleaved or len(section) != 3:
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    return [pair % 3 if pair // 3 < section[pair % 3] else 0 for pair in range(sum(section))]


def position_scales(scale: PositionScale, positions: Tensor) -> Tensor:
    """Positions int64 [T] -> factors on queries, float32 [T, 1, 1]."""
    places = torch.floor((positions.float() + scale.offset) / scale.interval)
    return (1 + scale.beta * torch.log1p(places)).view(-1, 1, 1)


def rotary_dim(rope: Rope, head_dim: int) -> int:
    """Dimensions of a head that are rotated. Raises ModelError for an odd number of them."""
    size = int(head_dim * rope.partial_rotary_factor)
    if size % 2 or not size:
        raise ModelError(
            f"config.json: partial_rotary_factor {rope.partial_rotary_factor} of head_dim {head_dim} is "
            f"{size} dimensions; rotary positions need an even number of them"
        )
    return size


def row_order(rope: Rope, head_dim: int, *, is_interleaved: bool) -> list[int] | None:
    """The rows of a head in a checkpoint, in the order in which row i rotates with row i + D / 2. None: they
    are in it. `is_interleaved`: rows 2i and 2i + 1 of the checkpoint rotate together."""
    size = rotary_dim(rope, head_dim)
    first = range(0, size, 2) if is_interleaved else range(size // 2)
    second = range(1, size, 2) if is_interleaved else range(size // 2, size)
    middle = (size + head_dim) // 2
    order = [*first, *range(size, middle), *second, *range(middle, head_dim)]
    return None if order == list(range(head_dim)) else order


def _divisors(rope: Rope, exponents: Tensor, divisors: tuple[float, ...]) -> Tensor:
    """Divisors of the frequencies, float32 [D / 2]. Raises ModelError where there are more or fewer."""
    if len(divisors) != len(exponents):
        raise ModelError(
            f"rotary positions have {len(divisors)} divisors for {len(exponents)} frequencies; the "
            "checkpoint is damaged: download it again"
        )
    return torch.tensor(divisors, dtype=torch.float32, device=exponents.device)


def plain_frequencies(rope: Rope, exponents: Tensor) -> Tensor:
    """theta^(-2i/D), float32 [D / 2]."""
    return 1.0 / (rope.rope_theta**exponents)


def linear_frequencies(rope: Rope, exponents: Tensor) -> Tensor:
    """The plain frequencies divided by `factor`."""
    return plain_frequencies(rope, exponents) / rope.factor


def yarn_frequencies(rope: Rope, exponents: Tensor) -> Tensor:
    """YaRN: high frequencies stay, low ones are divided by `factor`, with a ramp between them."""
    plain = plain_frequencies(rope, exponents)
    dim, original = 2 * len(exponents), rope.original_max_position_embeddings or rope.max_position_embeddings

    def dimension(turns: float) -> float:
        """Index of the pair of dimensions that makes this many full turns over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero: the ramp becomes a step
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device=plain.device) - low) / (high - low)).clamp(
        0, 1
    )
    return plain / rope.factor * ramp + plain * (1 - ramp)


def yarn_scale(rope: Rope) -> float:
    """The factor on cosines and sines; scores are multiplied by its square."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _logarithmic(rope, rope.mscale) / _logarithmic(rope, rope.mscale_all_dim)
    return _logarithmic(rope, 1.0)


def _logarithmic(rope: Rope, scale: float) -> float:
    return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0


def mla_score_scale(rope: Rope) -> float:
    """The factor on all scores of latent attention. Cosines and sines scale only the rotary part of those
    scores."""
    if rope.rope_type == "default" or not rope.mscale_all_dim:
        return 1.0
    return _logarithmic(rope, rope.mscale_all_dim) ** 2


def llama3_frequencies(rope: Rope, exponents: Tensor) -> Tensor:
    """Llama 3.1: as YaRN, with a ramp over wavelengths."""
    plain = plain_frequencies(rope, exponents)
    original = rope.original_max_position_embeddings or rope.max_position_embeddings
    turns = original * plain / (2 * math.pi)  # over the original context
    ramp = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain / rope.factor * (1 - ramp) + plain * ramp


def longrope_frequencies(rope: Rope, exponents: Tensor) -> Tensor:
    """LongRoPE: divided by the long factors, or by the short ones (see above)."""
    factors = rope.long_factor if rope.is_long else rope.short_factor
    return plain_frequencies(rope, exponents) / _divisors(rope, exponents, factors)


def longrope_scale(rope: Rope) -> float:
    """The factor on cosines and sines."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    original = rope.original_max_position_embeddings or rope.max_position_embeddings
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))


def no_frequencies(rope: Rope, exponents: Tensor) -> Tensor:
    """All 0."""
    return torch.zeros_like(exponents)


def _no_scale(rope: Rope) -> float:
    return 1.0


# rope type -> the factor on cosines and sines, where it is not 1
SCALES = {"yarn": yarn_scale, "longrope": longrope_scale}

FREQUENCIES = {
    "none": no_frequencies,
    "longrope": longrope_frequencies,
    "default": plain_frequencies,
    "linear": linear_frequencies,
    "dynamic": plain_frequencies,  # up to max_position_embeddings
    "yarn": yarn_frequencies,
    "llama3": llama3_frequencies,
}
