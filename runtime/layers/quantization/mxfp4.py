"""Stacks of weights in the microscaling format of 4 bits (MXFP4: Open Compute Project, 2023), as gpt-oss has
its experts.

    blocks  uint8 [E, outputs, inputs / 32, 16]  numbers of 4 bits (e2m1), the first of two in the lower half
                                                 of a byte
    scales  uint8 [E, outputs, inputs / 32]      exponent of the scale of 32 inputs, and 127
"""

from functools import partial

import torch
from torch import Tensor

from runtime.layers.quantization.float4 import VALUES
from runtime.layers.weight import Layer, Shard, SourceTensor, TensorReader, Weight

GROUP = 32  # inputs that share a scale


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Codes uint8 [..., groups, 16] and exponents uint8 [..., groups] -> float32 [..., inputs]. Exact."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    return torch.ldexp(VALUES.to(codes.device)[codes], scales.int().unsqueeze(-1) - 127).flatten(-2)


def is_whole(inputs: Shard) -> bool:
    """Whether a rank's inputs are whole groups."""
    return inputs.start % GROUP == 0 and inputs.size % GROUP == 0


class Mxfp4Stack(Layer):
    """One rank's rows and columns of a stack in a checkpoint: `blocks` and `scales`, kept as they are or read
    into a stack of plain numbers."""

    def __init__(
        self,
        num_experts: int,
        outputs: Shard,
        inputs: Shard,
        torch_device: torch.device,
        out: Tensor | None = None,
    ) -> None:
        """`out`: [E, inputs, outputs] of this rank. Without it `inputs` are whole groups."""
        self.outputs, self.inputs = outputs, inputs
        self.is_kept = out is None  # codes stay as they are
        groups = inputs.full // GROUP
        first, last = inputs.start // GROUP, -(-(inputs.start + inputs.size) // GROUP)
        self.groups = slice(first, last)
        self._parts: dict[str, Tensor] = {}  # what was read, while the other tensor is missing

        def weight(name: str, tensor: Tensor, *block: int) -> Weight:
            shape, load = (num_experts, outputs.full, groups, *block), partial(self._load, name)
            source = SourceTensor(shape, 1, outputs, load=load, dtypes=("U8",), dummy_kind=name)
            return Weight(tensor, {"": source})

        def octets(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.uint8, device=torch_device)

        shape = num_experts, outputs.size, last - first
        # plain numbers stand under the name of the blocks, and nothing under that of the scales
        self.blocks = weight("codes", octets(*shape, GROUP // 2) if out is None else out, GROUP // 2)
        self.scales = weight("exponents", octets(*shape) if out is None else octets(1))

    def _load(self, name: str, reader: TensorReader) -> None:
        read: Tensor = reader[:, self.outputs.range, self.groups]
        if self.is_kept:
            (self.blocks if name == "codes" else self.scales).tensor.copy_(read)
            return
        self._parts[name] = read
        if len(self._parts) == 2:
            self._fill(self.blocks.tensor)
            self._parts.clear()

    def _fill(self, out: Tensor) -> None:
        begin = self.inputs.start - self.groups.start * GROUP
        for expert, (codes, exponents) in enumerate(
            zip(self._parts["codes"], self._parts["exponents"], strict=True)
        ):
            numbers = dequantized(codes, exponents)
            out[expert].copy_(numbers[:, begin : begin + self.inputs.size].t())

    @property
    def tensor(self) -> Tensor:
        """The stack of plain numbers, [E, inputs, outputs] of this rank."""
        assert not self.is_kept, "plain numbers of a stack of codes"
        return self.blocks.tensor

    def coded(self) -> tuple[Tensor, Tensor]:
        """Codes uint8 [E, outputs, inputs / 2] and exponents uint8 [E, outputs, inputs / 32] of this rank."""
        return self.blocks.tensor.flatten(2), self.scales.tensor
