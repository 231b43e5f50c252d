"""States of the recurrent layers of a draft model.

Each slot has two: one behind the entries that are made (committed), and one that goes on over drafts (ahead),
which begins anew from the committed one in each step. So drafts that are rejected leave nothing behind: what
is accepted is pending again, and its entries are made from the committed state.

A cached prefix has no states of a draft model: behind one it reads on from nothing, which costs accepted
drafts.
"""

from collections.abc import Sequence

import numpy as np
import torch

from runtime.devices.base import Device
from runtime.devices.state_rows import StateRows
from runtime.layers.upload import upload_int64
from runtime.models.config.recurrent_config import Recurrent
from runtime.ranks.recurrent_states import RecurrentStates


class DraftStates:
    """The states of `num_slots` slots."""

    def __init__(
        self,
        device: Device,
        recurrent: Recurrent,
        dtype: torch.dtype,
        wide_dtype: torch.dtype,
        num_slots: int,
    ) -> None:
        """`dtype`: of the activations; `wide_dtype`: of the recurrent states. Allocates."""
        self.num_slots = num_slots
        self.memory = RecurrentStates(device, recurrent, dtype, wide_dtype, 2 * num_slots, num_slots)
        self.torch_device = device.torch_device

    @staticmethod
    def num_bytes(recurrent: Recurrent, ranks: int, item: int, wide_item: int, num_slots: int) -> int:
        """Bytes on one rank of `ranks`. `item`, `wide_item`: see Recurrent.state_bytes."""
        return 2 * num_slots * recurrent.state_bytes(ranks, item, wide_item)

    def admit(self, slots: Sequence[int]) -> None:
        """The slots are other sequences'."""
        index = upload_int64(np.array(slots, np.int64), self.torch_device)
        for tensor in self._tensors():
            tensor.index_fill_(0, index, 0)

    def look_ahead(self, slots: np.ndarray) -> None:
        """Passes over drafts of these slots begin from what is committed."""
        source = upload_int64(slots, self.torch_device)
        for tensor in self._tensors():
            tensor.index_copy_(0, source + self.num_slots, tensor.index_select(0, source))

    def rows(self, slots: np.ndarray, counts: np.ndarray, *, is_ahead: bool) -> StateRows:
        """The rows of a pass over `counts` tokens of each slot, one behind the other; int64 [R]."""
        owned = slots + self.num_slots if is_ahead else slots
        if (counts == 1).all():
            return StateRows(self.memory.tensors, upload_int64(owned, self.torch_device))
        begins = counts.cumsum() - counts
        ranges = zip(owned.tolist(), begins.tolist(), counts.tolist(), strict=True)
        return StateRows(self.memory.tensors, upload_int64(owned[:0], self.torch_device), tuple(ranges))

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for layer in self.memory.tensors for tensor in layer]
