"""Weights in the layouts of Marlin and of QServe's QoQ, whose codes lie as a kernel of one GPU reads them.

Formulas are those of the formats' own tools (IST-DASLab/marlin, mit-han-lab/omniserve), written down a second
time.
"""

from typing import Any

import torch
from torch import Tensor

from tests.models.quantisers import Written, grouped, token_int8, words

GROUP = 128
# sizes of a checkpoint whose weights are whole tiles
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def write_marlin(weight: Tensor, group: int) -> Written:
    """Codes around 8 in tiles, scales in the order in which threads read them."""
    size = group or weight.shape[1]
    codes, scales, _, means = grouped(weight, 4, size, True)
    outputs, inputs = weight.shape
    shuffled = torch.empty(inputs // 16, outputs * 16, dtype=torch.int64)
    for tile in range(outputs // 64):
        for lane in range(32):
            for step in range(4):
                column = 64 * tile + 16 * step + lane // 4
                row = 2 * (lane % 4)
                places = [(row + i, column + 8 * half) for half in (0, 1) for i in (0, 1, 8, 9)]
                for place, source in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                    inner, outer = places[source]
                    shuffled[:, 1024 * tile + 32 * lane + 8 * step + place] = codes[outer, inner::16]
    line = scales.T.contiguous()
    if size < inputs:
        line = line.view(len(line), -1, 8, 8).transpose(2, 3).flatten(1)
    else:
        line = line.view(1, -1, 4, 4, 2).transpose(2, 3).flatten(1)
    tensors = {"B": words(shuffled, tuple(range(8)), 4), "s": line.half()}
    return Written(tensors | {"workspace": torch.zeros(outputs // 64 * 16, dtype=torch.int32)}, means)


def qoq_bytes(codes: Tensor) -> Tensor:
    """int [out, in] -> int8 [out, in/2]: of each 32 x 32 codes those of row 8 * b + r and column 16 * c + 4 *
    lane + i, and in the upper half of a byte those 16 rows below."""
    outputs, inputs = codes.shape
    found = torch.empty(outputs // 32, inputs // 32, 8, 4, 2, 2, 4, dtype=torch.int64)
    for r in range(8):
        for lane in range(4):
            for c in range(2):
                for b in range(2):
                    for i in range(4):
                        part = codes[8 * b + r :: 16, 16 * c + 4 * lane + i :: 32]
                        found[:, :, r, lane, c, b, i] = part[::2] | part[1::2] << 4
    return found.to(torch.uint8).view(torch.int8).reshape(outputs, inputs // 2)


def qoq_order(values: Tensor) -> Tensor:
    """[out, groups] -> [groups, out], of each 32 outputs 0, 8, 16, 24, 1, 9 and so on."""
    order = torch.tensor([8 * i + j for j in range(8) for i in range(4)])
    return values.T.view(values.shape[1], -1, 32)[..., order].flatten(1).contiguous()


def write_qoq(weight: Tensor, has_groups: bool) -> Written:
    if not has_groups:
        codes, scales, zeros, means = grouped(weight, 4, weight.shape[1], False)
        tensors = {"qweight": qoq_bytes(codes), "s1_scales": scales[:, 0].half()}
        return Written(tensors | {"s1_szeros": (scales * zeros)[:, 0].half()}, means, token_int8)
    first = (weight.abs().amax(1, keepdim=True) / 119).half().float()
    whole = (weight / first).round().unflatten(1, (-1, GROUP))
    low, high = whole.amin(2, keepdim=True).clamp(max=0), whole.amax(2, keepdim=True).clamp(min=0)
    second = ((high - low) / 15).ceil().clamp(min=1)
    zero = (-low / second).round()
    codes = (whole / second + zero).round().clamp(0, 15)
    means = ((codes - zero) * second).flatten(1) * first
    tensors = {
        "qweight": qoq_bytes(codes.flatten(1).long()),
        "s1_scales": first[:, 0].half(),
        "s2_scales": qoq_order(second[..., 0]).to(torch.int8),
        "s2_zeros": qoq_order((-zero * second)[..., 0]).to(torch.int8),
    }
    return Written(tensors, means, token_int8)


TILED: dict[str, Any] = {
    "marlin": (
        lambda w, b: write_marlin(w, GROUP),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "marlin"},
    ),
    "marlin channel": (lambda w, b: write_marlin(w, 0), {"quant_method": "marlin", "group_size": -1}),
    "qoq": (lambda w, b: write_qoq(w, False), {"quant_method": "qoq", "wbits": 4, "group_size": -1}),
    "qoq groups": (lambda w, b: write_qoq(w, True), {"quant_method": "qoq", "wbits": 4, "group_size": GROUP}),
}
