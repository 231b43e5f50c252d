"""How quantization tools write a weight to a checkpoint, tensor by tensor, and how each tensor is read.

    layout      weight                                scales                   other tensors
    fp8         weight, float8 [out, in]              weight_scale(_inv)       input_scale
    compressed  weight, float8 or int8 [out, in]      weight_scale             input_scale, input_zero_point
    packed      weight_packed, int32 [out, in/n]      weight_scale             weight_zero_point, weight_g_idx
    awq         qweight, int32 [in, out/n], shuffled  scales [groups, out]     qzeros
    gptq        qweight, int32 [in/n, out]            scales [groups, out]     qzeros (less 1; not v2), g_idx
    modelslim   weight, int8 [out, in], or packed     deq_scale, weight_scale  input_scale, quant_bias, ...
    online      weight, not quantized                 computed from it

n is the number of codes in a 32-bit word; the first code is in the lowest bits, except in the shuffled order
of awq. byte_layouts.py and bitsandbytes.py have the layouts of codes in bytes, tiled_layouts.py those of
codes in tiles.
"""

from collections.abc import Callable
from functools import partial
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from runtime.errors import ModelError
from runtime.layers.quantization.bitsandbytes import bitsandbytes_4
from runtime.layers.quantization.byte_layouts import bitsandbytes_8, float4, int4_bytes, int8_bytes
from runtime.layers.quantization.modelslim import modelslim
from runtime.layers.quantization.module_shard import (
    INTS,
    SCALES,
    ModuleShard,
    ModuleTensors,
    Shapes,
    load_equal,
    load_largest,
    load_scale,
    load_scale_transposed,
    load_weight,
    pack_codes,
    read_all,
    require_no_bias,
    require_zeros,
    shard_of,
    skip,
)
from runtime.layers.quantization.tiled_layouts import marlin, qoq
from runtime.layers.quantization.while_loading import dequantized_module
from runtime.layers.weight import FLOATS, Shard, TensorReader
from runtime.models.config.quantization_schemes import Fp8, Full, Int8, PackedInt

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # for each of eight columns, the index of its code in the word
FP8_MAX = 448.0
ONLINE_COUNT = 1 << 17  # numbers that are quantized at once
HALF_MAX = 65504.0  # of float16


