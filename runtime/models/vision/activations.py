"""Activations of encoders, by the names of config.json."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu


def activate(name: str, x: Tensor) -> Tensor:
    """The activation of this name: one of ACTIVATIONS in models/config/media_config.py."""
    match name:
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "gelu_pytorch_tanh":
            return gelu(x, approximate="tanh")
        case "relu":
            return relu(x)
        case "silu":
            return silu(x)
    return gelu(x)
