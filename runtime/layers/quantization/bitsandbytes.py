"""4-bit weights of bitsandbytes (QLoRA, Dettmers et al., 2023), dequantized while they are loaded.

weight             uint8 [out * in / 2, 1]: two codes, the first in the upper half of the byte
weight.quant_map   float32 [16]: the number that each code stands for (nf4 or fp4)
weight.absmax      float32 [blocks]: a factor for each block of consecutive numbers; with double
                   quantization uint8 codes of nested_quant_map, times nested_absmax, plus an offset
weight.quant_state.bitsandbytes__nf4   JSON in bytes: sizes of blocks, the offset
"""

from functools import partial

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from runtime.errors import ModelError
from runtime.layers.quantization.module_shard import ModuleShard, ModuleTensors, Shapes, read_all
from runtime.layers.weight import TensorReader

KINDS = ("nf4", "fp4")
STATES = tuple(f"weight_quant_state_bitsandbytes__{kind}" for kind in KINDS)


def _keep(name: str, module: ModuleShard, reader: TensorReader) -> None:
    module.tensors[name] = read_all(reader)


def bitsandbytes_4(module: ModuleShard) -> ModuleTensors:
    """The tensors of one module. Nested ones are there with double quantization alone, and one of the
    states."""
    count = module.outputs.full * module.inputs.full
    any_size: Shapes = [(-1,)]
    sizes: dict[str, tuple[Shapes, tuple[str, ...]]] = {
        "weight": ([(-(-count // 2), 1)], ("U8",)),
        "weight_absmax": (any_size, ("F32", "U8")),
        "weight_quant_map": ([(16,)], ("F32",)),
        "weight_nested_absmax": (any_size, ("F32",)),
        "weight_nested_quant_map": ([(256,)], ("F32",)),
        **dict.fromkeys(STATES, (any_size, ("U8",))),
    }
    sources = {
        name: module.source(shapes, partial(_keep, name), dtypes) for name, (shapes, dtypes) in sizes.items()
    }
    return ModuleTensors(sources, {name for name in sizes if "nested" in name or "state" in name})


class _State(Struct):
    """What quant_state says."""

    blocksize: int  # numbers that share a factor
    shape: list[int]
    nested_blocksize: int = 0
    nested_offset: float | None = None  # None: factors are not quantized


def _state(module: ModuleShard) -> _State | None:
    """None: it was not read. Raises ModelError for one of another form."""
    name = next((name for name in STATES if name in module.tensors), None)
    if name is None:
        return None
    try:
        return msgspec.json.decode(bytes(module.tensors[name].tolist()), type=_State)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(
            f"a quant_state of bitsandbytes cannot be read: {error}; download it again"
        ) from None


def is_complete(module: ModuleShard) -> bool:
    """Whether all tensors that the weight is made of were read."""
    found, state = module.tensors, _state(module)
    if state is None:
        return False
    return state.nested_offset is None or {"weight_nested_absmax", "weight_nested_quant_map"} <= set(found)


def bitsandbytes_meaning(module: ModuleShard) -> Tensor:
    """This rank's part of the weight, float32 [rows, columns]. Raises ModelError where tensors do not fit
    each other."""
    found, outputs, inputs = module.tensors, module.outputs.full, module.inputs.full
    fields = _state(module)
    assert fields is not None, "see is_complete"
    absmax = found["weight_absmax"].float()
    if fields.nested_offset is not None:
        codes = found["weight_absmax"].long()
        factors = found["weight_nested_absmax"].repeat_interleave(fields.nested_blocksize)
        absmax = found["weight_nested_quant_map"][codes] * factors[: len(codes)] + fields.nested_offset
    size, count = fields.blocksize, outputs * inputs
    if fields.shape != [outputs, inputs] or len(absmax) != -(-count // size):
        raise ModelError(
            f"a weight of bitsandbytes has shape {fields.shape} and {len(absmax)} blocks, but config.json "
            f"asks for [{outputs}, {inputs}]; use the config.json that belongs to these weights"
        )
    begin, end = module.rows.start * inputs, module.rows.stop * inputs
    octets = found["weight"].flatten()[begin // 2 : -(-end // 2)]
    codes = torch.stack((octets >> 4, octets & 15), -1).flatten()[begin % 2 :][: end - begin].int()
    blocks = torch.arange(begin, end) // size
    return (found["weight_quant_map"][codes] * absmax[blocks]).view(-1, inputs)[:, module.columns]
