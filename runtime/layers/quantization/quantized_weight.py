"""Quantized weights as they lie on a rank while a checkpoint fills them: the tensors of `Quantized`
(devices/operands.py).

The tensors of a checkpoint are converted as they are read (layouts.py), and only this rank's shard of them.
From here on it makes no difference which tool wrote the checkpoint.
"""

from collections.abc import Iterator

import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.base import Quantized, RowQuantizer
from runtime.errors import ModelError
from runtime.layers.quantization.allocate import input_groups
from runtime.layers.quantization.layouts import module_tensors
from runtime.layers.quantization.module_shard import ModuleShard
from runtime.layers.weight import Layer, Shard, SourceTensor, Weight
from runtime.models.config.quantization_schemes import Fp8, Full, Int8, PackedInt, WeightFormat

ROW_TENSORS = ("weight", "scale", "zeros", "sums")  # tensors that have a row for each output


class QuantizedWeight(Layer):
    """One quantized weight. Its children have the names that the checkpoint gives them."""

    def __init__(
        self,
        format: WeightFormat,
        outputs: dict[str, Shard],
        inputs: Shard,
        tensors: dict[str, Tensor],
        *,
        loads_quant_bias: bool,
        quantizer: RowQuantizer | None = None,
    ) -> None:
        """`tensors`: those of `allocate_quantized`; none are needed for shards of size 0. `loads_quant_bias`:
        of the ranks that split the inputs, one adds the checkpoint's quant_bias, which is for all of them.
        `quantizer`: the device's, for weights that are quantized while they are loaded.
        Raises ModelError for a split that leaves half a byte."""
        scheme = format.scheme
        if isinstance(scheme, PackedInt) and inputs.size * scheme.bits % 8:
            raise ModelError(
                f"--tp-size gives a rank {inputs.size} inputs of a layer with {scheme.bits}-bit weights; "
                "lower it"
            )
        self.format, self.tensors = format, tensors
        own = input_groups(scheme, inputs)
        self.scheme = (
            structs.replace(scheme, group_size=own.width) if isinstance(scheme, Fp8 | PackedInt) else scheme
        )
        sources: dict[str, dict[str, SourceTensor]] = {}
        optional: set[str] = set()
        offset, seen = 0, set[str]()
        for name, shard in outputs.items():
            rows = {
                key: t[offset : offset + shard.size] if key in ROW_TENSORS else t
                for key, t in tensors.items()
            }
            module = module_tensors(
                ModuleShard(format, rows, shard, inputs, own.ids, loads_quant_bias, seen, quantizer)
            )
            offset += shard.size
            for leaf, source in module.sources.items():
                sources.setdefault(leaf, {})[name] = source
            optional |= module.optional
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.weights = {
            leaf: Weight(torch.empty(0), parts, is_optional=leaf in optional)
            for leaf, parts in sources.items()
        }
        self.includes_bias = "quant_bias" in sources

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """The checkpoint's tensors, by their names."""
        yield from self.weights.items()


def quantized_operand(weight: QuantizedWeight, stack: dict[str, Tensor] | None = None) -> Quantized | Tensor:
    """The loaded weight as the device's operators take it; a tensor where it was dequantized. With `stack`,
    the tensors of a stack of weights, of which `weight` is any one."""
    format, scheme, tensors = weight.format, weight.scheme, stack or weight.tensors
    if isinstance(scheme, Full):
        return tensors["weight"]
    if format.layout == "compressed-tensors" and scheme == Int8("tensor"):
        codes, offset = tensors["weight"], tensors["input_offset"].int()
        tensors["sums"].copy_(-codes.sum(-1, dtype=torch.int32) * offset)
        tensors["scale"].mul_(tensors["input_scale"].unsqueeze(-1))
    return Quantized(scheme, **tensors)
