"""States of recurrent layers on a rank: their tensors, which of them each slot owns, and the copies that
plans ask for (messages/steps.py, StateCopies)."""

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.state_rows import StateRows, StateTensors
from runtime.layers.upload import upload_int64
from runtime.messages.steps import StateCopies, StepPlan
from runtime.models.config.recurrent_config import Recurrent


class RecurrentStates:
    """State slots of all recurrent layers, and the state slot that each slot's sequence owns.

    Padding rows of captured steps use state slot 0. What they leave there is never read: a copy from slot 0
    makes zeros.
    """

    def __init__(
        self,
        device: Device,
        recurrent: Recurrent,
        dtype: torch.dtype,
        wide_dtype: torch.dtype,
        num_state_slots: int,
        max_slots: int,
    ) -> None:
        """`dtype`: of the activations; `wide_dtype`: of the recurrent states; `num_state_slots`: with slot 0.
        Allocates."""
        self.device = device
        self.recurrent = recurrent
        self.dtypes = dtype, wide_dtype
        self.num_state_slots = num_state_slots
        self.owned = np.zeros(max_slots + 1, np.int64)
        self.owned_on_device = torch.zeros(max_slots + 1, dtype=torch.int64, device=device.torch_device)
        self.tensors: list[StateTensors] = []
        self.allocate()

    def allocate(self) -> None:
        """Zeros for all slots of all layers, in the same list as before."""
        shapes = self.recurrent.mixer.states(self.device.collectives.size)
        for _ in range(self.recurrent.num_recurrent_layers):
            self.tensors.append(
                tuple(
                    self.device.memory.allocate_states(
                        self.num_state_slots, shape.shape, self.dtypes[shape.is_wide]
                    )
                    for shape in shapes
                )
            )

    def release(self) -> None:
        """Drops the tensors."""
        self.tensors.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for layer in self.tensors for tensor in layer)

    def load(self, copies: StateCopies) -> None:
        """Before a step's forward: slots change owners, and states are copied to them."""
        if len(copies.slots):
            self.owned[copies.slots] = copies.owned
            slots, owned = (
                upload_int64(ids, self.device.torch_device) for ids in (copies.slots, copies.owned)
            )
            self.owned_on_device[slots] = owned
        is_empty = copies.load_from == 0
        self._copy(copies.load_from[~is_empty], copies.load_to[~is_empty])
        if is_empty.any():
            zeroed = upload_int64(copies.load_to[is_empty], self.device.torch_device)
            for layer in self.tensors:
                for tensor in layer:
                    tensor.index_fill_(0, zeroed, 0)

    def keep(self, copies: StateCopies) -> None:
        """After a step's forward: copies states to be kept."""
        self._copy(copies.keep_from, copies.keep_to)

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """All are read before any is written."""
        if not len(sources):
            return
        source, target = (upload_int64(ids, self.device.torch_device) for ids in (sources, targets))
        for layer in self.tensors:
            for tensor in layer:
                tensor.index_copy_(0, target, tensor.index_select(0, source))

    def rows(self, plan: StepPlan) -> StateRows:
        """The rows of a plan whose loads are done."""
        num_decodes = plan.num_decodes
        decodes = upload_int64(self.owned[plan.slots[:num_decodes]], self.device.torch_device)
        counts = plan.counts[num_decodes:].tolist()
        begins = (num_decodes + np.cumsum([0, *counts])).tolist()
        owned = self.owned[plan.slots[num_decodes:]].tolist()
        return StateRows(self.tensors, decodes, tuple(zip(owned, begins, counts, strict=False)))

    def captured_rows(self, slots: Tensor) -> StateRows:
        """Decode rows of slots that are on the device, int64 [R]."""
        return StateRows(self.tensors, self.owned_on_device[slots])
