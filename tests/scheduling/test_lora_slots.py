"""Who sits where, who waits, and that nobody waits for ever."""

from runtime.cache.prefix import PrefixTree
from runtime.messages.requests import AdapterRef, Request
from runtime.messages.sampling import SamplingParams
from runtime.scheduling.lora_slots import PATIENCE, SeatConfig, Seats
from runtime.scheduling.order import Now
from runtime.scheduling.sequence import Sequence
from runtime.scheduling.shares import Shares
from runtime.scheduling.waiting import OrderConfig, WaitingQueue


class Hall:
    """Seats and a queue; sequences come, start and leave."""

    def __init__(self, num_seats: int, eviction: str = "lru") -> None:
        self.seats = Seats(SeatConfig(num_seats=num_seats, eviction=eviction))
        self.queue = WaitingQueue(OrderConfig(), Now(PrefixTree(1), {}), Shares(is_on=False, weights={}))
        self.count = 0

    def come(self, adapter: int, *, is_pinned: bool = False) -> Sequence:
        self.count += 1
        ref = AdapterRef(adapter, str(adapter), is_pinned) if adapter else None
        request = Request(id=str(self.count), prompt_ids=[1], params=SamplingParams(), seed=0, arrival_s=0.0, adapter=ref)
        sequence = Sequence(self.count, request, 0, 9, frozenset())
        self.queue.add(sequence)
        return sequence

    def start(self) -> list[Sequence]:
        """All that may start now do."""
        self.seats.release(self.queue)
        started = []
        while (sequence := self.seats.head(self.queue)) is not None:
            self.queue.take(sequence)
            self.seats.sit(sequence)
            started.append(sequence)
        return started

    def moved(self) -> dict[int, int]:
        seating = self.seats.take()
        return {} if seating is None else dict(zip(seating.seats.tolist(), seating.ids.tolist(), strict=True))


def test_the_plain_model_needs_no_seat() -> None:
    hall = Hall(0)
    one = hall.come(0)
    assert hall.start() == [one] and hall.seats.index(one) == -1 and hall.seats.take() is None


def test_who_finds_none_waits_and_others_pass() -> None:
    hall = Hall(2)
    a, b, c, again, plain = (hall.come(adapter) for adapter in (1, 2, 3, 1, 0))
    assert hall.start() == [a, b, again, plain]
    assert hall.moved() == {hall.seats.index(a): 1, hall.seats.index(b): 2} and hall.seats.index(again) == hall.seats.index(a)
    assert hall.start() == [] and hall.moved() == {}
    hall.seats.leave(b)
    seat = hall.seats.index(b)
    assert hall.start() == [c] and hall.moved() == {seat: 3}


def test_an_unused_adapter_stays_until_another_wants_its_seat() -> None:
    for eviction, gone in (("lru", 2), ("fifo", 1)):
        hall = Hall(2, eviction)
        for adapter in (1, 2, 1):
            (sequence,) = (hall.come(adapter),)
            hall.start()
            hall.seats.leave(sequence)
        assert sorted(hall.moved().values()) == [1, 2]
        hall.come(3)
        hall.start()
        hall.come(3 - gone)
        hall.start()
        assert list(hall.moved().values()) == [3], eviction
        seats = hall.seats
        assert (seats.num_taken, seats.num_used, seats.num_placed, seats.num_evicted) == (2, 2, 3, 1)


def test_nobody_waits_for_ever() -> None:
    hall = Hall(1)
    hall.come(1)
    running, waiting = hall.start(), hall.come(2)
    for _ in range(PATIENCE + 3):  # somebody of the first adapter is always there
        hall.come(1)
        running += hall.start()
        if waiting in running:
            break
        hall.seats.leave(running.pop(0))
    assert running == [waiting]
    hall.seats.leave(waiting)
    assert hall.start(), "those who lined up behind take their turn"


def test_pinned_adapters_stay() -> None:
    hall = Hall(2)
    pinned, other = hall.come(1, is_pinned=True), hall.come(2)
    hall.start()
    for sequence in (pinned, other):
        hall.seats.leave(sequence)
    hall.moved()
    hall.come(3)
    hall.start()
    seat = hall.seats.index(other) if 2 in hall.seats._taken else None
    assert seat is None and list(hall.moved().values()) == [3] and 1 in hall.seats._taken


def test_unloaded_when_its_last_sequence_has_ended() -> None:
    hall = Hall(1)
    one = hall.come(1)
    hall.start()
    hall.moved()
    hall.seats.unload(1, [one])
    assert hall.seats.take() is None
    hall.seats.leave(one)
    hall.seats.ended(1, [])
    seating = hall.seats.take()
    assert seating is not None and seating.gone.tolist() == [1]
