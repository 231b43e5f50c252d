"""Linear layers that a text's vector passes after pooling (Dense modules of sentence-transformers)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from runtime.devices.base import Device
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.weight import Layer
from runtime.models.config.dense_modules import DenseActivation, DenseModule

ACTIVATIONS: dict[DenseActivation, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": gelu,
    "silu": silu,
    "sigmoid": torch.sigmoid,
}


class Projections(Layer):
    """The layers in order, in float32. Checkpoints have their weights as `projections.layers.N`."""

    def __init__(self, device: Device, modules: tuple[DenseModule, ...]) -> None:
        self.layers = [
            ReplicatedLinear(device, torch.float32, one.inputs, one.outputs, bias=one.has_bias)
            for one in modules
        ]
        self.activations = [ACTIVATIONS.get(one.activation) for one in modules]

    def forward(self, x: Tensor) -> Tensor:
        """[N, inputs] -> float32 [N, outputs]."""
        x = x.float()
        for layer, activate in zip(self.layers, self.activations, strict=True):
            x = layer.forward(x)
            x = x if activate is None else activate(x)
        return x
