"""Weights whose blocks of ggml's types stay as a GGUF file has them, until a device packs them."""

from collections.abc import Iterator
from functools import partial

import torch

from runtime.devices.base import Device
from runtime.devices.packed import GgmlPart, PackedRows, PackedWeight
from runtime.layers.quantization.ggml_rows import GgmlRows
from runtime.layers.weight import Layer, Shard, SourceTensor, TensorReader, Weight
from runtime.models.config.gguf.types import BY_NAME
from runtime.models.config.quantization_schemes import Ggml, WeightFormat


class GgmlWeight(Layer):
    """One weight, of several parts if it is fused. Its tensors are views of the mapped file; those that are
    not loaded are on the meta device."""

    def __init__(self, scheme: Ggml, outputs: dict[str, Shard], inputs: Shard) -> None:
        """The ranks' shards of inputs begin and end with blocks."""
        self.outputs, self.inputs = outputs, inputs
        types = dict(scheme.types)
        self.parts = {name: _not_loaded(types[name], shard, inputs) for name, shard in outputs.items()}
        sources, offset = {}, 0
        for name, shard in outputs.items():
            shape = (shard.full, inputs.full)
            sources[name] = SourceTensor(shape, 0, shard, offset, load=partial(self._take, name))
            offset += shard.size
        self.weight = Weight(torch.empty(0), sources)
        self.num_bytes = sum(part.rows.nbytes for part in self.parts.values())

    def _take(self, name: str, reader: TensorReader) -> None:
        assert isinstance(reader, GgmlRows), "only GGUF files have ggml's types"
        self.parts[name] = reader.packed(self.outputs[name].range, self.inputs.range)

    def children(self) -> Iterator[tuple[str, Layer | Weight]]:
        """The checkpoint's tensor."""
        yield "weight", self.weight

    def pack(self, device: Device) -> PackedWeight:
        """What the device computes with. Call it once, when the weight is loaded."""
        assert device.ggml is not None
        return device.ggml.pack([self.parts[name] for name in self.outputs])

    def pack_rows(self, device: Device) -> PackedRows:
        """What the device computes with, of a weight whose rows are read as well: an embedding that is the
        head too. Call it once, when the weight is loaded."""
        packed = self.pack(device)
        assert isinstance(packed, PackedRows), "a device that packs ggml's types reads their rows"
        return packed


def _not_loaded(type: str, outputs: Shard, inputs: Shard) -> GgmlPart:
    """A part without its numbers: a device has kept what it makes of them, or none is asked for."""
    row_bytes = inputs.size // BY_NAME[type].block * BY_NAME[type].num_bytes
    rows = torch.empty(outputs.size, row_bytes, dtype=torch.uint8, device="meta")
    return GgmlPart(type, rows, torch.empty(outputs.size, dtype=torch.int64, device="meta"), inputs.size)


def ggml_weight(
    device: Device, dtype: torch.dtype, format: WeightFormat | None, outputs: dict[str, Shard], inputs: Shard
) -> GgmlWeight | None:
    """The weight, if its format is of ggml and the device computes it in this dtype; None: the loader
    dequantizes what the file has."""
    if format is None or not isinstance(format.scheme, Ggml) or device.ggml is None:
        return None
    types = dict(format.scheme.types)
    blocks = [BY_NAME[types[name]].block for name in outputs]
    is_whole = all(inputs.start % block == 0 and inputs.size % block == 0 for block in blocks)
    parts = [(types[name], shard.size) for name, shard in outputs.items()]
    if not is_whole or not device.ggml.computes(parts, dtype):
        return None
    return GgmlWeight(format.scheme, outputs, inputs)


def without_ggml(format: WeightFormat | None) -> WeightFormat | None:
    """The format of a weight that is not of ggml; None: it is loaded as a plain one."""
    return None if format is not None and isinstance(format.scheme, Ggml) else format
