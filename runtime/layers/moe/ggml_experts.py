"""The experts of one layer whose blocks of ggml's types stay as a GGUF file has them, until a device packs
them."""

import torch

from runtime.devices.all_to_all import PackedExperts
from runtime.devices.base import Device
from runtime.layers.quantization.ggml_weight import GgmlWeight
from runtime.layers.weight import Shard, replicated_shard
from runtime.models.config.gguf.types import BY_NAME
from runtime.models.config.quantization_schemes import Ggml, WeightFormat


def is_ggml(format: WeightFormat | None) -> bool:
    """Whether a weight is of ggml's types."""
    return format is not None and isinstance(format.scheme, Ggml)


class GgmlExperts:
    """Weights of all experts of a layer; those of other ranks have no parts."""

    def __init__(
        self,
        device: Device,
        first: Ggml,
        second: Ggml,
        hidden: int,
        inner: Shard,
        num_experts: int,
        own: tuple[int, ...],
    ) -> None:
        """`first`: the types of gate and up; `second`: that of down; `own`: the experts of this rank's
        places."""
        self.device, self.own = device, own
        self.weights = [
            _expert(first, second, replicated_shard(hidden), inner)
            if i in own
            else _expert(first, second, replicated_shard(hidden), Shard(inner.full, 0, 0))
            for i in range(num_experts)
        ]

    def pack(self) -> PackedExperts:
        """What the device computes with. Call it once, when all weights are loaded."""
        assert self.device.ggml is not None
        here = [self.weights[i] for i in self.own]
        return self.device.ggml.pack_experts(
            [[first.parts["gate"], first.parts["up"]] for first, _ in here],
            [second.parts[""] for _, second in here],
        )


def _expert(first: Ggml, second: Ggml, hidden: Shard, inner: Shard) -> tuple[GgmlWeight, GgmlWeight]:
    """`inner` of size 0: of an expert that another rank has."""
    outputs = hidden if inner.size else Shard(hidden.full, 0, 0)
    return GgmlWeight(first, {"gate": inner, "up": inner}, hidden), GgmlWeight(second, {"": outputs}, inner)


def ggml_experts(
    device: Device,
    dtype: torch.dtype,
    formats: tuple[WeightFormat | None, WeightFormat | None],
    hidden: int,
    inner: Shard,
    num_experts: int,
    own: tuple[int, ...],
) -> GgmlExperts | None:
    """The experts, if the device computes theirs of ggml's types in this dtype; None: the loader dequantizes
    what the file has. `formats`: of gate and up, and of down."""
    first, second = (format.scheme if format is not None else None for format in formats)
    if not isinstance(first, Ggml) or not isinstance(second, Ggml) or device.ggml is None or not own:
        return None
    types = dict(first.types)
    if types["gate"] != types["up"]:
        return None
    down = second.types[0][1]
    whole = hidden % BY_NAME[types["gate"]].block == 0 and all(
        number % BY_NAME[down].block == 0 for number in (inner.start, inner.size)
    )
    parts = ((types["gate"], inner.size), (down, hidden))
    if not whole or not all(device.ggml.computes((part,), dtype) for part in parts):
        return None
    return GgmlExperts(device, first, second, hidden, inner, num_experts, own)
