"""The causal short convolution of recurrent layers, and the layer that consists of one (LFM 2).

Each channel is convolved with its own kernel over its last K tokens. The state of a sequence is the last
K - 1 inputs of each channel, zeros at its beginning.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from runtime.devices.base import Device, ForwardBatch
from runtime.devices.state_rows import StateRows
from runtime.layers.linear import Linear, Reduction
from runtime.layers.recurrent.parts import PartsLinear, parts_weight
from runtime.layers.weight import Layer, Shard, even_shard
from runtime.models.config.recurrent_config import ShortConv


def state_rows(batch: ForwardBatch) -> StateRows:
    """The rows of a batch as recurrent layers see them."""
    assert batch.states is not None, "a recurrent layer in a batch without states"
    return batch.states


class CausalConv(Layer):
    """A depthwise causal convolution over the channels of this rank."""

    def __init__(
        self, device: Device, dtype: torch.dtype, channels: Sequence[Shard], kernel: int, *, bias: bool
    ) -> None:
        """`channels`: parts of the channels, in the checkpoint's order."""
        self.weight = parts_weight(device, dtype, channels, 1, kernel)
        self.bias = parts_weight(device, dtype, channels) if bias else None

    def forward(self, x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """x [T, C] -> [T, C]; `state` [state slots, C, K - 1] is read and written."""
        weight, num_decodes = self.weight.tensor, len(rows.decodes)
        bias = None if self.bias is None else self.bias.tensor
        outs = []
        if num_decodes:
            window = torch.cat((state[rows.decodes], x[:num_decodes].unsqueeze(2)), dim=2)
            state.index_put_((rows.decodes,), window[:, :, 1:])
            out = (window.float() * weight[:, 0].float()).sum(dim=2)
            outs.append((out if bias is None else out + bias.float()).to(x.dtype))
        for slot, begin, count in rows.extends:
            line = torch.cat((state[slot], x[begin : begin + count].T), dim=1)
            state[slot] = line[:, count:]
            outs.append(conv1d(line.unsqueeze(0), weight, bias, groups=len(weight))[0].T)
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class ShortConvMixer(Layer):
    """out(C * conv(B * x)), where B, C and x are projections of the input (LFM 2)."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        config: ShortConv,
        place: int,
        reduction: Reduction,
    ) -> None:
        """`place`: of the layer among the recurrent ones."""
        self.place = place
        own = even_shard(config.width, device.collectives, "convolution channels")
        self.in_proj = PartsLinear(device, dtype, hidden, [own] * 3, bias=config.has_bias)
        self.conv = CausalConv(device, dtype, [own], config.kernel, bias=config.has_bias)
        self.out_proj = Linear(
            device, dtype, config.width, {"": hidden}, shard="row", bias=config.has_bias, reduction=reduction
        )

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden] -> [T, hidden]; the states of the step's sequences move on."""
        rows = state_rows(batch)
        (state,) = rows.tensors[self.place]
        gate_in, gate_out, x = self.in_proj.split(x)
        return self.out_proj.forward(gate_out * self.conv.forward(gate_in * x, state, rows))
