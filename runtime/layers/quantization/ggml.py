"""What the blocks of ggml's types mean: uint8 [N, bytes of a block] -> float32 [N, numbers of a block].

    Q4_0 Q5_0 Q8_0     d * (code - half of the codes)              d: float16
    Q4_1 Q5_1          d * code + m                                m: float16
    Q2_K Q4_K Q5_K     d * scale * code - dmin * least             scale, least of 16 or 32 numbers
    Q3_K Q6_K          d * scale * (code - half of the codes)      scale of 16 numbers
    IQ4_NL IQ4_XS      d * table[code]                             XS: d * scale, of 32 numbers
    MXFP4              2^e * table[code]
    TQ1_0 TQ2_0        d * (code - 1)                              code: 0, 1 or 2; five in a byte of TQ1_0
    IQ1 IQ2 IQ3        d * scale * table[code], which the package `gguf` computes

The lower half of a byte belongs to the first part of its block. All products are exact in float32 (at most 24
bits), so there is one rounding at most, whatever the order.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from runtime.layers.quantization.float4 import VALUES
from runtime.models.config.gguf.types import BY_NAME, PLAIN, TABLED

IQ4_TABLE = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)
MXFP4_TABLE = 2 * VALUES  # ggml has twice the numbers: their exponent is less by one
DTYPES = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize_rows(name: str, rows: Tensor) -> Tensor:
    """Rows of a type as a file has them, uint8 [N, bytes], as float32 [N, numbers]."""
    if name in PLAIN:
        return rows.contiguous().view(DTYPES[name]).float()
    blocks = rows.reshape(-1, BY_NAME[name].num_bytes)
    if name in TABLED:
        return _from_tables(name, blocks).reshape(len(rows), -1)
    return READERS[name](blocks).reshape(len(rows), -1)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, float32 [N, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(octets: Tensor) -> Tensor:
    """[N, groups, bytes] -> [N, groups, 2 * bytes]: all lower halves, then all upper ones."""
    return torch.cat((octets & 15, octets >> 4), -1)


def _high_bits(octets: Tensor) -> Tensor:
    """The 32 bits of four bytes, the lowest first: [N, 4] -> [N, 32] of 0 and 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((octets.unsqueeze(-1) >> shifts & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | _high_bits(blocks[:, 2:6])
    return (codes.float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _high_bits(blocks[:, 4:8])
    return codes.float() * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _two_bits(octets: Tensor) -> Tensor:
    """[N, 64] -> [N, 16, 16]: of each 32 bytes first all lowest pairs of bits, then the next ones."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    return (octets.view(-1, 2, 1, 32) >> shifts & 3).reshape(-1, 16, 16)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, codes = blocks[:, :16], _two_bits(blocks[:, 16:80].contiguous())
    factors = (scales & 15).float() * _half(blocks, 80)
    least = (scales >> 4).float() * _half(blocks, 82)
    return codes.float() * factors.unsqueeze(-1) - least.unsqueeze(-1)


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    upper = torch.cat([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], 1)
    scales = (torch.cat((low & 15, low >> 4), 1) | upper).float() - 32
    bits = blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1) & 1
    codes = _two_bits(blocks[:, 32:96].contiguous()).float() - 4 + 4 * bits.reshape(-1, 16, 16).float()
    return codes * (scales * _half(blocks, 108)).unsqueeze(-1)


def _scales_and_leasts(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scales and leasts of Q4_K and Q5_K, times d and dmin: float32 [N, 8, 1] each."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1).float() * _half(blocks, 0)
    leasts = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1).float() * _half(blocks, 2)
    return scales.unsqueeze(-1), leasts.unsqueeze(-1)


def _halves_of_32(octets: Tensor) -> Tensor:
    """[N, 128] -> [N, 8, 32]: of each 32 bytes first the lower halves."""
    return _nibbles(octets.view(-1, 4, 32)).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, leasts = _scales_and_leasts(blocks)
    return _halves_of_32(blocks[:, 16:].contiguous()).float() * scales - leasts


def _q5_k(blocks: Tensor) -> Tensor:
    scales, leasts = _scales_and_leasts(blocks)
    bits = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1) & 1
    return (_halves_of_32(blocks[:, 48:].contiguous()) | bits << 4).float() * scales - leasts


def _q6_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    codes = _nibbles(low) | ((high >> shifts & 3) << 4).flatten(2)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return (codes.float() - 32).view(-1, 16, 16) * scales.unsqueeze(-1)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return IQ4_TABLE[_nibbles(blocks[:, 2:]).int()] * _half(blocks, 0)


def _iq4_xs(blocks: Tensor) -> Tensor:
    high = blocks[:, 2:4].repeat_interleave(4, 1) >> torch.tensor([0, 2, 4, 6] * 2, dtype=torch.uint8)
    low = blocks[:, 4:8].repeat_interleave(2, 1) >> torch.tensor([0, 4] * 4, dtype=torch.uint8)
    scales = ((low & 15 | (high & 3) << 4).float() - 32) * _half(blocks, 0)
    return IQ4_TABLE[_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).int()] * scales.unsqueeze(-1)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].int()
    bits = torch.where(exponent < 2, torch.tensor(0x200000) << exponent, (exponent - 1) << 23)
    return MXFP4_TABLE[_nibbles(blocks[:, 1:]).int()] * bits.int().view(torch.float32)


def _thirds(octets: Tensor, count: int) -> Tensor:
    """[N, bytes] -> [N, count * bytes]: of all bytes the first of their codes of base 3, then the second.
    A byte is a fraction of 256, from which a code is the whole part of three times it."""
    powers = torch.tensor([1, 3, 9, 27, 81][:count], dtype=torch.uint8)
    rest = octets.unsqueeze(1) * powers.view(1, -1, 1)  # modulo 256
    return (rest.int() * 3 >> 8).flatten(1)


def _tq1_0(blocks: Tensor) -> Tensor:
    parts = _thirds(blocks[:, :32], 5), _thirds(blocks[:, 32:48], 5), _thirds(blocks[:, 48:52], 4)
    return (torch.cat(parts, 1).float() - 1) * _half(blocks, 52)


def _tq2_0(blocks: Tensor) -> Tensor:
    return (_two_bits(blocks[:, :64].contiguous()).flatten(1).float() - 1) * _half(blocks, 64)


def _from_tables(name: str, blocks: Tensor) -> Tensor:
    """The numbers of blocks of the type `name`, float32, by the tables of the package `gguf`, without which
    files of these types are refused."""
    gguf = import_module("gguf")
    numbers = gguf.quants.dequantize(blocks.contiguous().numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(numbers).float()


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
