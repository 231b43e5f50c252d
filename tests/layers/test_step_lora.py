"""Which adapters the tokens have that a layer is given: those of a group, of all groups, or of one shard."""

from collections import Counter
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from runtime.devices.attention_ranks import AttentionRanks
from runtime.devices.single_rank import SingleRank
from runtime.layers.lora import LoraAdapters
from runtime.layers.step_lora import MICRO_BATCH, StepLora
from runtime.messages.attention_layout import AttentionLayout
from runtime.messages.lora import LoraAssignment
from tests.layers.test_group_tokens import Peers


class Second(SingleRank):
    """The second one of two ranks."""

    size, rank = 2, 1


class Ops:
    """Plans are what they are made of, with the number of LoRA slots."""

    def __init__(self, num_lora_slots: int) -> None:
        self.num_lora_slots = num_lora_slots

    def of_slots(self, num_lora_slots: int) -> "Ops":
        return Ops(num_lora_slots)

    def plan(self, lora_slots: np.ndarray) -> tuple[int, list[int]]:
        return self.num_lora_slots, lora_slots.tolist()

    def plan_rows(self, lora_slots: torch.Tensor) -> tuple[int, list[int]]:
        return self.num_lora_slots, lora_slots.tolist()


def opened(sent: list[torch.Tensor]) -> Any:
    """A rank's StepLora: its group is the second of three, each of two ranks, with four LoRA slots."""
    layout, own = AttentionLayout(6, 3), Second()
    attention = AttentionRanks(layout, own, SingleRank(), own, Peers(1, sent))
    device: Any = SimpleNamespace(attention=attention, has_groups=True, group_ranks=own)
    step: Any = StepLora(device, Ops(4), 4)
    step.kinds.update(("group", "all", "shard"))
    return step


def second(step: Any, kind: str) -> Any:
    """What a layer finds in the thread of the second micro-batch."""

    def found() -> Any:
        MICRO_BATCH.set(1)
        return step.plan(kind)

    return copy_context().run(found)


def test_tokens_of_a_step() -> None:
    step = opened([])
    groups = [np.array(slots, np.int32) for slots in ([3, -1], [0, -1, 2], [-1])]
    step.set(groups)
    assert step.plan("group") == (4, [0, -1, 2])
    assert step.plan("all") == (12, [3, -1, 4, -1, 6, -1])
    assert step.plan("shard") == (4, [2, -1]), "of four rows, the last of which is padding"
    step.set(groups, (1, 2, 1))
    assert [step.plan(kind) for kind in ("group", "all", "shard")] == [
        (4, [0, -1]),
        (12, [3, 4, -1, -1]),
        None,
    ]
    assert [second(step, kind) for kind in ("group", "all")] == [(4, [2]), (12, [-1, 6])]
    step.clear()
    assert step.plan("all") is second(step, "all") is None


def test_tokens_of_a_captured_step() -> None:
    sent = [torch.tensor(slots, dtype=torch.int32) for slots in ([-1, 1], [4, -1], [-1, -1])]
    step = opened(sent)
    step.set_captured(torch.tensor([0, -1]))
    assert step.plan("group") == (4, [0, -1]) and step.plan("shard") == (4, [-1])
    assert step.plan("all") == (12, [-1, 1, 4, -1, -1, -1])


def test_an_adapter_stays_until_no_group_needs_it() -> None:
    adapters: Any = LoraAdapters.__new__(LoraAdapters)
    adapters.step, adapters.lora_slots = opened([]), {}
    adapters.num_left, adapters.host_weights = Counter(), {7: {}}
    none = np.empty(0, np.int32)
    for group in range(3):
        assert 7 in adapters.host_weights
        adapters._assign(group, LoraAssignment(none, none, np.array([7], np.int32)))
    assert not adapters.host_weights and not adapters.num_left
