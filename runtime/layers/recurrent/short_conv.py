"""The causal short convolution of recurrent layers, and the layer that consists of one (LFM 2).

Each channel is convolved with its own kernel over its last K tokens. The state of a sequence is the last
K - 1 inputs of each channel, zeros at its beginning.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from runtime.devices.base import Device, ForwardBatch
from runtime.devices.recurrent import RecurrentKernel, RecurrentSpec
from runtime.devices.state_rows import StateRows, VerifyRows
from runtime.layers.linear import Linear, Reduction
from runtime.layers.recurrent.parts import PartsLinear, parts_weight
from runtime.layers.recurrent.recurrence import in_order, state_rows
from runtime.layers.weight import Layer, Shard, SourceTensor, channel_shard
from runtime.models.config.recurrent_config import ShortConv


class CausalConv(Layer):
    """A depthwise causal convolution over the channels of this rank."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        channels: Sequence[Shard],
        kernel: int,
        *,
        bias: bool,
        names: Sequence[str] = (),
    ) -> None:
        """`channels`: parts of the channels, in the checkpoint's order. `names`: of the parts, where the
        checkpoint has a tensor of each."""
        self.weight = parts_weight(device, dtype, channels, 1, kernel)
        if names:
            offsets = accumulate((part.size for part in channels), initial=0)
            self.weight.sources = {
                name: SourceTensor((part.full, 1, kernel), 0, part, offset)
                for name, part, offset in zip(names, channels, offsets, strict=False)
            }
        self.bias = parts_weight(device, dtype, channels) if bias else None

    def forward(self, x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """x [T, C] -> [T, C]; `state` [state slots, C, K - 1] is read, and written for all rows but those of
        drafts."""
        weight, num_decodes = self.weight.tensor, len(rows.decodes)
        bias = None if self.bias is None else self.bias.tensor
        outs = []
        if num_decodes:
            window = torch.cat((state[rows.decodes], x[:num_decodes].unsqueeze(2)), dim=2)
            state.index_put_((rows.decodes,), window[:, :, 1:])
            outs.append(self._one(window))
        if rows.verifies is not None:
            outs.append(self._verify(x, state, rows.verifies))
        for slot, begin, count in rows.extends:
            line = torch.cat((state[slot], x[begin : begin + count].T), dim=1)
            state[slot] = line[:, count:]
            outs.append(conv1d(line.unsqueeze(0), weight, bias, groups=len(weight))[0].T)
        return in_order(outs, rows)

    def _one(self, window: Tensor) -> Tensor:
        """The last K inputs [R, C, K] -> [R, C]."""
        out = (window.float() * self.weight.tensor[:, 0].float()).sum(dim=2)
        return (out if self.bias is None else out + self.bias.tensor.float()).to(window.dtype)

    def _verify(self, x: Tensor, state: Tensor, rows: VerifyRows) -> Tensor:
        """Rows of drafts; see Recurrence."""
        size = state.shape[2]
        line = torch.cat((state[rows.slots], x[rows.places].transpose(1, 2)), dim=2)  # [V, C, K - 1 + N]
        outs = [self._one(line[:, :, node : node + size + 1]) for node in range(rows.places.shape[1])]

        def advance(counts: Tensor, slots: Tensor) -> None:
            last = counts.unsqueeze(1) + torch.arange(size, device=line.device)
            kept = line.gather(2, last.unsqueeze(1).expand(-1, line.shape[1], -1))
            state.index_put_((slots,), kept)

        rows.advances.append(advance)
        return torch.stack(outs, dim=1).flatten(0, 1)[rows.nodes]


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
        self.place, self.device = place, device
        self.kernel: RecurrentKernel | None = None  # None: torch computes
        own = channel_shard(config.width, device.collectives, "convolution channels")
        self.in_proj = PartsLinear(device, dtype, hidden, [own] * 3, bias=config.has_bias)
        self.conv = CausalConv(device, dtype, [own], config.kernel, bias=config.has_bias)
        self.out_proj = Linear(
            device, dtype, own, {"": hidden}, shard="row", bias=config.has_bias, reduction=reduction
        )

    def finish_loading(self) -> None:
        """See Layer.finish_loading."""
        if self.device.recurrent is not None:
            bias = None if self.conv.bias is None else self.conv.bias.tensor
            self.kernel = self.device.recurrent.open(
                RecurrentSpec("conv", 1, 1, 1, 1, self.conv.weight.tensor, bias)
            )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, hidden] -> inputs of the convolution and gates behind it, [T, channels] each."""
        gate_in, gate_out, x = self.in_proj.split(x)
        return gate_in * x, gate_out

    def attend(self, queries: tuple[Tensor, ...], batch: ForwardBatch) -> Tensor:
        """See TokenMixer; the states of the step's sequences move on."""
        (x, gate), rows = queries, state_rows(batch)
        (state,) = rows.tensors[self.place]
        if self.kernel is not None:
            return gate * self.kernel.forward(x, None, None, None, (state,), rows)
        return gate * self.conv.forward(x, state, rows)
