"""Layouts of msModelSlim, tensor by tensor: see layouts.py."""

from dataclasses import replace
from functools import partial

import torch

from runtime.errors import ModelError
from runtime.layers.quantization.module_shard import (
    INTS,
    ModuleShard,
    ModuleTensors,
    Shapes,
    load_equal,
    load_scale,
    load_scale_factor,
    load_weight,
    pack_codes,
    read_all,
    require_zeros,
    shard_of,
    skip,
)
from runtime.layers.weight import FLOATS, Shard, TensorReader
from runtime.models.config.quantization_schemes import PackedInt


def load_quant_bias(module: ModuleShard, reader: TensorReader) -> None:
    """Reads modelslim's quant_bias [out]."""
    if module.loads_quant_bias:
        module.tensors["sums"].copy_(reader[module.rows])


def load_deq_scale(module: ModuleShard, reader: TensorReader) -> None:
    """Reads modelslim's deq_scale: float32, or its bits in the lower half of an int64."""
    values = read_all(reader)
    module.tensors["scale"].copy_(
        shard_of(module, values.int().view(torch.float32) if values.dtype == torch.int64 else values.float())
    )


def _pairs(shard: Shard) -> slice:
    """The bytes of a shard's codes, two in a byte. Raises ModelError where it begins or ends within one."""
    if shard.start % 2 or shard.size % 2:
        raise ModelError(
            f"--tp-size splits a layer's {shard.full} into {shard.size}, and the checkpoint has 2 codes in "
            "one byte; choose one that leaves multiples of 2"
        )
    return slice(shard.start // 2, (shard.start + shard.size) // 2)


def load_int4(module: ModuleShard, reader: TensorReader) -> None:
    """Reads modelslim's 4-bit codes: as int8, or two outputs in a byte, the first one in its lower half."""
    outputs = module.outputs
    if reader.get_shape()[0] == outputs.full:
        values = reader[module.rows, module.columns]
    else:
        packed_bytes = reader[_pairs(outputs), module.columns].contiguous().view(torch.uint8)
        values = torch.stack(((packed_bytes & 15), packed_bytes >> 4), 1).flatten(0, 1)
    module.tensors["weight"].copy_(pack_codes((values.view(torch.uint8) + 8) & 15, 4))


def modelslim(module: ModuleShard) -> ModuleTensors:
    """The tensors of msModelSlim's W8A8, W8A8_DYNAMIC and W4A8_DYNAMIC."""
    scheme, outputs, inputs = module.format.scheme, module.outputs.full, module.inputs.full
    column: Shapes = [(outputs, 1), (outputs,)]
    sources = {"weight_offset": module.source(column, require_zeros, (*FLOATS, *INTS), dummy_kind="zero")}
    optional = {"weight_offset", "bias"}
    if isinstance(scheme, PackedInt):
        groups = -(-inputs // scheme.group_size) if scheme.group_size else 0
        if module.outputs.size and module.tensors:
            module.tensors["scale"].fill_(1)
        flat = replace(module, group_ids=torch.zeros_like(module.group_ids))
        sources |= {
            "weight": module.source([(outputs, inputs), (outputs // 2, inputs)], load_int4, ("I8",)),
            "weight_scale": flat.source(column, load_scale_factor, dummy_kind="scale"),
            "scale_bias": module.source([(outputs, 1), (outputs, 16), (outputs,)], skip),
        }
        if groups:
            sources |= {
                "weight_scale_second": module.source(
                    [(outputs, groups)], load_scale_factor, dummy_kind="scale"
                ),
                "weight_offset_second": module.source(
                    [(outputs, groups)], require_zeros, (*FLOATS, *INTS), dummy_kind="zero"
                ),
            }
        return ModuleTensors(sources, optional | {"scale_bias", "weight_offset_second"})
    sources["weight"] = module.source([(outputs, inputs)], load_weight, ("I8",))
    if scheme.activations == "token":
        return ModuleTensors(
            sources | {"weight_scale": module.source(column, load_scale, dummy_kind="scale")}, optional
        )
    one: Shapes = [(1,), (), (1, 1)]
    sources |= {
        "weight_scale": module.source(column, skip, dummy_kind="scale"),
        "deq_scale": module.source(
            [(outputs,), (outputs, 1)], load_deq_scale, (*FLOATS, "I64"), dummy_kind="scale"
        ),
        "quant_bias": module.source([(outputs,)], load_quant_bias, ("I32",)),
        "input_scale": module.source(one, partial(load_equal, "input_scale"), dummy_kind="input scale"),
        "input_offset": module.source(
            one, partial(load_equal, "input_offset"), (*FLOATS, *INTS), dummy_kind="zero"
        ),
        "bias": module.source([(outputs,)], skip),
    }  # it is in quant_bias
    return ModuleTensors(sources, optional | {"weight_scale"})
