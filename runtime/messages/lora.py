"""Messages about LoRA adapters. An adapter has a number that is never used again; 0 is the base model.

A rank keeps all loaded adapters in host memory and has a few LoRA slots on the device, from which steps
compute. Plans say which adapter is copied to which slot before a step, so the scheduler knows the content of
all slots without asking.
"""

import numpy as np
from msgspec import Struct


class LoadAdapter(Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Read an adapter to host memory, while steps run. AdapterLoaded answers it, from each rank."""

    id: int
    folder: str


class AdapterLoaded(Struct, frozen=True, array_like=True, tag="adapter_loaded"):
    """The result of a LoadAdapter on one rank."""

    id: int
    rank: int
    error: str  # empty: it was loaded


class AdapterSetup(Struct, frozen=True, kw_only=True, array_like=True):
    """Settings of adapters for the ranks."""

    num_lora_slots: int
    max_rank: int
    targets: tuple[str, ...]  # last names of the modules that adapters may change
    loaded: list[LoadAdapter] = []  # adapters that are loaded when a rank starts


class LoraAssignment(Struct, frozen=True, array_like=True):
    """Changes of LoRA slots before a step: adapter ids[i] is copied to slot lora_slots[i]."""

    lora_slots: np.ndarray  # int32 [N]
    ids: np.ndarray  # int32 [N]
    gone: np.ndarray  # int32: adapters that are unloaded from host memory
