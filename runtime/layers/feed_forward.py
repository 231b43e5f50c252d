"""The dense feed-forwards of a layer."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from runtime.devices.base import Device, Gate
from runtime.devices.operands import NormInputs
from runtime.layers.fused_ops import fused_ops_of
from runtime.layers.linear import Linear, Reduction
from runtime.layers.weight import Layer, channel_shard, replicated_shard
from runtime.layers.xielu import Xielu
from runtime.models.config.block import Activation


class FeedForward(Layer):
    """SwiGLU: down(silu(gate(x)) * up(x)), or with another activation in place of silu (Shazeer, 2020).

    `reduction`: see Linear; with "none" each rank returns its partial sum. With `replicated` each rank has
    all of the weights, and only its own tokens pass it. `limit`: see clamped_silu_and_mul; 0: no clamp.
    """

    reads_once = True  # only the first projection reads what `forward` is given

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        reduction: Reduction = "all_reduce",
        replicated: bool = False,
        activation: Gate = "silu",
        limit: float = 0.0,
    ) -> None:
        self.ops, self.fused, self.limit = device.ops, fused_ops_of(device), limit
        self.activation: Gate = activation
        own = (
            replicated_shard(inner)
            if replicated
            else channel_shard(inner, device.collectives, "intermediate_size")
        )
        self.gate_up_proj = Linear(
            device,
            dtype,
            hidden,
            {"gate": own, "up": own},
            shard="replicated" if replicated else "column",
            bias=bias,
        )
        self.down_proj = Linear(
            device,
            dtype,
            own,
            {"": hidden},
            shard="replicated" if replicated else "row",
            bias=bias,
            reduction=reduction,
        )

    def leave_sum(self) -> None:
        """See Linear.leave_sum."""
        self.down_proj.leave_sum()

    @property
    def is_plain(self) -> bool:
        """Whether the gate is applied to the first product as it is."""
        first = self.gate_up_proj
        return first.lora is None and first.bias is None and not self.limit

    def of_norm(self, inputs: NormInputs) -> tuple[Tensor, Tensor] | None:
        """(`forward` of the norm that add_rms_norm makes of `inputs`, x + residual), where the device has one
        launch for the norm and the first product; None: it has none."""
        if not self.is_plain:
            return None
        found = self.fused.gated_product_of_norm(inputs, self.gate_up_proj.packed, self.activation)
        return None if found is None else (self.down_proj.forward(found[0]), found[1])

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        first = self.gate_up_proj
        if self.is_plain:
            gated = self.fused.gated_product(x, first.packed, self.activation)
            if gated is not None:
                return self.down_proj.forward(gated)
        gate_up = first.forward(x)
        if self.limit:
            return self.down_proj.forward(clamped_silu_and_mul(gate_up, self.limit))
        kind, feeds = self.activation, self.down_proj.packed
        found = self.fused.quantized_act(gate_up, kind, feeds) if self.down_proj.lora is None else None
        return self.down_proj.forward(
            self.fused.act_and_mul(gate_up, kind, feeds) if found is None else found
        )


def clamped_silu_and_mul(gate_up: Tensor, limit: float) -> Tensor:
    """min(silu(gate), limit) * clamp(up, -limit, limit): [..., 2 * inner] -> [..., inner] (Step 3.5)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


class ScaledFeedForward(FeedForward):
    """FeedForward with factors on the gate, before its activation, and on the output (Falcon-H1)."""

    gate_scale = out_scale = 1.0

    def of_norm(self, inputs: NormInputs) -> tuple[Tensor, Tensor] | None:
        """None: factors are between the two."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        gate, up = self.gate_up_proj.forward(x).chunk(2, dim=1)
        opened = self.ops.act_and_mul(torch.cat((gate * self.gate_scale, up), dim=1), self.activation)
        return self.down_proj.forward(opened) * self.out_scale


def _gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return relu(x).square()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": relu,
    "relu2": _relu2,
}


class PlainFeedForward(Layer):
    """down(act(up(x))), without a gate. `reduction`: see Linear."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        hidden: int,
        inner: int,
        activation: Activation,
        *,
        bias: bool,
        reduction: Reduction,
    ) -> None:
        self.act_fn = Xielu(device, dtype) if activation == "xielu" else None
        self.activate = ACTIVATIONS[activation] if self.act_fn is None else self.act_fn.forward
        own = channel_shard(inner, device.collectives, "intermediate_size")
        self.up = Linear(device, dtype, hidden, {"": own}, shard="column", bias=bias)
        self.down = Linear(device, dtype, own, {"": hidden}, shard="row", bias=bias, reduction=reduction)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down.forward(self.activate(self.up.forward(x)))
