"""Runs an application on our own server, on a free port, for the length of a test."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from starlette.types import ASGIApp

from runtime.http.app import http_app
from runtime.http.server import listen, serve
from tests.http.fake import FakeService


@asynccontextmanager
async def serving(
    app: ASGIApp | FakeService, *, stuck_s: float = 30.0, grace_s: float = 5.0, **more: Any
) -> AsyncIterator[tuple[str, int]]:
    """Address of a server of `app`."""
    if isinstance(app, FakeService):
        app = http_app(app)
    sockets = listen("127.0.0.1", 0)
    address = sockets[0].getsockname()
    shutdown = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            lambda: serve(app, sockets=sockets, shutdown=shutdown, stuck_s=stuck_s, grace_s=grace_s, **more)
        )
        try:
            yield address
        finally:
            shutdown.set()


@asynccontextmanager
async def stepping(service: FakeService) -> AsyncIterator[None]:
    """Has a held service produce one token after the other."""

    async def run() -> None:
        while True:
            await anyio.sleep(0.001)
            service.step()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        yield
        tasks.cancel_scope.cancel()


class Raw:
    """A client that sends exactly these bytes, and reads only when `receive` is called."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rest = b""

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, address: tuple[str, int], receive_buffer: int | None = None
    ) -> AsyncIterator["Raw"]:
        with socket.socket() as sock:
            if receive_buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, address)
            yield cls(sock)

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def send(
        self, path: str, body: bytes, *, declared: int | None = None, version: str = "1.1", more: str = ""
    ) -> None:
        length = len(body) if declared is None else declared
        head = f"POST {path} HTTP/{version}\r\nhost: test\r\ncontent-length: {length}\r\n{more}\r\n"
        await self.write(head.encode() + body)

    async def receive(self) -> bytes:
        """Some bytes; none when the server has closed."""
        return await asyncio.get_running_loop().sock_recv(self.sock, 2**16)

    async def until(self, mark: bytes) -> bytes:
        """What comes up to and with `mark`."""
        while mark not in self.rest:
            more = await self.receive()
            assert more, self.rest[-200:]
            self.rest += more
        found, _, self.rest = self.rest.partition(mark)
        return found + mark

    async def to_end(self) -> bytes:
        """All that comes until the server closes or resets."""
        try:
            while more := await self.receive():
                self.rest += more
        except ConnectionResetError:
            self.rest += b"<reset>"
        return self.rest
