"""Rings against a list: every reader gets every message once and in order, whatever the sizes and speeds."""

import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runtime.errors import RingError
from runtime.ranks import ring
from runtime.ranks.ring import HEADER, LAST, MORE, PAD, Reader, RingFds, Writer

CAPACITY = 1024
MAX_PAYLOAD = CAPACITY // 4 - HEADER.size


@pytest.fixture
def fds() -> Iterator[RingFds]:
    fds = ring.create(CAPACITY)
    yield fds
    fds.close()


def memory(fds: RingFds) -> bytes:
    return os.pread(fds.memory, CAPACITY, 0)


class Rings(RuleBasedStateMachine):
    """Random messages, up to longer than the ring, to readers that read when the rules say so."""

    @initialize(num_readers=st.integers(1, 3))
    def open(self, num_readers: int) -> None:
        self.fds = ring.create(CAPACITY, num_readers)
        self.writer = Writer(self.fds, 3)
        self.readers = [Reader(self.fds, 3, index) for index in range(num_readers)]
        self.due: list[deque[bytes]] = [deque() for _ in range(num_readers)]
        self.count = 0

    @rule(
        size=st.one_of(
            st.integers(0, 64), st.integers(0, MAX_PAYLOAD), st.integers(MAX_PAYLOAD, 3 * CAPACITY)
        ),
        cuts=st.none() | st.lists(st.integers(0, 3 * CAPACITY), max_size=3).map(sorted),
    )
    def publish(self, size: int, cuts: list[int] | None) -> None:
        """`cuts`: where the message is cut into parts; None: it comes in one piece."""
        message = bytes((self.count + i) % 251 for i in range(size))
        in_the_way = self.writer.has_rest
        ends = [0, *(cuts or []), 3 * CAPACITY]
        parts = [message[begin:end] for begin, end in pairwise(ends)]
        if self.writer.try_publish(message) if cuts is None else self.writer.try_publish_parts(parts):
            self.count += 1
            for due in self.due:
                due.append(message)
        else:
            assert in_the_way or any(self.due), "an empty ring takes every message"

    @rule(index=st.integers(0, 2), most=st.integers(1, 20))
    def read(self, index: int, most: int) -> None:
        index %= len(self.readers)
        for _ in range(most):
            message = self.readers[index].read_nowait()
            if message is None:
                assert len(self.due[index]) <= 1 if self.writer.has_rest else not self.due[index]
                return
            assert message == self.due[index].popleft()

    @rule()
    def flush(self) -> None:
        self.writer.flush()

    @rule()
    def read_all(self) -> None:
        while True:
            for index in range(len(self.readers)):
                self.read(index, sys.maxsize)
            if self.writer.flush():
                break
        for index in range(len(self.readers)):
            self.read(index, sys.maxsize)
        assert not any(self.due)

    @invariant()
    def counts_are_within_the_ring(self) -> None:
        if hasattr(self, "writer"):
            assert all(0 <= held <= CAPACITY for held in self.writer._held)

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.read_all()
            for end in (self.writer, *self.readers, self.fds):
                end.close()


TestRings = Rings.TestCase
TestRings.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_reader_sees_nothing_without_a_count(fds: RingFds) -> None:
    reader = Reader(fds, 1)
    os.pwrite(fds.memory, HEADER.pack(5, 1, 0, LAST, 0) + b"early", 0)
    assert reader.read_nowait() is None
    os.eventfd_write(fds.wakes[0].data, 1)
    assert reader.read_nowait() == b"early"
    assert reader.read_nowait() is None
    reader.close()


def test_a_writer_writes_nothing_without_credit(fds: RingFds) -> None:
    writer, reader = Writer(fds, 1), Reader(fds, 1)
    count = 0
    while writer.try_publish(bytes([count]) * 100):  # 128 bytes with the header
        count += 1
    assert count == CAPACITY // 128
    before = memory(fds)
    for number in range(2):
        assert not writer.try_publish(bytes(1)) and memory(fds) == before, (
            "less than a quarter is free: no credit has come"
        )
        assert reader.read_nowait() == bytes([number]) * 100
    assert writer.try_publish(bytes(1)) and memory(fds)[256:] == before[256:]
    writer.close()
    reader.close()


def test_the_slowest_reader_holds_the_writer_back() -> None:
    fds = ring.create(CAPACITY, 2)
    writer, fast, slow = Writer(fds, 1), Reader(fds, 1, 0), Reader(fds, 1, 1)
    count = 0
    while writer.try_publish(bytes(200)):
        count += 1
        assert fast.read_nowait() is not None
    assert count == CAPACITY // 224
    assert [len(slow.read_nowait() or b"") for _ in range(count)] == [200] * count
    assert writer.try_publish(bytes(200))
    for end in (writer, fast, slow, fds):
        end.close()


