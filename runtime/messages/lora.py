"""What scheduler and ranks tell each other of adapters. An adapter has a number, which is never used again; 0
is the plain model.

A rank keeps all loaded adapters in host memory and has a few *seats* on the device. Steps compute with what
sits there; plans say who sits down, so that who sits where is known here without asking, and changes in the
order of the steps.
"""

import numpy as np
from msgspec import Struct


class LoadAdapter(Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Read an adapter to host memory, beside the steps. AdapterLoaded answers it, from each rank."""

    id: int
    folder: str


class AdapterLoaded(Struct, frozen=True, array_like=True, tag="adapter_loaded"):
    """What became of it on one rank."""

    id: int
    rank: int
    error: str  # empty: there was none


class AdapterSetup(Struct, frozen=True, kw_only=True, array_like=True):
    """What ranks must know of adapters when they start."""

    num_lora_slots: int
    max_rank: int
    targets: tuple[str, ...]  # last names of the modules that adapters may change
    loaded: list[LoadAdapter] = []  # those that are there already


class LoraAssignment(Struct, frozen=True, array_like=True):
    """Before a step: adapters that sit down, and those that are loaded no longer."""

    lora_slots: np.ndarray  # int32 [N]
    ids: np.ndarray  # int32 [N]
    gone: np.ndarray  # int32: to be forgotten
