"""Host memory of recurrent states: its size, and copies that come back whole."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from runtime.errors import StartError
from runtime.ranks.host_states import HostStateMemory, open_host_states
from tests.devices.drive import start_rank

# an odd number of 16-bit numbers in front of float32 ones
LAYERS = [(torch.randn(4, 5, 3).bfloat16(), torch.randn(4, 2, 3, 7)) for _ in range(2)]
STATE_BYTES = 2 * (32 + 168)


@pytest.fixture
def fd() -> Iterator[int]:
    memory = os.memfd_create("states")
    yield memory
    os.close(memory)


def opened(fd: int, free_bytes: int = 1 << 20, **options: float) -> HostStateMemory | None:
    start = start_rank("", state_fds=[fd], state_ratio=1.0, **options)
    return open_host_states(start, 0, LAYERS, free_bytes)


def test_states_come_back(fd: int) -> None:
    """Through another mapping, as ranks have that start later."""
    first = opened(fd, host_ratio=2.0)
    assert first is not None and (first.num_states, first.state_bytes) == (8, STATE_BYTES)
    first.save(LAYERS, np.array([1, 3], np.int32), np.array([7, 2], np.int32))
    again = opened(fd, host_ratio=9.0)
    assert again is not None and again.num_states == 8, "memory keeps its size"
    others = [tuple(torch.zeros_like(tensor) for tensor in layer) for layer in LAYERS]
    again.fetch(others, np.array([2, 7], np.int32), np.array([0, 1], np.int32))
    for layer, other in zip(LAYERS, others, strict=True):
        for tensor, copy in zip(layer, other, strict=True):
            assert torch.equal(copy[:2], tensor[[3, 1]]) and not copy[2:].any()
    with pytest.raises(IndexError, match="no place 8"):
        again.fetch(others, np.array([8], np.int32), np.array([0], np.int32))


def test_how_many_states_there_are(fd: int) -> None:
    """The share of the memory that states have on the device."""
    assert opened(fd) is None, "no host tier"
    sized = opened(fd, host_bytes=20 * STATE_BYTES)
    assert sized is not None and sized.num_states == 10
    os.ftruncate(fd, 0)
    cut = opened(fd, free_bytes=10 * STATE_BYTES, host_ratio=8.0)
    assert cut is not None and cut.num_states == 4, "half of nine tenths"
    os.ftruncate(fd, 0)
    with pytest.raises(StartError, match="--hicache-size or --hicache-ratio"):
        opened(fd, host_bytes=3 * STATE_BYTES)
