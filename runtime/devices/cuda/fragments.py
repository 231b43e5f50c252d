"""Weights of four bits in the order of kernels/fragments.py: packed once, while weights are loaded."""

import torch
from torch import Tensor

FRAGMENTS = ("fragments4", "mxfp4")  # kinds of PackedWeight
BLOCK = 128  # inputs that a program takes at a time
PARTS = 4  # of a block
PART = 32  # inputs of a part
ZERO_BITS = 31  # of the scale of unsigned codes, those that are its zero point
# the largest exponent of MXFP4, with its 127, that leaves room for the factor of its numbers
MOST_EXPONENT = 128


def takes_group(width: int) -> bool:
    """Whether inputs that share a scale, 0 for all, are whole parts of a block or whole blocks."""
    return width % BLOCK == 0 or width in (PART, 2 * PART)


def to_words(codes: Tensor, kind: str) -> Tensor:
    """Codes uint8 [outs, ins] of one of FRAGMENTS -> words int32 [outs, blocks * 16]. Inputs behind the last
    are code 0."""
    whole = torch.nn.functional.pad(codes, (0, -codes.shape[1] % BLOCK))
    # a part is four times four pairs: which pairs a thread holds, and which thread
    each = whole.unflatten(1, (-1, PARTS, 4, 4, 2)).int()
    halves = torch.zeros_like(each[:, :, 0])
    for part in range(PARTS):
        halves |= _placed(each[:, :, part], part, kind)
    words = halves[..., 0] | (halves[..., 1] << 16)
    return words.transpose(2, 3).flatten(1)


def _placed(codes: Tensor, part: int, kind: str) -> Tensor:
    """Codes of a part at the bits of a half word that are theirs."""
    if kind == "fragments4":
        return codes << 4 * part
    if part < 3:
        return ((codes & 8) << 12 | (codes & 7) << 6) >> 3 * part
    return (codes & 12) << 11 | (codes & 3) << 10


def scale_words(scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Scales float32 [E, groups, outs] and zero points uint8, at most 16, of unsigned codes -> int32. Scales
    of up to 18 bits of mantissa, so all of those that a checkpoint has in 16 bits, stay as they are; others
    are rounded."""
    bits = (scales.view(torch.int32) + ZERO_BITS // 2 + 1) & ~ZERO_BITS
    return bits | (8 if zeros is None else zeros.int())


def exponent_words(exponents: Tensor) -> Tensor:
    """Exponents uint8 [E, outs, ins / 32] of MXFP4, at most MOST_EXPONENT -> int32 [E, blocks, outs]."""
    whole = torch.nn.functional.pad(exponents.int() + 126, (0, -exponents.shape[2] % PARTS))
    each = whole.unflatten(2, (-1, PARTS)).transpose(1, 2)
    return each[..., 0] | each[..., 1] << 8 | each[..., 2] << 16 | each[..., 3] << 24
