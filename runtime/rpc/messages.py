"""Reads the messages of calls: a few at a time, with a bound on their bytes and on what they weigh.

gRPC gives a message only when all of it has come, and keeps what has come of it meanwhile: up to
--max-body-bytes for each call that reads. So PLACES calls read at once, and the others wait their turn with
what the protocol's window lets through (some 64 KiB). A place is held for READ_S at most, or for HURRIED_S
while others wait: clients that send a byte now and then keep no one out.
"""

from collections.abc import Awaitable, Callable

import anyio
from anyio.to_thread import run_sync
from google.protobuf.message import DecodeError, Message

from runtime.errors import InvalidRequest, Overloaded
from runtime.http.body_budget import BodyBudget, BodyLease
from runtime.http.json_weight import UNWEIGHED_BYTES, check_weight_now, most_weight
from runtime.rpc.wire_weight import wire_weight

PLACES = 8
READ_S = 30.0
HURRIED_S = 2.0

Read = Callable[[], Awaitable[bytes]]  # the next message of a call; not bytes: there is none


class Messages:
    """The messages that the server holds."""

    def __init__(self, max_bytes: int, max_total_bytes: int) -> None:
        """`max_bytes`: of one message, `max_total_bytes`: of all of them, those that come included."""
        self.max_bytes = max_bytes
        places = min(PLACES, max(1, max_total_bytes // (2 * max_bytes)))
        self.budget = BodyBudget(max(max_bytes, max_total_bytes - places * max_bytes))
        self._turns = anyio.CapacityLimiter(places)
        self._reading: dict[anyio.CancelScope, float] = {}  # when each began

    async def read(self, kind: type[Message], read: Read, lease: BodyLease) -> Message:
        """The message of a call, which counts in `lease`. Raises InvalidRequest for one that is none,
        TooLarge for too many values, Overloaded for one that does not come, and Unavailable when all
        messages together are too large."""
        data = await self._whole(read)
        if not isinstance(data, bytes):
            raise InvalidRequest(f"the call has no message; send a {kind.DESCRIPTOR.name}")
        lease.add(len(data))
        if len(data) > UNWEIGHED_BYTES:
            most = most_weight(self.max_bytes)
            check_weight_now(await run_sync(wire_weight, data, kind.DESCRIPTOR, most), self.max_bytes)
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(
                f"the message is no {kind.DESCRIPTOR.name} of runtime.proto: {error}"
            ) from None

    async def _whole(self, read: Read) -> bytes:
        if self._turns.available_tokens == 0:
            for scope, began_s in self._reading.items():
                scope.deadline = min(scope.deadline, began_s + HURRIED_S)
        async with self._turns:
            is_awaited = self._turns.statistics().tasks_waiting > 0
            with anyio.move_on_after(HURRIED_S if is_awaited else READ_S) as scope:
                self._reading[scope] = anyio.current_time()
                try:
                    return await read()
                finally:
                    del self._reading[scope]
        raise Overloaded("the message did not come in time; send it at once, or fewer at the same time")
