"""How single weights are quantised in the layouts of fp8, compressed-tensors, AWQ, GPTQ and modelslim.

Formulas are those of the formats' own tools, written down a second time: nothing here is imported from the
runtime.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Round = Callable[[Tensor], Tensor]  # activations -> what is computed with
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column in each place of a word
GROUP, SQUARE = 16, 32


@dataclass
class Written:
    """One weight: what the checkpoint gets in place of NAME.weight, and what that means."""

    tensors: dict[str, Tensor]
    means: Tensor
    rounds: Round = field(default=lambda x: x)
    bias: Tensor | None = None  # where it is another one then


def fp8(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def token_fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return fp8(x / scale).float() * scale


def block_fp8(x: Tensor) -> Tensor:
    return torch.cat([token_fp8(part) for part in x.split(SQUARE, -1)], -1)


def token_int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def static(scale: float, offset: int, low: int, high: int) -> Round:
    return lambda x: ((x / scale + offset).round().clamp(low, high) - offset) * scale


def words(codes: Tensor, order: tuple[int, ...], bits: int) -> Tensor:
    """int [..., n] -> int32 [..., n / codes in a word]; `order`: the column in each place."""
    per_word = 32 // bits
    out = torch.zeros(*codes.shape[:-1], codes.shape[-1] // per_word, dtype=torch.int64)
    for index, column in enumerate(order):
        out |= codes.long()[..., column::per_word] << index * bits
    return (
        out.to(torch.int32)
        if bits * per_word < 32
        else (out & 0xFFFFFFFF).sub(2**32 * (out >= 2**31)).to(torch.int32)
    )


def grouped(
    weight: Tensor, bits: int, group: int, symmetric: bool, of: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zeros [out, groups], and the group of each input."""
    size = weight.shape[1]
    of = torch.arange(size) // group if of is None else of
    codes, means = torch.empty(weight.shape, dtype=torch.int64), torch.empty_like(weight)
    scales, zeros = [], []
    for index in range(int(of.max()) + 1):
        part = weight[:, of == index]
        low, high = part.amin(1, keepdim=True).clamp(max=0), part.amax(1, keepdim=True).clamp(min=0)
        scale = (
            (
                part.abs().amax(1, keepdim=True) / 2 ** (bits - 1)
                if symmetric
                else (high - low) / (2**bits - 1)
            )
            .half()
            .float()
        )
        zero = (
            torch.full_like(scale, 2 ** (bits - 1))
            if symmetric
            else (-low / scale).round().clamp(1, 2**bits - 1)
        )
        code = (part / scale + zero).round().clamp(0, 2**bits - 1)
        codes[:, of == index], means[:, of == index] = code.long(), (code - zero) * scale
        scales.append(scale)
        zeros.append(zero.long())
    return codes, torch.cat(scales, 1), torch.cat(zeros, 1), means


