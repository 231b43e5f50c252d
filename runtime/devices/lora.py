"""Interface of kernels for LoRA adapters. Devices without them compute adapters in plain torch
(layers/lora.py). Torch-free at run time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Adapter weights of one linear layer, which may consist of P parts, for all LoRA slots."""

    a: "Tensor"  # [slots, P, rank, I]
    b: "Tensor"  # [slots, C, rank], where C are the output columns of all parts, one part after another
    parts: tuple[
        tuple[int, int], ...
    ]  # for each part its first column in the layer's output, and its columns


class LoraPlan(Protocol):
    """Which token has which adapter, in the form that a device's kernels read. Only the device looks
    inside."""


class LoraOps(Protocol):
    """Kernels for steps whose tokens have different adapters, for a number of LoRA slots."""

    def of_slots(self, num_lora_slots: int) -> "LoraOps":
        """Kernels of this device for another number of LoRA slots."""
        ...

    def plan(self, lora_slots: "np.ndarray") -> LoraPlan:
        """Prepares a step in which some token has an adapter: int32 [T], the LoRA slot of each token, -1 for
        none."""
        ...

    def plan_rows(self, lora_slots: "Tensor") -> LoraPlan:
        """Prepares a step whose LoRA slots are on the device, int64 [T]. Called in captured bodies; the plan
        must hold for all later values."""
        ...

    def add(self, out: "Tensor", x: "Tensor", weights: LoraWeights, plan: LoraPlan) -> None:
        """Adds, in place, b[s] a[s, p] x [T, I] to the columns of each part p in the rows of out [T, O],
        where s is the LoRA slot of the token. Rows without an adapter do not change."""
        ...
