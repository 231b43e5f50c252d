"""Fused checkpoint tensors, of which a rank has a shard of each part: the rows of an input projection that
makes gate, input and time steps of a mixer, and the channels of its convolution."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.errors import ModelError
from runtime.layers.linear import Linear, OutputRows
from runtime.layers.weight import FormatLookup, Shard, SourceTensor, TensorReader, Weight, replicated_shard


def parts_source(
    shape: tuple[int, ...], parts: Sequence[Shard], target: Tensor, *, is_flat: bool = False
) -> SourceTensor:
    """A checkpoint tensor whose first dimension consists of `parts`, one after the other; this rank's shards
    of them go to `target` in the same order. `is_flat`: it may have dimensions of 1 around its numbers."""

    def load(reader: TensorReader) -> None:
        start = offset = 0
        found = reader[...].flatten() if is_flat else reader
        for part in parts:
            begin = start + part.start
            target[offset : offset + part.size].copy_(found[begin : begin + part.size])
            start += part.full
            offset += part.size

    others = ((1, 1, *shape, 1),) if is_flat else ()
    return SourceTensor(shape, 0, replicated_shard(shape[0]), load=load, other_shapes=others)


def parts_weight(
    device: Device, dtype: torch.dtype, parts: Sequence[Shard], *rest: int, is_flat: bool = False
) -> Weight:
    """A weight [sum of the parts, *rest] from one checkpoint tensor. `is_flat`: see parts_source."""
    target = torch.empty(sum(part.size for part in parts), *rest, dtype=dtype, device=device.torch_device)
    shape = (sum(part.full for part in parts), *rest)
    return Weight(target, {"": parts_source(shape, parts, target, is_flat=is_flat)})


class PartsLinear(Linear):
    """A column-parallel layer whose weight is one checkpoint tensor of several parts. With several ranks it
    cannot be quantized."""

    def __init__(
        self, device: Device, dtype: torch.dtype, inputs: int, parts: Sequence[Shard], *, bias: bool
    ) -> None:
        self.parts = list(parts)
        self.sizes = [part.size for part in parts]
        whole = Shard(sum(part.full for part in parts), 0, sum(self.sizes))
        super().__init__(device, dtype, inputs, {"": whole}, shard="column", bias=bias)

    def allocate(self, formats: FormatLookup) -> None:
        """See Layer.allocate. Raises ModelError."""
        super().allocate(formats)
        if self.device.collectives.size == 1:
            return
        if self.weight is None:
            raise ModelError(
                "the input projection of a recurrent layer is quantised here, which --tp-size 1 alone can "
                "read; set it, or take a checkpoint whose recurrent layers are not quantised"
            )
        for weight, rest in ((self.weight, (self.inputs.full,)), (self.bias, ())):
            if weight is not None:
                shape = (sum(part.full for part in self.parts), *rest)
                weight.sources[""] = parts_source(shape, self.parts, weight.tensor)

    def output_rows(self, part: str) -> list[OutputRows]:
        """See Linear.output_rows."""
        starts = accumulate((one.full for one in self.parts), initial=0)
        rows = [
            torch.arange(start + one.start, start + one.start + one.size)
            for one, start in zip(self.parts, starts, strict=False)
        ]
        return [OutputRows(0, torch.cat(rows))]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, in] -> the parts, [T, size] each."""
        return self.forward(x).split(self.sizes, dim=1)
