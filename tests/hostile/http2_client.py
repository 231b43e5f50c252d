"""An HTTP/2 client that reads and writes only when it is called."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import h2.config
import h2.connection
import h2.events
import h2.settings

from tests.http.serving import Raw


class Client:
    """One connection: what has come of each stream."""

    def __init__(self, raw: Raw) -> None:
        self.raw = raw
        self.wire = h2.connection.H2Connection(h2.config.H2Configuration())
        self.bodies: dict[int, bytes] = {}
        self.heads: dict[int, dict[bytes, bytes]] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}
        self.terminated: int | None = None

    async def open(self, window: int = 65_535) -> None:
        self.wire.local_settings[h2.settings.SettingCodes.INITIAL_WINDOW_SIZE] = window
        self.wire.local_settings.acknowledge()
        self.wire.initiate_connection()
        await self.flush()

    async def flush(self) -> None:
        await self.raw.write(self.wire.data_to_send())

    async def ask(self, path: str, body: Any, *, ends: bool = True, method: str = "POST", **more: str) -> int:
        number = self.wire.get_next_available_stream_id()
        names = {":method": method, ":path": path, ":scheme": "http", ":authority": "test", **more}
        self.wire.send_headers(number, list(names.items()), end_stream=body is None)
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.wire.send_data(number, data, end_stream=ends)
        await self.flush()
        return number

    async def read(self) -> None:
        data = await self.raw.receive()
        if not data:
            raise EOFError
        for event in self.wire.receive_data(data):
            match event:
                case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                    self.heads[event.stream_id] = self.heads.get(event.stream_id, {}) | {
                        bytes(name, "ascii") if isinstance(name, str) else name: (
                            bytes(value, "latin-1") if isinstance(value, str) else value
                        )
                        for name, value in event.headers
                    }
                case h2.events.DataReceived():
                    number = event.stream_id
                    self.bodies[number] = self.bodies.get(number, b"") + event.data
                case h2.events.StreamEnded():
                    self.ended.add(event.stream_id)
                case h2.events.StreamReset():
                    self.resets[event.stream_id] = int(event.error_code)
                case h2.events.ConnectionTerminated():
                    self.terminated = int(event.error_code)
        await self.flush()

    async def read_until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(20):
            while not condition():
                await self.read()


@asynccontextmanager
async def talking(address: tuple[str, int], window: int = 65_535) -> AsyncIterator[Client]:
    async with Raw.connected(address) as raw:
        client = Client(raw)
        await client.open(window)
        yield client
