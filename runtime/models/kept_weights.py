"""Weights that need not be loaded, because a device has kept what it made of them (devices/packed.py)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.devices.packed import KeptMismatch
from runtime.layers.linear import LinearUse
from runtime.layers.quantization.quantized_weight import QuantizedWeight
from runtime.layers.weight import Layer, LayerTree, members, named_weights

META = torch.device("meta")


def quantized_weights(layer: LayerTree, prefix: str = "") -> Iterator[tuple[str, QuantizedWeight]]:
    """All quantized weights below a layer, with what the names of their tensors begin with."""
    for name, value in vars(layer).items():
        for index, child in members(value if isinstance(value, list) else [value]):
            path = f"{prefix}{name}.{index}." if isinstance(value, list) else f"{prefix}{name}."
            if isinstance(child, QuantizedWeight):
                yield prefix if name == "quantized" else path, child
            elif isinstance(child, Layer) and not isinstance(layer, LinearUse):  # its weight is another's
                yield from quantized_weights(child, path)


def storages(model: LayerTree) -> dict[str, set[int]]:
    """For each weight that the loader may fill, the addresses of the memory that it fills."""
    found = {name: {_address(weight.tensor)} for name, weight in named_weights(model)}
    for prefix, quantized in quantized_weights(model):
        addresses = {_address(tensor) for tensor in quantized.tensors.values()}
        found |= {prefix + leaf: addresses for leaf in quantized.weights}
    return {name: addresses - {0} for name, addresses in found.items()}


def replaced(model: LayerTree, before: dict[str, set[int]], packed: frozenset[int]) -> list[str]:
    """Names of the weights of which a loaded model has nothing but what was packed. `before`: `storages` of
    the model before it was loaded; `packed`: the memory that was packed."""
    left = {name for name, _ in named_weights(model)}
    return [name for name, addresses in before.items() if addresses <= packed and name not in left]


def leave_empty(model: LayerTree, names: frozenset[str]) -> None:
    """Takes the memory of weights that are not loaded. Whatever is computed of them is on the meta device as
    well, so that `check_complete` finds it."""
    if not names:
        return
    for name, weight in named_weights(model):
        if name in names:
            weight.tensor = weight.tensor.to(META)
    for prefix, quantized in quantized_weights(model):
        if any(prefix + leaf in names for leaf in quantized.weights):
            quantized.tensors.update({name: tensor.to(META) for name, tensor in quantized.tensors.items()})


def check_complete(tensors: Iterator[Tensor]) -> None:
    """Raises KeptMismatch where a loaded model computes with a weight that was not loaded."""
    for tensor in tensors:
        if tensor.is_meta:
            raise KeptMismatch("a layer computes with a weight that was not loaded")


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0
