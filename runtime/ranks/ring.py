"""A ring of records in shared memory with one writer and any number of readers, each of which gets every
record.

The bytes are in a memfd, wake-ups are eventfds, and the other process inherits both as descriptors. Nothing
has a name, so nothing is left behind when a process is killed. Each reader has a pair of eventfds:

    data     writer → reader   records published since the reader last looked
    credit   reader → writer   bytes of the ring freed by the reader since the writer last looked

No cursor is shared. The writer keeps account of the bytes that each reader has not freed, and writes nowhere
else; a reader looks only at records that it has a count for. So each byte is handed over by one of the two
counters, which is also the memory fence: the kernel changes a counter under a lock, and what one process
stored before it released that lock is visible to the process that takes it next, on every architecture, also
on arm64 with its weak memory order. A record that was half written when its writer was killed has no count,
so no reader sees it.

A record is a header (payload bytes, generation, sequence number, kind) and the payload. It begins at a
multiple of 8 bytes and never crosses the end of the ring: a record that does not fit there begins at offset
0, and a PAD record (or fewer bytes than a header has) fills the rest. Credit is returned a quarter of the
ring at a time, to save system calls, and a record takes at most a quarter. So a reader that has read
everything has freed more than three quarters, which is enough for a record and the padding before it. Longer
messages are sent as several records, all but the last of kind MORE.

Writer and Reader borrow their descriptors; the caller of `create`, or the process that inherited them, closes
them (`RingFds.close`).
"""

import fcntl
import mmap
import os
import select
import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from runtime.errors import RingError

DEFAULT_BYTES = 4 << 20  # records of up to 1 MiB; small enough to stay in the last-level cache
MIN_BYTES = 1 << 10
MAX_MESSAGE_BYTES = 1 << 30

LAST, MORE, PAD = 0, 1, 2  # kinds of records
HEADER = struct.Struct("=IIQII")  # payload bytes, generation, sequence number, kind, unused
ALIGN = 8


class Wakes(NamedTuple):
    """The two eventfds of one reader."""

    data: int
    credit: int


class RingFds(NamedTuple):
    """The descriptors of a ring: all of them at the writer, one pair of wakes at a reader in another
    process."""

    memory: int
    wakes: tuple[Wakes, ...]

    def flat(self) -> list[int]:
        """All descriptors."""
        return [self.memory, *(fd for wakes in self.wakes for fd in wakes)]

    def for_reader(self, index: int) -> "RingFds":
        """The descriptors that a reader needs."""
        return RingFds(self.memory, (self.wakes[index],))

    def close(self) -> None:
        """Closes all descriptors."""
        for fd in self.flat():
            os.close(fd)

    @staticmethod
    def parse(text: str) -> "RingFds":
        """The inverse of `str`, for a command line. Raises ValueError."""
        memory, *rest = (int(part) for part in text.split(","))
        if not rest or len(rest) % 2:
            raise ValueError(f"{text!r} does not list a memfd and pairs of eventfds")
        return RingFds(memory, tuple(Wakes(*pair) for pair in zip(rest[::2], rest[1::2], strict=True)))

    def __str__(self) -> str:
        return ",".join(str(fd) for fd in self.flat())


