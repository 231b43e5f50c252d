"""Layouts of a checkpoint whose codes lie in bytes, and not in words: floats of 4 bits, signed integers.

    layout           weight                            scales
    nvfp4            weight, uint8 [out, in/2]         weight_scale [out, groups], times weight_scale_2
    nvfp4_packed     weight_packed, the same           weight_scale, divided by weight_global_scale
    mxfp4            weight, the same                  weight_scale, uint8 exponents [out, groups]
    mxfp4_packed     weight_packed, the same           the same
    int4_bytes       weight, int8 [out, in/2]          weight_scale [out, groups]
    int8_bytes       weight, int8 [out, in]            weight_scale and weight_zero_point [out, groups]
    bitsandbytes_8   weight, int8 [out, in]            SCB [out], times 127

The first of two codes is in a byte's lower half. A float of 4 bits (E2M1) is a float8_e4m3 as well, so floats
of NVFP4 and MXFP4 are held as these, with the scales of their groups: nothing is rounded. ModelOpt multiplies
by the scale of a whole weight, compressed-tensors divides by it.
"""

import torch
from torch import Tensor

from runtime.layers.quantization.float4 import FP8_BYTES
from runtime.layers.quantization.module_shard import (
    INTS,
    SCALES,
    ModuleShard,
    ModuleTensors,
    Shapes,
    load_scale,
    load_scale_divisor,
    load_scale_factor,
    require_zeros,
    shard_of,
    skip,
    to_scales,
)
from runtime.layers.weight import FLOATS, TensorReader
from runtime.models.config.quantization_schemes import PackedInt

ONE: Shapes = [(1,), (), (1, 1)]
# layout -> names of the codes and of the scale of the whole weight
FLOAT4 = {
    "nvfp4": ("weight", "weight_scale_2"),
    "nvfp4_packed": ("weight_packed", "weight_global_scale"),
    "mxfp4": ("weight", None),
    "mxfp4_packed": ("weight_packed", None),
}


def _columns_of_pairs(module: ModuleShard, reader: TensorReader) -> Tensor:
    """Bytes of two codes each for this rank's columns, as codes uint8 [rows, columns]."""
    begin, end = module.inputs.start, module.inputs.start + module.inputs.size
    octets = reader[module.rows, begin // 2 : -(-end // 2)].contiguous().view(torch.uint8)
    codes = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
    return codes[:, begin % 2 : begin % 2 + end - begin]


def load_exponents(module: ModuleShard, reader: TensorReader) -> None:
    """Reads scales that are powers of two, as exponents of E8M0."""
    module.tensors["scale"].copy_(shard_of(module, to_scales(reader[...])))


def load_float4(module: ModuleShard, reader: TensorReader) -> None:
    """Reads E2M1 codes as float8_e4m3 numbers."""
    codes = _columns_of_pairs(module, reader)
    module.tensors["weight"].view(torch.uint8).copy_(FP8_BYTES[codes.long()])


def load_signed4(module: ModuleShard, reader: TensorReader) -> None:
    """Reads codes of -8 to 7 in two's complement, as codes of 0 to 15."""
    codes = _columns_of_pairs(module, reader) ^ 8
    module.tensors["weight"].copy_(codes[..., ::2] | codes[..., 1::2] << 4)


def load_signed(module: ModuleShard, reader: TensorReader) -> None:
    """Reads signed codes in a byte each, as unsigned ones around the middle of the scheme's."""
    bits = _bits(module)
    codes = (reader[module.rows, module.columns].int() + (1 << bits - 1)).to(torch.uint8)
    module.tensors["weight"].copy_(codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4)


def load_signed_zeros(module: ModuleShard, reader: TensorReader) -> None:
    """Reads zero points of signed codes."""
    zeros = shard_of(module, reader[...].int()) + (1 << _bits(module) - 1)
    module.tensors["zeros"].copy_(zeros.to(torch.uint8))


def load_scb(module: ModuleShard, reader: TensorReader) -> None:
    """Reads the largest value of each output, which has the code 127."""
    module.tensors["scale"].copy_(shard_of(module, reader[...].float() / 127))


def _bits(module: ModuleShard) -> int:
    assert isinstance(module.format.scheme, PackedInt)
    return module.format.scheme.bits


def _scales(module: ModuleShard) -> Shapes:
    group = getattr(module.format.scheme, "group_size", 0)
    outputs, inputs = module.outputs.full, module.inputs.full
    return [(outputs, -(-inputs // group))] if group else [(outputs, 1), (outputs,), (1,), (), (1, 1)]


def float4(module: ModuleShard) -> ModuleTensors:
    """NVFP4 and MXFP4 of ModelOpt, compressed-tensors, Quark and AutoRound."""
    name, total = FLOAT4[module.format.layout]
    packed: Shapes = [(module.outputs.full, module.inputs.full // 2)]
    if module.tensors and module.outputs.size:
        module.tensors["scale"].fill_(1)  # its factors are read in any order
    scale = load_exponents if total is None else load_scale_factor
    sources = {
        name: module.source(packed, load_float4, ("U8",)),
        "weight_scale": module.source(_scales(module), scale, SCALES, dummy_kind="wide scale"),
        "input_scale": module.source(ONE, skip),
        "input_global_scale": module.source(ONE, skip),
    }
    if total is not None:
        load = load_scale_factor if total == "weight_scale_2" else load_scale_divisor
        sources[total] = module.source(ONE, load, dummy_kind="one")
    return ModuleTensors(sources, {"input_scale", "input_global_scale"})


def int4_bytes(module: ModuleShard) -> ModuleTensors:
    """Experts of w4afp8."""
    shape: Shapes = [(module.outputs.full, module.inputs.full // 2)]
    return ModuleTensors(
        {
            "weight": module.source(shape, load_signed4, ("I8", "U8")),
            "weight_scale": module.source(_scales(module), load_scale, dummy_kind="scale"),
            "input_scale": module.source(ONE, skip),
        },
        {"input_scale"},
    )


def int8_bytes(module: ModuleShard) -> ModuleTensors:
    """torchao, and weights alone in 8 bits of compressed-tensors and Quark."""
    assert isinstance(module.format.scheme, PackedInt)
    has_zeros = module.format.scheme.has_zero_points
    zeros = load_signed_zeros if has_zeros else require_zeros
    return ModuleTensors(
        {
            "weight": module.source([(module.outputs.full, module.inputs.full)], load_signed, ("I8",)),
            "weight_scale": module.source(_scales(module), load_scale, dummy_kind="scale"),
            "weight_zero_point": module.source(_scales(module), zeros, (*INTS, *FLOATS), dummy_kind="zero"),
        },
        set() if has_zeros else {"weight_zero_point"},
    )


def bitsandbytes_8(module: ModuleShard) -> ModuleTensors:
    """LLM.int8() (Dettmers et al., 2022)."""
    return ModuleTensors(
        {
            "weight": module.source([(module.outputs.full, module.inputs.full)], load_signed, ("I8",)),
            "SCB": module.source([(module.outputs.full,)], load_scb, dummy_kind="wide scale"),
            "weight_format": module.source([()], skip, ("U8",)),
        },
        {"weight_format"},
    )