def write_fp8(weight: Tensor, how: str) -> Written:
    if how == "block":
        rows, columns = (-(-size // SQUARE) for size in weight.shape)
        squares = [
            [weight[r * SQUARE : (r + 1) * SQUARE, c * SQUARE : (c + 1) * SQUARE] for c in range(columns)]
            for r in range(rows)
        ]
        scale = torch.tensor([[square.abs().max() / 448 for square in line] for line in squares])
        spread = scale.repeat_interleave(SQUARE, 0).repeat_interleave(SQUARE, 1)[
            : weight.shape[0], : weight.shape[1]
        ]
        codes = fp8(weight / spread)
        return Written({"weight": codes, "weight_scale_inv": scale}, codes.float() * spread, block_fp8)
    scale = weight.abs().max() / 448
    codes = fp8(weight / scale)
    tensors = {"weight": codes, "weight_scale": scale.reshape(())}
    if how == "dynamic":
        return Written(tensors, codes.float() * scale, token_fp8)
    return Written(
        tensors | {"input_scale": torch.tensor(0.01)},
        codes.float() * scale,
        lambda x: fp8(x / 0.01).float() * 0.01,
    )


def write_channel(weight: Tensor, kind: str, activations: str) -> Written:
    """compressed-tensors with a scale for each output."""
    most = 448 if kind == "float" else 127
    scale = weight.abs().amax(1, keepdim=True) / most
    codes = fp8(weight / scale) if kind == "float" else (weight / scale).round().to(torch.int8)
    tensors = {"weight": codes, "weight_scale": scale}
    if activations == "static":
        tensors |= {
            "input_scale": torch.tensor([0.03]),
            "input_zero_point": torch.tensor([5], dtype=torch.int8),
        }
        return Written(tensors, codes.float() * scale, static(0.03, 5, -128, 127))
    rounds: dict[str, Round] = {"float": token_fp8, "int": token_int8}
    return Written(tensors, codes.float() * scale, rounds[kind] if activations == "dynamic" else lambda x: x)


def write_packed(weight: Tensor, bits: int, symmetric: bool, order: bool) -> Written:
    of = (
        torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1])) // GROUP
        if order
        else None
    )
    codes, scales, zeros, means = grouped(weight, bits, GROUP, symmetric, of)
    line = tuple(range(32 // bits))
    tensors = {
        "weight_packed": words(codes, line, bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, line, bits).T.contiguous()
    if of is not None:
        tensors["weight_g_idx"] = of.int()
    return Written(tensors, means)


def write_awq(weight: Tensor) -> Written:
    codes, scales, zeros, means = grouped(weight, 4, GROUP, False)
    return Written(
        {
            "qweight": words(codes.T.contiguous(), AWQ_ORDER, 4),
            "qzeros": words(zeros.T.contiguous(), AWQ_ORDER, 4),
            "scales": scales.T.half().contiguous(),
        },
        means,
    )


def write_gptq(weight: Tensor, bits: int, symmetric: bool, order: bool, less: int) -> Written:
    of = torch.arange(weight.shape[1]) // GROUP
    if order:  # the same for all weights of the same input, as calibration would have it
        of = of[torch.randperm(len(of), generator=torch.Generator().manual_seed(len(of)))]
    codes, scales, zeros, means = grouped(weight, bits, GROUP, symmetric, of)
    line = tuple(range(32 // bits))
    return Written(
        {
            "qweight": words(codes, line, bits).T.contiguous(),
            "qzeros": words(zeros.T.contiguous() - less, line, bits),
            "scales": scales.T.half().contiguous(),
            "g_idx": of.int(),
        },
        means,
    )


def write_modelslim(weight: Tensor, kind: str, bias: Tensor | None) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / (7 if kind.startswith("W4") else 127)
    codes = (weight / scale).round().to(torch.int8)
    means = codes.float() * scale
    tensors: dict[str, Tensor] = {
        "weight": codes,
        "weight_scale": scale,
        "weight_offset": torch.zeros_like(scale),
    }
    if kind == "W8A8":
        total = codes.sum(1, dtype=torch.int32)
        extra = torch.zeros(len(codes)) if bias is None else bias / (scale[:, 0] * 0.03)
        tensors |= {
            "input_scale": torch.tensor([0.03]),
            "input_offset": torch.tensor([-7.0]),
            "deq_scale": scale[:, 0] * 0.03,
            "quant_bias": (7 * total + extra.round()).to(torch.int32),
        }
        return Written(
            tensors,
            means,
            static(0.03, -7, -128, 127),
            None if bias is None else extra.round() * scale[:, 0] * 0.03,
        )
    if kind == "W4A8_DYNAMIC":  # two outputs in a byte
        tensors["weight"] = (codes[::2] & 15 | codes[1::2] << 4).to(torch.int8)
        tensors["scale_bias"] = 8 * means.sum(1, keepdim=True)
    return Written(tensors, means, token_int8)


def write_second(weight: Tensor, bias: Tensor | None) -> Written:
    """W4A8 with a scale for each output and another for each group, one code in a byte."""
    codes, scales, _, means = grouped(weight, 4, GROUP, True)
    first = scales.amax(1, keepdim=True)
    second = scales / first
    tensors = {
        "weight": (codes - 8).to(torch.int8),
        "weight_scale": first,
        "weight_offset": torch.zeros_like(first),
        "weight_scale_second": second,
        "weight_offset_second": torch.zeros_like(second),
    }
    return Written(tensors, means, token_int8)


def config(
    format_: str, kind: str, bits: int, strategy: str, inputs: dict[str, Any] | None, **more: Any
) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy} | more
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignore = ["lm_head", "re:.*mlp.gate$"]
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


def inputs(kind: str, dynamic: bool, symmetric: bool = True) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": kind,
        "dynamic": dynamic,
        "strategy": "token" if dynamic else "tensor",
        "symmetric": symmetric,
    }
