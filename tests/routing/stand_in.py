"""Servers that say what a test wants, byte for byte, and a router before them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import httpx
from msgspec import Struct

from runtime.http.auth import Keys
from runtime.http.server import listen, serve
from runtime.routing.app import RouterApp
from runtime.routing.pairs import Pairs, PairSettings
from runtime.routing.workers import RouteSettings, Workers

WAIT_S = 20.0
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Seen(Struct):
    """A request that a server was sent."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Call:
    """A request that is to be answered on its connection."""

    def __init__(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.seen, self._reader, self._writer = seen, reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def send_chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def cut(self) -> None:
        """Ends the connection."""
        self._writer.transport.abort()

    async def wait_gone(self) -> None:
        """Returns when the client has closed the connection."""
        try:
            assert await self._reader.read(1) == b""
        except ConnectionError:
            pass


Handler = Callable[[Call], Awaitable[None]]


async def answer_ok(call: Call) -> None:
    await call.send(OK)


class StandIn:
    """A server whose answers are those of `handler`. Health checks get `health`."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.health = OK
        self.seen: list[Seen] = []
        self.num_connections = 0
        self.url = ""

    @asynccontextmanager
    async def run(self) -> AsyncIterator["StandIn"]:
        async with asyncio.TaskGroup() as tasks:
            calls: set[asyncio.Task[None]] = set()
            server = await asyncio.start_server(
                lambda reader, writer: calls.add(tasks.create_task(self._serve(reader, writer))),
                "127.0.0.1",
                0,
            )
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                yield self
            finally:
                server.close()
                for call in calls:
                    call.cancel()
                await asyncio.sleep(0)  # transports close in the next turn of the loop

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                seen = await _read(reader)
                if seen.target == "/health":
                    writer.write(self.health)
                    continue
                self.seen.append(seen)
                await self.handler(Call(seen, reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return Seen(method, target, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


class Router:
    """A running router and a client of it."""

    def __init__(self, workers: Workers | Pairs, client: httpx.AsyncClient) -> None:
        self.workers = workers
        self.client = client

    async def post(self, path: str = "/v1/completions", **kwargs: Any) -> httpx.Response:
        return await self.client.post(path, **({"json": {"prompt": "x"}} | kwargs))


@asynccontextmanager
async def routed(
    *servers: StandIn,
    admin_key: str | None = None,
    is_local: bool = True,
    prefill: tuple[StandIn, ...] = (),
    pairs: PairSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Router]:
    """A router before these servers, which all have been found healthy unless their health says otherwise.
    With `pairs` they answer, and those of `prefill` compute prompts."""
    async with AsyncExitStack() as stack:
        for server in (*servers, *prefill):
            await stack.enter_async_context(server.run())
        own = {"policy": "round_robin", "health_check_interval_secs": 60.0} | settings
        workers: Workers | Pairs
        if pairs is None:
            workers = Workers([server.url for server in servers], RouteSettings(**own))
        else:
            workers = Pairs(RouteSettings(**own), RouteSettings(**own), pairs)
            for number, server in enumerate(prefill):
                workers.add(server.url, 9000 + number)
            for server in servers:
                workers.add(server.url, None)
        sockets, stop = listen("127.0.0.1", 0), anyio.Event()
        url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        app = RouterApp(workers, Keys(admin=admin_key, is_local=is_local))
        async with (
            anyio.create_task_group() as tasks,
            httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client,
        ):
            served = anyio.Event()

            async def run() -> None:
                await serve(app, sockets=sockets, shutdown=stop, grace_s=0.1)
                served.set()

            tasks.start_soon(workers.watch)
            tasks.start_soon(run)
            with anyio.fail_after(WAIT_S):
                healthy = [server for server in servers if server.health is OK]
                while len(workers.healthy) < len(healthy):
                    await anyio.sleep(0.005)
            try:
                yield Router(workers, client)
            finally:
                stop.set()
                with anyio.CancelScope(shield=True):
                    await served.wait()
                tasks.cancel_scope.cancel()
                workers.close()