def test_a_message_longer_than_the_ring_arrives_whole_and_in_order(fds: RingFds) -> None:
    writer, reader = Writer(fds, 1), Reader(fds, 1)
    long = os.urandom(5 * CAPACITY)
    assert writer.try_publish(b"before") and writer.try_publish(long)
    assert writer.has_rest and not writer.try_publish(b"too early")
    got = []
    while len(got) < 2:
        message = reader.read_nowait()
        got += [bytes(message)] if message is not None else []
        writer.flush()
    assert got == [b"before", long] and not writer.has_rest
    assert writer.try_publish(b"after") and reader.read_nowait() == b"after"
    writer.close()
    reader.close()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"generation": 2}, "generation 2 in a ring of generation 1"),
        ({"sequence": 4}, "record 4 came where record 0 was due"),
        ({"size": 2**32 - 1}, "not valid"),
        ({"size": MAX_PAYLOAD + 1}, "not valid"),
        ({"kind": 9}, "not valid"),
        ({"kind": PAD}, "not valid"),
    ],
    ids=["generation", "sequence", "length", "length of a quarter", "kind", "padding at the start"],
)
def test_a_corrupt_header_is_refused_again_and_again(
    fds: RingFds, change: dict[str, int], message: str
) -> None:
    header = {"size": 3, "generation": 1, "sequence": 0, "kind": LAST} | change
    reader = Reader(fds, 1)
    os.pwrite(fds.memory, HEADER.pack(*header.values(), 0), 0)
    os.eventfd_write(fds.wakes[0].data, 1)
    for _ in range(2):
        with pytest.raises(RingError, match=message):
            reader.read_nowait()
    reader.close()


def test_a_record_across_the_end_and_wrong_padding_are_refused(fds: RingFds) -> None:
    writer, reader = Writer(fds, 1), Reader(fds, 1)
    for _ in range(4):
        assert writer.try_publish(bytes(208)) and reader.read_nowait() is not None
    at = writer._head
    for size, kind in ((CAPACITY - at, LAST), (0, PAD)):
        os.pwrite(fds.memory, HEADER.pack(size, 1, 4, kind, 0), at)
        os.eventfd_write(fds.wakes[0].data, 1)
        with pytest.raises(RingError, match="not valid"):
            reader.read_nowait()
    writer.close()
    reader.close()


def test_credit_that_was_never_given_is_refused(fds: RingFds) -> None:
    writer = Writer(fds, 1)
    os.eventfd_write(fds.wakes[0].credit, 8)
    with pytest.raises(RingError, match="gave back more"):
        writer.collect()
    writer.close()


def test_a_message_above_the_limit_names_sizes(fds: RingFds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "MAX_MESSAGE_BYTES", 4000)
    writer, reader = Writer(fds, 1), Reader(fds, 1)
    with pytest.raises(RingError, match="4001 bytes is above the limit of 4000"):
        writer.try_publish(bytes(4001))
    monkeypatch.setattr(ring, "MAX_MESSAGE_BYTES", 300)
    os.pwrite(fds.memory, b"".join(HEADER.pack(200, 1, n, MORE, 0) + bytes(200) for n in range(2)), 0)
    os.eventfd_write(fds.wakes[0].data, 2)
    with pytest.raises(RingError, match="more than 300"):
        reader.read_nowait()
    writer.close()
    reader.close()


@pytest.mark.parametrize("capacity", [0, 512, 1040])
def test_a_ring_of_an_odd_size_is_refused(capacity: int) -> None:
    with pytest.raises(RingError, match=f"not {capacity}"):
        ring.create(capacity)


def test_no_process_can_resize_the_memory(fds: RingFds) -> None:
    for size in (0, 2 * CAPACITY):
        with pytest.raises(PermissionError):
            os.ftruncate(fds.memory, size)


def test_descriptors_survive_a_command_line(fds: RingFds) -> None:
    assert RingFds.parse(str(fds)) == fds and fds.for_reader(0) == fds
    for text in ("", "1", "1,2", "a,b,c"):
        with pytest.raises(ValueError):
            RingFds.parse(text)


def test_fileno_is_readable_exactly_while_something_is_unread(fds: RingFds) -> None:
    writer, reader = Writer(fds, 1), Reader(fds, 1)

    def is_readable() -> bool:
        return bool(select.select([reader.fileno()], [], [], 0)[0])

    assert not is_readable() and reader.read(timeout_s=0) is None
    writer.try_publish(b"a")
    writer.try_publish(b"b")
    assert is_readable()
    assert [reader.read(), reader.read(), reader.read_nowait()] == [b"a", b"b", None]
    assert not is_readable()
    writer.close()
    reader.close()


HOLD = """
import signal, sys
from runtime.ranks.ring import Reader, RingFds, _take
reader = Reader(RingFds.parse(sys.argv[1]), 1)
reader._arrival.poll()
reader._pending = _take(reader.fileno())
reader._check_header()
print("holding", flush=True)
signal.pause()
"""


def test_after_a_reader_was_killed_mid_record_a_new_generation_works() -> None:
    fds = ring.create(CAPACITY)
    writer = Writer(fds, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(fds)], pass_fds=fds.flat(), stdout=subprocess.PIPE
    )
    with process:
        assert writer.try_publish(b"the last words it hears")
        assert process.stdout is not None and process.stdout.readline() == b"holding\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    while writer.try_publish(bytes(100)):
        pass
    assert not writer.try_publish(bytes(100)), "what a dead reader holds is never written over"
    with pytest.raises(RingError, match="generation 1"):
        Reader(fds, 2).read_nowait()
    writer.close()
    fds.close()

    fds = ring.create(CAPACITY)
    writer, reader = Writer(fds, 2), Reader(fds, 2)
    assert writer.try_publish(b"hello") and reader.read_nowait() == b"hello"
    for end in (writer, reader, fds):
        end.close()
