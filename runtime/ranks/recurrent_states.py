"""States of recurrent layers on a rank: their tensors, which of them each slot owns, and the copies that
plans ask for (messages/steps.py, StateCopies)."""

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.state_rows import StateRows, StateTensors, VerifyRows
from runtime.layers.upload import upload_int64
from runtime.messages.steps import Samples, StateCopies, StepPlan
from runtime.models.config.recurrent_config import Recurrent
from runtime.ranks.host_states import HostStateMemory


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
        self.host: HostStateMemory | None = None  # copies in host memory; None: there are none
        self.verified: VerifyRows | None = None  # of the step whose drafts are not accepted yet
        self.allocate()

    def allocate(self) -> None:
        """Zeros for all slots of all layers, in the same list as before."""
        ranks = self.device.group_ranks
        shapes = self.recurrent.mixer.states(ranks.size, ranks.rank)
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
        """Before a step's forward: states are saved to host memory, slots change owners, and states are
        copied to them."""
        if len(copies.save_to) or len(copies.fetch_from):
            assert self.host is not None, "copies of states, but no host tier"
            self.host.save(self.tensors, copies.save_from, copies.save_to)
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
        if self.host is not None:
            self.host.fetch(self.tensors, copies.fetch_from, copies.fetch_to)

    def keep(self, copies: StateCopies) -> None:
        """After a step's forward: copies states to be kept, but for those of rows of drafts."""
        is_known = copies.keep_at < 0 if len(copies.keep_at) else slice(None)
        self._copy(copies.keep_from[is_known], copies.keep_to[is_known])

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
        ranges = list(zip(owned, begins, counts, strict=False))
        is_verified = (plan.samples[num_decodes:] == int(Samples.ALL)).tolist()
        verified = [row for row, is_own in zip(ranges, is_verified, strict=True) if is_own]
        extends = tuple(row for row, is_own in zip(ranges, is_verified, strict=True) if not is_own)
        self.verified = self._verify_rows(verified) if verified else None
        return StateRows(self.tensors, decodes, extends, self.verified)

    def _verify_rows(self, ranges: list[tuple[int, int, int]]) -> VerifyRows:
        slots, begins, counts = np.array(ranges, np.int64).T
        nodes = np.arange(counts.max())
        places = begins[:, None] + np.minimum(nodes, counts[:, None] - 1)
        is_own = nodes < counts[:, None]
        arrays = (slots, places, places[is_own], np.flatnonzero(is_own))
        uploaded = (upload_int64(ids, self.device.torch_device) for ids in arrays)
        return VerifyRows(tuple(ranges), *uploaded)

    def accept(self, num_accepted: Tensor, starts: np.ndarray, copies: StateCopies | None) -> None:
        """After a step's sampling: the states of its rows of drafts, which are V in the plan's order, move on
        over their first tokens, as many as int64 [V] says. `starts`, int64 [V]: the lengths of their
        sequences before. States that the rows pass on their way are kept as `copies` says."""
        verified, self.verified = self.verified, None
        if verified is None:
            return
        if copies is not None and (copies.keep_at >= 0).any():
            self._keep_passed(verified, num_accepted, starts, copies)
        for advance in verified.advances:
            advance(num_accepted, verified.slots)

    def _keep_passed(
        self, verified: VerifyRows, num_accepted: Tensor, starts: np.ndarray, copies: StateCopies
    ) -> None:
        """A row that does not get where its state is to be kept writes its own state, unchanged."""
        row_of = {slot: row for row, (slot, _, _) in enumerate(verified.ranges)}
        passed, targets = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
        for source, target, at in zip(
            copies.keep_from.tolist(), copies.keep_to.tolist(), copies.keep_at.tolist(), strict=True
        ):
            if at >= 0:
                row = row_of[source]
                passed[row], targets[row] = max(at - starts[row], 0), target
        counts, slots = (upload_int64(ids, self.device.torch_device) for ids in (passed, targets))
        is_passed = (counts > 0) & (counts <= num_accepted)
        counts, slots = torch.where(is_passed, counts, 0), torch.where(is_passed, slots, verified.slots)
        for advance in verified.advances:
            advance(counts, slots)

    def captured_rows(self, slots: Tensor) -> StateRows:
        """Decode rows of slots that are on the device, int64 [R]."""
        return StateRows(self.tensors, self.owned_on_device[slots])
