"""Linear layers as data (devices/decoder_spec.py)."""

from runtime.devices.decoder_spec import LinearSpec
from runtime.layers.linear import Linear


def linear_spec(linear: Linear, scale: float = 1.0) -> LinearSpec:
    """The spec of a loaded layer, with a factor on what it returns."""
    bias = None if linear.bias is None else linear.bias.tensor
    lora = None if linear.lora is None else linear.lora.weights
    return LinearSpec(linear.packed, bias, linear.inputs.size, linear.size, lora, scale)
