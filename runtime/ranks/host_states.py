"""Copies of recurrent states in one rank's host memory, whose bytes are in a memfd that outlives the rank
(devices/host_memory.py)."""

import mmap
import os

import numpy as np
import torch
from torch import Tensor

from runtime.devices.host_memory import MOST
from runtime.devices.state_rows import StateTensors
from runtime.errors import StartError
from runtime.messages.ranks import StartRank


class HostStateMemory:
    """Places for the states of a sequence in all layers, place 0 included, which is not used."""

    def __init__(self, fd: int, num_states: int, state_bytes: int) -> None:
        self.num_states, self.state_bytes = num_states, state_bytes
        memory = mmap.mmap(fd, num_states * state_bytes)
        self.places = torch.from_numpy(np.frombuffer(memory, np.uint8).reshape(num_states, state_bytes))

    def save(self, layers: list[StateTensors], slots: np.ndarray, places: np.ndarray) -> None:
        """Copies states to places; int32 [S] each. They are there when this returns."""
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            for tensor, part in self._parts(layers, place):
                part.copy_(tensor[slot])

    def fetch(self, layers: list[StateTensors], places: np.ndarray, slots: np.ndarray) -> None:
        """Copies them back."""
        for place, slot in zip(places.tolist(), slots.tolist(), strict=True):
            for tensor, part in self._parts(layers, place):
                tensor[slot] = part.to(tensor.device)

    def _parts(self, layers: list[StateTensors], place: int) -> list[tuple[Tensor, Tensor]]:
        """The tensors of all layers, and of each the place's copy of one state. Raises IndexError for a place
        that there is not."""
        if not 0 < place < self.num_states:
            raise IndexError(f"there is no place {place} for a state, only 1 to {self.num_states - 1}")
        parts, at = [], 0
        for tensor in (tensor for layer in layers for tensor in layer):
            size = tensor[0].nbytes
            part = self.places[place, at : at + size].view(tensor.dtype).view(tensor.shape[1:])
            parts.append((tensor, part))
            at += aligned(size)
        return parts


def aligned(num_bytes: int) -> int:
    """Up to where the next number of any dtype may begin."""
    return -(-num_bytes // 8) * 8


def open_host_states(
    start: StartRank, rank: int, layers: list[StateTensors], free_bytes: int
) -> HostStateMemory | None:
    """This rank's host memory for states of recurrent layers; None without a host tier. `free_bytes`: memory
    of the machine that this rank may take.

    Of --hicache-size states take the share that they have on the device (--mamba-full-memory-ratio); of
    --hicache-ratio as many for each state there. Memory that an earlier generation of ranks has sized keeps
    its size and content. Raises StartError where there is no room for one state."""
    if not (start.host_bytes or start.host_ratio):
        return None
    fd = start.state_fds[rank]
    state_bytes = sum(aligned(tensor[0].nbytes) for layer in layers for tensor in layer)
    num_slots = len(layers[0][0])
    size = os.fstat(fd).st_size
    if size and size % state_bytes == 0:
        return HostStateMemory(fd, size // state_bytes, state_bytes)
    share = host_share(start)
    wanted = (
        int(start.host_bytes * share) // state_bytes
        if start.host_bytes
        else int(start.host_ratio * num_slots)
    )
    num_states = min(wanted, int(free_bytes * MOST * share) // state_bytes)
    if num_states < 2:
        raise StartError(
            f"host memory has room for {num_states} sequence states of {state_bytes} bytes, and needs 2; "
            "raise --hicache-size or --hicache-ratio, or --mamba-full-memory-ratio"
        )
    os.ftruncate(fd, 0)
    os.ftruncate(fd, num_states * state_bytes)
    return HostStateMemory(fd, num_states, state_bytes)


def host_share(start: StartRank) -> float:
    """The share of host memory that states take."""
    return start.state_ratio / (1 + start.state_ratio)
