"""Events of background responses, stored so that a client whose connection broke can resume its stream."""

from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping

import anyio

from runtime.messages.tenants import tenant_of

MAX_BYTES = 64 * 2**20  # of all streams together
EVENT_BYTES = 100  # overhead of a stored event


class ResumableStream:
    """The events of one response. The event with sequence_number `first + i` is `events[i]`."""

    def __init__(self, owner: str = "") -> None:
        self.owner = owner  # name of its tenant
        self.events: deque[bytes] = deque()
        self.first = 0
        self.size = 0
        self.is_over = False
        self.wakeup = anyio.Event()

    @property
    def end(self) -> int:
        """The sequence number of the next event."""
        return self.first + len(self.events)

    def append(self, data: bytes) -> None:
        """Appends whole events, each of which ends with an empty line."""
        for event in data.split(b"\n\n")[:-1]:
            self.events.append(event + b"\n\n")
            self.size += len(event) + EVENT_BYTES
        self._wake()

    def finish(self) -> None:
        """Ends the stream; followers return after the last event."""
        self.is_over = True
        self._wake()

    def drop_first(self) -> None:
        """Drops the oldest event."""
        self.size -= len(self.events.popleft()) - 2 + EVENT_BYTES
        self.first += 1

    async def follow(self, number: int) -> AsyncIterator[bytes]:
        """The events from `number` on, as they come. Ends early for a reader so slow that its next event was
        dropped."""
        while number >= self.first:
            if number < self.end:
                data = b"".join([self.events[i - self.first] for i in range(number, self.end)])
                number = self.end
                yield data
            elif self.is_over:
                return
            else:
                await self.wakeup.wait()

    def _wake(self) -> None:
        wakeup, self.wakeup = self.wakeup, anyio.Event()
        wakeup.set()


class ResumableStreams:
    """Streams by response id, within `max_bytes` together, and each tenant's within its part. Over it, ended
    streams are dropped first, the oldest first; then the oldest events of the longest stream."""

    def __init__(self, max_bytes: int = MAX_BYTES, tenant_quota: float = 1.0) -> None:
        """`tenant_quota`: as in Tenant.quota."""
        self.max_bytes = max_bytes
        self.tenant_quota = tenant_quota
        self.size = 0
        self._size_of = Counter[str]()  # by owner
        self._streams: dict[str, ResumableStream] = {}

    def open(self, response_id: str, owner: str = "") -> ResumableStream:
        """A new stream of an owner."""
        stream = self._streams[response_id] = ResumableStream(owner)
        return stream

    def find(self, response_id: str) -> ResumableStream | None:
        """The stream of a response, if it is stored."""
        return self._streams.get(response_id)

    def append(self, stream: ResumableStream, data: bytes) -> None:
        """Appends events to a stream, and drops others where there is no room."""
        before = stream.size
        stream.append(data)
        self._count(stream.owner, stream.size - before)
        most = tenant_of(stream.owner, self.tenant_quota).most(self.max_bytes)
        while self._size_of[stream.owner] > most:
            self._shrink({name: one for name, one in self._streams.items() if one.owner == stream.owner})
        while self.size > self.max_bytes:
            self._shrink(self._streams)

    def _shrink(self, streams: Mapping[str, ResumableStream]) -> None:
        """Drops the oldest of these streams that has ended, or an event of the longest."""
        over = next((response_id for response_id, one in streams.items() if one.is_over), None)
        if over is not None:
            self.drop(over)
            return
        longest = max(streams.values(), key=lambda one: one.size)
        before = longest.size
        longest.drop_first()
        self._count(longest.owner, longest.size - before)

    def _count(self, owner: str, size: int) -> None:
        self.size += size
        self._size_of[owner] += size
        if not self._size_of[owner]:
            del self._size_of[owner]

    def drop(self, response_id: str) -> None:
        """Drops a stream and ends it."""
        stream = self._streams.pop(response_id, None)
        if stream is not None:
            self._count(stream.owner, -stream.size)
            stream.finish()
