"""Which adapters the tokens of a step have, for each kind of tokens that a layer may be given (linear.Given),
and for each micro-batch.

LoRA slots are those of an attention group: each assigns adapters to its own. A layer that all groups share
has the slots of all of them, those of group g behind the slots of the groups before it.
"""

from collections.abc import Sequence
from contextvars import ContextVar

import numpy as np
import torch
from torch import Tensor

from runtime.devices.base import Device
from runtime.devices.lora import LoraOps, LoraPlan
from runtime.layers.linear import Given
from runtime.layers.parallel.group_tokens import open_group_tokens
from runtime.layers.parallel.sequence_parallel import SequenceParallel

# the micro-batch that this thread computes (ranks/two_batches.py); 0 as well where there is one batch
MICRO_BATCH: ContextVar[int] = ContextVar("MICRO_BATCH", default=0)
Plans = dict[Given, LoraPlan]  # what is missing has no adapters


class StepLora:
    """The adapters of the step that is being launched, shared by all layers."""

    def __init__(self, device: Device, ops: LoraOps, num_lora_slots: int) -> None:
        """`ops`: for the slots of one group."""
        attention = device.attention
        self.groups = open_group_tokens(device)
        self.num_groups, self.group = 1, 0
        if self.groups is not None and attention is not None:
            self.num_groups, self.group = attention.layout.num_groups, attention.index
        self.num_lora_slots = num_lora_slots
        self.ranks = SequenceParallel(device.group_ranks)
        joined = ops if self.num_groups == 1 else ops.of_slots(self.num_groups * num_lora_slots)
        self.ops: dict[Given, LoraOps] = {"group": ops, "shard": ops, "all": joined}
        self.kinds: set[Given] = set()  # that adapted layers are given
        self._parts: list[Plans] = [{}]

    def plan(self, given: Given) -> LoraPlan | None:
        """What LoraOps.plan made of the tokens that a layer is given now; None: none has an adapter."""
        return self._parts[MICRO_BATCH.get()].get(given)

    def num_slots(self, given: Given) -> int:
        """LoRA slots of a layer."""
        return self.num_lora_slots * (self.num_groups if given == "all" else 1)

    def first_slot(self, given: Given, group: int) -> int | None:
        """Where the slots of a group begin in a layer; None: the layer has none for it."""
        if given == "all":
            return group * self.num_lora_slots
        return 0 if group == self.group else None

    def clear(self) -> None:
        """No token has an adapter."""
        self._parts = [{}, {}]

    def set(self, groups: Sequence[np.ndarray], first: Sequence[int] = ()) -> None:
        """`groups`: of each attention group the LoRA slots of its tokens, int32 [own], -1: none; `first`: of
        each, how many tokens are in the first of two micro-batches; (): there is one batch."""
        if not first:
            self._parts = [self._plans(groups)]
            return
        halves = [np.split(slots, [count]) for slots, count in zip(groups, first, strict=True)]
        self._parts = [self._plans([half[i] for half in halves]) for i in range(2)]

    def _plans(self, groups: Sequence[np.ndarray]) -> Plans:
        found: Plans = {}
        for kind in self.kinds:
            slots = groups[self.group]
            if kind == "all":
                starts = range(0, self.num_groups * self.num_lora_slots, self.num_lora_slots)
                offset = [np.where(own < 0, own, own + at) for own, at in zip(groups, starts, strict=True)]
                slots = np.concatenate(offset).astype(np.int32)
            elif kind == "shard":
                size, rank = self.ranks.shard_size(len(slots)), self.ranks.ranks.rank
                padding = np.full(size * self.ranks.ranks.size - len(slots), -1, np.int32)
                slots = np.concatenate((slots, padding))[rank * size : (rank + 1) * size]
            if (slots >= 0).any():
                found[kind] = self.ops[kind].plan(slots)
        return found

    def set_captured(self, slots: Tensor) -> None:
        """In a body that is captured: as `set`, of LoRA slots that are on the device, int64 [T], and may be
        others when it is replayed. All groups bring T tokens."""
        found: Plans = {}
        for kind in self.kinds:
            own = slots
            if kind == "all" and self.groups is not None:
                own = torch.where(slots < 0, slots, slots + self.group * self.num_lora_slots)
                own = self.groups.join(own.to(torch.int32), (len(slots),) * self.num_groups).long()
            elif kind == "shard":  # rows of padding are zeros
                own = self.ranks.shard((slots + 1).unsqueeze(1)).squeeze(1) - 1
            found[kind] = self.ops[kind].plan_rows(own)
        self._parts = [found]