def create(capacity: int = DEFAULT_BYTES, num_readers: int = 1) -> RingFds:
    """A new ring of `capacity` bytes (a multiple of 32). Its size is sealed: no process can cut memory off
    from another.

    Raises OSError when the machine is out of descriptors or memory.
    """
    if capacity < MIN_BYTES or capacity % (4 * ALIGN):
        raise RingError(
            f"a ring must have at least {MIN_BYTES} bytes and a multiple of {4 * ALIGN}, not {capacity}"
        )
    opened: list[int] = []
    try:
        opened.append(os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(opened[0], capacity)
        fcntl.fcntl(opened[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        for _ in range(2 * num_readers):
            opened.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    except OSError:
        for fd in opened:
            os.close(fd)
        raise
    return RingFds(opened[0], tuple(Wakes(*pair) for pair in zip(opened[1::2], opened[2::2], strict=True)))


class Writer:
    """The writing end. A message is taken whole or not at all; none is ever lost or overwritten."""

    def __init__(self, fds: RingFds, generation: int) -> None:
        self._memory = mmap.mmap(fds.memory, 0)
        self._capacity = len(self._memory)
        self._max_payload = self._capacity // 4 - HEADER.size
        self._generation = generation
        self._sequence = 0
        self._head = 0  # offset of the next record
        self._wakes = fds.wakes
        self._held = [0] * len(fds.wakes)  # bytes that each reader has not given back
        self._rest = deque[memoryview]()  # of a long message: what is not in the ring yet
        self._credits = select.poll()
        for wakes in fds.wakes:
            self._credits.register(wakes.credit, select.POLLIN)

    @property
    def has_rest(self) -> bool:
        """Whether a long message was taken that is not completely in the ring yet; `flush` continues it."""
        return bool(self._rest)

    def try_publish(self, message: bytes | bytearray) -> bool:
        """Takes `message`, or returns False while the ring is full: try again when credit has come.

        A message longer than a record is taken when its first part fits. Raises RingError for one above
        MAX_MESSAGE_BYTES.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise RingError(f"a message of {len(message)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
        if self._rest and not self.flush():
            return False
        if len(message) <= self._max_payload:
            return self._put(message, LAST)
        return self._begin([memoryview(message)])

    def try_publish_parts(self, parts: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Takes a message that comes in `parts`, as `try_publish` does. They are copied to the ring as it
        has room for them, and must not change meanwhile."""
        if (size := sum(map(len, parts))) <= self._max_payload:
            return self.try_publish(b"".join(parts))
        if size > MAX_MESSAGE_BYTES:
            raise RingError(f"a message of {size} bytes is above the limit of {MAX_MESSAGE_BYTES}")
        if self._rest and not self.flush():
            return False
        return self._begin([memoryview(part) for part in parts if len(part)])

    def _begin(self, parts: Sequence[memoryview]) -> bool:
        """Takes a message that is longer than a record, when its first part fits."""
        first, size = parts[0], self._max_payload
        if not self._put(first[:size], MORE):
            return False
        self._rest.extend([rest for rest in (first[size:], *parts[1:]) if len(rest)])
        self.flush()
        return True

    def collect(self) -> None:
        """Takes new credit, so that the credit eventfds are no longer readable."""
        for index, wakes in enumerate(self._wakes):
            self._held[index] -= _take(wakes.credit)
            if self._held[index] < 0:
                raise RingError(f"reader {index} gave back more of the ring than it was given")

    def flush(self) -> bool:
        """Puts more of a long message into the ring; True when it is complete."""
        while self._rest:
            part, rest = self._rest[0][: self._max_payload], self._rest[0][self._max_payload :]
            is_last = len(self._rest) == 1 and not rest
            if not self._put(part, LAST if is_last else MORE):
                return False
            if rest:
                self._rest[0] = rest
            else:
                self._rest.popleft()
        return True

    def publish(self, message: bytes | bytearray) -> None:
        """Waits, without using the processor, until the whole message is in the ring."""
        while not self.try_publish(message):
            self._credits.poll()
        while not self.flush():
            self._credits.poll()

    def close(self) -> None:
        """Unmaps the ring; its descriptors stay open."""
        self._memory.close()

    def _put(self, payload: bytes | bytearray | memoryview, kind: int) -> bool:
        """Writes one record and wakes all readers, or returns False if a reader has not freed that place."""
        size = HEADER.size + len(payload)
        size += -size % ALIGN
        to_end = self._capacity - self._head
        padding = to_end if to_end < size else 0
        if not self._has_room(padding + size):
            return False
        if padding:
            if padding >= HEADER.size:
                HEADER.pack_into(
                    self._memory, self._head, padding - HEADER.size, self._generation, self._sequence, PAD, 0
                )
            self._head = 0
        HEADER.pack_into(self._memory, self._head, len(payload), self._generation, self._sequence, kind, 0)
        start = self._head + HEADER.size
        self._memory[start : start + len(payload)] = payload
        self._head = (self._head + size) % self._capacity
        self._sequence += 1
        for index, wakes in enumerate(self._wakes):
            self._held[index] += padding + size
            os.eventfd_write(wakes.data, 1)
        return True

    def _has_room(self, size: int) -> bool:
        """Whether every reader has given `size` bytes back. Looks for new credit only when it is needed."""
        if max(self._held) + size <= self._capacity:
            return True
        self.collect()
        return max(self._held) + size <= self._capacity


class Reader:
    """The reading end. Messages are copied out, and their place is free at once."""

    def __init__(self, fds: RingFds, generation: int, index: int = 0) -> None:
        self._memory = mmap.mmap(fds.memory, 0, prot=mmap.PROT_READ)
        self._view = memoryview(self._memory)
        self._capacity = len(self._memory)
        self._generation = generation
        self._sequence = 0
        self._tail = 0  # offset of the next record
        self._data, self._credit = fds.wakes[index]
        self._pending = 0  # records that were counted but not read
        self._freed = 0  # bytes that were read but not returned as credit
        self._begun = bytearray()  # the records so far of a long message
        self._arrival = select.poll()
        self._arrival.register(self._data, select.POLLIN)

    def fileno(self) -> int:
        """Readable when records were published since `read_nowait` last returned None."""
        return self._data

    def read_nowait(self) -> bytearray | None:
        """The next message, or None when there is none (yet). Read until None before waiting for `fileno`.

        Raises RingError for a record of another generation, out of sequence, or with a header that no writer
        makes; the ring cannot be read any further then.
        """
        while True:
            if not self._pending:
                self._pending = _take(self._data)
                if not self._pending:
                    return None
            message = self._take_record()
            if message is not None:
                return message

    def read(self, timeout_s: float | None = None) -> bytearray | None:
        """Waits for the next message in the kernel, with no use of the processor. None: `timeout_s` has
        passed."""
        while True:
            if not self._pending and not self._arrival.poll(None if timeout_s is None else timeout_s * 1000):
                return None
            message = self.read_nowait()
            if message is not None:
                return message

    def close(self) -> None:
        """Unmaps the ring; its descriptors stay open."""
        self._view.release()
        self._memory.close()

    def _take_record(self) -> bytearray | None:
        """Copies the next record out; the message when the record was its last."""
        size, kind = self._check_header()
        if kind == PAD:
            self._free(self._capacity - self._tail)
            size, kind = self._check_header()
        start = self._tail + HEADER.size
        payload = self._view[start : start + size]
        message = None
        if kind == LAST and not self._begun:
            message = bytearray(payload)
        else:
            self._begun += payload
            if kind == LAST:
                message, self._begun = self._begun, bytearray()
        self._pending -= 1
        self._sequence += 1
        self._free(HEADER.size + size + -size % ALIGN)
        return message

    def _check_header(self) -> tuple[int, int]:
        """Payload bytes and kind of the record at the tail."""
        left = self._capacity - self._tail
        if left < HEADER.size:
            return 0, PAD
        size, generation, sequence, kind, _ = HEADER.unpack_from(self._memory, self._tail)
        if generation != self._generation:
            raise RingError(f"a record of generation {generation} in a ring of generation {self._generation}")
        if sequence != self._sequence:
            raise RingError(f"record {sequence} came where record {self._sequence} was due")
        if kind == PAD:
            is_valid = self._tail > 0 and HEADER.size + size == left
        else:
            is_valid = kind in (LAST, MORE) and HEADER.size + size <= min(left, self._capacity // 4)
        if not is_valid:
            raise RingError(
                f"record {sequence} is not valid: kind {kind} and {size} bytes at byte {self._tail} of "
                f"{self._capacity}"
            )
        if kind != PAD and len(self._begun) + size > MAX_MESSAGE_BYTES:
            raise RingError(f"record {sequence} makes a message of more than {MAX_MESSAGE_BYTES} bytes")
        return size, kind

    def _free(self, size: int) -> None:
        self._tail = (self._tail + size) % self._capacity
        self._freed += size
        if self._freed >= self._capacity // 4:
            os.eventfd_write(self._credit, self._freed)
            self._freed = 0


def _take(eventfd: int) -> int:
    """What was added to a counter since it was last taken; 0 when nothing was."""
    try:
        return os.eventfd_read(eventfd)
    except BlockingIOError:
        return 0
