"""State of slots in host memory, for steps that the host's own kernels compute: numpy reads and writes a few
numbers in a fraction of the time that operators of torch take. The arrays are views of the tensors of Slots.
"""

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Device


class HostSlots:
    """Arrays over the slots' tensors, and what a step of decode rows takes from them."""

    def __init__(self, page_tables: Tensor, last_token: Tensor, floats: Tensor, top_k: Tensor) -> None:
        """int32 [pools, slots, pages], int64 [slots], float32 [3, slots], int64 [slots], on the cpu."""
        self.page_tables = page_tables.numpy()
        self.last_token = last_token.numpy()
        self.floats = floats.numpy()
        self.top_k = top_k.numpy()

    def last_tokens(self, slots: np.ndarray) -> Tensor:
        """int64 [N]: a copy."""
        return torch.from_numpy(self.last_token[slots])

    def set_last_tokens(self, slots: np.ndarray, tokens: Tensor) -> None:
        """`tokens`: int64 [N], one for each of different slots."""
        self.last_token[slots] = tokens.numpy()

    def locations(self, slots: np.ndarray, positions: np.ndarray, page_size: int) -> tuple[Tensor, ...]:
        """Where tokens of these slots are in the cache, int64 [N] for each pool."""
        pages, offsets = np.divmod(positions, page_size)
        return tuple(
            torch.from_numpy(table[slots, pages] * np.int64(page_size) + offsets)
            for table in self.page_tables
        )

    def sampling(self, slots: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Temperature, top_p and min_p, float32 [N], and top_k, int64 [N], of these slots."""
        temperature, top_p, min_p = (torch.from_numpy(values[slots]) for values in self.floats)
        return temperature, top_p, min_p, torch.from_numpy(self.top_k[slots])


def computes_on_host(device: Device) -> bool:
    """Whether steps are computed by the host's own kernels when their launch returns."""
    return device.programs is not None and device.torch_device.type == "cpu" and device.streams is None