def _scale_shapes(module: ModuleShard) -> Shapes:
    outputs, block_rows = module.outputs.full, module.format.block_rows
    group = getattr(module.format.scheme, "group_size", 0)
    if block_rows:
        return [(-(-outputs // block_rows), -(-module.inputs.full // group))]
    if group:
        return [(outputs, -(-module.inputs.full // group))]
    return [(outputs, 1), (outputs,), (1,), (), (1, 1)]


def _fp8_or_int8(module: ModuleShard) -> ModuleTensors:
    scheme, full = module.format.scheme, [(module.outputs.full, module.inputs.full)]
    sources = {
        "weight": module.source(full, load_weight, ("F8_E4M3",) if isinstance(scheme, Fp8) else ("I8",)),
        "weight_scale": module.source(_scale_shapes(module), load_scale, SCALES, dummy_kind="scale"),
    }
    optional = set()
    if not isinstance(scheme, Fp8):
        sources["weight_zero_point"] = module.source(_scale_shapes(module), require_zeros, (*INTS, *FLOATS))
        optional = {"weight_zero_point"}
    if scheme.activations != "tensor":
        return ModuleTensors(sources, optional)
    one: Shapes = [(1,), (), (1, 1)]
    if isinstance(scheme, Fp8):
        return ModuleTensors(
            sources
            | {
                "input_scale": module.source(
                    one, partial(load_largest, "input_scale"), dummy_kind="input scale"
                )
            }
        )
    sources["input_scale"] = module.source(one, partial(load_equal, "input_scale"), dummy_kind="input scale")
    sources["input_zero_point"] = module.source(
        one, partial(load_equal, "input_offset"), (*INTS, *FLOATS), dummy_kind="zero"
    )
    return ModuleTensors(sources, optional | {"input_zero_point"})


def _packing(module: ModuleShard) -> tuple[PackedInt, int, int]:
    """The scheme, the number of codes in a word, and the number of input groups in the checkpoint."""
    scheme = module.format.scheme
    assert isinstance(scheme, PackedInt)
    groups = -(-module.inputs.full // scheme.group_size) if scheme.group_size else 1
    return scheme, 32 // _code_bits(module), groups


def _code_bits(module: ModuleShard) -> int:
    """Bits of a code in the checkpoint."""
    return module.format.code_bits or getattr(module.format.scheme, "bits", 0)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Codes of 32-bit words: int32 [..., n] -> uint8 [..., 32 * n / bits]. Codes follow each other without
    gaps, so that codes of 3 bits may begin in one word and end in the next."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    if bits == 4:
        return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
    if bits == 2:
        return torch.stack([octets >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    run = octets.unflatten(-1, (-1, bits)).long()  # eight codes each
    joined = sum(run[..., i] << 8 * i for i in range(bits))
    assert isinstance(joined, Tensor)
    codes = [joined >> bits * i & (1 << bits) - 1 for i in range(8)]
    return torch.stack(codes, -1).flatten(-2).to(torch.uint8)


def _word_range(shard: Shard, bits: int) -> slice:
    """The words of a shard's codes. Raises ModelError where the shard begins or ends within a run of words
    that holds whole codes."""
    run = 32 // gcd(bits, 32)  # codes in the shortest run of whole words
    if shard.start % run or shard.size % run:
        raise ModelError(
            f"--tp-size splits a layer's {shard.full} into {shard.size}, and the checkpoint has {run} "
            f"codes of {bits} bits side by side; choose one that leaves multiples of {run}"
        )
    return slice(shard.start * bits // 32, (shard.start + shard.size) * bits // 32)


def load_packed(module: ModuleShard, reader: TensorReader) -> None:
    """Reads words [out, in/n] of compressed-tensors."""
    bits = _code_bits(module)
    words: Tensor = reader[module.rows, _word_range(module.inputs, bits)]
    if bits in (4, 8):
        module.tensors["weight"].copy_(words.contiguous().view(torch.uint8))
    else:
        module.tensors["weight"].copy_(pack_codes(unpack_words(words, bits), 4))


def load_gptq(module: ModuleShard, reader: TensorReader) -> None:
    """Reads words [in/n, out] of gptq."""
    bits = _code_bits(module)
    words: Tensor = reader[_word_range(module.inputs, bits), module.rows]
    if bits in (4, 8):
        module.tensors["weight"].copy_(words.T.contiguous().view(torch.uint8))
    else:
        module.tensors["weight"].copy_(pack_codes(unpack_words(words.T, bits), 4))


def _unshuffle_awq(codes: Tensor) -> Tensor:
    return codes.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2)


def load_awq(module: ModuleShard, reader: TensorReader) -> None:
    """Reads shuffled words [in, out/n] of awq."""
    scheme = _packing(module)[0]
    words: Tensor = reader[module.columns, _word_range(module.outputs, 4)]
    module.tensors["weight"].copy_(
        pack_codes(_unshuffle_awq(unpack_words(words, scheme.bits)).T.contiguous(), scheme.bits)
    )


def load_zeros(unpack: Callable[[Tensor, int], Tensor], module: ModuleShard, reader: TensorReader) -> None:
    """Reads zero points; `unpack` gives them as [out, groups]."""
    module.tensors["zeros"].copy_(
        shard_of(module, unpack(read_all(reader), _code_bits(module))[: module.outputs.full])
    )


def _packed(module: ModuleShard) -> ModuleTensors:
    scheme, per_word, groups = _packing(module)
    outputs, inputs = module.outputs.full, module.inputs.full
    sources = {
        "weight_packed": module.source([(outputs, -(-inputs // per_word))], load_packed, ("I32",)),
        "weight_scale": module.source([(outputs, groups)], load_scale, dummy_kind="scale"),
        "weight_shape": module.source([(2,)], skip, INTS),
    }
    if scheme.has_zero_points:
        unpack = partial(load_zeros, lambda words, bits: unpack_words(words.T, bits).T)
        sources["weight_zero_point"] = module.source([(-(-outputs // per_word), groups)], unpack, ("I32",))
    if scheme.has_g_idx:
        sources["weight_g_idx"] = module.source(
            [(inputs,)], partial(load_equal, "order"), INTS, dummy_kind="zero"
        )
    return ModuleTensors(sources, {"weight_shape"})


def _awq(module: ModuleShard) -> ModuleTensors:
    scheme, per_word, groups = _packing(module)
    outputs, inputs = module.outputs.full, module.inputs.full
    unpack = partial(load_zeros, lambda words, bits: _unshuffle_awq(unpack_words(words, bits)).T)
    return ModuleTensors(
        {
            "qweight": module.source([(inputs, outputs // per_word)], load_awq, ("I32",)),
            "qzeros": module.source([(groups, outputs // per_word)], unpack, ("I32",)),
            "scales": module.source([(groups, outputs)], load_scale_transposed, dummy_kind="scale"),
        }
    )


def require_plain_groups(module: ModuleShard, reader: TensorReader) -> None:
    """Raises ModelError unless inputs are in groups in their own order."""
    group = getattr(module.format.scheme, "group_size", 0) or module.inputs.full
    if not torch.equal(read_all(reader).long(), torch.arange(module.inputs.full) // group):
        raise ModelError(
            "g_idx has groups in an order of their own, but quantization_config has no desc_act; restore "
            "config.json"
        )


def _gptq(module: ModuleShard) -> ModuleTensors:
    scheme, _, groups = _packing(module)
    bits = _code_bits(module)
    outputs, inputs = module.outputs.full, module.inputs.full
    less = 0 if module.format.layout == "gptq_v2" else 1
    unpack = partial(load_zeros, lambda words, bits: unpack_words(words, bits).T + less)
    order = partial(load_equal, "order") if scheme.has_g_idx else require_plain_groups
    return ModuleTensors(
        {
            "qweight": module.source([(inputs * bits // 32, outputs)], load_gptq, ("I32",)),
            "qzeros": module.source([(groups, outputs * bits // 32)], unpack, ("I32",)),
            "scales": module.source([(groups, outputs)], load_scale_transposed, dummy_kind="scale"),
            "g_idx": module.source([(inputs,)], order, INTS, dummy_kind="zero"),
            "bias": module.source([(outputs,)], require_no_bias),
        },
        {"bias"} if scheme.has_g_idx else {"bias", "g_idx"},
    )


def load_online(module: ModuleShard, reader: TensorReader) -> None:
    """Quantizes a plain weight. Scales come from whole rows, so that any split over ranks gives the same
    model. A block of rows at a time, by all threads: what is made of it stays in a cache."""
    values = reader[module.rows, :]
    if _by_device(module, values):
        return
    quantize = _online_codes if isinstance(module.format.scheme, PackedInt) else _online_numbers
    step = max(1, ONLINE_COUNT // max(1, values.shape[1]))
    for begin in range(0, len(values), step):
        rows = slice(begin, begin + step)
        weight, scale = quantize(module, values[rows].float())
        module.tensors["weight"][rows].copy_(weight)
        module.tensors["scale"][rows].copy_(scale)


def _by_device(module: ModuleShard, values: Tensor) -> bool:
    """Has the device quantize plain rows, where it can and this rank has all inputs. -> whether it did"""
    weight, scheme = module.tensors["weight"], module.format.scheme
    has_way = isinstance(scheme, Int8) or (isinstance(scheme, PackedInt) and scheme.bits == 4)
    if module.quantizer is None or weight.device.type != "cpu" or not has_way:
        return False
    if module.inputs.size != module.inputs.full:
        return False
    group = scheme.group_size if isinstance(scheme, PackedInt) else 0
    return module.quantizer.quantize(values, group, weight, module.tensors["scale"])


def _online_numbers(module: ModuleShard, values: Tensor) -> tuple[Tensor, Tensor]:
    """Float8 or int8 numbers of plain rows [rows, inputs], and the scale of each row."""
    most = FP8_MAX if isinstance(module.format.scheme, Fp8) else 127.0
    scale = (values.abs().amax(1, keepdim=True) / most).clamp_(min=1e-12)
    values = (values[:, module.columns] / scale).clamp_(-most, most)
    return values.round_() if isinstance(module.format.scheme, Int8) else values, scale


def _online_codes(module: ModuleShard, values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes around the middle one of plain rows [rows, inputs], and the scales of their groups. Of each group
    the number that is farthest from 0 becomes code 0 whatever its sign is, and is exact but for the rounding
    of its scale to float16."""
    scheme = module.format.scheme
    assert isinstance(scheme, PackedInt)
    group, middle = scheme.group_size or values.shape[1], 1 << scheme.bits - 1
    grouped = pad(values, (0, -values.shape[1] % group)).unflatten(1, (-1, group))
    farthest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))
    scale = (farthest / -middle).clamp_(-HALF_MAX, HALF_MAX)
    if scheme.bits == 4:
        scale = scale.half().float()
    codes = (grouped / torch.where(scale == 0, 1, scale)).round_().add_(middle).clamp_(0, 2 * middle - 1)
    own = codes.to(torch.uint8).flatten(1)[:, module.columns]
    return pack_codes(own, scheme.bits), scale[:, module.group_ids.to(scale.device), 0]


def _online(module: ModuleShard) -> ModuleTensors:
    return ModuleTensors({"weight": module.source([(module.outputs.full, module.inputs.full)], load_online)})


LAYOUTS: dict[str, Callable[[ModuleShard], ModuleTensors]] = {
    "fp8": _fp8_or_int8,
    "compressed-tensors": _fp8_or_int8,
    "packed": _packed,
    "awq": _awq,
    "gptq": _gptq,
    "gptq_v2": _gptq,
    "modelslim": modelslim,
    "online": _online,
    "nvfp4": float4,
    "nvfp4_packed": float4,
    "mxfp4": float4,
    "mxfp4_packed": float4,
    "int4_bytes": int4_bytes,
    "int8_bytes": int8_bytes,
    "bitsandbytes_4": bitsandbytes_4,
    "bitsandbytes_8": bitsandbytes_8,
    "marlin": marlin,
    "qoq": qoq,
    "qoq_groups": qoq,
}


def module_tensors(module: ModuleShard) -> ModuleTensors:
    """The tensors that a checkpoint has for this module."""
    layout = LAYOUTS[module.format.layout]
    return dequantized_module(module, layout) if isinstance(module.format.scheme, Full) else layout(module)
