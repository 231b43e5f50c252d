"""Weights that are dequantized while they are loaded: no kernel computes with what the checkpoint has.

The tensors of a module are read to the host, and given up as soon as the weight has been made of them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Lock

import torch
from msgspec import structs
from torch import Tensor

from runtime.devices.base import Quantized
from runtime.layers.quantization.allocate import allocate_quantized, input_groups
from runtime.layers.quantization.bitsandbytes import bitsandbytes_meaning, is_complete
from runtime.layers.quantization.dequantize import dequantized
from runtime.layers.quantization.module_shard import ModuleShard, ModuleTensors
from runtime.layers.weight import SourceTensor, TensorReader
from runtime.models.config.quantization_schemes import Int8, Scheme

HOST = torch.device("cpu")


class _Module:
    """A module of which some tensors have been read. `source`: the same shard with tensors on the host."""

    def __init__(self, target: Tensor, source: ModuleShard, stored: Scheme | None) -> None:
        self.target, self.source, self.stored = target, source, stored
        self.missing: set[str] = set()  # names of tensors that are still to be read
        self.is_done = False
        self.lock = Lock()

    def read(self, name: str, load: Callable[[TensorReader], None], reader: TensorReader) -> None:
        """Reads one tensor, and with the last one makes the weight."""
        with self.lock:
            if not self.source.tensors:
                self._allocate()
            load(reader)
            self.missing.discard(name)
            if not self.is_done and not self.missing and (self.stored or is_complete(self.source)):
                self.target.copy_(self._meaning())
                self.is_done = True
                for big in ("weight", "scale", "zeros"):
                    self.source.tensors.pop(big, None)

    def _allocate(self) -> None:
        if self.stored is None:
            return
        size, inputs = self.source.outputs.size, self.source.inputs
        self.source.tensors.update(allocate_quantized(self.stored, size, inputs, torch.float32, HOST))
        self.source.tensors["scale"].fill_(1)

    def _meaning(self) -> Tensor:
        if self.stored is None:
            return bitsandbytes_meaning(self.source)
        tensors, scheme = self.source.tensors, self.stored
        if not isinstance(scheme, Int8):
            scheme = structs.replace(scheme, group_size=input_groups(scheme, self.source.inputs).width)
        fields = {name: tensors[name] for name in ("weight", "scale", "zeros", "order") if name in tensors}
        return dequantized(Quantized(scheme, **fields), torch.float32)


def dequantized_module(module: ModuleShard, layout: Callable[[ModuleShard], ModuleTensors]) -> ModuleTensors:
    """The tensors that a checkpoint has for a module whose scheme is Full."""
    stored = module.format.stored
    source = replace(
        module,
        format=module.format if stored is None else structs.replace(module.format, scheme=stored),
        tensors={},
        group_ids=module.group_ids if stored is None else input_groups(stored, module.inputs).ids,
        seen=set(),
    )
    found = layout(source)
    if not module.outputs.size:
        return found
    pending = _Module(module.tensors["weight"], source, stored)
    pending.missing = set(found.sources) - found.optional
    return ModuleTensors(
        {name: _with_load(pending, name, one) for name, one in found.sources.items()}, found.optional
    )


def _with_load(pending: _Module, name: str, source: SourceTensor) -> SourceTensor:
    return source if source.load is None else replace(source, load=partial(pending.read, name, source.load))
