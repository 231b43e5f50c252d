"""The side of a server with --encoder-only: encodes what other servers send, over the connections of
wire.py."""

import math
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic

import anyio
import numpy as np
from anyio import CapacityLimiter
from anyio.abc import TaskGroup, TaskStatus
from msgspec import Struct
from msgspec.msgpack import Decoder

from runtime import log
from runtime.errors import LinkError, RequestError
from runtime.messages.media import MediaValues
from runtime.messages.transfer import EncodeAsk, Encoded, Refused, Waiting
from runtime.transfer.listening import MAX_CONNECTIONS, accept_connections, listen
from runtime.transfer.service import BEAT_S, IDLE_S
from runtime.transfer.wire import MOVES, Wire, accept

LOG = log.get("encoders")
MAX_BYTES = 1 << 30  # of one file's input
QUESTIONS = Decoder(EncodeAsk)
OTHER_MODEL = "it has another model, other weights or another dtype"
# the rows of an input, float32 [rows, width]; raises RequestError
Encode = Callable[[MediaValues], Awaitable[np.ndarray]]


class EncodedCounts(Struct):
    """Counts since the start."""

    files: int = 0
    refused: int = 0
    connections: int = 0  # that are open now


class EncoderService:
    """Listens, and encodes."""

    def __init__(self, key: bytes, identity: bytes, encode: Encode) -> None:
        """`identity`: of the encoder and its weights."""
        self.counts = EncodedCounts()
        self._key, self._identity, self._encode = key, identity, encode
        self._threads = CapacityLimiter(MOVES)

    async def run(self, host: str, port: int, *, task_status: TaskStatus[int]) -> None:
        """Serves until cancelled; reports the port. Raises StartError."""
        listener = listen(host, port)
        try:
            task_status.started(listener.getsockname()[1])
            async with anyio.create_task_group() as tasks:
                await accept_connections(listener, partial(self._begin, tasks))
        finally:
            listener.close()

    def _begin(self, tasks: TaskGroup, connection: socket.socket, peer: str) -> None:
        if self.counts.connections >= MAX_CONNECTIONS:
            connection.close()
            return
        self.counts.connections += 1
        tasks.start_soon(self._serve, connection, peer)

    async def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            wire = await accept(connection, self._key, self._threads)
            while True:
                await self._answer(wire, await wire.receive(QUESTIONS, IDLE_S))
        except (LinkError, OSError) as error:
            LOG.debug("a connection ended", peer=peer, reason=str(error))
        finally:
            connection.close()
            self.counts.connections -= 1

    async def _answer(self, wire: Wire, ask: EncodeAsk) -> None:
        size = 4 * math.prod(ask.shape)
        if min(ask.shape, default=0) < 1 or not 0 < size <= MAX_BYTES:
            raise LinkError(f"an input of shape {ask.shape} is none")
        values = np.empty(math.prod(ask.shape), np.float32)
        view = values.data.cast("B")
        await wire.receive_pages([view])
        if ask.identity != self._identity:
            self.counts.refused += 1
            await wire.send(Refused(OTHER_MODEL))
            return
        media = MediaValues(id=0, values=values, shape=ask.shape, grid=ask.grid, num_rows=ask.num_rows)
        rows = await self._encoded(wire, media)
        if isinstance(rows, RequestError):
            self.counts.refused += 1
            await wire.send(Refused(str(rows)))
            return
        self.counts.files += 1
        view = rows.data.cast("B")
        await wire.send_pages(Encoded(len(rows), rows.shape[1]), [view])

    async def _encoded(self, wire: Wire, media: MediaValues) -> np.ndarray | RequestError:
        """The rows, or why there are none. The other side is told now and then that it has to wait."""
        found: list[np.ndarray | RequestError] = []
        is_done = anyio.Event()

        async def encode() -> None:
            try:
                found.append(await self._encode(media))
            except RequestError as error:
                found.append(error)
            is_done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(encode)
            notice_s = monotonic()
            while not is_done.is_set():
                with anyio.move_on_after(BEAT_S):
                    await is_done.wait()
                if not is_done.is_set() and monotonic() - notice_s >= BEAT_S:
                    await wire.send(Waiting())
                    notice_s = monotonic()
        return found[0]
