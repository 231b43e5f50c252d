"""An activation with learned numbers (xIELU, Huang and Schlag, 2024)."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from runtime.devices.base import Device
from runtime.layers.weight import Layer, SourceTensor, TensorReader, Weight, replicated_shard


class Xielu(Layer):
    """p x² + b x where x > 0, and n (exp(min(x, eps)) - 1 - x) + b x elsewhere, with p = softplus(alpha_p)
    and n = b + softplus(alpha_n)."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self.alpha_p, self.alpha_n, self.beta, self.eps = (_number(device, dtype) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """[...] -> [...]."""
        beta, eps = self.beta.tensor, self.eps.tensor
        above, below = softplus(self.alpha_p.tensor), beta + softplus(self.alpha_n.tensor)
        negative = (torch.expm1(torch.minimum(x, eps)) - x) * below
        return torch.where(x > 0, above * x * x, negative) + beta * x


def _number(device: Device, dtype: torch.dtype) -> Weight:
    """One number, which checkpoints have in one dimension or in none."""
    tensor = torch.empty(1, dtype=dtype, device=device.torch_device)

    def load(reader: TensorReader) -> None:
        tensor.copy_(reader[...].reshape(1))

    return Weight(tensor, {"": SourceTensor((1,), 0, replicated_shard(1), load=load, other_shapes=((),))})
