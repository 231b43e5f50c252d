"""The head of a classifier or a reward model: hidden states to a number for each class."""

import torch
from torch import Tensor
from torch.nn.functional import relu

from runtime.devices.base import Device
from runtime.layers.parallel.replicated import ReplicatedLinear
from runtime.layers.weight import Layer


class RewardHead(Layer):
    """second(relu(first(x)))."""

    def __init__(self, device: Device, dtype: torch.dtype, hidden: int, size: int) -> None:
        self.first = ReplicatedLinear(device, dtype, hidden, hidden, bias=True)
        self.second = ReplicatedLinear(device, dtype, hidden, size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, size]."""
        return self.second.forward(relu(self.first.forward(x)))
