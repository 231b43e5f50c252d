"""Which adapters have LoRA slots, which sequences wait, and that none waits for ever."""

from runtime.cache.prefix import PrefixTree
from runtime.cache.sequence import Sequence
from runtime.messages.requests import AdapterRef, Request
from runtime.messages.sampling import SamplingParams
from runtime.scheduling.lora_slots import PATIENCE, LoraSlotConfig, LoraSlots
from runtime.scheduling.order import Now
from runtime.scheduling.shares import Shares
from runtime.scheduling.waiting import OrderConfig, WaitingQueue


class Hall:
    """LoRA slots and a queue; sequences come, start and leave."""

    def __init__(self, num_lora_slots: int, eviction: str = "lru") -> None:
        self.lora_slots = LoraSlots(LoraSlotConfig(num_lora_slots=num_lora_slots, eviction=eviction))
        self.queue = WaitingQueue(OrderConfig(), Now(PrefixTree(1), {}), Shares(is_on=False, weights={}))
        self.count = 0

    def come(self, adapter: int, *, is_pinned: bool = False) -> Sequence:
        self.count += 1
        ref = AdapterRef(adapter, str(adapter), is_pinned) if adapter else None
        request = Request(
            id=str(self.count), prompt_ids=[1], params=SamplingParams(), seed=0, arrival_s=0.0, adapter=ref
        )
        sequence = Sequence(self.count, request, 0, 9, frozenset())
        self.queue.add(sequence)
        return sequence

    def start(self) -> list[Sequence]:
        """All that may start now do."""
        self.lora_slots.release(self.queue)
        started = []
        while (sequence := self.lora_slots.head(self.queue)) is not None:
            self.queue.take(sequence)
            self.lora_slots.acquire(sequence)
            started.append(sequence)
        return started

    def moved(self) -> dict[int, int]:
        lora_assignment = self.lora_slots.take()
        return (
            {}
            if lora_assignment is None
            else dict(zip(lora_assignment.lora_slots.tolist(), lora_assignment.ids.tolist(), strict=True))
        )


def test_the_plain_model_needs_no_lora_slot() -> None:
    hall = Hall(0)
    one = hall.come(0)
    assert hall.start() == [one] and hall.lora_slots.index(one) == -1 and hall.lora_slots.take() is None


def test_who_finds_none_waits_and_others_pass() -> None:
    hall = Hall(2)
    a, b, c, again, plain = (hall.come(adapter) for adapter in (1, 2, 3, 1, 0))
    assert hall.start() == [a, b, again, plain]
    assert hall.moved() == {
        hall.lora_slots.index(a): 1,
        hall.lora_slots.index(b): 2,
    } and hall.lora_slots.index(again) == hall.lora_slots.index(a)
    assert hall.start() == [] and hall.moved() == {}
    assert sorted(hall.lora_slots.used_adapters) == [1, 2]
    hall.lora_slots.leave(b)
    lora_slot = hall.lora_slots.index(b)
    assert hall.start() == [c] and hall.moved() == {lora_slot: 3}
    assert sorted(hall.lora_slots.used_adapters) == [1, 3]


def test_an_unused_adapter_stays_until_another_wants_its_slot() -> None:
    for eviction, gone in (("lru", 2), ("fifo", 1)):
        hall = Hall(2, eviction)
        for adapter in (1, 2, 1):
            (sequence,) = (hall.come(adapter),)
            hall.start()
            hall.lora_slots.leave(sequence)
        assert sorted(hall.moved().values()) == [1, 2]
        hall.come(3)
        hall.start()
        hall.come(3 - gone)
        hall.start()
        assert list(hall.moved().values()) == [3], eviction
        lora_slots = hall.lora_slots
        assert (
            lora_slots.num_taken,
            len(lora_slots.used_adapters),
            lora_slots.num_placed,
            lora_slots.num_evicted,
        ) == (2, 2, 3, 1)


def test_no_request_waits_for_ever() -> None:
    hall = Hall(1)
    hall.come(1)
    running, waiting = hall.start(), hall.come(2)
    for _ in range(PATIENCE + 3):  # a sequence of the first adapter is always there
        hall.come(1)
        running += hall.start()
        if waiting in running:
            break
        hall.lora_slots.leave(running.pop(0))
    assert running == [waiting]
    hall.lora_slots.leave(waiting)
    assert hall.start(), "those who lined up behind take their turn"


def test_pinned_adapters_stay() -> None:
    hall = Hall(2)
    pinned, other = hall.come(1, is_pinned=True), hall.come(2)
    hall.start()
    for sequence in (pinned, other):
        hall.lora_slots.leave(sequence)
    hall.moved()
    hall.come(3)
    hall.start()
    lora_slot = hall.lora_slots.index(other) if 2 in hall.lora_slots._taken else None
    assert lora_slot is None and list(hall.moved().values()) == [3] and 1 in hall.lora_slots._taken


def test_unloaded_when_its_last_sequence_has_ended() -> None:
    hall = Hall(1)
    one = hall.come(1)
    hall.start()
    hall.moved()
    hall.lora_slots.unload(1, [one])
    assert hall.lora_slots.take() is None
    hall.lora_slots.leave(one)
    hall.lora_slots.ended(1, [])
    lora_assignment = hall.lora_slots.take()
    assert lora_assignment is not None and lora_assignment.gone.tolist() == [1]
