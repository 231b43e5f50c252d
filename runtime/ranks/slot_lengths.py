"""Lengths of the slots of a rank: the number of tokens whose keys and values are in the cache.

The host knows each length as soon as it knows how many drafts were accepted, which on an asynchronous device
is later than a next step can be launched. Captured steps read lengths from the device and need not wait; what
plans attention on the host waits for the accepted counts (`starts`).
"""

import numpy as np
import torch
from torch import Tensor

from runtime.layers.upload import Packed, PackedUpload, upload_int64
from runtime.ranks.transfers import Fetched


class SlotLengths:
    """Lengths by slot, on the host and, where steps are captured, on the device."""

    def __init__(self, num_slots: int, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        # as of the steps launched so far, but for accepted drafts that have not come yet
        self._known = np.zeros(num_slots, np.int64)
        self._coming: list[tuple[np.ndarray, Fetched]] = []  # slots, and how much each of them grows by
        self.on_device: Tensor | None = None  # int64 [num_slots]; None: nothing reads it there

    def reserve(self) -> Tensor:
        """The lengths on the device, kept up to date from now on."""
        if self.on_device is None:
            self._settle()
            self.on_device = upload_int64(self._known, self.torch_device)
        return self.on_device

    def admit(self, slots: list[int], lengths: list[int], upload: PackedUpload | None = None) -> None:
        """Slots are taken by other sequences, of which so many tokens are in the cache. `upload`: what
        travels with the step; None: this travels alone."""
        self._settle()
        self._known[slots] = lengths
        if self.on_device is not None:
            own = upload or PackedUpload(self.torch_device)
            both = own.int64(np.array((slots, lengths)))
            own.then(lambda: self._set_on_device(both))
            if upload is None:
                own.send()

    def _set_on_device(self, both: Packed) -> None:
        """`both`: int64 [2, N], slots and their lengths."""
        assert self.on_device is not None, "lengths that nothing reads there"
        slots, lengths = both.tensor.unbind()
        self.on_device.index_put_((slots,), lengths)

    def pack_ends(self, slots: np.ndarray, ends: np.ndarray, upload: PackedUpload) -> Packed | None:
        """For `advance`: slots and their lengths behind a step, int64 [2, R]; None: no tensor has lengths."""
        return None if self.on_device is None else upload.int64(np.stack((slots, ends)))

    def starts(self, slots: np.ndarray) -> np.ndarray:
        """int64: the positions of the next tokens of these slots. Waits for accepted counts on their way."""
        if self._coming:
            self._settle()
        return self._known[slots]

    def advance(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, packed: Packed | None = None
    ) -> None:
        """A step adds `counts` tokens to slots whose lengths were `starts`. `packed`: of `pack_ends`."""
        self._known[slots] = ends = starts + counts
        if self.on_device is not None and packed is not None:
            self._set_on_device(packed)
        elif self.on_device is not None:
            self.on_device[upload_int64(slots, self.torch_device)] = upload_int64(ends, self.torch_device)

    def advanced_on_device(self, slots: np.ndarray) -> None:
        """A captured step has added one token to each of these slots."""
        self._known[slots] += 1

    def accept(self, slots: np.ndarray, num_accepted: Tensor, fetched: Fetched) -> None:
        """A step adds `num_accepted` tokens (int64 [V], on the device) to slots whose lengths are known;
        `fetched` brings the same numbers."""
        if self.on_device is not None:
            index = upload_int64(slots, self.torch_device)
            self.on_device[index] = self.on_device[index] + num_accepted
        self.accepted_on_device(slots, fetched)

    def accepted_on_device(self, slots: np.ndarray, fetched: Fetched) -> None:
        """A captured step has added to each of these slots as many tokens as `fetched` brings, int64 [R]."""
        self._coming.append((slots, fetched))
        if fetched.is_done():
            self._settle()

    def _settle(self) -> None:
        for slots, fetched in self._coming:
            (num_accepted,) = fetched.arrays()
            self._known[slots] += num_accepted
        self._coming.clear()
